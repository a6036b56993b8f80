"""Intervals over prompts: they hold what they should as often as they say, and prompts are the units."""

import numpy as np
import pytest

from dspark_hf.intervals import mean_ratio_interval, ratio_interval


def prompts(generator: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and rounds of texts that are easy or hard as a whole: 2 tokens a round in the mean."""
    rounds = generator.integers(10, 30, size=count)
    ease = generator.uniform(0.5, 1.5, size=count)  # a text's own
    return rounds + generator.poisson(ease * rounds), rounds


def coverage(count: int, repetitions: int = 200) -> float:
    generator = np.random.default_rng(5)
    intervals = [ratio_interval(*prompts(generator, count)) for _ in range(repetitions)]
    return float(np.mean([low <= 2.0 <= high for low, high in intervals]))


def test_they_hold_the_truth_as_often_as_they_say():
    assert 0.90 <= coverage(60) <= 0.99
    assert 0.86 <= coverage(12) <= 0.98


def test_rounds_of_one_text_are_no_independent_samples():
    """As if each round were a prompt of its own, the interval would be far too narrow."""
    generator = np.random.default_rng(1)
    tokens, rounds = prompts(generator, 60)
    low, high = ratio_interval(tokens, rounds)
    total = int(rounds.sum())
    each_round = 1 + np.random.default_rng(2).poisson(tokens.sum() / total - 1, size=total)
    closer_low, closer_high = ratio_interval(each_round, np.ones(total))
    assert high - low > 1.3 * (closer_high - closer_low)


def test_the_same_numbers_give_the_same_interval():
    tokens, rounds = prompts(np.random.default_rng(0), 10)
    assert ratio_interval(tokens, rounds) == ratio_interval(tokens.tolist(), rounds.tolist())
    low, high = ratio_interval(tokens, rounds)
    assert low < tokens.sum() / rounds.sum() < high


def test_equal_prompts_leave_no_doubt():
    assert ratio_interval([3, 6], [2, 4]) == (1.5, 1.5)


@pytest.mark.parametrize(("above", "below"), [([], []), ([3], [2]), ([0, 0], [0, 0])])
def test_without_two_prompts_or_anything_to_divide_by_there_is_none(above, below):
    assert ratio_interval(above, below) is None
    assert mean_ratio_interval([([3, 5], [2, 2]), (above, below)]) is None
    assert mean_ratio_interval([]) is None


def test_resamples_with_nothing_to_divide_by_do_not_count():
    low, high = ratio_interval([0, 3], [0, 2])
    assert low == high == 1.5


def test_the_mean_of_tasks_is_surer_than_each():
    generator = np.random.default_rng(4)
    groups = [prompts(generator, 30) for _ in range(9)]
    low, high = mean_ratio_interval(groups)
    assert low < np.mean([tokens.sum() / rounds.sum() for tokens, rounds in groups]) < high
    widths = [end - start for start, end in (ratio_interval(*group) for group in groups)]
    assert high - low == pytest.approx(np.mean(widths) / 3, rel=0.25)
