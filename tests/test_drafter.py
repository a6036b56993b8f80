"""The drafter against a plain dense reference, rows against their solo runs, and what it borrows from a target."""

import copy
import pickle
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from conftest import load_drafter, load_golden
from torch import nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from dspark_hf import DSparkConfig, DSparkDraftModel
from dspark_hf.modeling.attention import grouped_attention
from dspark_hf.modeling.backbone import DSparkRotaryEmbedding
from dspark_hf.modeling.draft_context import DraftContext


GEMMA4 = {
    "value_norm": True,
    "sandwich_norms": True,
    "layer_scalar": True,
    "attention_scaling": 1.0,
    "hidden_act": "gelu_pytorch_tanh",
    "embedding_scale": 4.0,
    "final_logit_softcapping": 3.0,
}
FAMILIES = {
    "qwen3": {},
    "llama": {"query_key_norm": False, "attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
    "gemma4": GEMMA4,
    "gemma4, keys as values": GEMMA4 | {"attention_k_eq_v": True},
    "mixed sliding": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
    "window below the block": {"layer_types": ["sliding_attention", "sliding_attention"], "sliding_window": 3},
    "causal": {"causal_layer_types": ["full_attention"]},
    "mixed sliding, causal": {
        "layer_types": ["sliding_attention", "full_attention"],
        "causal_layer_types": ["sliding_attention"],
        "sliding_window": 6,
    },
    "window from the anchor": {
        "layer_types": ["sliding_attention", "full_attention"],
        "causal_layer_types": ["sliding_attention"],
        "sliding_window": 6,
        "window_from_anchor": True,
    },
    "short window from the anchor": {
        "layer_types": ["sliding_attention", "sliding_attention"],
        "sliding_window": 2,
        "window_from_anchor": True,
    },
    "slot 0 no draft": {"sample_from_anchor": False},
    "slot 0 no draft, sliding, causal": {
        "sample_from_anchor": False,
        "layer_types": ["sliding_attention", "full_attention"],
        "causal_layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 5,
    },
    "one key head": {"num_key_value_heads": 1},
    "ungrouped": {"num_key_value_heads": 4},
}


def tiny_config(**changes: Any) -> DSparkConfig:
    """A drafter's config in which no two sizes are equal by accident."""
    fields = {
        "vocab_size": 37,
        "hidden_size": 16,
        "target_hidden_size": 12,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "target_layer_ids": [-1, 1, 2],
        "num_target_layers": 4,
        "block_size": 4,
        "mask_token_id": 1,
        "markov_rank": 5,
        "owns_embedding": True,
        "owns_lm_head": True,
    }
    return DSparkConfig(**fields | changes)


def tiny_drafter(**changes: Any) -> DSparkDraftModel:
    """A random drafter whose attention is far from uniform and whose norms and biases are far from neutral."""
    drafter = DSparkDraftModel(tiny_config(**changes)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in drafter.state_dict().items():
            noise = torch.randn(value.shape, generator=generator)
            value.copy_(1 + 0.3 * noise if "norm" in name or "scalar" in name else 0.5 * noise)
    return drafter


def borrower(**changes: Any) -> DSparkDraftModel:
    """A random drafter with neither embedding nor head, for a target of width 16 and vocabulary 37."""
    return tiny_drafter(owns_embedding=False, owns_lm_head=False, target_hidden_size=16, **changes)


def block_of(drafter: DSparkDraftModel, anchors: Sequence[int]) -> torch.Tensor:
    """Token ids of the blocks that start from the anchors."""
    return drafter.block_tokens(torch.tensor(anchors))


@torch.no_grad()
def dense_reference(drafter: DSparkDraftModel, taps: torch.Tensor, anchor: int, start: int) -> torch.Tensor:
    """
    The backbone for one row, written out plainly: no cache, one head at a time, everything in float64.

    Args:
        drafter ([`DSparkDraftModel`]): Lends weights and config.
        taps (`torch.Tensor` of shape `(context_length, taps * target_hidden_size)`): All of the row's context.
        anchor (`int`): First token of the block.
        start (`int`): Position of the first context token.
    """
    config = drafter.config
    weights = {name: value.double() for name, value in drafter.state_dict().items()}
    types = config.layer_types

    def linear(name: str, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)

    def norm(name: str | None, inputs: torch.Tensor) -> torch.Tensor:
        scale = 1.0 if name is None else weights[f"{name}.weight"]
        return inputs / (inputs.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * scale

    def rotated(heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        half = config.head_dim // 2
        frequencies = config.rope_parameters["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        turn = torch.polar(torch.ones(()).double(), positions[:, None, None] * frequencies)
        turned = torch.complex(heads[..., :half], heads[..., half:]) * turn
        return torch.cat([turned.real, turned.imag], dim=-1)

    def attention(layer: str, layer_type: str, block: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        tokens = torch.cat([context, block])
        positions = start + torch.arange(len(tokens))
        query, key = (
            linear(f"{layer}.{name}_proj", inputs).unflatten(-1, (-1, config.head_dim))
            for name, inputs in (("q", block), ("k", tokens))
        )
        value = key if config.attention_k_eq_v else linear(f"{layer}.v_proj", tokens).view_as(key)
        if config.value_norm:
            value = norm(None, value)
        if config.query_key_norm:
            query, key = norm(f"{layer}.q_norm", query), norm(f"{layer}.k_norm", key)
        query, key = rotated(query, positions[len(context) :]), rotated(key, positions)
        visible = torch.ones(len(block), len(tokens), dtype=torch.bool)
        if layer_type in config.causal_layer_types:
            visible &= positions <= positions[len(context) :, None]
        if layer_type == "sliding_attention" and config.window_from_anchor:
            visible &= positions >= start + len(context) - config.sliding_window
        elif layer_type == "sliding_attention":
            visible &= positions > positions[len(context) :, None] - config.sliding_window
        scaling = config.attention_scaling or config.head_dim**-0.5
        outputs = []
        for head in range(config.num_attention_heads):
            shared = head * config.num_key_value_heads // config.num_attention_heads
            scores = (query[:, head] @ key[:, shared].T * scaling).masked_fill(~visible, float("-inf"))
            outputs.append(scores.softmax(-1) @ value[:, shared])
        return linear(f"{layer}.o_proj", torch.cat(outputs, dim=-1))

    def mlp(layer: str, inputs: torch.Tensor) -> torch.Tensor:
        gate = ACT2FN[config.hidden_act](linear(f"{layer}.gate_proj", inputs))
        return linear(f"{layer}.down_proj", gate * linear(f"{layer}.up_proj", inputs))

    context = norm("hidden_norm", linear("fc", taps.double()))
    block = weights["embed_tokens.weight"][block_of(drafter, [anchor])[0]] * config.embedding_scale
    for number, layer_type in enumerate(types):
        layer = f"layers.{number}"
        attended = attention(f"{layer}.self_attn", layer_type, norm(f"{layer}.input_layernorm", block), context)
        if config.sandwich_norms:
            block = block + norm(f"{layer}.post_attention_layernorm", attended)
            inner = mlp(f"{layer}.mlp", norm(f"{layer}.pre_feedforward_layernorm", block))
            block = block + norm(f"{layer}.post_feedforward_layernorm", inner)
        else:
            block = block + attended
            block = block + mlp(f"{layer}.mlp", norm(f"{layer}.post_attention_layernorm", block))
        block = block * weights.get(f"{layer}.layer_scalar", 1)
    return norm("norm", block)[not config.sample_from_anchor :]


class Rows:
    """Rows that each have their own taps and anchors, drafted for together or alone."""

    def __init__(
        self,
        drafter: DSparkDraftModel,
        taps: Sequence[torch.Tensor],
        starts: Sequence[int],
        capacity: int = 4,
        window: int | None = None,
    ):
        self.drafter, self.taps, self.starts = drafter, list(taps), list(starts)
        self.context = DraftContext(drafter.config, starts, capacity, window)

    @property
    def seen(self) -> list[int]:
        """How many of each row's taps were appended so far."""
        ends = map(sum, zip(self.context.starts, self.context.lengths, strict=True))
        return [end - start for end, start in zip(ends, self.starts, strict=True)]

    @torch.no_grad()
    def round(self, new: Sequence[int], anchors: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Append so many of each row's taps, then draft: hidden states, tokens and confidences."""
        held = self.seen
        parts = [taps[before : before + count] for taps, before, count in zip(self.taps, held, new, strict=True)]
        slots = block_of(self.drafter, anchors)
        hidden = self.drafter(self.drafter.embed(slots), torch.cat(parts), new, self.context)
        draft = self.drafter.draft(hidden, slots[:, 0])
        return hidden, draft.tokens, draft.confidence_logits

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these."""
        self.context.keep_rows(rows)
        self.taps = [self.taps[row] for row in rows]
        self.starts = [self.starts[row] for row in rows]

    def spoil_unused_slots(self) -> None:
        """Fill what lies past each row's length with values that could not be overlooked."""
        for buffer in self.context.layers:
            for row, length in enumerate(self.context.lengths):
                buffer.keys[row, :, length:] = 1e3
                buffer.values[row, :, length:] = -1e3


def random_taps(drafter: DSparkDraftModel, lengths: Sequence[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(length, drafter.fc.in_features, generator=generator) for length in lengths]


# The backbone


@pytest.mark.parametrize("start", [0, 7])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_row_equals_the_dense_reference(family, start):
    drafter = tiny_drafter(**FAMILIES[family])
    rows = Rows(drafter, random_taps(drafter, [40]), [start])
    for turn, new in enumerate([0, 6, 1, 3, 17, 2]):  # past capacities 4, 8, 16 and 32
        hidden, _, _ = rows.round([new], [turn])
        expected = dense_reference(drafter, rows.taps[0][: rows.seen[0]], turn, start)
        torch.testing.assert_close(hidden[0].double(), expected, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_rows_equal_their_solo_runs(family):
    drafter = tiny_drafter(**FAMILIES[family])
    starts, taps = [0, 7, 100, 3], random_taps(drafter, [60, 60, 60, 60])
    batch = Rows(drafter, taps, starts)
    solo = [Rows(drafter, [taps[row]], [starts[row]]) for row in range(4)]
    plan = [  # rows alive, new context tokens of each
        ([0, 1, 2, 3], [6, 0, 11, 2]),
        ([0, 1, 2, 3], [1, 2, 4, 9]),
        ([0, 2, 3], [1, 5, 3]),
        ([3, 2], [3, 3]),
        ([3, 2], [20, 1]),
        ([2], [2]),
    ]
    alive = [0, 1, 2, 3]
    for turn, (rows, new) in enumerate(plan):
        if rows != alive:
            batch.keep([alive.index(row) for row in rows])
            alive = rows
        anchors = [turn + 10 * row for row in rows]
        found = batch.round(new, anchors)
        for place, row in enumerate(rows):
            hidden, tokens, confidence = solo[row].round([new[place]], [anchors[place]])
            torch.testing.assert_close(found[0][place], hidden[0], atol=1e-5, rtol=1e-5)
            assert found[1][place].tolist() == tokens[0].tolist()
            torch.testing.assert_close(found[2][place], confidence[0], atol=1e-5, rtol=1e-5)
        batch.spoil_unused_slots()
    assert batch.seen == solo[2].seen == [26]


@pytest.mark.parametrize("window", [1, 3, 5, 9])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_context_window_is_the_end_of_the_context(family, window):
    drafter = tiny_drafter(**FAMILIES[family])
    starts, taps = [0, 7], random_taps(drafter, [60, 60])
    batch = Rows(drafter, taps, starts, window=window)
    for turn, new in enumerate([(6, 0), (1, 2), (5, 4), (1, 1), (1, 1), (2, 1), (1, 5), (20, 1), (1, 1), (3, 2)]):
        hidden, _, _ = batch.round(new, [turn, turn + 10])
        for row, seen in enumerate(batch.seen):
            first = max(seen - window, 0)
            anchor, start = turn + 10 * row, starts[row] + first
            expected = dense_reference(drafter, taps[row][first:seen], anchor, start)
            torch.testing.assert_close(hidden[row].double(), expected, atol=5e-5, rtol=1e-4)
        batch.spoil_unused_slots()
    assert batch.seen == [41, 18]


def test_what_lies_before_a_context_window_is_not_projected_and_not_held():
    drafter, projected = tiny_drafter(), []
    drafter.fc.register_forward_hook(lambda module, inputs, output: projected.append(len(inputs[0])))
    rows = Rows(drafter, random_taps(drafter, [400]), [0], window=8)
    rows.round([300], [1])
    assert projected == [8]
    for turn in range(90):
        rows.round([1], [turn % 30])
        assert rows.context.lengths[0] <= 16
    assert rows.seen == [390] and rows.context.layers[0].capacity <= 32


def test_sliding_layers_alone_bound_what_is_held():
    for window, bound in ((None, 6), (9, 6), (4, 4)):
        drafter = tiny_drafter(layer_types=["sliding_attention"] * 2, sliding_window=6)
        rows = Rows(drafter, random_taps(drafter, [100]), [0], window=window)
        assert rows.context.window == bound
        rows.round([90], [1])
        assert rows.context.lengths == [bound]
    assert Rows(tiny_drafter(**FAMILIES["mixed sliding"]), [], []).context.window is None


@pytest.mark.parametrize("folder", ["deepspec-vanilla", "deepspec-rnn", "deepspec-gemma4", "deepspec-gemma4-keqv"])
def test_ragged_rows_of_real_contexts_equal_their_solo_runs(folder):
    drafter = load_drafter(folder)
    _, tensors = load_golden(folder)
    prompts = sorted({name.split(".")[0] for name in tensors if name.startswith("p")})
    taps = [
        torch.cat(
            [tensors[f"{prompt}.r{turn}.context"] for turn in range(4) if f"{prompt}.r{turn}.context" in tensors]
        )
        for prompt in prompts
    ]
    batch = Rows(drafter, taps, [0] * len(taps))
    solo = [Rows(drafter, [row], [0]) for row in taps]
    for turn in range(3):
        # Each row goes its own way: a third of what is left to it, at least one.
        new = [max(1, (len(row) - held) // (3 - turn)) for row, held in zip(taps, batch.seen, strict=True)]
        new = [min(count, len(row) - held) for count, row, held in zip(new, taps, batch.seen, strict=True)]
        anchors = [40 + turn + row for row in range(len(taps))]
        hidden, tokens, confidence = batch.round(new, anchors)
        for row, alone in enumerate(solo):
            expected = alone.round([new[row]], [anchors[row]])
            torch.testing.assert_close(hidden[row], expected[0][0], atol=1e-5, rtol=1e-5)
            assert tokens[row].tolist() == expected[1][0].tolist()
            torch.testing.assert_close(confidence[row], expected[2][0], atol=1e-5, rtol=1e-5)
        batch.spoil_unused_slots()
    assert len(set(batch.seen)) > 1


def test_positions_are_relative():
    # A row whose prefix is not known drafts from true positions: only the distances between its tokens matter.
    drafter = tiny_drafter(**FAMILIES["mixed sliding"])
    taps = random_taps(drafter, [20])
    near, far = Rows(drafter, taps, [0]), Rows(drafter, taps, [1000])
    for new in (12, 3):
        torch.testing.assert_close(near.round([new], [5])[0], far.round([new], [5])[0], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("rows", [1, 3])
def test_every_token_is_rotated_by_its_true_position(rows, monkeypatch):
    # Whole rows shifted would still draft the same, so the positions themselves are looked at.
    drafter, seen = tiny_drafter(), []
    rotary = drafter.rotary
    monkeypatch.setattr(drafter, "rotary", lambda positions, dtype: seen.append(positions) or rotary(positions, dtype))
    starts = [5, 0, 20][:rows]
    batch = Rows(drafter, random_taps(drafter, [9, 9, 9][:rows]), starts)
    for new in ([2, 1, 3][:rows], [1, 4, 2][:rows]):
        held = batch.context.lengths
        batch.round(new, [3] * rows)
        ends = [start + before + count for start, before, count in zip(starts, held, new, strict=True)]
        contexts = [list(range(end - count, end)) for end, count in zip(ends, new, strict=True)]
        blocks = [list(range(end, end + drafter.config.block_size)) for end in ends]
        assert seen.pop().tolist() == sum(contexts + blocks, [])


def test_keeping_no_rows_or_rows_before_the_first_pass():
    drafter = tiny_drafter()
    context = DraftContext(drafter.config, [0, 3])
    context.keep_rows([1])
    rows = Rows(drafter, random_taps(drafter, [8]), [3])
    expected = rows.round([8], [2])[0]
    rows.context.lengths, rows.context = [0], context
    torch.testing.assert_close(rows.round([8], [2])[0], expected)
    context.keep_rows([])
    assert context.lengths == context.starts == []


def test_drafting_never_reads_a_value_back():
    # On the meta device there are no values: anything like `.item()` in the loop would fail.
    with torch.device("meta"):
        drafter = DSparkDraftModel(tiny_config(markov_head_type="rnn"))
    context = DraftContext(drafter.config, [0, 0])
    slots = block_of(drafter, [3, 4]).to("meta")
    taps = torch.zeros(5, drafter.fc.in_features, device="meta")
    draft = drafter.draft(drafter(drafter.embed(slots), taps, [2, 3], context), slots[:, 0])
    assert draft.tokens.shape == draft.confidence_logits.shape == (2, 4)


# Attention and rotary embedding


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("mask_queries", [None, 1, 3])
def test_grouped_attention(mask_queries, softcap, sinks):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 6, 3, 4, generator=generator)
    key, value = torch.randn(2, 2, 5, 4, generator=generator), torch.randn(2, 2, 5, 7, generator=generator)
    mask = sink_scores = None
    if mask_queries is not None:
        mask = torch.rand(2, 1, mask_queries, 5, generator=generator) > 0.4
        mask[..., 0] = True
    if sinks:
        sink_scores = torch.randn(6, generator=generator)
    scores = query @ key.repeat_interleave(3, dim=1).transpose(2, 3) * 0.7
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks:
        scores = torch.cat([scores, sink_scores[:, None, None].expand(2, 6, 3, 1)], dim=-1)
    expected = scores.softmax(-1)[..., :5] @ value.repeat_interleave(3, dim=1)
    torch.testing.assert_close(grouped_attention(query, key, value, mask, 0.7, softcap, sink_scores), expected)


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 5e4},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
        {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda parameters: parameters["rope_type"],
)
def test_rotary_embedding_equals_llamas(parameters):
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "head_dim": 16, "max_position_embeddings": 256}
    rotary = DSparkRotaryEmbedding(tiny_config(**sizes, rope_parameters=dict(parameters)))
    llama = LlamaRotaryEmbedding(LlamaConfig(**sizes, rope_parameters=dict(parameters)))
    positions = torch.tensor([0, 1, 17, 200, 4000])
    for found, expected in zip(rotary(positions, torch.float32), llama(torch.zeros(1), positions[None]), strict=True):
        torch.testing.assert_close(found[:, 0], expected[0])


def cast(drafter: DSparkDraftModel, how: str) -> DSparkDraftModel:
    return drafter.half() if how == "half" else drafter.to(torch.bfloat16)


@pytest.mark.parametrize("how", ["half", "bfloat16"])
def test_rotary_frequencies_stay_float32(how):
    plain, drafter = tiny_drafter(), cast(tiny_drafter(), how)
    frequencies, _ = drafter.rotary.frequencies(torch.device("cpu"))
    assert frequencies.dtype == torch.float32
    assert torch.equal(frequencies, plain.rotary.frequencies(torch.device("cpu"))[0])
    # At position 4001 a bfloat16 angle would be off by up to 8 radians.
    cos, _ = drafter.rotary(torch.tensor([4001]), drafter.dtype)
    exact, _ = plain.rotary(torch.tensor([4001]), torch.float32)
    assert cos.dtype == drafter.dtype
    torch.testing.assert_close(cos.float(), exact, atol=4e-3, rtol=0)


# A model among others


@pytest.mark.parametrize("remake", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_draft_the_same(remake):
    drafter = load_drafter("deepspec-rnn")
    taps = random_taps(drafter, [6])
    expected = Rows(drafter, taps, [0]).round([6], [40])
    found = Rows(remake(drafter), taps, [0]).round([6], [40])
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_generate_says_what_to_do_instead():
    with pytest.raises(ValueError, match=r"target\.generate\(\*\*inputs, assistant_model=drafter\)"):
        tiny_drafter().generate(torch.tensor([[1, 2]]), max_new_tokens=3)


def test_statistics_belong_to_a_thread():
    drafter = tiny_drafter()
    drafter.last_call.stats = "mine"
    seen = []
    thread = threading.Thread(target=lambda: seen.append(drafter.speculative_stats))
    thread.start()
    thread.join()
    assert seen == [None] and drafter.speculative_stats == "mine"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@torch.no_grad()
def test_drafter_and_target_on_different_devices():
    table, head = nn.Embedding(37, 16), nn.Linear(16, 37, bias=False)
    taps, slots = torch.randn(5, 48), torch.tensor([[2, 1, 1, 1], [3, 1, 1, 1]])
    tokens = []
    for device in ("cpu", "cuda"):
        drafter = borrower().to(device)
        hidden = drafter(drafter.embed(slots, table), taps, [2, 3], DraftContext(drafter.config, [0, 0]))
        assert hidden.device.type == device
        tokens.append(drafter.draft(hidden, slots[:, 0].to(device), head).tokens.cpu())
    assert torch.equal(*tokens)
