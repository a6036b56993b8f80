"""Confidence intervals by resampling prompts: rounds of one text follow from each other, so a text is the unit."""

from collections.abc import Sequence

import numpy as np


LEVEL = 0.95
DRAWS = 2000
SEED = 0

Interval = tuple[float, float]


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float]) -> Interval | None:
    """
    Bootstrap interval of a ratio of sums: prompts are drawn with replacement, the percentiles of what comes out are
    returned. With a dozen prompts it covers some 90% instead of 95 (measured on synthetic rounds, see its test).

    Args:
        numerators, denominators (`Sequence[float]`): One each a prompt, for example its tokens and its rounds.

    Returns:
        `tuple[float, float]`, or `None` for fewer than two prompts or where nothing is divided by.

    Source: Efron and Tibshirani 1993, An Introduction to the Bootstrap, chapters 13 and 17.4 (clusters).
    """
    return mean_ratio_interval([(numerators, denominators)])


def mean_ratio_interval(groups: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Interval | None:
    """
    The same of the mean of several groups' ratios, prompts being drawn within each group.

    Args:
        groups (`Sequence[tuple]`): Numerators and denominators of each group's prompts, for example of a task's.

    Returns:
        `tuple[float, float]`, or `None` where [`ratio_interval`] gives none for one of the groups.
    """
    generator = np.random.default_rng(SEED)
    drawn = [_resampled_ratios(*group, generator) for group in groups]
    if not drawn or any(ratios is None for ratios in drawn):
        return None
    means = np.mean(drawn, axis=0)
    low, high = np.nanquantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _resampled_ratios(
    numerators: Sequence[float], denominators: Sequence[float], generator: np.random.Generator
) -> np.ndarray | None:
    """Ratios of `DRAWS` resamples; nan where one divides by nothing."""
    above, below = np.asarray(numerators, dtype=float), np.asarray(denominators, dtype=float)
    prompts = len(above)
    if prompts < 2 or not below.any():
        return None
    counts = generator.multinomial(prompts, [1 / prompts] * prompts, size=DRAWS)  # (draws, prompts)
    sums = counts @ below
    return np.divide(counts @ above, sums, out=np.full(DRAWS, np.nan), where=sums > 0)
