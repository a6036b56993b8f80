"""The target's embedding and head in the drafter's service, whatever their dtype, wrapper or place."""

import copy
from typing import Any

import accelerate
import pytest
import torch
from conftest import load_drafter
from test_drafter import block_of, borrower, tiny_drafter
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from dspark_hf.modeling.draft_context import DraftContext


class Opaque(nn.Module):
    """Stands for a quantised or sharded module: it can be called, and has nothing to look at."""

    def __init__(self, function: Any):
        super().__init__()
        self.function = function

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.function(inputs)


class Stored(nn.Module):
    """Stands for a quantised head: weights in a storage dtype, which inputs must not be cast to."""

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(weight.to(dtype), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        assert inputs.dtype in (torch.float32, torch.bfloat16)
        return inputs @ self.weight.to(inputs.dtype).T


def test_modules_without_parameters_can_be_borrowed():
    drafter, table, head = borrower(), nn.Embedding(37, 16), nn.Linear(16, 37)
    slots = block_of(drafter, [2])
    assert torch.equal(drafter.embed(slots, Opaque(table.forward)), table(slots))
    hidden = torch.randn(1, 4, 16)
    assert torch.equal(drafter.base_logits(hidden, Opaque(head.forward)), head(hidden))
    plain = drafter.draft(hidden, slots[:, 0], head).tokens
    assert torch.equal(drafter.draft(hidden, slots[:, 0], Opaque(head.forward)).tokens, plain)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_inputs_are_not_cast_to_a_storage_dtype(dtype):
    weight = torch.randint(-4, 4, (37, 16)).float()
    hidden = torch.randn(1, 4, 16)
    assert torch.equal(borrower().base_logits(hidden, Stored(weight, dtype)), hidden @ weight.T)


@torch.no_grad()
@pytest.mark.parametrize("target_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_mixture_of_dtypes_drafts(dtype, target_dtype):
    drafter = borrower(markov_head_type="gated").to(dtype)
    table, head = nn.Embedding(37, 16).to(target_dtype), nn.Linear(16, 37, bias=False).to(target_dtype)
    slots = block_of(drafter, [2, 3])
    embeds = drafter.embed(slots, table)
    assert embeds.dtype == dtype
    taps = torch.randn(5, drafter.fc.in_features, dtype=target_dtype)
    hidden = drafter(embeds, taps, [2, 3], DraftContext(drafter.config, [0, 0]))
    assert hidden.dtype == dtype
    draft = drafter.draft(hidden, slots[:, 0], head)
    assert draft.tokens.shape == (2, 4) and draft.confidence_logits.dtype == dtype


def test_offloaded_modules_can_be_borrowed():
    table, head = nn.Embedding(37, 16), nn.Linear(16, 37, bias=False)
    offloaded = [accelerate.cpu_offload(copy.deepcopy(module), execution_device="cpu") for module in (table, head)]
    assert all(module.weight.device.type == "meta" for module in offloaded)
    drafter, slots, hidden = borrower(), torch.tensor([[2, 1, 1, 1]]), torch.randn(1, 4, 16)
    assert torch.equal(drafter.embed(slots, offloaded[0]), table(slots))
    assert torch.equal(drafter.base_logits(hidden, offloaded[1]), head(hidden))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 4.0, 62.0])
def test_a_wrappers_embedding_scale_is_replaced_by_the_drafters(scale, dtype):
    table = Gemma3TextScaledWordEmbedding(37, 16, 0, embed_scale=3844**0.5).to(dtype)
    drafter = borrower(embedding_scale=scale).to(dtype)
    slots = block_of(drafter, [2])
    expected = nn.functional.embedding(slots, table.weight) * scale
    embeds = drafter.embed(slots, table)
    if scale == 62.0:
        assert torch.equal(embeds, table(slots))
    torch.testing.assert_close(embeds, expected, atol=0, rtol=1e-6 if dtype == torch.float32 else 1e-2)


def test_a_scale_of_the_drafters_own_multiplies_raw_embeddings():
    drafter = tiny_drafter(embedding_scale=4.0)
    slots = block_of(drafter, [2])
    assert torch.equal(drafter.embed(slots), drafter.embed_tokens(slots) * 4)


def test_own_embedding_and_head_come_before_the_targets():
    drafter, hidden, slots = tiny_drafter(), torch.randn(1, 4, 16), torch.tensor([[2, 1, 1, 1]])
    assert torch.equal(drafter.embed(slots, nn.Embedding(37, 16)), drafter.embed(slots))
    assert torch.equal(drafter.base_logits(hidden, nn.Linear(16, 37)), drafter.base_logits(hidden))


def test_nothing_to_embed_with_and_no_head_are_errors():
    drafter = borrower()
    with pytest.raises(ValueError, match="pass `target_embedding`"):
        drafter.embed(torch.tensor([[2, 1, 1, 1]]))
    with pytest.raises(ValueError, match="pass `target_lm_head`"):
        drafter.base_logits(torch.zeros(1, 4, 16))


def test_casting_the_drafter_leaves_the_target_alone(tiny_target):
    drafter = load_drafter("deepspec-vanilla")
    before = {name: value.clone() for name, value in tiny_target.state_dict().items()}
    slots = block_of(drafter, [5])
    drafter.embed_tokens = drafter.lm_head = None
    embeds = drafter.embed(slots, tiny_target.get_input_embeddings())
    drafter.base_logits(embeds, tiny_target.get_output_embeddings())
    drafter.to(torch.bfloat16)
    assert not any("embed" in name or "lm_head" in name for name in drafter.state_dict())
    for name, value in tiny_target.state_dict().items():
        assert value.dtype == torch.float32 and torch.equal(value, before[name])
