"""
Sequential Temperature Scaling: one temperature a block position, so that the cumulative product of confidences says
how often a prefix really survives. Arrays in, numbers out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


BINS = 15
# Temperatures tried at each position: evenly spaced on a log scale from 0.1 to 10, 1 among them.
GRID = np.round(10.0 ** np.linspace(-1.0, 1.0, 181), 4)
# Blocks that must have reached a position for it to be fitted.
FEWEST_REACHED = 100


def scaled_survivals(confidence_logits: np.ndarray, temperatures: Sequence[float] | np.ndarray) -> np.ndarray:
    """
    Survival of each position: cumulative products of sigmoid(logit / temperature).

    Args:
        confidence_logits (`np.ndarray` of shape `(blocks, block_size)`): Raw output of the confidence head.
        temperatures (`Sequence[float]` of length `block_size`): Above 0, so that the order of the confidences at a
            position stays what it was.

    Returns:
        `np.ndarray` of shape `(blocks, block_size)`, each row non-increasing in [0, 1].

    Raises:
        `ValueError`: a shape, a logit or a temperature that cannot be.

    Source: DSpark, Sequential Temperature Scaling.
    """
    logits, temperatures = np.asarray(confidence_logits, dtype=float), np.asarray(temperatures, dtype=float)
    if logits.ndim != 2 or temperatures.shape != logits.shape[1:]:
        raise ValueError(
            f"`confidence_logits` has the shape {logits.shape} and `temperatures` {temperatures.shape}; they must be "
            "(blocks, block_size) and (block_size,)."
        )
    if not np.isfinite(logits).all():
        raise ValueError("`confidence_logits` holds values that are not finite; check the drafter's weights.")
    if not (np.isfinite(temperatures) & (temperatures > 0)).all():
        raise ValueError(f"`temperatures` is {temperatures.tolist()}; each must be above 0.")
    return np.cumprod(_sigmoid(logits / temperatures), axis=1)


def survived(accepted: np.ndarray, block_size: int) -> np.ndarray:
    """
    Whether each position was accepted with all before it: 1 or 0, of shape `(blocks, block_size)`.

    Args:
        accepted (`np.ndarray` of shape `(blocks,)`): Length of each block's accepted prefix, 0 to `block_size`.
        block_size (`int`): Drafts of a block, all of them verified.

    Raises:
        `ValueError`: a length that cannot be.
    """
    accepted = np.asarray(accepted)
    if accepted.ndim != 1 or ((accepted < 0) | (accepted > block_size)).any():
        raise ValueError(f"`accepted` must be of shape (blocks,), each 0 to the block size of {block_size}.")
    return (accepted[:, None] > np.arange(block_size)).astype(float)


def expected_calibration_error(predicted: np.ndarray, happened: np.ndarray, bins: int = BINS) -> float:
    """
    Mean distance between predicted probability and frequency, over equal-width bins weighted by their size.

    Args:
        predicted (`np.ndarray` of shape `(samples,)`): Probabilities in [0, 1]; at least one.
        happened (`np.ndarray` of shape `(samples,)`): 0 or 1.
        bins (`int`): Number of bins.

    Returns:
        `float`: in [0, 1]. Perfect predictions too have one above 0, by chance, see [`calibration_error_by_chance`].

    Source: Guo et al. 2017 (arXiv 1706.04599), Section 2; DSpark, Figure 6.
    """
    gaps = np.bincount(_bin_of(predicted, bins), weights=predicted - happened, minlength=bins)
    return float(np.abs(gaps).sum() / len(predicted))


def gaps_by_group(
    predicted: np.ndarray, happened: np.ndarray, groups: np.ndarray, count: int, bins: int = BINS
) -> np.ndarray:
    """
    What [`expected_calibration_error`] is made of, apart for each group of samples: predictions less what happened,
    summed in each bin. The error of some groups together is the sum of absolute values of the bins, after summing
    over groups, over the number of samples.

    Args:
        predicted, happened, bins: As for [`expected_calibration_error`].
        groups (`np.ndarray` of shape `(samples,)`): The group of each sample, from 0.
        count (`int`): Groups there are.

    Returns:
        `np.ndarray` of shape `(count, bins)`.
    """
    places = groups * bins + _bin_of(predicted, bins)
    return np.bincount(places, weights=predicted - happened, minlength=count * bins).reshape(count, bins)


def reliability_points(
    predicted: np.ndarray, happened: np.ndarray, bins: int = BINS
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """
    The points of a reliability diagram: mean prediction, frequency and number of samples of each bin that has any.

    Args:
        predicted, happened, bins: As for [`expected_calibration_error`].

    Source: Guo et al. 2017, Figure 1; DSpark, Figure 6.
    """
    places = _bin_of(predicted, bins)
    counts = np.bincount(places, minlength=bins)
    filled = counts > 0
    means = [
        np.bincount(places, weights=values, minlength=bins)[filled] / counts[filled]
        for values in (predicted, happened)
    ]
    return means[0], means[1], counts[filled]


def fit_temperatures(confidence_logits: np.ndarray, accepted: np.ndarray) -> np.ndarray:
    """
    Fit position by position, left to right: each gets the temperature of `GRID` with the least calibration error of
    the cumulative product, those before it held fixed. Among equals the one nearest to 1 is taken; a position that
    fewer than 100 blocks reached, everything before it accepted, keeps 1: so few outcomes fit any temperature.

    Args:
        confidence_logits (`np.ndarray` of shape `(blocks, block_size)`): Raw logits of blocks that were verified
            whole; at least one.
        accepted (`np.ndarray` of shape `(blocks,)`): Length of each block's accepted prefix.

    Returns:
        `np.ndarray` of shape `(block_size,)`.

    Raises:
        `ValueError`: there are no blocks, or a shape or value cannot be.

    Source: DSpark, Sequential Temperature Scaling.
    """
    happened = _outcomes(confidence_logits, accepted)
    nearest_to_one_first = GRID[np.argsort(np.abs(np.log(GRID)), kind="stable")]
    temperatures, until = [], np.ones(len(happened))
    for position, (logits, outcome) in enumerate(zip(confidence_logits.T, happened.T, strict=True)):
        if (accepted >= position).sum() < FEWEST_REACHED:
            temperatures.append(1.0)
            until = until * _sigmoid(logits)
            continue
        errors = [
            expected_calibration_error(until * _sigmoid(logits / temperature), outcome)
            for temperature in nearest_to_one_first
        ]
        temperatures.append(nearest_to_one_first[int(np.argmin(errors))])  # the first of equals
        until = until * _sigmoid(logits / temperatures[-1])
    return np.array(temperatures)


@dataclass(frozen=True)
class PositionMetrics:
    """
    How well the survival at one position foretells that it was accepted with all before it.

    Attributes:
        reached (`int`): Blocks in which everything before the position was accepted.
        roc_auc (`float`, *optional*): Discrimination; `None` where all blocks ended alike.
        ece, brier (`float`): Calibration error, and mean squared distance from what happened.
    """

    reached: int
    roc_auc: float | None
    ece: float
    brier: float


def position_metrics(
    confidence_logits: np.ndarray, accepted: np.ndarray, temperatures: Sequence[float] | np.ndarray
) -> list[PositionMetrics]:
    """
    Discrimination and calibration of the survival, position by position, over all blocks.

    Args:
        confidence_logits (`np.ndarray` of shape `(blocks, block_size)`): Raw logits of blocks that were verified
            whole; at least one.
        accepted (`np.ndarray` of shape `(blocks,)`): Length of each block's accepted prefix.
        temperatures (`Sequence[float]` of length `block_size`): Above 0; ones for the raw confidences.

    Raises:
        `ValueError`: there are no blocks, or a shape or value cannot be.

    Source: DSpark, Figure 6.
    """
    happened = _outcomes(confidence_logits, accepted)
    survivals = scaled_survivals(confidence_logits, temperatures)
    reached = [len(accepted), *happened.sum(axis=0).astype(int).tolist()]
    return [
        PositionMetrics(
            reached=reached[position],
            roc_auc=roc_auc(predicted, outcome),
            ece=expected_calibration_error(predicted, outcome),
            brier=float(np.mean((predicted - outcome) ** 2)),
        )
        for position, (predicted, outcome) in enumerate(zip(survivals.T, happened.T, strict=True))
    ]


def roc_auc(scores: np.ndarray, happened: np.ndarray) -> float | None:
    """
    Probability that a sample where it happened has a higher score than one where it did not, ties counting half.

    Args:
        scores (`np.ndarray` of shape `(samples,)`): Any numbers.
        happened (`np.ndarray` of shape `(samples,)`): 0 or 1.

    Returns:
        `float` in [0, 1], or `None` where all are 0 or all 1.
    """
    positives = int(happened.sum())
    negatives = len(happened) - positives
    if positives == 0 or negatives == 0:
        return None
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2.0)[places]  # from 1; equal scores share their mean rank
    above = ranks[happened > 0].sum() - positives * (positives + 1) / 2.0
    return float(above / (positives * negatives))


def calibration_error_by_chance(survivals: np.ndarray, quantile: float = 0.95, draws: int = 200) -> float:
    """
    The mean over positions of the calibration error that perfectly calibrated survivals stay below with a given
    probability, with so many blocks: outcomes are drawn from the survivals themselves.

    Args:
        survivals (`np.ndarray` of shape `(blocks, block_size)`): Each row non-increasing, in [0, 1].
        quantile (`float`): Probability to stay below.
        draws (`int`): Sets of outcomes drawn, from a seed of their own.
    """
    generator = np.random.default_rng(0)
    errors = []
    for _ in range(draws):
        # One number a block: the survivals fall along it, so position j happens with its own and never without j - 1.
        happened = (generator.random((len(survivals), 1)) < survivals).astype(float)
        columns = zip(survivals.T, happened.T, strict=True)
        errors.append(np.mean([expected_calibration_error(*column) for column in columns]))
    return float(np.quantile(errors, quantile))


def _outcomes(confidence_logits: np.ndarray, accepted: np.ndarray) -> np.ndarray:
    blocks, block_size = confidence_logits.shape
    if blocks == 0 or len(accepted) != blocks:
        raise ValueError(
            f"`confidence_logits` has {blocks} blocks and `accepted` {len(accepted)}; there must be at least one, and "
            "as many of each."
        )
    return survived(accepted, block_size)


def _bin_of(predicted: np.ndarray, bins: int) -> np.ndarray:
    if len(predicted) == 0 or not ((predicted >= 0) & (predicted <= 1)).all():
        raise ValueError("`predicted` must hold at least one probability, each 0 to 1.")
    return np.minimum((predicted * bins).astype(int), bins - 1)


def _sigmoid(values: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0.0, -values))
