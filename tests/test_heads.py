"""The sequential heads and the confidence head: shapes, what each slot sees, the slots that are drawn."""

import pytest
import torch
from test_borrowing import Opaque
from test_drafter import tiny_drafter
from tiny import random_drafter
from torch import nn


@pytest.mark.parametrize(
    ("changes", "shapes"),
    [
        ({"markov_head_type": "vanilla"}, {}),
        ({"markov_head_type": "gated"}, {"gate_proj.weight": [5, 21], "gate_proj.bias": [5]}),
        ({"markov_head_type": "rnn"}, {"joint_proj.weight": [15, 26], "joint_proj.bias": [15]}),
    ],
)
def test_shapes_of_the_sequential_heads(changes, shapes):
    state = tiny_drafter(**changes).markov_head.state_dict()
    shapes = shapes | {"markov_w1.weight": [37, 5], "markov_w2.weight": [37, 5]}
    assert {name: list(value.shape) for name, value in state.items()} == shapes


@pytest.mark.parametrize(
    ("changes", "width"),
    [
        ({}, 21),
        ({"confidence_head_with_markov": False}, 16),
        ({"confidence_head_with_markov": False, "markov_rank": 0}, 16),
    ],
)
def test_shapes_of_the_confidence_head(changes, width):
    state = tiny_drafter(**changes).confidence_head.state_dict()
    assert {name: list(value.shape) for name, value in state.items()} == {"proj.weight": [1, width], "proj.bias": [1]}


@torch.no_grad()
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_logits_follow_the_tokens_drawn_before(head):
    drafter = tiny_drafter(markov_head_type=head)
    hidden = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(2))
    drawn = torch.tensor([[3, 8, 8, 1], [30, 2, 36, 0]])
    seen = []

    def forced(slot: int, logits: torch.Tensor, ids: None) -> torch.Tensor:
        seen.append(logits)
        return drawn[:, slot]

    anchors = torch.tensor([7, 9])
    draft = drafter.draft(hidden, anchors, select=forced)
    assert torch.equal(draft.tokens, drawn)
    w1, w2 = drafter.markov_head.markov_w1.weight, drafter.markov_head.markov_w2.weight
    for row in range(2):
        state = torch.zeros(5)
        for slot, token in enumerate([anchors[row], *drawn[row, :-1]]):
            features = w1[token]
            if head == "gated":
                gate = drafter.markov_head.gate_proj(torch.cat([hidden[row, slot], features]))
                features = torch.sigmoid(gate) * features
            elif head == "rnn":
                gate, candidate, output = drafter.markov_head.joint_proj(
                    torch.cat([state, features, hidden[row, slot]])
                ).chunk(3)
                state = torch.sigmoid(gate) * state + torch.sigmoid(-gate) * torch.tanh(candidate)
                features = torch.tanh(output)
            expected = hidden[row, slot] @ drafter.lm_head.weight.T + w2 @ features
            torch.testing.assert_close(seen[slot][row], expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 3])
def test_the_slots_that_are_drawn_are_laid_out_as_if_there_were_no_others(rows, monkeypatch):
    """The strides of a slice make a product in bfloat16 take 20 times as long on a CPU."""
    drafter = random_drafter("vanilla", block_size=3, owns_lm_head=True)
    strides, base_logits = [], drafter.base_logits
    monkeypatch.setattr(
        drafter, "base_logits", lambda states, head: strides.append(states.stride()) or base_logits(states)
    )
    hidden = torch.randn(rows, drafter.config.block_size, 8, dtype=torch.float64)
    for slots in range(1, drafter.config.block_size + 1):
        drafted = drafter.draft(hidden, torch.zeros(rows, dtype=torch.long), slots=slots)
        assert drafted.tokens.shape == (rows, slots)
        assert strides.pop() == (slots * 8, 8, 1)


def test_the_sequential_heads_projection_is_called_not_read():
    # It may be quantised, or carry an adapter that its weight alone does not show.
    drafter = tiny_drafter()
    hidden = torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(2))
    favourite = nn.functional.one_hot(torch.tensor([9]), 37) * 1e3
    drafter.markov_head.markov_w2 = Opaque(lambda features: favourite)
    assert drafter.draft(hidden, torch.tensor([7])).tokens.tolist() == [[9, 9, 9, 9]]


@torch.no_grad()
def test_a_drafter_without_sequential_head_drafts_from_base_logits():
    drafter = tiny_drafter(markov_rank=0, confidence_head_with_markov=False)
    hidden = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(2))
    draft = drafter.draft(hidden, torch.tensor([0, 1]))
    assert torch.equal(draft.tokens, drafter.base_logits(hidden).argmax(-1))


@torch.no_grad()
@pytest.mark.parametrize("changed", [0, 1, 2, 3])
def test_confidence_of_a_slot_does_not_see_its_own_token(changed):
    drafter = tiny_drafter()
    hidden = torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(2))
    drawn = torch.tensor([[3, 8, 11, 1]])
    other = drawn.clone()
    other[0, changed] = 20
    first, second = (
        drafter.draft(hidden, torch.tensor([7]), select=lambda slot, *_, t=tokens: t[:, slot]).confidence_logits[0]
        for tokens in (drawn, other)
    )
    assert torch.equal(first[: changed + 1], second[: changed + 1])
    assert changed == 3 or first[changed + 1] != second[changed + 1]
