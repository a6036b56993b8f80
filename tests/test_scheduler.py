"""The schedule of one call, round by round."""

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from test_scheduling import assignments, theta

from dspark_hf import scheduling
from dspark_hf.scheduling import (
    HARDWARE_AWARE,
    SCHEDULES,
    Choice,
    Costs,
    Scheduler,
    best_slots,
    lengths_by_capacity,
    lengths_by_throughput,
    survivals,
)
from dspark_hf.synthetic import concentration_of


def linear(per_token: float, per_slot: float = 0.0, draft: float = 0.1) -> Callable[[int, float], Costs]:
    """Costs of a step of one second and so much more a token, and of a draft."""

    def costs(rows: int, context: float) -> Costs:
        verify = 1.0 + per_token * np.arange(rows * 9 + 1)
        return Costs(verify, [0.0] + [draft + per_slot * slot for slot in range(8)])

    return costs


def a_round(
    scheduler: Scheduler,
    confidences: Sequence[Sequence[float]],
    hits: float = 1.0,
    numbers: list[int] | None = None,
    left: list[int] | None = None,
) -> tuple[int, Choice | None]:
    """One round of the loop: slots drawn, and the choice; `hits` of each row's sent drafts are accepted."""
    numbers = list(range(len(confidences))) if numbers is None else numbers
    slots = scheduler.slots(numbers, 100.0, left)
    if not slots:
        return 0, None
    drafted = [survivals(values[:slots]) for values in confidences]
    choice = scheduler.choose(numbers, drafted)
    scheduler.observe(numbers, drafted, choice.lengths, [int(length * hits) for length in choice.lengths])
    return slots, choice


def runs(slots: Sequence[int]) -> list[int]:
    """Rounds with drafts, without, with, ... in a row."""
    return [len(list(group)) for _, group in itertools.groupby(slots, bool)]


BAD, GOOD = [0.02] * 7, [0.95] * 7


@pytest.mark.parametrize("schedule", HARDWARE_AWARE)
@pytest.mark.parametrize(("batch", "before_it_judges"), [(1, 4), (2, 2), (3, 2), (4, 1), (9, 1)])
def test_a_drafter_that_brings_nothing_is_probed_at_growing_intervals(schedule, batch, before_it_judges):
    scheduler = Scheduler(schedule, 7, costs=linear(0.05))
    slots = [a_round(scheduler, [BAD] * batch)[0] for _ in range(1100)]
    assert runs(slots)[:12] == [before_it_judges, 16, 1, 32, 1, 64, 1, 128, 1, 256, 1, 256]
    assert slots[:before_it_judges] == [7] * before_it_judges
    assert {count for count in slots[before_it_judges:] if count} == {1}  # a probe is no dearer than need be


@pytest.mark.parametrize("schedule", ["constant", "confidence"])
def test_schedules_that_know_no_costs_draft_whole_blocks_always(schedule):
    scheduler = Scheduler(schedule, 7, threshold=0.5)
    played = [a_round(scheduler, [BAD, GOOD]) for _ in range(50)]
    assert {slots for slots, _ in played} == {7}
    assert {tuple(choice.lengths) for _, choice in played} == {(7, 7) if schedule == "constant" else (0, 7)}
    assert all(choice.throughput is None and choice.capacity is None for _, choice in played)


@pytest.mark.parametrize("schedule", HARDWARE_AWARE)
def test_drafting_that_costs_more_than_it_brings_stops_although_verification_pays(schedule):
    """The paper's limit: what was spent on a draft is not got back by pruning it."""
    usual = [[0.5] * 7] * 4
    cheap, dear = (Scheduler(schedule, 7, costs=linear(0.01, draft=draft)) for draft in (0.1, 3.0))
    assert all(a_round(cheap, usual)[0] for _ in range(40))
    assert runs([a_round(dear, usual)[0] for _ in range(300)]) == [1, 256, 1, 42]


@pytest.mark.parametrize(("draft", "pause"), [(0.05, 16), (0.3, 30), (0.6, 60)])
def test_the_first_pause_keeps_the_next_probe_under_a_hundredth(draft, pause):
    verify = np.ones(2 + 2 * 7 + 1)
    costs = Costs(verify, [0.0] + [draft] * 7)
    scheduler = Scheduler("hardware_aware", 7, costs=lambda rows, context: costs)
    assert runs([a_round(scheduler, [BAD] * 2, hits=0.0)[0] for _ in range(100)])[:3] == [2, pause, 1]


@pytest.mark.parametrize("schedule", HARDWARE_AWARE)
def test_drafting_resumes_when_the_drafter_turns_good(schedule):
    scheduler = Scheduler(schedule, 7, costs=linear(0.01))
    slots = [a_round(scheduler, [BAD] * 4, hits=0.0)[0] for _ in range(60)]
    assert runs(slots) == [1, 16, 1, 32, 1, 9]
    while not a_round(scheduler, [GOOD] * 4)[0]:
        pass
    after = [a_round(scheduler, [GOOD] * 4)[0] for _ in range(40)]
    assert all(after) and after[-1] == 7
    # The interval shrank with every round that drafted: the next pause is a short one.
    slots = [a_round(scheduler, [BAD] * 4, hits=0.0)[0] for _ in range(60)]
    assert [length for length in runs(slots)[1:] if length > 1][0] == 16


@pytest.mark.parametrize("schedule", HARDWARE_AWARE)
def test_every_sixteenth_block_is_drawn_whole(schedule):
    """Slots after the second never survive and cost something."""
    scheduler = Scheduler(schedule, 7, costs=linear(0.01, per_slot=0.3))
    slots = [a_round(scheduler, [[0.9, 0.9, 0, 0, 0, 0, 0]] * 4)[0] for _ in range(50)]
    assert slots == [7 if number % 16 == 0 else 2 for number in range(50)]


@pytest.mark.parametrize("schedule", HARDWARE_AWARE)
def test_slots_that_turn_good_are_found(schedule):
    scheduler = Scheduler(schedule, 7, costs=linear(0.01, per_slot=0.1))
    for _ in range(20):
        slots, _ = a_round(scheduler, [[0.9, 0.9, 0, 0, 0, 0, 0]] * 4)
    assert slots == 2
    slots = [a_round(scheduler, [GOOD] * 4)[0] for _ in range(120)]
    assert slots[-1] == 7 and 2 in slots


def with_a_laggard(scheduler: Scheduler, left: Sequence[int] | None = None) -> int:
    """Rounds out of 60 that drafted for three rows that accept what is promised and one that accepts none."""
    numbers, drafted = list(range(4)), 0
    for _ in range(60):
        slots = scheduler.slots(numbers, 100.0, left)
        if slots:
            block = [survivals([0.6] * slots)] * 4
            scheduler.choose(numbers, block)
            scheduler.observe(numbers, block, [slots] * 4, [1, 2, 1, 0])
            drafted += 1
    return drafted


@pytest.mark.parametrize("schedule", HARDWARE_AWARE)
def test_a_batch_is_done_when_its_slowest_row_is(schedule):
    """Drafts give the batch twice the tokens a round and make the round longer by a half."""

    def scheduler(per_row: float) -> Scheduler:
        def costs(rows: int, context: float) -> Costs:
            return Costs(np.full(rows * 9 + 1, 1.0 + per_row * rows), [0.0] + [0.5 * (1.0 + per_row * rows)] * 7)

        return Scheduler(schedule, 7, costs=costs)

    assert with_a_laggard(scheduler(0.0)) < 20  # a step for the slowest row alone costs as much as one for all
    assert with_a_laggard(scheduler(50.0)) == 60  # a row that is done saves a quarter of a step
    assert with_a_laggard(scheduler(0.0), [90, 90, 90, 30]) == 60  # the slowest row is nearly done


def shares_after(rates: Sequence[float], rounds: int, seed: int) -> list[float]:
    """What rows are expected to accept of the mean, once each has accepted a draft or not at its own rate."""
    chance = random.Random(seed)
    scheduler, numbers = Scheduler("hardware_aware", 1, costs=linear(0.0)), list(range(len(rates)))
    for _ in range(rounds):
        accepted = [int(chance.random() < rate) for rate in rates]
        scheduler.observe(numbers, [[0.5]] * len(rates), [1] * len(rates), accepted)
    return scheduler._shares(numbers)


def test_rows_differ_by_what_is_more_than_chance():
    alike = shares_after([0.5] * 256, 8, seed=1)
    assert statistics.fmean(alike) == pytest.approx(1.0, abs=0.02) and min(alike) > 0.6
    two_kinds = shares_after([0.2] * 128 + [0.8] * 128, 8, seed=1)
    low, high = statistics.fmean(two_kinds[:128]), statistics.fmean(two_kinds[128:])
    assert 0.3 < low < 0.6 and 1.4 < high < 1.7
    assert shares_after([0.0, 0.0], 5, seed=1) == [1.0, 1.0]  # nothing was ever accepted: nothing tells them apart
    unseen = Scheduler("hardware_aware", 1, costs=linear(0.0))
    unseen.observe([0, 1], [[0.5]] * 2, [1, 1], [1, 0])
    assert unseen._shares([0, 1, 2])[2] == 1.0  # a row that joins later is like the mean


def test_what_a_row_accepted_long_ago_is_forgotten():
    scheduler = Scheduler("hardware_aware", 2, costs=linear(0.0))
    for accepted in [2] * 100 + [0] * 100:
        scheduler.observe([5], [[0.5, 0.5]], [2], [accepted])
    rounds, accepted, _ = scheduler.own[5]
    assert rounds == pytest.approx(20, rel=0.01) and accepted / rounds < 0.02


def best_by_hand(rows: Sequence[Sequence[float]], speed: Callable[[int], float]) -> int:
    """The smallest capacity with the highest Theta, from all assignments."""
    best: dict[int, float] = {}
    for lengths in assignments(rows):
        best[sum(lengths)] = max(best.get(sum(lengths), 0.0), theta(rows, lengths, speed))
    return min(best, key=lambda capacity: (-best[capacity], capacity))


def jagged_costs(seed: int) -> Callable[[int, float], Costs]:
    """A step whose time jumps about, with whole blocks so much cheaper than parts that none is drawn in part."""
    chance = random.Random(seed)
    verify = np.array([chance.uniform(1.0, 2.0) for _ in range(32)])
    return lambda rows, context: Costs(verify, [0.0, 5.0, 5.0, 0.05])


@pytest.mark.parametrize("seed", range(4))
def test_a_lagged_capacity_is_that_of_the_last_round_but_one(seed):
    chance, costs = random.Random(seed), jagged_costs(seed)
    scheduler = Scheduler("hardware_aware_lagged", 3, costs=costs)
    speed = costs(3, 0.0).steps_per_second(3)
    past: list[list[list[float]]] = []
    for _ in range(12):
        confidences = [[chance.uniform(0.4, 1.0) for _ in range(3)] for _ in range(3)]
        slots, choice = a_round(scheduler, confidences)
        assert slots == 3
        now = [survivals(values) for values in confidences]
        if len(past) < 2:
            assert choice.capacity is None
            assert (choice.lengths, choice.throughput) == lengths_by_throughput(now, speed)
        else:
            assert choice.capacity == best_by_hand(past[-2], speed)
            assert choice.lengths == lengths_by_capacity(now, choice.capacity)
            assert choice.throughput == pytest.approx(theta(now, choice.lengths, speed))
        past.append(now)


def test_a_lagged_capacity_when_rows_come_and_go():
    """A row that was not there counts as the mean of those that were; rows that left do not count."""
    capacities = set()
    for seed in range(6):
        chance, costs = random.Random(seed), jagged_costs(seed)
        speed = costs(0, 0.0).steps_per_second(3)
        scheduler = Scheduler("hardware_aware_lagged", 3, costs=costs)
        past: list[dict[int, list[float]]] = []
        for numbers in ([0, 1], [0, 1], [0, 1, 4], [0, 1, 4], [1, 4], [4], [4], [2, 4]):
            confidences = [[chance.uniform(0.5, 1.0) for _ in range(3)] for _ in numbers]
            slots, choice = a_round(scheduler, confidences, numbers=numbers)
            assert slots == 3
            if len(past) > 1:
                before = past[-2]
                mean = [math.fsum(values) / len(before) for values in zip(*before.values(), strict=True)]
                assert choice.capacity == best_by_hand([before.get(number, mean) for number in numbers], speed)
                capacities.add(choice.capacity)
            past.append(dict(zip(numbers, map(survivals, confidences), strict=True)))
    assert len(capacities) > 4


@pytest.mark.parametrize(("seconds", "capacity"), [(1.7, 1), (1.8, 0)])
def test_a_new_row_counts_as_the_mean_of_all_that_were_there(seconds, capacity):
    """Survivals of 1, 1 and 0.1 are one of 0.7: 1.7 tokens in 1.8 s are more than 1 in 1.1 s, in 1.9 s not."""
    scheduler = Scheduler("hardware_aware_lagged", 1, costs=lambda rows, context: Costs(verify, [0.0, 0.1]))
    verify = np.array([0.0, 1.0, seconds])
    for _ in range(2):
        scheduler.observe([0, 1, 2], [[1.0], [1.0], [0.1]], [1, 1, 0], [1, 1, 0])
    scheduler.slots([7], 9.0)
    assert scheduler.choose([7], [[0.5]]).capacity == capacity


def test_a_lagged_capacity_holds_for_the_slots_that_were_drawn():
    """At the end of a text fewer are drawn: the capacity, like Theta, is that of rounds with so few."""
    costs = lambda rows, context: Costs(np.array([0.0, 1.0, 1.1, 1.2, 1.2]), [0.0, 0.1, 2.0, 2.0])  # noqa: E731
    scheduler = Scheduler("hardware_aware_lagged", 3, costs=costs)
    for _ in range(2):
        a_round(scheduler, [[0.9, 0.9, 0.9]])
    assert scheduler.slots([0], 9.0) == 3
    choice = scheduler.choose([0], [[0.5]])
    assert choice == Choice([1], pytest.approx(1.5 / 1.2), capacity=1)


def test_slots_that_were_not_drawn_count_with_the_running_mean_of_their_confidence():
    costs = lambda rows, context: Costs(np.array([0.0, 1.0, 1.1, 1.2, 1.2]), [0.0, 0.1, 2.0, 2.0])  # noqa: E731
    scheduler = Scheduler("hardware_aware_lagged", 3, costs=costs)
    scheduler.slots([0], 9.0)
    scheduler.observe([0], [survivals([0.9, 0.7, 0.2])], [0], [0])
    means = [0.5 + 0.05 * (value - 0.5) for value in (0.9, 0.7, 0.2)]
    assert scheduler.mean_confidences == pytest.approx(means)
    scheduler.observe([0], [[0.6]], [0], [0])
    assert scheduler.drafted[-1][0] == pytest.approx([0.6, 0.6 * means[1], 0.6 * means[1] * means[2]])
    scheduler.observe([0], [[0.0, 0.0, 0.0]], [0], [0])  # nothing is learnt of a slot behind one that cannot survive
    assert scheduler.mean_confidences[1:] == pytest.approx(means[1:])


# Floors


def options_of(schedule: str, **costs: float) -> dict[str, Any]:
    return {"costs": linear(**costs)} if schedule in HARDWARE_AWARE else {"threshold": 0.5}


@pytest.mark.parametrize("schedule", ["confidence", *HARDWARE_AWARE])
def test_a_row_is_not_starved_for_longer_than_it_may_be(schedule):
    uneven = [[0.9] * 3, [0.2] * 3, [0.1] * 3]
    left = [900, 90, 90]  # it is the first row that the batch waits for
    scheduler = Scheduler(schedule, 3, max_starved_rounds=3, **options_of(schedule, per_token=0.3))
    lengths = [a_round(scheduler, uneven, left=left)[1].lengths for _ in range(12)]
    assert all(first > 0 for first, _, _ in lengths)
    assert [second for _, second, _ in lengths] == [third for _, _, third in lengths] == [0, 0, 0, 1] * 3
    left_alone = Scheduler(schedule, 3, **options_of(schedule, per_token=0.3))
    assert all(a_round(left_alone, uneven, left=left)[1].lengths[1:] == [0, 0] for _ in range(12))


def test_rounds_in_which_nothing_was_sent_starve_no_row_and_feed_none():
    scheduler = Scheduler("confidence", 3, threshold=0.5, max_starved_rounds=2)
    favoured, nobody = [[0.9] * 3, [0.2] * 3], [[0.2] * 3, [0.2] * 3]
    lengths = [a_round(scheduler, each)[1].lengths for each in [favoured, nobody] * 4]
    assert [second for _, second in lengths] == [0, 0, 0, 1, 0, 0, 0, 1]
    alone = Scheduler("confidence", 3, threshold=0.5, max_starved_rounds=1)
    assert [a_round(alone, nobody)[1].lengths for _ in range(4)] == [[0, 0]] * 4


@pytest.mark.parametrize("schedule", ["confidence", *HARDWARE_AWARE])
@pytest.mark.parametrize("floor", [1, 2, 5])
def test_a_floor_holds_whatever_it_costs_where_there_is_room(schedule, floor):
    scheduler = Scheduler(schedule, 3, min_verify_length=floor, **options_of(schedule, per_token=9.0, draft=0.1))
    for _ in range(3):
        if scheduler.slots([0, 1, 2], 9.0):
            drafted = [survivals([0.3] * 3), [0.1], []]  # rows near the end of their text
            choice = scheduler.choose([0, 1, 2], drafted)
            assert choice.lengths == [min(floor, 3), 1, 0]
            if schedule in HARDWARE_AWARE:
                speed = linear(9.0)(3, 9.0).steps_per_second(3)
                assert choice.throughput == pytest.approx(theta(drafted, choice.lengths, speed))
            scheduler.observe([0, 1, 2], [survivals([0.3] * 3)] * 3, choice.lengths, [0, 0, 0])


# Promises


def judged_by(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """What each judgement of a drafter rests on, from now on."""
    seen: list[np.ndarray] = []

    def best(history: np.ndarray, costs: Costs) -> tuple[int, float]:
        seen.append(np.array(history))
        return best_slots(history, costs)

    monkeypatch.setattr(scheduling, "best_slots", best)
    return seen


@pytest.mark.parametrize(("hits", "wanted"), [(0.0, 4 / (4 + 2 * 1.75)), (1.0, 8 / (4 + 2 * 1.75))])
def test_survivals_are_scaled_by_how_far_promises_were_kept(hits, wanted, monkeypatch):
    """Four tokens of good faith: of 3.5 that were promised, none came or four did."""
    seen = judged_by(monkeypatch)
    scheduler = Scheduler("hardware_aware", 2, costs=linear(0.0))
    values = survivals([1.0, 0.75])
    for number in range(2):
        assert a_round(scheduler, [[1.0, 0.75]], hits)[1].lengths == [2], number
    scheduler.judged.extend([scheduler.judged[0]] * 2)  # as many as a first judgement needs
    assert scheduler.slots([0], 9.0) > 0
    assert seen[-1].tolist() == [[pytest.approx([min(value * wanted, 1.0) for value in values])]] * 4


def test_more_than_twice_what_was_promised_counts_as_twice(monkeypatch):
    seen = judged_by(monkeypatch)
    scheduler = Scheduler("hardware_aware", 2, costs=linear(0.0))
    for _ in range(12):
        a_round(scheduler, [[0.1, 0.1]] * 4)
    assert seen[-1][0, 0].tolist() == pytest.approx([0.2, 0.02])


def test_who_promises_and_never_keeps_is_stopped_and_who_is_modest_goes_on():
    boaster = Scheduler("hardware_aware", 7, costs=linear(0.05))
    slots = [a_round(boaster, [[0.9] * 7] * 4, hits=0.0)[0] for _ in range(12)]
    assert slots[0] == 7 and slots[-1] == 0
    modest = Scheduler("hardware_aware", 7, costs=linear(0.05))
    unheard = Scheduler("hardware_aware", 7, costs=linear(0.05))
    confidences = [[0.22] * 7] * 4
    assert all(a_round(modest, confidences, hits=1.0)[0] for _ in range(40))
    assert 0 in [a_round(unheard, confidences, hits=0.0)[0] for _ in range(40)]


@pytest.mark.parametrize(("batch", "rounds"), [(1, 16), (3, 5), (16, 1), (40, 1)])
def test_a_judgement_rests_on_the_newest_rounds(batch, rounds, monkeypatch):
    seen = judged_by(monkeypatch)
    scheduler = Scheduler("hardware_aware", 2, costs=linear(0.0))
    for number in range(40):
        a_round(scheduler, [[0.2 + number / 1000, 0.0]] * batch)
    assert seen[-1].shape == (rounds, batch, 2)
    newest = [2 * (0.2 + number / 1000) for number in range(39 - rounds, 39)]  # all were kept, counted twice
    assert seen[-1][:, 0, 0].tolist() == pytest.approx(newest)


# Whole calls


def a_machine(rows: int, context: float) -> Costs:
    """Seconds of the demo pair on two cores, in round numbers."""
    verify = 0.040 + 0.0009 * rows + 0.00045 * (np.arange(rows * 6 + 1) - rows)
    return Costs(verify, [0.0] + [0.0075 + 0.0004 * rows + 0.0006 * slots for slots in range(1, 6)])


def seconds_of_a_call(
    scheduler: Scheduler, accept_probs: Sequence[float], new_tokens: int, seed: int, drafts: bool = True
) -> float:
    """
    Rows that each accept with a probability of their own in the mean, by confidences of AUC 0.8 that are true, and
    leave when they are done.
    """
    chance = np.random.default_rng(seed)
    means = np.array(accept_probs)[:, None]
    weights = concentration_of(float(means.mean()), 0.8)
    left, seconds = np.full(len(means), new_tokens), 0.0
    while left.any():
        rows = np.flatnonzero(left)
        room = left[rows] - 1
        costs = a_machine(len(rows), 100.0)
        slots = min(scheduler.slots(rows.tolist(), 100.0, left[rows].tolist()), room.max()) if drafts else 0
        lengths = np.zeros(len(rows), dtype=int)
        accepted = lengths
        if slots:
            confidences = chance.beta(means[rows] * weights, (1 - means[rows]) * weights, (len(rows), slots))
            values = np.cumprod(confidences, axis=1).tolist()
            hits = np.cumprod(chance.random(confidences.shape) < confidences, axis=1).sum(axis=1)
            lengths = scheduler.choose(rows.tolist(), [v[:r] for v, r in zip(values, room, strict=True)]).lengths
            accepted = np.minimum(hits, lengths)
            scheduler.observe(rows.tolist(), values, lengths, accepted.tolist())
        seconds += costs.draft_seconds[slots] + costs.verify_seconds[len(rows) + sum(lengths)]
        left[rows] -= 1 + accepted
    return seconds


def speed(
    monkeypatch: pytest.MonkeyPatch, schedule: str, accept_probs: Sequence[float], always: bool = False
) -> float:
    """How many times as fast as without drafts 40 calls of 48 tokens a row are together."""
    with monkeypatch.context() as patch:
        if always:
            patch.setattr(Scheduler, "_pays", lambda *arguments: True)
        costs = a_machine if schedule in HARDWARE_AWARE else None
        calls = [(Scheduler(schedule, 5, costs=costs), accept_probs, 48, seed) for seed in range(40)]
        without = sum(seconds_of_a_call(*call, drafts=False) for call in calls)
        return without / sum(seconds_of_a_call(*call) for call in calls)


@pytest.mark.parametrize("schedule", HARDWARE_AWARE)
@pytest.mark.parametrize("rows", [4, 8])
def test_chance_among_rows_that_are_alike_does_not_stop_drafting_that_pays(schedule, rows, monkeypatch):
    kept = speed(monkeypatch, schedule, [0.52] * rows)
    assert kept > 0.96 * speed(monkeypatch, schedule, [0.52] * rows, always=True)
    assert kept > 0.98 * speed(monkeypatch, "constant", [0.52] * rows) > 1.05


@pytest.mark.parametrize("schedule", HARDWARE_AWARE)
@pytest.mark.parametrize("accept_probs", [[0.25] * 8, [0.3] * 16, [0.02] * 4 + [0.4] * 4])
def test_a_call_in_which_drafting_does_not_pay_loses_little(schedule, accept_probs, monkeypatch):
    assert 0.97 < speed(monkeypatch, schedule, accept_probs) < 1.0
    assert speed(monkeypatch, schedule, accept_probs, always=True) < 0.9


# Repeatable, quick


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_same_rounds_give_the_same_decisions(schedule):
    def play() -> list[tuple[int, Choice | None]]:
        chance = random.Random(3)
        scheduler = Scheduler(
            schedule, 4, 0.3, jagged_costs(2) if schedule in HARDWARE_AWARE else None, max_starved_rounds=2
        )
        scheduler.costs = scheduler.costs and linear(0.15, per_slot=0.02)
        rounds = [[[chance.random() for _ in range(4)] for _ in range(3)] for _ in range(60)]
        return [a_round(scheduler, confidences, hits=0.5) for confidences in rounds]

    np.random.seed(1)
    first = play()
    np.random.seed(2)
    random.random()
    assert play() == first
    if schedule in HARDWARE_AWARE:
        assert len({slots for slots, _ in first}) > 1


@pytest.mark.parametrize("schedule", HARDWARE_AWARE)
def test_deciding_takes_no_time_at_64_rows_of_block_7(schedule):
    """About 0.6 ms on a quiet core; a round of so many rows takes a hundred or more."""
    chance = random.Random(0)
    scheduler = Scheduler(schedule, 7, costs=linear(0.001, per_slot=0.01))
    numbers, seconds = list(range(64)), []
    for _ in range(20):
        block = [survivals([chance.uniform(0.7, 1.0) for _ in range(7)]) for _ in numbers]
        start = time.perf_counter()
        slots = scheduler.slots(numbers, 100.0)
        block = [values[:slots] for values in block]
        choice = scheduler.choose(numbers, block)
        scheduler.observe(numbers, block, choice.lengths, [length // 2 for length in choice.lengths])
        seconds.append(time.perf_counter() - start)
        assert slots and sum(choice.lengths) > 64
    assert statistics.median(seconds) < 5e-3


def test_only_measured_costs_are_smoothed_and_only_for_algorithm_1():
    seconds = np.array([1.0, 1.0, 3.0] + [1.05] * 6)
    chosen = {}
    for schedule in HARDWARE_AWARE:
        for noisy in (False, True):
            costs = Costs(seconds, [0.0] * 8, noisy)
            scheduler = Scheduler(schedule, 7, costs=lambda rows, context, costs=costs: costs)
            chosen[schedule, noisy] = a_round(scheduler, [GOOD])[1].lengths
    assert chosen["hardware_aware", False] == [0] and chosen["hardware_aware", True] == [7]
    assert chosen["hardware_aware_lagged", False] == chosen["hardware_aware_lagged", True]
