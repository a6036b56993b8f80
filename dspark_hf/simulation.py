"""
Schedules set against each other without a model: what a threshold keeps and prunes, and what each schedule makes of
more and more rows, over recorded blocks and the costs of a profile.

The blocks were verified whole, so what every shorter length would have brought is known: the lesser of the length and
the accepted drafts. What a schedule would have changed about the blocks that follow is not: each row goes on with the
next recorded block, whatever was sent of the last.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from tqdm.auto import tqdm

from .profiles import DraftCurve, Profile, StepCurve
from .scheduling import Costs, best_capacity, lengths_by_capacity, lengths_by_threshold, lengths_by_throughput


THRESHOLDS = tuple(step / 20 for step in range(20))  # 0 to 0.95, the paper's Figure 5
# Rounds between the confidences that a lagged capacity follows from and the round it is for.
LAG = 2
# In the order of the tables: the schedules of a call, then what they are measured by.
PLANS = (
    "no_drafts",
    "constant",
    "confidence",
    "hardware_aware",
    "hardware_aware_lagged",
    "oracle",
    "clairvoyant",
)


@dataclass(frozen=True)
class Outcomes:
    """
    Recorded blocks as a schedule sees them, and what came of them.

    Args:
        survivals (`np.ndarray` of shape `(blocks, block_size)`): Of each slot, calibrated, non-increasing along a
            block.
        accepted (`np.ndarray` of shape `(blocks,)`): Drafts of each block that were accepted, 0 to `block_size`, when
            it was verified whole.
        sets (`Sequence[str]`): The prompt set of each block; the blocks of a set in the order of their text.
    """

    survivals: np.ndarray
    accepted: np.ndarray
    sets: Sequence[str]

    @property
    def block_size(self) -> int:
        """Drafts of a block."""
        return self.survivals.shape[1]

    @cached_property
    def promised(self) -> np.ndarray:
        """Expected accepted drafts by length, of shape `(blocks, 1 + block_size)`."""
        return np.pad(np.cumsum(self.survivals, axis=1), ((0, 0), (1, 0)))

    @cached_property
    def cut_lengths(self) -> dict[float, np.ndarray]:
        """For each of `THRESHOLDS` the `verify_length` of each block."""
        rows = self.survivals.tolist()
        return {threshold: np.array(lengths_by_threshold(rows, threshold)) for threshold in THRESHOLDS}


@dataclass(frozen=True)
class SweepPoint:
    """
    What a threshold does to a prompt set.

    Attributes:
        set (`str`, *optional*): The prompt set; `None` for the blocks of all sets together.
        threshold (`float`): Least survival that is sent.
        blocks (`int`): How many there were.
        draft_acceptance_rate (`float`, *optional*): Accepted over verified drafts; `None` if none was verified.
        pruned (`float`): Share of all drafts that are not sent.
        accepted_kept (`float`, *optional*): Share of the drafts accepted in whole blocks that still are; `None` if
            there were none.
        verify_length (`float`): Mean drafts sent of a block.
        mean_acceptance_length (`float`): Tokens a round, the target's own included.
    """

    set: str | None
    threshold: float
    blocks: int
    draft_acceptance_rate: float | None
    pruned: float
    accepted_kept: float | None
    verify_length: float
    mean_acceptance_length: float


def threshold_sweep(outcomes: Outcomes) -> list[SweepPoint]:
    """
    What each of `THRESHOLDS` keeps and prunes.

    Args:
        outcomes ([`Outcomes`]): At least one block.

    Returns:
        `list[SweepPoint]`: Threshold by threshold, for all blocks together and then for each set in the order in which
        the sets appear.

    Source: DSpark, "Verify Smarter, Not Longer", Figure 5.
    """
    sets = np.asarray(outcomes.sets)
    points = []
    for name in (None, *dict.fromkeys(outcomes.sets)):
        members = np.ones(len(sets), bool) if name is None else sets == name
        whole = outcomes.accepted[members]
        for threshold, lengths in outcomes.cut_lengths.items():
            sent = lengths[members]
            accepted = np.minimum(whole, sent).sum()
            points.append(
                SweepPoint(
                    set=name,
                    threshold=threshold,
                    blocks=len(sent),
                    draft_acceptance_rate=float(accepted / sent.sum()) if sent.any() else None,
                    pruned=float(1.0 - sent.mean() / outcomes.block_size),
                    accepted_kept=float(accepted / whole.sum()) if whole.any() else None,
                    verify_length=float(sent.mean()),
                    mean_acceptance_length=float(1.0 + accepted / len(sent)),
                )
            )
    return points


def walk_blocks(sets: Sequence[str], rows: int, rounds: int, seed: int) -> np.ndarray:
    """
    Which block each row has in each round: it starts at a random one and goes on in the order of the recording, so
    that a row's confidences follow each other as they did. Where a prompt ends the set's next begins, as another
    request takes a free place; after a set's last block comes its first.

    Args:
        sets (`Sequence[str]`): The prompt set of each block.
        rows, rounds, seed (`int`): The same three give the same walk; of one seed, fewer rows are the first of more.

    Returns:
        `np.ndarray` of shape `(rounds, rows)`: Indices of blocks.
    """
    labels = np.asarray(sets)
    following = np.empty(len(labels), dtype=int)
    for name in dict.fromkeys(sets):
        members = np.flatnonzero(labels == name)
        following[members] = np.roll(members, -1)
    walk = np.empty((rounds, rows), dtype=int)
    walk[0] = np.random.default_rng(seed).integers(len(labels), size=rows)
    for before, now in zip(walk, walk[1:], strict=False):
        now[:] = following[before]
    return walk


@dataclass(frozen=True)
class LoadPoint:
    """
    What one plan makes of a number of rows.

    Attributes:
        plan (`str`): One of `PLANS`, see [`simulate_rows`].
        rows (`int`): Concurrent requests.
        threshold (`float`, *optional*): That of `"confidence"`.
        budget (`float`): Mean tokens a request that are verified, 1 + `verify_length`.
        throughput (`float`): Tokens a second of all rows and rounds, by what was accepted.
        expected_throughput (`float`, *optional*): By the survivals instead; both agree where these are calibrated.
            `None` for `"clairvoyant"`, which expects nothing.
        gap_to_oracle (`float`, *optional*): Per cent by which the expected tokens a second of a round fall short of
            the oracle's, in the mean of all rounds; below 0 only for `"no_drafts"`, which pays for no draft.
        gap_to_clairvoyant (`float`): Per cent by which `throughput` falls short of the clairvoyant's; below 0 only
            for `"no_drafts"`.
    """

    plan: str
    rows: int
    threshold: float | None
    budget: float
    throughput: float
    expected_throughput: float | None
    gap_to_oracle: float | None
    gap_to_clairvoyant: float


@dataclass(frozen=True)
class Rounds:
    """What came of each round, in arrays of shape `(rounds,)`: drafts sent, tokens, those expected, seconds."""

    drafts: np.ndarray
    tokens: np.ndarray
    expected: np.ndarray | None
    seconds: np.ndarray

    @property
    def throughput(self) -> float:
        return float(self.tokens.sum() / self.seconds.sum())


def simulate_load(outcomes: Outcomes, costs: Mapping[int, Costs], rounds: int, seed: int) -> list[LoadPoint]:
    """
    Each plan under each number of concurrent rows. In one round all plans have the same blocks.

    Args:
        outcomes ([`Outcomes`]): At least one block.
        costs (`Mapping[int, Costs]`): Numbers of rows, each at least 1, and the costs of a round with so many.
        rounds (`int`): Of each, at least 1.
        seed (`int`): For the blocks that rows start with.

    Returns:
        `list[LoadPoint]`: For each number of rows one a plan.

    Source: DSpark, Figure 8.
    """
    points: list[LoadPoint] = []
    with tqdm(total=sum(costs), desc="Simulate", unit="row") as progress:
        for rows, of_round in costs.items():
            walk = walk_blocks(outcomes.sets, rows, LAG + rounds, seed)
            points += simulate_rows(outcomes, of_round, walk)
            progress.update(rows)
    return points


def simulate_rows(outcomes: Outcomes, costs: Costs, walk: np.ndarray) -> list[LoadPoint]:
    """
    Each plan over the same rounds. All but the first draft whole blocks and pay for it; none bypasses drafting.

    - `"no_drafts"`: one token a row, no draft.
    - `"constant"`: whole blocks.
    - `"confidence"`: the one of `THRESHOLDS` with the highest throughput, known in hindsight.
    - `"hardware_aware"`: Algorithm 1.
    - `"hardware_aware_lagged"`: the best capacity of the round but one before, filled by current survivals.
    - `"oracle"`: the best capacity of the current survivals. A yardstick only: searched like this, a capacity can
      depend on the very tokens it admits, so no lossless schedule can have it. It gets the most out of each round by
      itself, as the schedules try to, which is not quite the most out of all rounds together.
    - `"clairvoyant"`: knows which drafts are going to be accepted and sends those that bring the most tokens a second
      over all rounds: no choice of lengths can be faster.

    Args:
        outcomes ([`Outcomes`]): What the walk leads through.
        costs ([`Costs`]): Of a round with the walk's number of rows.
        walk (`np.ndarray` of shape `(LAG + rounds, rows)`): Indices of blocks; the first `LAG` rounds are
            history only.

    Returns:
        `list[LoadPoint]`: One for each of `PLANS`, in their order.

    Source: DSpark, Algorithm 1 and Section 5.2.
    """
    blocks = walk[LAG:]
    lengths = scheduled_lengths(outcomes, costs, walk)
    lengths["constant"] = np.full(blocks.shape, outcomes.block_size)
    played = {plan: play(outcomes, blocks, chosen, costs) for plan, chosen in lengths.items()}
    cut = {t: play(outcomes, blocks, chosen[blocks], costs) for t, chosen in outcomes.cut_lengths.items()}
    threshold = max(cut, key=lambda value: cut[value].throughput)
    played["confidence"] = cut[threshold]
    played["no_drafts"] = play_without_drafts(blocks, costs)
    played["clairvoyant"] = play_clairvoyant(outcomes, blocks, costs)
    return [_point(plan, played, blocks.shape[1], threshold) for plan in PLANS]


def scheduled_lengths(outcomes: Outcomes, costs: Costs, walk: np.ndarray) -> dict[str, np.ndarray]:
    """The lengths, of shape `(rounds, rows)`, of the plans that go by expected throughput."""
    rate = costs.steps_per_second(outcomes.block_size)
    smooth_rate = smoothed_rate(costs, walk.shape[1], outcomes.block_size)
    capacities: list[int] = []
    lengths: dict[str, list[list[int]]] = {"hardware_aware": [], "hardware_aware_lagged": [], "oracle": []}
    for blocks in walk:
        survivals = outcomes.survivals[blocks].tolist()
        capacities.append(best_capacity(survivals, rate)[0])
        if len(capacities) > LAG:
            lengths["hardware_aware"].append(lengths_by_throughput(survivals, smooth_rate)[0])
            lengths["hardware_aware_lagged"].append(lengths_by_capacity(survivals, capacities[-1 - LAG]))
            lengths["oracle"].append(lengths_by_capacity(survivals, capacities[-1]))
    return {plan: np.array(chosen) for plan, chosen in lengths.items()}


def smoothed_rate(costs: Costs, rows: int, block_size: int) -> Callable[[int], float]:
    """The SPS(B) that Algorithm 1 goes by, as in [`Scheduler`]: without a machine's noise."""
    return (costs.smooth(rows) if costs.noisy else costs).steps_per_second(block_size)


def play(outcomes: Outcomes, blocks: np.ndarray, lengths: np.ndarray, costs: Costs) -> Rounds:
    """Send so many drafts of each block; both arrays are of shape `(rounds, rows)`."""
    rows, drafts = blocks.shape[1], lengths.sum(axis=1)
    return Rounds(
        drafts=drafts,
        tokens=rows + np.minimum(outcomes.accepted[blocks], lengths).sum(axis=1),
        expected=rows + outcomes.promised[blocks, lengths].sum(axis=1),
        seconds=costs.draft_seconds[outcomes.block_size] + costs.verify_seconds[rows + drafts],
    )


def play_without_drafts(blocks: np.ndarray, costs: Costs) -> Rounds:
    """Steps of one token a row; `blocks` is of shape `(rounds, rows)`."""
    rounds, rows = blocks.shape
    tokens = np.full(rounds, rows)
    return Rounds(np.zeros(rounds, dtype=int), tokens, tokens, np.full(rounds, costs.verify_seconds[rows]))


def play_clairvoyant(outcomes: Outcomes, blocks: np.ndarray, costs: Costs) -> Rounds:
    """
    Send only drafts that are going to be accepted, in each round the number with the most tokens - rate * seconds,
    where the rate is what all rounds then come to (Dinkelbach's method: the rate rises until it repeats). Where a
    profile has a step over more tokens quicker, others fill it up to that; they are not counted.
    """
    rows, most = blocks.shape[1], outcomes.accepted[blocks].sum(axis=1)
    counts = np.arange(most.max() + 1)
    tokens = rows + counts
    steps = costs.verify_seconds[rows : rows + rows * outcomes.block_size + 1]
    quickest = np.minimum.accumulate(steps[::-1])[::-1]
    seconds = costs.draft_seconds[outcomes.block_size] + quickest[counts]
    rate = 0.0
    while True:
        gains = tokens - rate * seconds
        best_up_to = np.maximum.accumulate(np.where(gains == np.maximum.accumulate(gains), counts, 0))
        drafts = best_up_to[most]
        reached = float(tokens[drafts].sum() / seconds[drafts].sum())
        if reached <= rate:
            return Rounds(drafts, tokens[drafts], None, seconds[drafts])
        rate = reached


def _point(plan: str, played: dict[str, Rounds], rows: int, threshold: float) -> LoadPoint:
    rounds, oracle, clairvoyant = played[plan], played["oracle"], played["clairvoyant"]
    expected = gap = None
    if rounds.expected is not None:
        expected = float(rounds.expected.sum() / rounds.seconds.sum())
        share = (rounds.expected / rounds.seconds) / (oracle.expected / oracle.seconds)
        gap = float(100.0 * (1.0 - share.mean()))
    return LoadPoint(
        plan=plan,
        rows=rows,
        threshold=threshold if plan == "confidence" else None,
        budget=float(1.0 + rounds.drafts.mean() / rows),
        throughput=rounds.throughput,
        expected_throughput=expected,
        gap_to_oracle=gap,
        gap_to_clairvoyant=100.0 * (1.0 - rounds.throughput / clairvoyant.throughput),
    )


def gpu_like_profile(
    block_size: int,
    most_rows: int,
    floor_seconds: float = 6e-3,
    token_seconds: float = 2e-5,
    tile: int = 64,
    draft_share: float = 0.1,
    slot_seconds: float = 5e-5,
) -> Profile:
    """
    A MADE-UP profile with the traits of a GPU: nothing here was measured.

    A step with B tokens takes sqrt(floor_seconds² + (token_seconds * tile * ceil(B / tile))²): while few tokens are
    computed the time is that of reading the weights, with many it grows by the token, and it jumps wherever another
    tile is begun. A draft takes `draft_share` of a step with all slots of all rows, and `slot_seconds` for each slot
    that is drawn. The defaults are of the size that a target of 8 billion parameters in 16 bits on a large data-centre
    GPU would suggest.

    Args:
        block_size (`int`): Of the drafter.
        most_rows (`int`): Rows up to which the curves go.
        floor_seconds (`float`): Of reading the weights once.
        token_seconds (`float`): Of computing a token where there are many.
        tile (`int`): Tokens of a tile.
        draft_share (`float`): Cost of the drafter's pass over that of the target's.
        slot_seconds (`float`): Of drawing one slot.

    Source: the shape follows DSpark, "Adapting Algorithm 1 to Real Hardware", conflict 1.
    """

    def step_seconds(tokens: np.ndarray) -> np.ndarray:
        return np.hypot(floor_seconds, token_seconds * tile * np.ceil(tokens / tile))

    tokens, rows = np.arange(1, most_rows * (1 + block_size) + 1), np.arange(1, most_rows + 1)
    backbone = draft_share * step_seconds(rows * block_size)
    draft = DraftCurve(
        rows.tolist(), (backbone + slot_seconds).tolist(), (backbone + block_size * slot_seconds).tolist()
    )
    return Profile(
        key={"device": "made up, GPU-like"},
        block_size=block_size,
        steps=[StepCurve(1, tokens.tolist(), step_seconds(tokens).tolist())],
        draft_greedy=draft,
        draft_sampled=draft,
        made={
            "by": "a formula, not a measurement",
            "floor_seconds": floor_seconds,
            "token_seconds": token_seconds,
            "tile": tile,
            "draft_share": draft_share,
            "slot_seconds": slot_seconds,
        },
    )
