"""
How many drafts of each row are sent to verification, and whether drafting pays at all: plain numbers in, plain numbers
out.

Nothing here may change the output distribution, so nothing looks ahead: whether slot k of a row is sent follows from
confidences up to k, which are known before token k is drawn, and from rounds that are over (DSpark, "The
Non-Anticipating Property").
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter, mul

import numpy as np


SCHEDULES = ("constant", "confidence", "hardware_aware", "hardware_aware_lagged")
HARDWARE_AWARE = SCHEDULES[2:]


def survivals(confidences: Sequence[float]) -> list[float]:
    """Cumulative products a_j of a block's confidences c_1 ... c_j (DSpark, Algorithm 1, step 1)."""
    return list(accumulate(confidences, mul))


def lengths_by_threshold(rows: Sequence[Sequence[float]], threshold: float) -> list[int]:
    """
    Send each row's drafts up to the first whose survival falls below a threshold.

    Args:
        rows (`Sequence[Sequence[float]]`): For each row the block's survivals, non-increasing, each in [0, 1].
        threshold (`float`): In [0, 1]; 0 sends every block whole.

    Returns:
        `list[int]`: `verify_length` of each row, 0 to its block size.
    """
    return [next((slot for slot, value in enumerate(row) if value < threshold), len(row)) for row in rows]


def ranked(rows: Sequence[Sequence[float]]) -> list[tuple[int, int, float]]:
    """
    All candidates `(row, position, survival)` with a chance to survive, the best first; ties go to the earlier
    position, then to the lower row (DSpark, Algorithm 1, step 2). Positions count from 1.
    """
    pool = [
        (row, position, survival)
        for row, values in enumerate(rows)
        for position, survival in enumerate(values, start=1)
        if survival > 0
    ]
    # Rows stand in order and sorting is stable: two sorts by one number each are twice as fast as one by three.
    pool.sort(key=itemgetter(1))
    pool.sort(key=itemgetter(2), reverse=True)
    return pool


def lengths_by_throughput(
    rows: Sequence[Sequence[float]], steps_per_second: Callable[[int], float], least: Sequence[int] | None = None
) -> tuple[list[int], float]:
    """
    Admit candidates in order of survival while the expected throughput rises: Algorithm 1 as printed. It stops at the
    first candidate that does not raise it, before anything that depends on that candidate's token is looked at.

    Args:
        rows (`Sequence[Sequence[float]]`): For each row the block's survivals, non-increasing, each in [0, 1].
        steps_per_second (`Callable[[int], float]`): SPS(B), steps a second with B tokens a step.
        least (`Sequence[int]`, *optional*): Lengths that each row gets whatever it costs, so that none is starved.

    Returns:
        Lengths, and the expected tokens a second they give.

    Source: DSpark, "The Hardware-Aware Prefix Scheduler", Algorithm 1.
    """
    lengths = _least_lengths(rows, least)
    batch = len(rows) + sum(lengths)
    tokens = len(rows) + sum(sum(values[:given]) for values, given in zip(rows, lengths, strict=True))
    best = tokens * steps_per_second(batch)
    for row, position, survival in ranked(rows):
        if position <= lengths[row]:
            continue
        batch, tokens = batch + 1, tokens + survival
        throughput = tokens * steps_per_second(batch)
        if throughput <= best:
            break
        best, lengths[row] = throughput, position
    return lengths, best


def best_capacity(rows: Sequence[Sequence[float]], steps_per_second: Callable[[int], float]) -> tuple[int, float]:
    """
    The number of drafts with the highest expected throughput, over all numbers: right on a jagged curve too, but only
    to be used with survivals that cannot depend on the tokens under discussion, those of rounds that are over.

    Returns:
        Drafts in all, and the expected tokens a second.

    Source: DSpark, Section 5.2.
    """
    tokens, best, capacity = float(len(rows)), len(rows) * steps_per_second(len(rows)), 0
    for count, (_, _, survival) in enumerate(ranked(rows), start=1):
        tokens += survival
        throughput = tokens * steps_per_second(len(rows) + count)
        if throughput > best:
            best, capacity = throughput, count
    return capacity, best


def lengths_by_capacity(
    rows: Sequence[Sequence[float]], capacity: int, least: Sequence[int] | None = None
) -> list[int]:
    """
    Fill a given number of drafts with the candidates of the highest survival. A candidate's rank follows from
    survivals at least as high as its own, so from none that depend on its token.

    Args:
        rows (`Sequence[Sequence[float]]`): For each row the block's survivals, non-increasing.
        capacity (`int`): Drafts in all.
        least (`Sequence[int]`, *optional*): Lengths that each row gets first; they count towards the capacity.

    Source: DSpark, Section 5.2.
    """
    lengths = _least_lengths(rows, least)
    room = capacity - sum(lengths)
    for row, position, _ in ranked(rows):
        if room <= 0:
            break
        if position > lengths[row]:
            lengths[row] = position
            room -= 1
    return lengths


def _least_lengths(rows: Sequence[Sequence[float]], least: Sequence[int] | None) -> list[int]:
    return [min(given, len(values)) for given, values in zip(least or [0] * len(rows), rows, strict=True)]


@dataclass(frozen=True)
class Costs:
    """
    What a round costs on this machine with this target and drafter, for a given number of rows.

    Attributes:
        verify_seconds (`np.ndarray`): Entry B is the time of a target step with B tokens, up to all whole blocks.
        draft_seconds (`Sequence[float]`): Entry d is the time to draft d slots for all rows; entry 0 is 0.
        noisy (`bool`): Whether they were measured, so that a bump may be noise.
    """

    verify_seconds: np.ndarray
    draft_seconds: Sequence[float]
    noisy: bool = False

    def steps_per_second(self, slots: int) -> Callable[[int], float]:
        """SPS(B) of rounds that draft so many slots: the draft is a part of the round whose rate counts (Eq. 1)."""
        seconds, drafting = self.verify_seconds.tolist(), self.draft_seconds[slots]
        return lambda tokens: 1.0 / (drafting + seconds[tokens])

    def smooth(self, rows: int) -> "Costs":
        """
        The same with the greatest convex curve that nowhere exceeds the measured step times, from one token a row on.

        Algorithm 1 stops at the first draft that does not raise the expected tokens a second, which is only right
        where nothing further on raises them again. Expected tokens are concave in the number of drafts, best first;
        over times that are convex their ratio has one peak. A measured curve is neither: noise and tiles of the
        hardware would stop the search at the first bump.
        """
        seconds = self.verify_seconds.tolist()
        # The hull has corners only where the curve bends upwards; straight lines bend by no more than rounding does.
        bends = np.flatnonzero(np.diff(self.verify_seconds[rows:], 2) > 1e-12 * seconds[-1]) + rows + 1
        hull: list[int] = []  # corners of the lower convex hull
        for tokens in (rows, *bends.tolist(), len(seconds) - 1):
            while len(hull) > 1 and (seconds[hull[-1]] - seconds[hull[-2]]) * (tokens - hull[-1]) >= (
                seconds[tokens] - seconds[hull[-1]]
            ) * (hull[-1] - hull[-2]):
                hull.pop()
            hull.append(tokens)
        smooth = self.verify_seconds.astype(float)
        smooth[rows:] = np.interp(np.arange(rows, len(seconds)), hull, smooth[hull])
        return Costs(smooth, self.draft_seconds)


@dataclass(frozen=True)
class Prospect:
    """
    What rounds with drafts are expected to be like.

    Attributes:
        slots (`int`): Of each block that are worth drawing, at least 1.
        accepted (`float`): Drafts of a row that are accepted in a round, in the mean over the rows.
        steps (`float`): Time of a round, in steps without drafts.
    """

    slots: int
    accepted: float
    steps: float


def best_slots(history: Sequence[Sequence[Sequence[float]]], costs: Costs) -> Prospect:
    """
    How many slots of a block are worth drawing, judged by rounds that are over: those with the most tokens a second.

    Args:
        history (`Sequence` of rounds of rows of survivals): Each round with the same number of rows, each row with
            one survival a slot.
        costs ([`Costs`]): For so many rows.
    """
    rounds = np.asarray(history, dtype=float)  # (rounds, rows, block_size)
    count, rows, block_size = rounds.shape
    step = float(costs.verify_seconds[rows])
    best, prospect = 0.0, Prospect(1, 0.0, math.inf)
    for depth in range(1, block_size + 1):
        pool = -np.sort(-rounds[:, :, :depth].reshape(count, -1), axis=1)
        tokens = np.full((count, 1 + rows * depth), float(rows))  # with no draft, one, ... all
        tokens[:, 1:] += np.cumsum(pool, axis=1)
        seconds = costs.draft_seconds[depth] + costs.verify_seconds[rows : rows + 1 + rows * depth]
        chosen = np.argmax(tokens / seconds, axis=1)
        # Tokens over seconds of all rounds together, each with its own best number of drafts.
        all_tokens, all_seconds = tokens[np.arange(count), chosen].sum(), seconds[chosen].sum()
        if all_tokens / all_seconds > best:
            best = all_tokens / all_seconds
            prospect = Prospect(depth, float(all_tokens / count / rows - 1), float(all_seconds / count / step))
    return prospect


def seconds_to_finish(rounds: Sequence[float], one_row: float, all_rows: float) -> float:
    """
    Time until all rows of a batch are done, each of which leaves when it is: what a round costs whatever its rows is
    paid until the last one leaves, what a row adds as long as that row is there.

    Args:
        rounds (`Sequence[float]`): What each row needs.
        one_row, all_rows (`float`): Seconds of a round with one row and with all; with others, on a line between.
    """
    more = max((all_rows - one_row) / (len(rounds) - 1), 0.0) if len(rounds) > 1 else 0.0
    return (all_rows - more * len(rounds)) * max(rounds) + more * sum(rounds)


@dataclass(frozen=True)
class Choice:
    """
    Attributes:
        lengths (`list[int]`): `verify_length` of each row.
        throughput (`float`, *optional*): Expected tokens a second; `None` where no costs are known.
        capacity (`int`, *optional*): Drafts in all that the lagged schedule allowed.
    """

    lengths: list[int]
    throughput: float | None = None
    capacity: int | None = None


# Rows times rounds that the first judgement on drafting needs, and the most that one rests on.
_ENOUGH, _WINDOW = 4, 16
# Rounds without drafts after the first judgement against them, and at most.
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 256
# The most that the draft of the probe after a pause may take of the steps in the pause.
_PROBE_SHARE = 0.01
# One block in so many is drawn whole, to see what the slots that are left out would bring.
_WHOLE_BLOCK_EVERY = 16
# Tokens of good faith when what was accepted is set against what was promised.
_GOOD_FAITH = 4.0
# Weight of the newest row in the running mean of a slot's confidence, and of a row's newest round in what it accepts.
_NEWEST = 0.05
# How much rows are thought to differ in what they accept before enough is seen of them: as much as chance makes means
# of so many rounds differ. So many rows weigh as much as that thought. With fewer rounds, rows that are alike seem to
# lag by mere chance, and drafting that pays is stopped (`tests/test_scheduler.py`, whole calls).
_ALIKE_ROUNDS, _ALIKE_ROWS = 32.0, 16.0


class Scheduler:
    """
    The schedule of one `generate` call: how many slots to draft, how many drafts to send, round by round.

    The hardware-aware schedules stop drafting when the batch is expected to be done earlier without, and probe again
    after 16 rounds, or as many as keep the draft of a probe under 1 % of them, then after twice as many, and so on up
    to 256. What they know of the drafter is its survivals in rounds that are over, scaled by how far its promises were
    kept, and how much each row accepted: a batch is done when its slowest row is, so that drafts of which that row
    accepts none can cost more time than the tokens of the others save. `"hardware_aware"` is Algorithm 1, over
    [`Costs.smooth`] where costs were measured. `"hardware_aware_lagged"` takes its capacity from the survivals of the
    last round but one that drafted; a row that was not there counts as the mean of those that were, and before there
    are two such rounds Algorithm 1 decides.

    Args:
        schedule (`str`): One of `SCHEDULES`.
        block_size (`int`): Slots of a block.
        threshold (`float`): Least survival that is sent, for `"confidence"`.
        costs (`Callable[[int, float], Costs]`, *optional*): Costs of a round with so many rows at so many tokens of
            context; the hardware-aware schedules need it, the others take none.
        min_verify_length (`int`): Drafts of each row that are sent whatever they cost, when drafts are drawn.
        max_starved_rounds (`int`, *optional*): After so many rounds in which other rows' drafts were sent and none of
            its own, a row gets one sent.
    """

    def __init__(
        self,
        schedule: str,
        block_size: int,
        threshold: float = 0.0,
        costs: Callable[[int, float], Costs] | None = None,
        min_verify_length: int = 0,
        max_starved_rounds: int | None = None,
    ):
        assert (costs is not None) == (schedule in HARDWARE_AWARE)
        self.schedule, self.block_size, self.threshold, self.costs = schedule, block_size, threshold, costs
        self.min_verify_length, self.max_starved_rounds = min_verify_length, max_starved_rounds
        self.starved: dict[int, int] = {}
        self.drafted: deque[dict[int, list[float]]] = deque(maxlen=2)  # survivals of the last two rounds, by row
        self.judged: deque[dict[int, list[float]]] = deque(maxlen=_WINDOW)  # of those since the last pause
        self.mean_confidences = [0.5] * block_size
        # Of each row: rounds, drafts accepted, and the sum of the squares of these; what is older counts less.
        self.own: dict[int, tuple[float, float, float]] = {}
        self.rounds = 0
        self.promised = self.accepted = 0.0
        self.pause = self.waiting = 0
        self.round_costs: Costs | None = None

    def slots(self, rows: Sequence[int], context: float, left: Sequence[int] | None = None) -> int:
        """
        How many slots of this round's blocks are worth drawing; 0 for a step without drafts.

        Args:
            rows (`Sequence[int]`): The active rows, by a number that stays a row's own.
            context (`float`): Mean number of tokens the rows hold.
            left (`Sequence[int]`, *optional*): Tokens that each row can still get, at least 1; by default the same.
        """
        if self.costs is None:
            return self.block_size
        measured = self.costs(len(rows), context)
        smooth = measured.noisy and self.schedule == "hardware_aware"
        self.round_costs = measured.smooth(len(rows)) if smooth else measured
        if not self.pause and len(self.judged) * len(rows) < _ENOUGH:
            return self.block_size
        if self.waiting:
            self.waiting -= 1
            return 0
        if not self.judged:  # the pause is over: probe with as much as was last worth drawing
            return best_slots(self._history(self.drafted, rows), self.round_costs).slots
        prospect = best_slots(self._history(self.judged, rows), self.round_costs)
        left = [1] * len(rows) if left is None else left
        if not self._pays(prospect, rows, left, self.costs(1, context)):
            step = float(self.round_costs.verify_seconds[len(rows)])
            probe = self.round_costs.draft_seconds[prospect.slots] / step
            longer = max(2 * self.pause, _FIRST_PAUSE, probe / _PROBE_SHARE)
            self.pause = math.ceil(min(longer, _LONGEST_PAUSE))
            self.waiting = self.pause - 1
            self.judged.clear()
            return 0
        self.pause //= 2
        return self.block_size if self.rounds % _WHOLE_BLOCK_EVERY == 0 else prospect.slots

    def _pays(self, prospect: Prospect, rows: Sequence[int], left: Sequence[int], one_row: Costs) -> bool:
        """Whether all rows are expected to be done earlier with drafts than without."""
        step = float(self.round_costs.verify_seconds[len(rows)])
        alone = float(one_row.verify_seconds[1])
        drafting_alone = one_row.draft_seconds[prospect.slots] + float(one_row.verify_seconds[1 + prospect.slots])
        shares = self._shares(rows)
        rounds = [tokens / (1 + share * prospect.accepted) for tokens, share in zip(left, shares, strict=True)]
        with_drafts = seconds_to_finish(rounds, drafting_alone, prospect.steps * step)
        return with_drafts < seconds_to_finish(left, alone, step)

    def _shares(self, rows: Sequence[int]) -> list[float]:
        """
        What each row is expected to accept, of what rows accept in the mean: by its own past, with the differences as
        large as rows are thought to differ in earnest, which is less than their short pasts do by chance.
        """
        own = [self.own.get(row, (0.0, 0.0, 0.0)) for row in rows]
        rounds, accepted, squares = map(sum, zip(*own, strict=True))
        if accepted == 0.0:
            return [1.0] * len(rows)
        mean, seen = accepted / rounds, [(count, total) for count, total, _ in own if count]
        # Variance of what a row accepts from round to round; after a single round, that of independent drafts.
        within = squares - sum(total**2 / count for count, total in seen)
        chance = (mean * (1 + mean) + within) / (1 + rounds - len(seen))
        excess = sum((total / count - mean) ** 2 - chance / count for count, total in seen)
        spread = (_ALIKE_ROWS * chance / _ALIKE_ROUNDS + max(excess, 0.0)) / (_ALIKE_ROWS + len(seen))
        return [
            max(1 + (total / count / mean - 1) * math.sqrt(spread / (spread + chance / count)), 0.0) if count else 1.0
            for count, total, _ in own
        ]

    def _history(self, rounds: Sequence[dict[int, list[float]]], rows: Sequence[int]) -> np.ndarray:
        """Survivals of the newest rounds, as far as they tell of these rows and as many as a judgement rests on."""
        rounds = list(rounds)[-max(_WINDOW // len(rows), 1) :]
        kept = min((self.accepted + _GOOD_FAITH) / (self.promised + _GOOD_FAITH), 2.0)
        return np.minimum(np.array([_complete(known, rows) for known in rounds]) * kept, 1.0)

    def choose(self, rows: Sequence[int], survivals: Sequence[Sequence[float]]) -> Choice:
        """
        The `verify_length` of each row in this round.

        Args:
            rows (`Sequence[int]`): The active rows, as in [`slots`].
            survivals (`Sequence[Sequence[float]]`): For each row those of the slots that were drafted and that still
                have room in its text.
        """
        least = [max(self.min_verify_length, int(self._is_starved(row))) for row in rows]
        if self.schedule == "constant":
            choice = Choice([len(values) for values in survivals])
        elif self.schedule == "confidence":
            lengths = zip(lengths_by_threshold(survivals, self.threshold), least, survivals, strict=True)
            choice = Choice([max(length, min(given, len(values))) for length, given, values in lengths])
        else:
            drafted = max(map(len, survivals))  # less than were worth it, where the texts end before
            rate = self.round_costs.steps_per_second(drafted)
            if self.schedule == "hardware_aware" or len(self.drafted) < 2:
                choice = Choice(*lengths_by_throughput(survivals, rate, least))
            else:
                before = [values[:drafted] for values in _complete(self.drafted[0], rows)]
                capacity, _ = best_capacity(before, rate)
                lengths = lengths_by_capacity(survivals, capacity, least)
                tokens = len(rows) + sum(sum(v[:length]) for v, length in zip(survivals, lengths, strict=True))
                choice = Choice(lengths, tokens * rate(len(rows) + sum(lengths)), capacity)
        anyone = any(choice.lengths)
        for row, length in zip(rows, choice.lengths, strict=True):
            self.starved[row] = 0 if length else self.starved.get(row, 0) + anyone
        return choice

    def _is_starved(self, row: int) -> bool:
        return self.max_starved_rounds is not None and self.starved.get(row, 0) >= self.max_starved_rounds

    def observe(
        self,
        rows: Sequence[int],
        survivals: Sequence[Sequence[float]],
        lengths: Sequence[int],
        accepted: Sequence[int],
    ) -> None:
        """
        Take the outcome of a round that drafted.

        Args:
            rows (`Sequence[int]`): The rows, as in [`choose`].
            survivals (`Sequence[Sequence[float]]`): For each row those of all slots that were drafted.
            lengths, accepted (`Sequence[int]`): Drafts of each row that were sent, and accepted.
        """
        if self.costs is None:
            return
        self.rounds += 1
        known = {}
        for row, values in zip(rows, survivals, strict=True):
            known[row] = whole = list(values)
            last = 1.0
            for slot, value in enumerate(values):
                if last > 0:
                    self.mean_confidences[slot] += _NEWEST * (value / last - self.mean_confidences[slot])
                last = value
            for slot in range(len(values), self.block_size):
                last *= self.mean_confidences[slot]
                whole.append(last)
        self.drafted.append(known)
        self.judged.append(known)
        self.promised += sum(sum(values[:length]) for values, length in zip(survivals, lengths, strict=True))
        self.accepted += sum(accepted)
        for row, count in zip(rows, accepted, strict=True):
            before = self.own.get(row, (0.0, 0.0, 0.0))
            now = (1, count, count**2)
            self.own[row] = tuple((1 - _NEWEST) * old + new for old, new in zip(before, now, strict=True))


def _complete(known: Mapping[int, list[float]], rows: Sequence[int]) -> list[list[float]]:
    """The survivals of rows in a round that is over; of a row that was not there, the mean of all that were."""
    if all(row in known for row in rows):
        return [known[row] for row in rows]
    mean = np.mean(list(known.values()), axis=0).tolist()
    return [known.get(row, mean) for row in rows]
