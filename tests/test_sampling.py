"""Drawing, residuals, and verification of ragged rows against a plain reference."""

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_hf import sampling
from dspark_hf.sampling import Verification, draw_accepts, draw_tokens, most_likely, probabilities, residual


VOCAB = 5


def test_probabilities_are_at_least_float32():
    scores = torch.tensor([[1.0, 2.0, -float("inf")]])
    for dtype, wanted in ((torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float64,) * 2):
        probs = probabilities(scores.to(dtype))
        assert probs.dtype == wanted and probs[0, 2] == 0
        torch.testing.assert_close(probs, scores.to(wanted).softmax(dim=-1))


# Drawing


def test_tokens_are_drawn_as_often_as_they_are_likely():
    probs = torch.tensor([[0.1, 0.0, 0.6, 0.3, 0.0], [0.0, 0.25, 0.0, 0.0, 0.75]])
    torch.manual_seed(0)
    counts = torch.zeros(2, VOCAB)
    for _ in range(200):
        drawn = draw_tokens(probs.repeat_interleave(50, dim=0))
        assert drawn.dtype == torch.long and drawn.shape == (100,)
        for row in range(2):
            counts[row] += torch.bincount(drawn[row * 50 : (row + 1) * 50], minlength=VOCAB)
    assert torch.equal(counts > 0, probs > 0)
    expected = 10_000 * probs
    statistic = ((counts - expected)[probs > 0] ** 2 / expected[probs > 0]).sum()
    assert statistic < 16.3  # 0.999 quantile at 3 degrees of freedom


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-53])
def test_the_ends_of_the_interval_draw_tokens_that_are_possible(uniform, monkeypatch):
    monkeypatch.setattr(torch, "rand_like", lambda like: torch.full_like(like, uniform))
    for dtype in (torch.float32, torch.float64):
        for scale in (0.3, 1.0, 1.7):  # the probabilities need not add up to one exactly
            probs = scale * torch.tensor([[0.0, 0.0, 0.3, 0.7, 0.0, 0.0]], dtype=dtype)
            assert draw_tokens(probs).item() == (2 if uniform == 0 else 3)


def test_a_seed_repeats_the_draws():
    probs = torch.rand(64, 100)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append((draw_tokens(probs).tolist(), draw_accepts(probs).tolist()))
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("value", [math.nan, 0.0])
def test_no_distribution_is_an_error(value):
    with pytest.raises(ValueError, match="hold no distribution to draw from"):
        draw_tokens(torch.full((1, 4), value))


def test_certain_coins():
    torch.manual_seed(0)
    accepts = draw_accepts(torch.tensor([[0.0, 1.0]]).repeat(10_000, 1))
    assert accepts.dtype == torch.bool and not accepts[:, 0].any() and accepts[:, 1].all()
    assert draw_accepts(torch.full((10_000,), 0.25)).float().mean().item() == pytest.approx(0.25, abs=0.02)


def test_the_most_likely_is_the_first_of_equals():
    scores = torch.tensor([[0.0, 2.0, 2.0, 1.0], [3.0, -float("inf"), 3.0, 3.0]])
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert most_likely(scores.to(dtype)).tolist() == [1, 0]
        many = scores.repeat(11, 1)  # more rows than are compared at a time
        assert most_likely(many.to(dtype)).tolist() == [1, 0] * 11


@pytest.mark.parametrize("vocab_size", [7, 1023, 1024, 1025, 5000])
def test_the_most_likely_of_a_large_vocabulary(vocab_size):
    """Small whole numbers, so that many are equal: within a chunk, between chunks and with what is left over."""
    generator = torch.Generator().manual_seed(vocab_size)
    for highest in (3, 100_000):
        scores = torch.randint(highest, (5, 40, vocab_size), generator=generator).float()
        assert torch.equal(most_likely(scores), torch.from_numpy(scores.numpy().argmax(axis=-1)))
        rounded = scores.bfloat16()
        assert torch.equal(most_likely(rounded), torch.from_numpy(rounded.float().numpy().argmax(axis=-1)))
    scores = torch.zeros(1, vocab_size)
    scores[0, -1] = math.nan
    assert most_likely(scores).tolist() == [vocab_size - 1], "NaN counts as the highest, as for argmax"


# Residuals

weights = st.lists(st.integers(0, 8), min_size=VOCAB, max_size=VOCAB).filter(any)


@settings(deadline=None, derandomize=True)
@given(weights, weights)
def test_residual_is_the_positive_part_or_the_target_itself(of_target, of_drafter):
    target = [Fraction(weight, sum(of_target)) for weight in of_target]
    drafter = [Fraction(weight, sum(of_drafter)) for weight in of_drafter]
    left = [max(p - q, Fraction(0)) for p, q in zip(target, drafter, strict=True)]
    expected = [float(part / sum(left)) for part in left] if any(left) else [float(p) for p in target]
    found = residual(*(torch.tensor([list(map(float, probs))], dtype=torch.float64) for probs in (target, drafter)))
    assert torch.isfinite(found).all()
    if any(left):
        torch.testing.assert_close(found[0], torch.tensor(expected, dtype=torch.float64))
    else:  # rounding may leave something, all of it tokens that the target can say
        assert found.sum().item() == pytest.approx(1.0)
        assert all(weight > 0 for weight, p in zip(of_target, found[0].tolist(), strict=True) if p > 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_distributions_leave_the_targets(dtype):
    probs = torch.rand(3, VOCAB, dtype=dtype).softmax(dim=-1)
    assert torch.equal(residual(probs, probs), probs)
    tiny = torch.tensor([[1.0, 0.0, 1e-40]], dtype=dtype)  # a leftover below the smallest normal float32
    assert torch.isfinite(residual(tiny, torch.tensor([[1.0, 0.0, 0.0]], dtype=dtype))).all()


# Verification

lengths_of_rows = st.lists(st.integers(0, 4), min_size=1, max_size=4)


def a_round(lengths: list[int], seed: int):
    """Drafts, what they were drawn from, what the target says of each position, and coins."""
    generator = torch.Generator().manual_seed(seed)
    rows, block_size = len(lengths), 4
    draft_probs = (3 * torch.randn(rows, block_size, VOCAB, generator=generator)).double().softmax(dim=-1)
    drafts = torch.multinomial(draft_probs.flatten(0, 1), 1, generator=generator).view(rows, block_size)
    target_probs = (3 * torch.randn(sum(lengths) + rows, VOCAB, generator=generator)).double().softmax(dim=-1)
    coins = torch.rand(rows, block_size, generator=generator).double()
    return drafts, draft_probs, target_probs, coins


def rows_of(target: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
    """The stream of positions, row by row."""
    return list(target.split([length + 1 for length in lengths]))


@settings(deadline=None, derandomize=True)
@given(lengths_of_rows, st.integers(0, 10**6))
def test_greedy_verification_of_ragged_rows(lengths, seed):
    drafts, _, scores, coins = a_round(lengths, seed)
    choices = [row.argmax(dim=-1).tolist() for row in rows_of(scores, lengths)]
    for row, length in enumerate(lengths):  # half of the drafts are right
        for slot in range(length):
            if coins[row, slot] < 0.6:
                drafts[row, slot] = choices[row][slot]
    verdict = Verification(drafts, lengths).greedy(scores)
    for row, length in enumerate(lengths):
        accepted = 0
        while accepted < length and drafts[row, accepted] == choices[row][accepted]:
            accepted += 1
        assert verdict.accepted[row] == accepted
        expected = [*drafts[row, :accepted].tolist(), choices[row][accepted]]
        assert verdict.tokens[row, : accepted + 1].tolist() == expected


@settings(deadline=None, derandomize=True)
@given(lengths_of_rows, st.integers(0, 10**6), st.booleans())
def test_sampled_verification_of_ragged_rows(lengths, seed, agree):
    drafts, draft_probs, target_probs, coins = a_round(lengths, seed)
    if agree:  # drafter and target are close, so that many are accepted
        for row, of_target in enumerate(rows_of(target_probs, lengths)):
            draft_probs[row, : lengths[row]] = 0.7 * draft_probs[row, : lengths[row]] + 0.3 * of_target[:-1]
    drawn_from: list[torch.Tensor] = []

    def draw(probs: torch.Tensor) -> torch.Tensor:
        drawn_from.append(probs)
        return probs.argmax(dim=-1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "draw_tokens", draw)
        patch.setattr(sampling, "draw_accepts", lambda accept_probs: coins[:, : accept_probs.shape[1]] < accept_probs)
        verdict = Verification(drafts, lengths).sampled(target_probs, draft_probs)
    assert len(drawn_from) == 1
    for row, (length, of_target) in enumerate(zip(lengths, rows_of(target_probs, lengths), strict=True)):
        accepted = 0
        while accepted < length:
            token = drafts[row, accepted]
            if not coins[row, accepted] < min(1.0, of_target[accepted, token] / draft_probs[row, accepted, token]):
                break
            accepted += 1
        own = of_target[accepted]
        if accepted < length:
            left = (own - draft_probs[row, accepted]).clamp(min=0)
            own = left / left.sum()
        assert verdict.accepted[row] == accepted
        torch.testing.assert_close(drawn_from[0][row], own)
        assert verdict.tokens[row, : accepted + 1].tolist() == [*drafts[row, :accepted].tolist(), int(own.argmax())]


class Steps:
    """Verifies by step with given coins, and keeps which places were asked for and what was drawn from."""

    def __init__(self, lengths: list[int], target_probs: torch.Tensor, target_ids: torch.Tensor | None):
        self.place_of = [(row, step) for row, length in enumerate(lengths) for step in range(length + 1)]
        self.target_probs, self.target_ids = target_probs, target_ids
        self.asked: list[int] = []
        self.drawn_from: dict[int, torch.Tensor] = {}

    def law(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.asked += places.tolist()
        self.rows, self.steps = map(list, zip(*(self.place_of[place] for place in places), strict=True))
        self.ending = self.rows
        return self.target_probs[places], None if self.target_ids is None else self.target_ids[places]

    def __call__(self, drafts: torch.Tensor, lengths: list[int], coins: torch.Tensor, *args: Any) -> sampling.Verdict:
        def toss(accept_probs: torch.Tensor) -> torch.Tensor:
            accepts = coins[self.rows, [min(step, 3) for step in self.steps]] < accept_probs
            self.ending = [row for row, accept in zip(self.rows, accepts.tolist(), strict=True) if not accept]
            return accepts

        def draw(probs: torch.Tensor) -> torch.Tensor:
            self.drawn_from |= dict(zip(self.ending, probs, strict=True))
            return probs.argmax(dim=-1)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampling, "draw_tokens", draw)
            patch.setattr(sampling, "draw_accepts", toss)
            return Verification(drafts, lengths).sampled_by_step(self.law, *args)


@settings(deadline=None, derandomize=True)
@given(lengths_of_rows, st.integers(0, 10**6), st.sampled_from([None, "one set", "a set each"]), st.booleans())
def test_step_by_step_is_all_at_once(lengths, seed, reduced, few):
    """With the target's probabilities of all tokens, or of those alone that it can say."""
    drafts, draft_probs, target_probs, coins = a_round(lengths, seed)
    generator = torch.Generator().manual_seed(seed)
    target_ids = torch.rand(target_probs.shape, generator=generator).topk(3).indices.sort().values
    of_ids = target_probs.gather(1, target_ids)
    target_probs = torch.zeros_like(target_probs).scatter(1, target_ids, of_ids)
    draft_ids = None
    if reduced is not None:
        shape = (VOCAB,) if reduced == "one set" else draft_probs.shape
        draft_ids = torch.rand(shape, generator=generator).topk(3, dim=-1).indices.sort(dim=-1).values
        draft_probs = draft_probs[..., :3].contiguous()
        drafts = draft_ids.expand_as(draft_probs).gather(2, draft_probs.argmax(dim=-1, keepdim=True)).squeeze(2)
    drawn_from: list[torch.Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "draw_tokens", lambda probs: drawn_from.append(probs) or probs.argmax(dim=-1))
        patch.setattr(sampling, "draw_accepts", lambda accept_probs: coins[:, : accept_probs.shape[1]] < accept_probs)
        at_once = Verification(drafts, lengths).sampled(target_probs, draft_probs, None, draft_ids)
    steps = Steps(lengths, of_ids if few else target_probs, target_ids if few else None)
    by_step = steps(drafts, lengths, coins, draft_probs, None, draft_ids)
    assert torch.equal(by_step.accepted, at_once.accepted)
    reached = [(row, step) for row, accepted in enumerate(at_once.accepted.tolist()) for step in range(accepted + 1)]
    assert sorted(steps.place_of[place] for place in steps.asked) == reached, "no place is asked for in vain"
    for row, accepted in enumerate(at_once.accepted.tolist()):
        assert by_step.tokens[row, : accepted + 1].tolist() == at_once.tokens[row, : accepted + 1].tolist()
        found = steps.drawn_from[row]
        if few:
            ids = target_ids[steps.place_of.index((row, accepted))]
            found = torch.zeros_like(drawn_from[0][row]).scatter(0, ids, found)
        torch.testing.assert_close(found, drawn_from[0][row], rtol=1e-12, atol=0)


def test_coins_that_cannot_matter_do_not(monkeypatch):
    """Those of drafts that were not sent, and those behind a rejected draft."""
    lengths = [3, 1, 0, 4]
    drafts, draft_probs, target_probs, _ = a_round(lengths, seed=0)
    monkeypatch.setattr(sampling, "draw_tokens", lambda probs: probs.argmax(dim=-1))
    first_rejected = [1, 0, 0, 2]
    outcomes = []
    for filler in (False, True):
        coins = torch.full((4, 4), filler)
        for row, rejected in enumerate(first_rejected):
            coins[row, :rejected] = True
            if rejected < lengths[row]:
                coins[row, rejected] = False
        monkeypatch.setattr(sampling, "draw_accepts", lambda accept_probs, coins=coins: coins)
        verdict = Verification(drafts, lengths).sampled(target_probs, draft_probs)
        kept = [row[: count + 1] for row, count in zip(verdict.tokens.tolist(), verdict.accepted, strict=True)]
        outcomes.append((verdict.accepted.tolist(), kept))
    assert outcomes[0] == outcomes[1] and outcomes[0][0] == first_rejected


@pytest.mark.parametrize("do_sample", [False, True])
def test_nothing_to_verify(do_sample):
    scores = torch.randn(3, VOCAB)
    verification = Verification(torch.zeros(3, 4, dtype=torch.long), [0, 0, 0])
    if do_sample:
        verdict = verification.sampled(scores.softmax(dim=-1), torch.zeros(3, 0, VOCAB))
    else:
        verdict = verification.greedy(scores)
        assert verdict.tokens[:, 0].tolist() == scores.argmax(dim=-1).tolist()
    assert verdict.accepted.tolist() == [0, 0, 0] and verdict.tokens.shape == (3, 1)


@pytest.mark.parametrize(("do_sample", "by_step"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("accept_prob", [0.0, 0.5, 1.0])
def test_synthetic_acceptance_does_not_look_at_the_drafts(accept_prob, do_sample, by_step):
    torch.manual_seed(0)
    rows = 2000
    drafts, draft_probs, target_probs, _ = a_round([4] * rows, seed=1)
    verification = Verification(drafts, [4] * rows)
    accept_probs = torch.full((rows, 4), accept_prob)
    if by_step:
        verdict = verification.sampled_by_step(lambda places: (target_probs[places], None), draft_probs, accept_probs)
    elif do_sample:
        verdict = verification.sampled(target_probs, draft_probs, accept_probs)
    else:
        verdict = verification.greedy(target_probs.log(), accept_probs)
    expected = sum(accept_prob**slot for slot in range(1, 5))
    assert verdict.accepted.double().mean().item() == pytest.approx(expected, abs=0.1)
