"""
What schedules, and temperatures of other domains, make of recorded blocks: one thing swapped, all else held fixed.

Whatever is chosen or fitted is judged on prompts that had no part in it: the prompts of each set are halved, a choice
on one half is judged on the other, and both halves count. Intervals draw prompts with replacement within their set;
what was chosen or fitted is held fixed meanwhile, and two plans of a comparison always have the same draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from tqdm.auto import tqdm

from .blocks import Blocks
from .calibration import calibration_error_by_chance, fit_temperatures, gaps_by_group, scaled_survivals, survived
from .intervals import Interval, mirrored_interval, percentile_interval, resamples
from .scheduling import Costs, lengths_by_throughput
from .simulation import (
    LAG,
    PLANS,
    Outcomes,
    play,
    play_clairvoyant,
    play_without_drafts,
    scheduled_lengths,
    smoothed_rate,
    walk_blocks,
)


# What temperatures are fitted on, beside each of the sets: nothing, all of them.
RAW, ALL = "raw confidences", "all sets"
# How often each block is played in the mean, at least.
_PLAYED = 2


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95% interval over prompts."""

    value: float
    interval: Interval


@dataclass(frozen=True, eq=False)
class Halves:
    """
    Recorded blocks by prompt, the prompts of each set in two halves.

    Args:
        blocks ([`Blocks`]): With the prompt of each block; at least two prompts of each set.

    Raises:
        `ValueError`: the prompts are not known, or a set has only one.
    """

    blocks: Blocks

    def __post_init__(self) -> None:
        if self.blocks.prompts is None:
            raise ValueError("the file does not say which prompt each block comes from; record it anew")
        for name in self.names:
            if len({prompt for prompt, own in zip(self.blocks.prompts, self.sets, strict=True) if own == name}) < 2:
                raise ValueError(
                    f"the set {name!r} has blocks of only one prompt, and one half is judged by the other; give more "
                    "prompts of it, or leave it out"
                )

    @cached_property
    def sets(self) -> np.ndarray:
        """The set of each block."""
        return np.asarray(self.blocks.sets)

    @cached_property
    def names(self) -> list[str]:
        """The sets, in the order in which they appear."""
        return list(dict.fromkeys(self.blocks.sets))

    @cached_property
    def prompts(self) -> np.ndarray:
        """The prompt of each block, counted from 0 without gaps."""
        return np.unique(self.blocks.prompts, return_inverse=True)[1]

    @cached_property
    def prompt_sets(self) -> np.ndarray:
        """The set of each prompt."""
        return self.sets[np.unique(self.prompts, return_index=True)[1]]

    @cached_property
    def half(self) -> np.ndarray:
        """0 or 1 for each block: the prompts of a set belong to the halves by turns."""
        turns = np.empty(len(self.prompt_sets), dtype=int)
        for name in self.names:
            members = np.flatnonzero(self.prompt_sets == name)
            turns[members] = np.arange(len(members)) % 2
        return turns[self.prompts]

    def fits(self, name: str) -> list[np.ndarray]:
        """
        Temperatures for the first half's blocks, and for the second's: each fitted on the other half.

        Args:
            name (`str`): The set they are fitted on, or `RAW`, which is all ones, or `ALL`.
        """
        logits, accepted = self.blocks.confidence_logits, self.blocks.accepted
        if name == RAW:
            return [np.ones(logits.shape[1])] * 2
        members = np.ones(len(self.sets), bool) if name == ALL else self.sets == name
        chosen = [members & (self.half != half) for half in (0, 1)]
        return [fit_temperatures(logits[other], accepted[other]) for other in chosen]

    def survivals(self, fits: Sequence[np.ndarray]) -> np.ndarray:
        """Survivals of shape `(blocks, block_size)`, each half's by its own temperatures."""
        both = [scaled_survivals(self.blocks.confidence_logits, temperatures) for temperatures in fits]
        return np.where((self.half == 0)[:, None], *both)


@dataclass(frozen=True)
class SchedulePoint:
    """
    What one plan makes of a number of rows.

    Attributes:
        plan (`str`): One of `PLANS`, see [`simulate_rows`]; `"confidence"` has its threshold chosen on the half of the
            prompts that it is not judged on.
        rows (`int`): Concurrent requests.
        thresholds (`list[float]`, *optional*): Those of `"confidence"` on the first half and on the second.
        budget (`float`): Mean tokens a request that are verified, 1 + `verify_length`.
        throughput (`Estimate`): Tokens a second of all rows, by what was accepted.
        expected_throughput (`float`, *optional*): By the survivals instead; `None` for `"clairvoyant"`.
        over_constant, over_no_drafts (`Estimate`): `throughput` over that of whole blocks, and of no drafts at all.
        gap_to_oracle (`Estimate`, *optional*): Per cent by which the expected tokens a second of a round fall short of
            the oracle's, in the mean of all rounds; `None` for `"clairvoyant"`.
        gap_to_clairvoyant (`Estimate`): Per cent by which `throughput` falls short of the clairvoyant's.
    """

    plan: str
    rows: int
    thresholds: list[float] | None
    budget: float
    throughput: Estimate
    expected_throughput: float | None
    over_constant: Estimate
    over_no_drafts: Estimate
    gap_to_oracle: Estimate | None
    gap_to_clairvoyant: Estimate


def ablate_schedules(
    halves: Halves, survivals: np.ndarray, costs: Mapping[int, Costs], rounds: int, seed: int
) -> list[SchedulePoint]:
    """
    Each plan over the same rounds of the same blocks.

    Args:
        halves ([`Halves`]): The blocks.
        survivals (`np.ndarray` of shape `(blocks, block_size)`): Calibrated.
        costs (`Mapping[int, Costs]`): Numbers of rows, each at least 1, and the costs of a round with so many.
        rounds (`int`): That follow each other, at least 1. So many are played again from other blocks until there
            were twice as many blocks as were recorded.
        seed (`int`): For the blocks that rows start with.

    Returns:
        `list[SchedulePoint]`: For each number of rows one a plan, in the order of `PLANS`.

    Source: the critical assessment of DSpark (arXiv 2607.05147), suggestions 1 and 4; Algorithm 1; Section 5.2.
    """
    outcomes = Outcomes(survivals, halves.blocks.accepted, halves.blocks.sets)
    points: list[SchedulePoint] = []
    with tqdm(total=sum(costs), desc="Schedules", unit="row") as progress:
        for rows, of_round in costs.items():
            points += _schedules_of(halves, outcomes, of_round, rows, rounds, seed)
            progress.update(rows)
    return points


def _schedules_of(
    halves: Halves, outcomes: Outcomes, costs: Costs, rows: int, rounds: int, seed: int
) -> list[SchedulePoint]:
    walks = [list(_walks(halves, halves.half == half, rows, rounds, seed)) for half in (0, 1)]
    parts = [np.concatenate([walk[LAG:] for walk in own]) for own in walks]
    thresholds = [_best_threshold(outcomes, costs, other) for other in reversed(parts)]
    planned = [scheduled_lengths(outcomes, costs, walk) for own in walks for walk in own]
    blocks = np.concatenate(parts)
    lengths = {plan: np.concatenate([each[plan] for each in planned]) for plan in planned[0]}
    lengths["constant"] = np.full(blocks.shape, outcomes.block_size)
    cuts = [outcomes.cut_lengths[threshold][own] for threshold, own in zip(thresholds, parts, strict=True)]
    lengths["confidence"] = np.concatenate(cuts)

    accepted = outcomes.accepted[blocks]
    played = {plan: play(outcomes, blocks, chosen, costs) for plan, chosen in lengths.items()}
    played["no_drafts"] = play_without_drafts(blocks, costs)
    played["clairvoyant"] = play_clairvoyant(outcomes, blocks, costs)
    kept = {plan: np.minimum(accepted, chosen) for plan, chosen in lengths.items()}
    kept["no_drafts"] = np.zeros(blocks.shape)
    # Which drafts the clairvoyant leaves out is all the same: let it be an equal share of each row's.
    sent = played["clairvoyant"].drafts / np.maximum(accepted.sum(axis=1), 1)
    kept["clairvoyant"] = accepted * sent[:, None]

    counts = resamples(halves.prompt_sets.tolist())
    sums = _Sums(halves.prompts[blocks], len(halves.prompt_sets))
    shares = {}  # of the oracle's expected tokens a second, round by round
    for plan in PLANS:
        if played[plan].expected is not None:
            rates = [played[each].expected / played[each].seconds for each in (plan, "oracle")]
            shares[plan] = sums.ratio(np.repeat(rates[0] / rates[1], rows), np.ones(blocks.size), counts)
    lengths |= {"no_drafts": kept["no_drafts"], "clairvoyant": kept["clairvoyant"]}
    speeds = {
        plan: sums.ratio(1 + kept[plan], _seconds_by_row(lengths[plan], played[plan].seconds, costs), counts)
        for plan in PLANS
    }
    return [
        SchedulePoint(
            plan=plan,
            rows=rows,
            thresholds=thresholds if plan == "confidence" else None,
            budget=float(1 + played[plan].drafts.mean() / rows),
            throughput=speeds[plan].estimate,
            expected_throughput=None
            if played[plan].expected is None
            else float(played[plan].expected.sum() / played[plan].seconds.sum()),
            over_constant=speeds[plan].over(speeds["constant"]).estimate,
            over_no_drafts=speeds[plan].over(speeds["no_drafts"]).estimate,
            gap_to_oracle=shares[plan].shortfall.estimate if plan in shares else None,
            gap_to_clairvoyant=speeds[plan].over(speeds["clairvoyant"]).shortfall.estimate,
        )
        for plan in PLANS
    ]


def _walks(halves: Halves, chosen: np.ndarray, rows: int, rounds: int, seed: int) -> Iterator[np.ndarray]:
    """Walks of shape `(LAG + rounds, rows)` through some of the blocks, enough to play each of them."""
    members = np.flatnonzero(chosen)
    for number in range(math.ceil(_PLAYED * len(members) / (rows * rounds))):
        # Seeds far apart: those of a neighbouring `seed` are others.
        yield members[walk_blocks(halves.sets[members].tolist(), rows, LAG + rounds, seed + 1_000_003 * number)]


def _seconds_by_row(lengths: np.ndarray, seconds: np.ndarray, costs: Costs) -> np.ndarray:
    """
    What each row has part in of a round's seconds, of shape `(rounds, rows)`: what the round takes beyond a step of
    one token a row goes by the drafts that were sent of it, the rest is shared equally. Were all shared equally,
    resampled prompts with more drafts would seem to come at no cost.
    """
    rows, drafts = lengths.shape[1], lengths.sum(axis=1, keepdims=True)
    beyond = np.where(
        drafts > 0, costs.verify_seconds[rows + drafts.round().astype(int)] - costs.verify_seconds[rows], 0
    )
    shared = (seconds[:, None] - beyond) / rows
    return shared + beyond * lengths / np.maximum(drafts, 1)


def _best_threshold(outcomes: Outcomes, costs: Costs, blocks: np.ndarray) -> float:
    speeds = {t: play(outcomes, blocks, cut[blocks], costs).throughput for t, cut in outcomes.cut_lengths.items()}
    return max(speeds, key=speeds.__getitem__)


@dataclass(frozen=True, eq=False)
class _Drawn:
    """A figure, and what it is in each resample."""

    value: float
    draws: np.ndarray

    @property
    def estimate(self) -> Estimate:
        return Estimate(self.value, percentile_interval(self.draws))

    @property
    def shortfall(self) -> _Drawn:
        """Per cent that it lies below 1."""
        return _Drawn(100.0 * (1.0 - self.value), 100.0 * (1.0 - self.draws))

    @property
    def mirrored(self) -> Estimate:
        return Estimate(self.value, mirrored_interval(self.value, self.draws))

    def less(self, other: _Drawn) -> _Drawn:
        return _Drawn(self.value - other.value, self.draws - other.draws)

    def over(self, other: _Drawn) -> _Drawn:
        return _Drawn(self.value / other.value, self.draws / other.draws)


@dataclass(frozen=True, eq=False)
class _Sums:
    """
    Figures of rounds by the prompts they belong to.

    Args:
        prompts (`np.ndarray` of shape `(rounds, rows)`): The prompt of each row in each round.
        count (`int`): Prompts there are.
    """

    prompts: np.ndarray
    count: int

    def ratio(self, above: np.ndarray, below: np.ndarray, counts: np.ndarray) -> _Drawn:
        """
        A ratio of sums and its resamples.

        Args:
            above, below (`np.ndarray` of `rounds * rows` numbers): What each row in each round has part in.
            counts (`np.ndarray` of shape `(draws, prompts)`): As [`resamples`] gives them.
        """
        sums = [
            np.bincount(self.prompts.ravel(), weights=values.ravel(), minlength=self.count)
            for values in (above, below)
        ]
        drawn = [counts @ values for values in sums]
        draws = np.divide(*drawn, out=np.full(len(counts), np.nan), where=drawn[1] > 0)
        return _Drawn(float(sums[0].sum() / sums[1].sum()), draws)


@dataclass(frozen=True)
class DriftCell:
    """
    Temperatures of one origin on the blocks of one set.

    Attributes:
        fitted_on (`str`): A set, `RAW` or `ALL`.
        used_on (`str`): A set.
        ece (`Estimate`): Calibration error of the survival, mean over positions.
        ece_excess (`Estimate`): By how much that exceeds the error with temperatures of the set's own.
        throughput (`dict[int, Estimate]`): Tokens a second of Algorithm 1, by rows.
        lost (`dict[int, Estimate]`): Per cent by which that falls short of the set's own temperatures, by rows.
    """

    fitted_on: str
    used_on: str
    ece: Estimate
    ece_excess: Estimate
    throughput: dict[int, Estimate]
    lost: dict[int, Estimate]


@dataclass(frozen=True)
class Drift:
    """
    Attributes:
        cells (`list[DriftCell]`): By origin (`RAW`, the sets, `ALL`), then by set.
        temperatures (`dict[str, list[list[float]]]`): By origin, for the first half's blocks and the second's.
        chance (`dict[str, float]`): For each set the error that perfectly calibrated survivals stay below in 95 of 100
            recordings of so many blocks.
    """

    cells: list[DriftCell]
    temperatures: dict[str, list[list[float]]]
    chance: dict[str, float]


def calibration_drift(halves: Halves, costs: Mapping[int, Costs], rounds: int, seed: int) -> Drift:
    """
    Fit temperatures on each set and use them on each: what they miss the outcomes by, and what that costs Algorithm 1.
    Those of a set's own are fitted on its other half, so that the diagonal has no advantage.

    Args:
        halves ([`Halves`]): The blocks.
        costs, rounds, seed: As for [`ablate_schedules`].

    Source: the critical assessment of DSpark (arXiv 2607.05147), suggestion 2; Sequential Temperature Scaling.
    """
    origins = [RAW, *halves.names, *([ALL] if len(halves.names) > 1 else [])]
    fits = {origin: halves.fits(origin) for origin in origins}
    cells: dict[tuple[str, str], DriftCell] = {}
    chance = {}
    with tqdm(total=len(origins) * len(halves.names), desc="Drift", unit="fit") as progress:
        for used_on in halves.names:
            members = halves.sets == used_on
            walks = {
                rows: np.concatenate([walk[LAG:] for walk in _walks(halves, members, rows, rounds, seed)])
                for rows in costs
            }
            errors, speeds = {}, {}
            for origin in dict.fromkeys([used_on, *origins]):  # its own first, against which the others stand
                survivals = halves.survivals(fits[origin])
                outcomes = Outcomes(survivals, halves.blocks.accepted, halves.blocks.sets)
                errors[origin] = _calibration_error(halves, survivals, members)
                speeds[origin] = {
                    rows: _speed_of_algorithm_1(halves, outcomes, costs[rows], walk) for rows, walk in walks.items()
                }
                own, ece = speeds[used_on], errors[origin].mirrored
                cells[origin, used_on] = DriftCell(
                    origin,
                    used_on,
                    Estimate(ece.value, tuple(max(end, 0.0) for end in ece.interval)),
                    errors[origin].less(errors[used_on]).mirrored,
                    {rows: speed.estimate for rows, speed in speeds[origin].items()},
                    {rows: speed.over(own[rows]).shortfall.estimate for rows, speed in speeds[origin].items()},
                )
                progress.update()
            chance[used_on] = calibration_error_by_chance(halves.survivals(fits[used_on])[members])
    ordered = [cells[origin, used_on] for origin in origins for used_on in halves.names]
    return Drift(ordered, {name: [each.tolist() for each in both] for name, both in fits.items()}, chance)


def _calibration_error(halves: Halves, survivals: np.ndarray, members: np.ndarray) -> _Drawn:
    """The mean over positions of the calibration error of a set's blocks."""
    known, prompts = np.unique(halves.prompts[members], return_inverse=True)
    happened = survived(halves.blocks.accepted[members], survivals.shape[1])
    columns = zip(survivals[members].T, happened.T, strict=True)
    gaps = np.stack([gaps_by_group(*column, prompts, len(known)) for column in columns])  # (positions, prompts, bins)
    sizes = np.bincount(prompts)
    counts = resamples([0] * len(known))
    drawn = np.abs(counts @ gaps).sum(axis=2).mean(axis=0) / (counts @ sizes)  # of (positions, draws, bins)
    return _Drawn(float(np.abs(gaps.sum(axis=1)).sum(axis=1).mean() / sizes.sum()), drawn)


def _speed_of_algorithm_1(halves: Halves, outcomes: Outcomes, costs: Costs, blocks: np.ndarray) -> _Drawn:
    """Tokens a second over rounds of blocks of one set, an array of shape `(rounds, rows)`."""
    rows = blocks.shape[1]
    rate = smoothed_rate(costs, rows, outcomes.block_size)
    lengths = np.array([lengths_by_throughput(each, rate)[0] for each in outcomes.survivals[blocks].tolist()])
    seconds = play(outcomes, blocks, lengths, costs).seconds
    tokens = 1 + np.minimum(outcomes.accepted[blocks], lengths)
    counts = resamples(halves.prompt_sets.tolist())
    return _Sums(halves.prompts[blocks], len(halves.prompt_sets)).ratio(
        tokens, _seconds_by_row(lengths, seconds, costs), counts
    )
