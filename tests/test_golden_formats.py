"""Drafters of z-lab's DFlash and of speculators against those packages' own outputs: taps, logits, text."""

import pytest
import torch
from conftest import DFLASH, SPECULATORS, load_drafter, load_golden
from test_golden_decodes import check

from dspark_hf.modeling.draft_context import DraftContext


pytestmark = pytest.mark.usefixtures("no_grad")

TOLERANCE = 1e-4


def draft_block(drafter, target, context, anchor, select=None) -> dict[str, torch.Tensor]:
    """One block behind a context that is handed over at once."""
    logits = []

    def choose(slot: int, slot_logits: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
        logits.append(slot_logits[0])
        return select(slot) if select is not None else drafter._most_likely(slot, slot_logits, ids)

    block = drafter.embed(drafter.block_tokens(anchor), target.get_input_embeddings())
    hidden = drafter(block, context, [len(context)], DraftContext(drafter.config, [0], capacity=8))
    draft = drafter.draft(hidden, anchor, target.get_output_embeddings(), choose)
    found = {"block_hidden": hidden[0], "draft_logits": torch.stack(logits), "draft_tokens": draft.tokens[0]}
    found["base_logits"] = drafter.base_logits(hidden, target.get_output_embeddings())[0]
    if draft.confidence_logits is not None:
        found["confidence_logits"] = draft.confidence_logits[0]
    return found


def close(found: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0, msg=lambda message: f"{name}: {message}")


def taps_of(target, drafter, ids: torch.Tensor) -> torch.Tensor:
    """What the drafter's config says it reads, of a text."""
    states = target(ids, output_hidden_states=True).hidden_states
    return torch.cat([states[tap + 1] for tap in drafter.config.target_layer_ids], dim=-1)[0]


@pytest.mark.parametrize("prompt", [0, 1, 2])
@pytest.mark.parametrize("name", DFLASH)
def test_a_block_of_dflash(name, prompt, tiny_target):
    decodes, tensors = load_golden(name)
    expected = {key.removeprefix(f"p{prompt}."): value for key, value in tensors.items() if f"p{prompt}." in key}
    drafter, ids = load_drafter(name), decodes["decodes"][prompt]["prompt_ids"]
    assert drafter.config.block_size == len(expected["draft_tokens"])
    context = expected.pop("context")
    close(taps_of(tiny_target, drafter, torch.tensor([ids])), context, "taps")
    anchor = expected.pop("anchor")
    assert anchor.item() == decodes["decodes"][prompt]["output_ids"][len(ids)]
    found = draft_block(drafter, tiny_target, context, anchor)
    assert found["draft_tokens"].tolist() == expected.pop("draft_tokens").tolist()
    assert expected.keys() == {"block_hidden", "draft_logits"}
    for key, value in expected.items():
        close(found[key], value, key)


@pytest.mark.parametrize("name", SPECULATORS)
def test_blocks_of_speculators(name, tiny_target):
    _, tensors = load_golden(name)
    drafter, ids, context = load_drafter(name), tensors["input_ids"], tensors["context"][0]
    close(taps_of(tiny_target, drafter, ids), context, "taps")
    whole = 0
    for row, place in enumerate(tensors["anchor_positions"].tolist()):
        tokens = tensors["block_tokens"][row]
        assert tokens[0] == ids[0, place]
        following = torch.cat([tokens[1:], tokens[:1]])
        found = draft_block(
            drafter, tiny_target, context[:place], tokens[:1], lambda slot, t=following: t[slot : slot + 1]
        )
        valid = min(drafter.config.block_size, len(context) - place)
        whole += valid == drafter.config.block_size
        for key in ("block_hidden", "base_logits", "draft_logits", "confidence_logits"):
            close(found[key][:valid], tensors[key][row, :valid], f"{key} behind {place}")
    assert whole > 1


def test_the_window_bites():
    """Otherwise the sliding fixtures would show nothing."""
    _, tensors = load_golden("speculators-sliding")
    assert max(tensors["anchor_positions"].tolist()) > load_drafter("speculators-sliding").config.sliding_window
    _, tensors = load_golden("dflash-nested-sliding")
    assert len(tensors["p0.context"]) > load_drafter("dflash-nested-sliding").config.sliding_window


def test_what_a_reduced_vocabulary_leaves_out():
    _, tensors = load_golden("speculators-reduced-vocab")
    drafter = load_drafter("speculators-reduced-vocab")
    assert torch.equal(drafter.d2t, tensors["d2t"] + torch.arange(70))
    assert drafter.d2t.dtype == torch.int64 and drafter.config.draft_vocab_size == 70 < drafter.config.vocab_size


@pytest.mark.parametrize("name", DFLASH)
def test_dflash_decodes(name, tiny_target, monkeypatch):
    monkeypatch.setattr(tiny_target.generation_config, "eos_token_id", None)
    golden, _ = load_golden(name)
    for decode in golden["decodes"]:
        with monkeypatch.context() as patch:
            check(tiny_target, load_drafter(name), decode, patch)


@pytest.mark.parametrize("name", ["speculators-vanilla", "speculators-rnn"])
def test_speculators_decode_as_the_same_weights_do(name, tiny_target, monkeypatch):
    monkeypatch.setattr(tiny_target.generation_config, "eos_token_id", None)
    described, _ = load_golden(name)
    golden, _ = load_golden(described["same_weights_as"])
    for decode in golden["decodes"]:
        if decode.get("threshold", 0.0) == 0.0:
            with monkeypatch.context() as patch:
                check(tiny_target, load_drafter(name), decode, patch)


@pytest.mark.parametrize("name", [*DFLASH, *SPECULATORS])
def test_a_batch_decodes_as_plain_generate_does(name, tiny_target):
    ids = torch.tensor([list(range(3, 20)), [0] * 9 + list(range(40, 48)), list(range(70, 87))])
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    options = {"attention_mask": mask, "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    drafter = load_drafter(name)
    assert torch.equal(
        tiny_target.generate(ids, assistant_model=drafter, **options), tiny_target.generate(ids, **options)
    )
    assert drafter.speculative_stats.accepted > 0
