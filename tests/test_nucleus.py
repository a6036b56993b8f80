"""Top-p filtering by the most likely tokens gives what Transformers' sort gives."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from dspark_hf import nucleus
from dspark_hf.nucleus import filter_nucleus, find_nuclei
from dspark_hf.sampling import draw_tokens, probabilities


class Counted(TopPLogitsWarper):
    """Counts the rows that it was asked to sort."""

    rows = 0

    def __call__(self, input_ids, scores):
        self.rows += len(scores)
        return super().__call__(input_ids, scores)


def check(processor: TopPLogitsWarper, scores: torch.Tensor) -> None:
    found, expected = filter_nucleus(processor, scores), TopPLogitsWarper.__call__(processor, None, scores)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rounded", [False, True], ids=["scores", "bfloat16 scores"])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.95, 0.999])
@pytest.mark.parametrize("temperature", [0.2, 0.7, 1.0, 3.0])
def test_equal_to_the_sort(top_p, temperature, rounded, dtype):
    """Scores in bfloat16 have many equal ones; at a high temperature the nucleus is thousands of tokens."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(12, 20000, generator=generator, dtype=dtype) * 4
    scores = (scores.bfloat16() if rounded else scores).to(dtype) / temperature
    check(TopPLogitsWarper(top_p), scores)
    check(TopPLogitsWarper(top_p), TopKLogitsWarper(50)(None, scores))
    check(TopPLogitsWarper(top_p, min_tokens_to_keep=7), scores)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(
    st.lists(st.lists(st.sampled_from([0.0, 1.0, 1.5, 2.0, 8.0, -float("inf")]), min_size=6, max_size=6), min_size=1),
    st.floats(0.01, 0.99),
    st.integers(1, 4),
)
def test_ties_and_masked_tokens(rows, top_p, min_tokens_to_keep):
    rows = [row if max(row) > -float("inf") else [0.0] * 6 for row in rows]
    check(TopPLogitsWarper(top_p, min_tokens_to_keep=min_tokens_to_keep), torch.tensor(rows))


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.integers(2, 40), st.data())
def test_limits_that_fall_on_a_sum(count, data):
    """Equal probabilities, and a limit that is exactly a number of them: rounding decides, so the sort does."""
    top_p = data.draw(st.integers(1, count - 1)) / count
    check(TopPLogitsWarper(top_p), torch.zeros(1, count))
    check(TopPLogitsWarper(top_p), torch.arange(count).float().mul(1e-6)[None])


def test_what_cannot_be_told_is_sorted_and_nothing_else(monkeypatch):
    clear = torch.log(torch.tensor([[0.7, 0.25, 0.04, 0.01]]))
    tied = torch.log(torch.tensor([[0.4, 0.2, 0.2, 0.2]]))
    processor = Counted(0.5)
    filter_nucleus(processor, torch.cat([clear, tied, clear]))
    assert processor.rows == 1
    monkeypatch.setattr(nucleus, "_LAST_LOOK", 3)
    for top_p, sorted_rows in ((0.6, 0), (0.8, 0), (0.98, 1)):  # nuclei of 1, 2 and 3 tokens
        processor = Counted(top_p)
        found = filter_nucleus(processor, clear, 2)
        assert processor.rows == sorted_rows
        assert torch.equal(found, TopPLogitsWarper(top_p)(None, clear))


def test_scores_that_are_no_numbers_are_left_to_the_sort():
    processor = Counted(0.9)
    filter_nucleus(processor, torch.tensor([[0.0, float("nan"), 1.0]]))
    assert processor.rows == 1


# Few tokens in place of the vocabulary


def check_nuclei(warpers: list[LogitsProcessor], processor: TopPLogitsWarper, logits: torch.Tensor) -> int | None:
    """Compare with all scores, processed one after the other: how many tokens were enough, if not the vocabulary."""
    scores, tokens = find_nuclei(warpers, processor, logits)
    expected = logits.to(scores.dtype)
    for warper in [*warpers, TopPLogitsWarper(processor.top_p, min_tokens_to_keep=processor.min_tokens_to_keep)]:
        expected = warper(None, expected)
    assert scores.dtype == torch.promote_types(logits.dtype, torch.float32)
    if tokens is None:
        assert torch.equal(scores, expected)
        return None
    assert torch.equal(torch.full_like(expected, -float("inf")).scatter_(1, tokens, scores), expected)
    assert (tokens[:, 1:] > tokens[:, :-1]).all()
    assert tokens.shape[1] == (expected > -float("inf")).sum(dim=-1).max()
    of_all = probabilities(expected).gather(1, tokens)
    torch.testing.assert_close(probabilities(scores), of_all, rtol=1e-6, atol=0)
    return tokens.shape[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("temperature", [0.2, 0.7, 3.0])
def test_nuclei_are_those_of_all_scores(temperature, top_p, dtype):
    """More positions than are taken at a time; a vocabulary with a rest behind the last chunk."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(19, 20001, generator=generator) * 4).to(dtype)
    warm, processor = TemperatureLogitsWarper(temperature), TopPLogitsWarper(top_p)
    found = check_nuclei([warm], processor, logits)
    assert temperature == 0.7 or (found is None) == (temperature == 3.0)
    assert check_nuclei([warm, TopKLogitsWarper(20)], processor, logits) <= 25  # more than 20 where some are equal
    check_nuclei([warm, TopKLogitsWarper(200)], processor, logits)
    check_nuclei([], TopPLogitsWarper(top_p, min_tokens_to_keep=70), logits)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(
    st.lists(st.lists(st.sampled_from([0.0, 1.0, 1.5, 2.0, 8.0, -float("inf")]), min_size=6, max_size=6), min_size=1),
    st.floats(0.01, 0.99),
    st.integers(1, 6),
    st.integers(1, 6),
)
def test_nuclei_of_ties_and_masked_tokens(rows, top_p, min_tokens_to_keep, looked_at):
    rows = [row if max(row) > -float("inf") else [0.0] * 6 for row in rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nucleus, "_FIRST_LOOK", looked_at)
        processor = TopPLogitsWarper(top_p, min_tokens_to_keep=min_tokens_to_keep)
        check_nuclei([], processor, torch.tensor(rows))
        check_nuclei([TemperatureLogitsWarper(0.5), TopKLogitsWarper(2)], processor, torch.tensor(rows))


def test_a_tie_is_sorted_and_its_row_stays_small():
    clear = torch.log(torch.tensor([[0.7, 0.25, 0.04, 0.01]])).repeat(10, 1)
    tied = torch.log(torch.tensor([[0.4, 0.2, 0.2, 0.2]]))
    processor = Counted(0.5)
    assert check_nuclei([], processor, torch.cat([clear, tied, clear])) == 2
    assert processor.rows == 1


@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_nuclei_of_no_distribution_are_an_error_once_drawn_from(value):
    for logits in (torch.full((1, 100), value), torch.cat([torch.zeros(1, 100), torch.full((1, 100), value)])):
        with pytest.raises(ValueError, match="hold no distribution to draw from"):
            draw_tokens(probabilities(find_nuclei([], TopPLogitsWarper(0.9), logits)[0]))
