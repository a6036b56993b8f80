"""The drafter alone against DeepSpec's own outputs, round by round: hidden states, logits, confidences and tokens."""

from functools import cache

import pytest
import torch
from conftest import DEEPSPEC, load_drafter, load_golden

from dspark_hf.modeling.draft_context import DraftContext


TOLERANCE = 1e-4


def rounds_in(folder: str) -> list[tuple[int, int]]:
    """Prompts and rounds that a folder has tensors of."""
    _, tensors = load_golden(folder)
    names = {tuple(name.split(".")[:2]) for name in tensors if not name.startswith("train.")}
    return sorted((int(prompt[1:]), int(turn[1:])) for prompt, turn in names)


@cache
def replay(folder: str, prompt: int) -> list[dict[str, torch.Tensor]]:
    """Draft every round of one prompt from the recorded contexts and anchors, over one growing context."""
    decodes, tensors = load_golden(folder)
    decode = [decode for decode in decodes["decodes"] if decode.get("threshold", 0) == 0][prompt]
    drafter = load_drafter(folder)
    context, outputs = DraftContext(drafter.config, [0], capacity=8), []
    for turn in [turn for number, turn in rounds_in(folder) if number == prompt]:
        new = tensors[f"p{prompt}.r{turn}.context"]
        start = context.lengths[0] + len(new)
        slots = torch.full((1, drafter.config.block_size), drafter.config.mask_token_id)
        slots[0, 0] = decode["output_ids"][start]
        logits = []

        def greedy(slot: int, slot_logits: torch.Tensor, ids: None, logits: list = logits) -> torch.Tensor:
            logits.append(slot_logits)
            return slot_logits.argmax(dim=-1)

        with torch.no_grad():
            hidden = drafter(drafter.embed(slots), new, [len(new)], context)
            draft = drafter.draft(hidden, slots[:, 0], select=greedy)
            base = drafter.base_logits(hidden)
        outputs.append(
            {
                "start": torch.tensor(context.lengths[0]),
                "block_hidden": hidden[0],
                "base_logits": base[0],
                "draft_logits": torch.cat(logits),
                "draft_tokens": draft.tokens[0],
            }
        )
        if draft.confidence_logits is not None:
            outputs[-1]["confidence_logits"] = draft.confidence_logits[0]
    return outputs


@pytest.mark.parametrize(
    ("folder", "prompt", "turn"), [(folder, *where) for folder in DEEPSPEC for where in rounds_in(folder)]
)
def test_a_round_agrees_with_deepspec(folder, prompt, turn):
    _, tensors = load_golden(folder)
    prefix = f"p{prompt}.r{turn}."
    expected = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    found = replay(folder, prompt)[turn]
    assert expected.keys() - {"context"} == found.keys()
    assert found.pop("start") == expected["start"]
    assert found["draft_tokens"].tolist() == expected["draft_tokens"].tolist()
    for name in found.keys() - {"draft_tokens"}:
        torch.testing.assert_close(
            found[name], expected[name], atol=TOLERANCE, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_every_head_and_family_is_covered():
    configs = [load_drafter(folder).config for folder in DEEPSPEC]
    assert {config.markov_head_type for config in configs if config.markov_rank} == {"vanilla", "gated", "rnn"}
    assert {config.markov_rank > 0 for config in configs} == {True, False}
    assert {config.enable_confidence_head for config in configs} == {True, False}
    assert {config.sandwich_norms for config in configs} == {True, False}
    assert {config.attention_k_eq_v for config in configs} == {True, False}
