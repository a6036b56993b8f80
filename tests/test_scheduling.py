"""Verification lengths: plain numbers in, plain numbers out."""

import ast
import copy
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_hf import scheduling
from dspark_hf.scheduling import (
    HARDWARE_AWARE,
    SCHEDULES,
    Costs,
    Prospect,
    Scheduler,
    best_capacity,
    best_slots,
    lengths_by_capacity,
    lengths_by_threshold,
    lengths_by_throughput,
    ranked,
    seconds_to_finish,
    survivals,
)


rows = st.lists(st.floats(0, 1), max_size=8)
property_test = settings(deadline=None, derandomize=True)


def test_survival_is_the_cumulative_product():
    assert survivals([0.5, 0.5, 1.0, 0.1]) == [0.5, 0.25, 0.25, 0.025]
    assert survivals([]) == []


# The threshold


@pytest.mark.parametrize(
    ("threshold", "length"), [(0.0, 4), (0.02, 4), (0.1, 3), (0.25, 3), (0.26, 1), (0.5, 1), (0.51, 0), (1.0, 0)]
)
def test_a_block_is_cut_at_the_first_slot_below_the_threshold(threshold, length):
    assert lengths_by_threshold([survivals([0.5, 0.5, 1.0, 0.1])], threshold) == [length]


def test_rows_are_cut_each_for_itself():
    confidences = [[0.9, 0.9, 0.9], [0.1, 1.0, 1.0], [1.0, 1.0, 1.0], []]
    assert lengths_by_threshold([survivals(row) for row in confidences], 0.8) == [2, 0, 3, 0]


def test_conditional_confidences_above_the_threshold_do_not_save_a_block():
    """Each slot is likely given those before it; all of them together are not."""
    assert lengths_by_threshold([survivals([0.8] * 7)], 0.5) == [3]


@property_test
@given(rows, st.floats(0, 1))
def test_every_slot_that_is_sent_survives(confidences, threshold):
    (length,) = lengths_by_threshold([survivals(confidences)], threshold)
    for slot in range(1, len(confidences) + 1):
        survival = math.prod(confidences[:slot])
        if slot <= length:
            assert survival >= threshold or math.isclose(survival, threshold)
    if length < len(confidences):
        assert math.prod(confidences[: length + 1]) <= threshold


@property_test
@given(rows, st.floats(0, 1), st.floats(0, 1))
def test_a_higher_threshold_never_sends_more(confidences, first, second):
    low, high = sorted((first, second))
    assert lengths_by_threshold([survivals(confidences)], low) >= lengths_by_threshold([survivals(confidences)], high)


# The traces worked in the review of the paper

TWO_ROWS = [survivals([0.9, 0.5]), survivals([0.6, 0.6])]
TWO_ROWS_SPEED = {2: 1.0, 3: 0.8, 4: 0.55, 5: 0.5, 6: 0.3}
THREE_ROWS = [survivals([0.95, 0.85, 0.70]), survivals([0.80, 0.55, 0.30]), survivals([0.65, 0.25, 0.10])]
THREE_ROWS_SPEED = dict(zip(range(3, 13), [1.0, 0.85, 0.70, 0.60, 0.42, 0.30, 0.20, 0.12, 0.07, 0.04], strict=True))


def expected_tokens(rows: Sequence[Sequence[float]], lengths: Sequence[int]) -> float:
    """tau: each row's own token and the survivals of what is sent."""
    return math.fsum(1 + math.fsum(values[:length]) for values, length in zip(rows, lengths, strict=True))


def test_the_trace_with_two_requests():
    """DSpark, "The Hardware-Aware Prefix Scheduler": the steps, and the whole table of Theta(B)."""
    lengths, throughput = lengths_by_throughput(TWO_ROWS, TWO_ROWS_SPEED.__getitem__)
    assert lengths == [1, 0] and throughput == pytest.approx(2.32)
    pool = [(row, position, round(survival, 6)) for row, position, survival in ranked(TWO_ROWS)]
    assert pool == [(0, 1, 0.9), (1, 1, 0.6), (0, 2, 0.45), (1, 2, 0.36)]
    table = {2: ([0, 0], 2.0, 2.0), 3: ([1, 0], 2.9, 2.32), 4: ([1, 1], 3.5, 1.925), 5: ([2, 1], 3.95, 1.975)}
    table[6] = ([2, 2], 4.31, 1.293)
    for batch, (admitted, tokens, theta) in table.items():
        assert lengths_by_capacity(TWO_ROWS, batch - 2) == admitted
        assert expected_tokens(TWO_ROWS, admitted) == pytest.approx(tokens)
        assert tokens * TWO_ROWS_SPEED[batch] == pytest.approx(theta)
    assert best_capacity(TWO_ROWS, TWO_ROWS_SPEED.__getitem__) == (1, pytest.approx(2.32))


def test_the_trace_with_three_requests():
    """DSpark, "A Three-Request Numeric Trace Through the Whole Loop"."""
    pool = [(row + 1, position, survival) for row, position, survival in ranked(THREE_ROWS)]
    wanted = [(1, 1), (1, 2), (2, 1), (3, 1), (1, 3), (2, 2), (3, 2), (2, 3), (3, 3)]
    assert [candidate[:2] for candidate in pool] == wanted
    printed = [0.950, 0.808, 0.800, 0.650, 0.565, 0.440, 0.163, 0.132, 0.016]
    assert [candidate[2] for candidate in pool] == pytest.approx(printed, abs=5.1e-4)
    asked: list[int] = []

    def speed(batch: int) -> float:
        asked.append(batch)
        return THREE_ROWS_SPEED[batch]

    lengths, throughput = lengths_by_throughput(THREE_ROWS, speed)
    assert lengths == [1, 0, 0] and throughput == pytest.approx(3.358, abs=5.1e-4)
    assert asked == [3, 4, 5]  # it breaks at the first that does not raise it
    for batch, theta in ((4, 3.358), (5, 3.331), (6, 3.335), (7, 2.607)):
        tokens = expected_tokens(THREE_ROWS, lengths_by_capacity(THREE_ROWS, batch - 3))
        assert tokens * THREE_ROWS_SPEED[batch] == pytest.approx(theta, abs=1e-3)
    assert best_capacity(THREE_ROWS, THREE_ROWS_SPEED.__getitem__) == (1, pytest.approx(throughput))


# Order


def test_ties_go_to_the_earlier_position_then_to_the_lower_row():
    assert ranked([[0.5, 0.5], [0.5, 0.25], [0.5, 0.5]]) == [
        (0, 1, 0.5),
        (1, 1, 0.5),
        (2, 1, 0.5),
        (0, 2, 0.5),
        (2, 2, 0.5),
        (1, 2, 0.25),
    ]
    even = [[0.5, 0.5]] * 3
    assert [lengths_by_capacity(even, capacity) for capacity in range(7)] == [
        [0, 0, 0],
        [1, 0, 0],
        [1, 1, 0],
        [1, 1, 1],
        [2, 1, 1],
        [2, 2, 1],
        [2, 2, 2],
    ]
    assert lengths_by_throughput(even, {3: 1.0, 4: 1.0, 5: 0.8}.__getitem__) == ([1, 0, 0], 3.5)


def test_what_is_equal_is_not_admitted():
    """Theta has to rise: 2 tokens at half the speed are no more than one."""
    assert lengths_by_throughput([[1.0, 1.0]], {1: 1.0, 2: 0.5, 3: 1.0}.__getitem__) == ([0], 1.0)
    assert best_capacity([[1.0, 0.0]], {1: 1.0, 2: 0.5}.__getitem__) == (0, 1.0)


@pytest.mark.parametrize("speed", [lambda batch: 1.0, float], ids=["flat", "rising"])
def test_what_cannot_survive_is_never_admitted(speed):
    values = [[0.5, 0.0, 0.0], [0.0, 0.0], [1e-300, 0.0]]
    assert lengths_by_throughput(values, float)[0] == [1, 0, 1]
    assert best_capacity(values, speed)[0] <= 2
    assert lengths_by_capacity(values, 8) == [1, 0, 1]
    assert lengths_by_throughput([[0.0], []], speed) == ([0, 0], 2 * speed(2))


def test_nothing_drafted_is_nothing_sent():
    assert lengths_by_throughput([[], []], lambda batch: 0.5) == ([0, 0], 1.0)
    assert best_capacity([[], []], lambda batch: 0.5) == (0, 1.0)
    assert lengths_by_capacity([[], []], 3) == [0, 0]


# Against all length assignments

confidence = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.5, 1.0]))
small_rows = st.lists(st.lists(confidence, max_size=3).map(survivals), min_size=1, max_size=3)


def assignments(rows: Sequence[Sequence[float]], least: Sequence[int] | None = None) -> Iterator[tuple[int, ...]]:
    """All lengths from the floor on that send nothing beyond it that cannot survive."""
    ranges = []
    for values, given_ in zip(rows, least or [0] * len(rows), strict=True):
        floor = min(given_, len(values))
        ranges.append(range(floor, max(floor, sum(value > 0 for value in values)) + 1))
    return itertools.product(*ranges)


def theta(rows: Sequence[Sequence[float]], lengths: Sequence[int], speed: Callable[[int], float]) -> float:
    return expected_tokens(rows, lengths) * speed(len(rows) + sum(lengths))


def convex_seconds(first: float, steps: list[float]) -> list[float]:
    """Seconds by tokens, each dearer than the one before: tau is concave, so Theta rises once and falls once."""
    return list(itertools.accumulate([first, *sorted(steps)]))


@property_test
@given(small_rows, st.floats(0.1, 4), st.lists(st.floats(0, 2), min_size=12, max_size=12), st.data())
def test_on_a_unimodal_curve_algorithm_1_is_the_best_of_all_assignments(rows, first, steps, data):
    seconds = convex_seconds(first, steps)

    def speed(batch: int) -> float:
        return 1 / seconds[batch]

    least = data.draw(st.one_of(st.none(), st.lists(st.integers(0, 4), min_size=len(rows), max_size=len(rows))))
    lengths, throughput = lengths_by_throughput(rows, speed, least)
    best = max(theta(rows, each, speed) for each in assignments(rows, least))
    assert math.isclose(throughput, best, rel_tol=1e-9)
    assert math.isclose(throughput, theta(rows, lengths, speed), rel_tol=1e-9)


jagged = st.lists(st.floats(0.01, 10), min_size=13, max_size=13)


@property_test
@given(small_rows, jagged)
def test_on_any_curve_the_best_capacity_is_the_best_of_its_inputs(rows, curve):
    capacity, throughput = best_capacity(rows, curve.__getitem__)
    lengths = lengths_by_capacity(rows, capacity)
    best = max(theta(rows, each, curve.__getitem__) for each in assignments(rows))
    assert math.isclose(throughput, best, rel_tol=1e-9) and sum(lengths) == capacity
    assert math.isclose(theta(rows, lengths, curve.__getitem__), best, rel_tol=1e-9)


@property_test
@given(small_rows, jagged)
def test_algorithm_1_stops_where_theta_first_does_not_rise(rows, curve):
    lengths, throughput = lengths_by_throughput(rows, curve.__getitem__)
    along = [theta(rows, lengths_by_capacity(rows, sent), curve.__getitem__) for sent in range(len(ranked(rows)) + 1)]
    sent = sum(lengths)
    assert math.isclose(throughput, along[sent], rel_tol=1e-9)
    assert lengths == lengths_by_capacity(rows, sent)
    assert all(after > before * (1 - 1e-9) for before, after in itertools.pairwise(along[: sent + 1]))
    assert sent + 1 == len(along) or along[sent + 1] <= along[sent] * (1 + 1e-9)
    assert throughput <= best_capacity(rows, curve.__getitem__)[1] * (1 + 1e-9)


@property_test
@given(small_rows, st.integers(0, 12), st.data())
def test_a_capacity_is_filled_with_the_most_promising(rows, capacity, data):
    lengths = lengths_by_capacity(rows, capacity)
    assert sum(lengths) == min(capacity, len(ranked(rows)))
    same_size = [each for each in assignments(rows) if sum(each) == sum(lengths)]
    best = max(expected_tokens(rows, each) for each in same_size)
    assert math.isclose(expected_tokens(rows, lengths), best, rel_tol=1e-12)
    more = lengths_by_capacity(rows, capacity + 1)
    assert all(first <= second for first, second in zip(lengths, more, strict=True))
    least = data.draw(st.lists(st.integers(0, 4), min_size=len(rows), max_size=len(rows)))
    floored = lengths_by_capacity(rows, capacity, least)
    floor = [min(given_, len(values)) for given_, values in zip(least, rows, strict=True)]
    assert all(first >= second for first, second in zip(floored, floor, strict=True))
    assert sum(floored) <= max(capacity, sum(floor))


@property_test
@given(small_rows)
def test_the_first_so_many_of_the_order_are_prefixes(rows):
    """Lemma 1: no slot comes before one that it follows in its row."""
    seen: set[tuple[int, int]] = set()
    for row, position, survival in ranked(rows):
        assert position == 1 or (row, position - 1) in seen
        assert survival == rows[row][position - 1]
        seen.add((row, position))


@pytest.mark.parametrize("least", [[2, 0, 1], [0, 0, 9], [1, 1, 1]])
def test_floors_are_honoured_whatever_they_cost(least):
    def dear(batch: int) -> float:
        return 100.0 ** -(batch - 3)

    floor = [min(given_, 3) for given_ in least]
    lengths, throughput = lengths_by_throughput(THREE_ROWS, dear, least)
    assert lengths == floor and throughput == pytest.approx(theta(THREE_ROWS, floor, dear))
    assert lengths_by_capacity(THREE_ROWS, 0, least) == floor
    # What they take counts towards a capacity, and the best of the rest fills it up.
    assert lengths_by_capacity(THREE_ROWS, 4, [0, 0, 2]) == [2, 0, 2]
    assert lengths_by_throughput(THREE_ROWS, lambda batch: 1.0, least)[0] == [3, 3, 3]


# What a round costs, and how many slots are worth drawing


def test_a_draft_is_a_part_of_the_round():
    costs = Costs(np.array([0.0, 1.0, 2.0, 4.0]), [0.0, 1.0, 3.0])
    assert [costs.steps_per_second(0)(batch) for batch in (1, 2, 3)] == [1.0, 0.5, 0.25]
    assert [costs.steps_per_second(2)(batch) for batch in (1, 2, 3)] == pytest.approx([1 / 4, 1 / 5, 1 / 7])


def worth(history: Sequence[Sequence[Sequence[float]]], costs: Costs) -> tuple[int, float]:
    """Slots, and the tokens a second that they are expected to bring over those of steps without drafts."""
    prospect = best_slots(history, costs)
    return prospect.slots, (1 + prospect.accepted) / prospect.steps


@property_test
@given(st.integers(1, 3), st.integers(1, 2), st.integers(1, 3), st.integers(0, 10**6))
def test_slots_against_all_depths_and_all_assignments(rounds, batch, block_size, seed):
    chance = random.Random(seed)  # numbers without ties, where another choice would be as good
    history = [
        [survivals([chance.uniform(0.1, 1) for _ in range(block_size)]) for _ in range(batch)] for _ in range(rounds)
    ]
    verify = np.array([chance.uniform(0.5, 2) for _ in range(batch * (1 + block_size) + 1)])
    drafting = [0.0, *(chance.uniform(0.1, 1) for _ in range(block_size))]
    by_depth = []
    for depth in range(1, block_size + 1):
        tokens = seconds = 0.0
        for known in history:
            cut = [values[:depth] for values in known]
            rated = []
            for lengths in assignments(cut):
                taken = drafting[depth] + verify[batch + sum(lengths)]
                rated.append((expected_tokens(cut, lengths) / taken, expected_tokens(cut, lengths), taken))
            _, expected, taken = max(rated)
            tokens, seconds = tokens + expected, seconds + taken
        by_depth.append(tokens / seconds)
    best = max(by_depth)
    plain = batch / verify[batch]
    assert worth(history, Costs(verify, drafting)) == (by_depth.index(best) + 1, pytest.approx(best / plain))


def test_more_slots_are_drawn_where_they_bring_more():
    history = [[[0.9, 0.8, 0.7]]]
    flat = Costs(np.full(5, 1.0), [0.0, 0.1, 0.1, 0.1])
    assert worth(history, flat) == (3, pytest.approx(3.4 / 1.1))
    steep = Costs(np.array([0.0, 1.0, 1.1, 5.0, 9.0]), [0.0, 0.1, 0.2, 0.3])
    assert worth(history, steep) == (1, pytest.approx(1.9 / 1.2))
    hopeless = Costs(np.array([0.0, 1.0, 9.0, 9.0, 9.0]), [0.0, 0.1, 0.2, 0.3])
    assert worth(history, hopeless) == (1, pytest.approx(1 / 1.1))  # with nothing sent


def test_a_round_whose_drafts_are_poor_is_expected_to_send_none():
    """Half the blocks are sent whole, of the others none: 4 tokens in 3.4 seconds, not 4.2 in 4.4."""
    history = [[[0.9, 0.9]], [[0.1, 0.0]]]
    costs = Costs(np.array([0.0, 1.0, 2.0, 2.0]), [0.0, 0.1, 0.2])
    assert best_slots(history, costs) == Prospect(2, pytest.approx(0.9), pytest.approx(1.7))


@property_test
@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.floats(0.1, 1), st.floats(0, 1))
def test_the_end_of_a_batch_against_round_by_round(rounds, one_row, more):
    """Rows leave when they are done; each that is there adds to a round."""
    seconds, left = 0.0, list(rounds)
    while left:
        seconds += one_row + more * (len(left) - 1)
        left = [count - 1 for count in left if count > 1]
    assert seconds_to_finish(rounds, one_row, one_row + more * (len(rounds) - 1)) == pytest.approx(seconds)


def test_rounds_that_take_longer_with_fewer_rows_count_with_all():
    assert seconds_to_finish([2, 5], 3.0, 1.0) == 5.0


# Nothing is known of a token before it is drawn


def sent_slots(lengths: Sequence[int]) -> set[tuple[int, int]]:
    return {(row, position) for row, length in enumerate(lengths) for position in range(1, length + 1)}


def differs_before(
    choose: Callable[[list[list[float]]], Sequence[int]], first: list[list[float]], row: int, slot: int, other: list
) -> set[tuple[int, int]]:
    """
    Slots up to `slot` of a row, in the order in which they are looked at, whose fate changes when the survivals after
    it are others: those that only the row's token `slot` can have changed.
    """
    second = [other if index == row else values for index, values in enumerate(first)]
    key = (-first[row][slot - 1], slot, row)
    earlier = {
        (index, position)
        for index, values in enumerate(first)
        for position, value in enumerate(values, start=1)
        if (-value, position, index) <= key
    }
    return (sent_slots(choose(first)) ^ sent_slots(choose(second))) & earlier


@st.composite
def played_scheduler(draw, schedule: str, batch: int, block_size: int) -> Scheduler:
    """A schedule with any costs and options and some rounds behind it, at the point where lengths are chosen."""
    options: dict[str, Any] = {"min_verify_length": draw(st.integers(0, 2))}
    options["max_starved_rounds"] = draw(st.sampled_from([None, 1, 2]))
    if schedule in HARDWARE_AWARE:
        most = batch * (1 + block_size)
        verify = np.array(draw(st.lists(st.floats(0.1, 3), min_size=most + 1, max_size=most + 1)))
        options["costs"] = lambda rows, context: Costs(verify, [0.0] + [0.2] * block_size)
    scheduler = Scheduler(schedule, block_size, draw(st.sampled_from([0.0, 0.3, 0.7])), **options)
    numbers = list(range(batch))
    for _ in range(draw(st.integers(0, 3))):
        if scheduler.slots(numbers, 8.0):
            past = draw(blocks(batch, block_size))
            lengths = scheduler.choose(numbers, past).lengths
            scheduler.observe(numbers, past, lengths, [length // 2 for length in lengths])
    scheduler.slots(numbers, 8.0)
    return scheduler


def blocks(batch: int, block_size: int) -> st.SearchStrategy[list[list[float]]]:
    row = st.lists(confidence, min_size=block_size, max_size=block_size).map(survivals)
    return st.lists(row, min_size=batch, max_size=batch)


@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(deadline=None, derandomize=True, max_examples=80)
@given(data=st.data())
def test_whether_a_slot_is_sent_does_not_depend_on_its_token(schedule, data):
    batch, block_size = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    scheduler = data.draw(played_scheduler(schedule, batch, block_size))
    first = data.draw(blocks(batch, block_size))
    row, slot = data.draw(st.integers(0, batch - 1)), data.draw(st.integers(1, block_size))
    later = data.draw(st.lists(confidence, min_size=block_size - slot, max_size=block_size - slot))
    other = first[row][:slot] + survivals([first[row][slot - 1], *later])[1:]

    def choose(values: list[list[float]]) -> list[int]:
        return copy.deepcopy(scheduler).choose(list(range(batch)), values).lengths

    assert not differs_before(choose, first, row, slot, other)


def test_a_search_over_current_survivals_is_found_out_by_the_same_property():
    """DSpark, Appendix A: the capacity follows from the second confidence, which knows the first token."""
    speed = {1: 1.0, 2: 0.5, 3: 0.45}.__getitem__

    def retrospective(rows: list[list[float]]) -> list[int]:
        return lengths_by_capacity(rows, best_capacity(rows, speed)[0])

    after_a, after_b = survivals([0.8, 0.9]), survivals([0.8, 0.0])
    assert retrospective([after_a]) == [2] and retrospective([after_b]) == [0]
    assert best_capacity([after_a], speed) == (2, pytest.approx(1.134))
    assert differs_before(retrospective, [after_a], 0, 1, after_b) == {(0, 1)}
    assert lengths_by_throughput([after_a], speed) == lengths_by_throughput([after_b], speed) == ([0], 1.0)


# Plain


def test_no_tensors_come_in():
    tree = ast.parse(Path(scheduling.__file__).read_text())
    names = {name for node in ast.walk(tree) for name in _imported(node)}
    assert names <= {"collections", "collections.abc", "itertools", "math", "operator", "dataclasses", "numpy"}


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


@settings(deadline=None, derandomize=True)
@given(st.integers(1, 4), st.lists(st.floats(0.1, 2.0), min_size=21, max_size=21), st.data())
def test_over_smooth_costs_algorithm_1_stops_at_the_best_number_of_drafts(batch, seconds, data):
    """The hull is convex and nowhere above what was measured, and the early stop then loses nothing."""
    verify = np.array(seconds[: batch * 5 + 1])
    smooth = Costs(verify, [0.0, 0.1, 0.1, 0.1, 0.1]).smooth(batch)
    assert (smooth.verify_seconds <= verify + 1e-12).all() and smooth.verify_seconds[batch] == verify[batch]
    assert smooth.verify_seconds[-1] == verify[-1]
    assert (np.diff(smooth.verify_seconds[batch:], 2) > -1e-9).all()
    blocks = [survivals(data.draw(st.lists(st.floats(0.01, 1.0), min_size=4, max_size=4))) for _ in range(batch)]
    rate = smooth.steps_per_second(4)
    assert math.isclose(lengths_by_throughput(blocks, rate)[1], best_capacity(blocks, rate)[1], rel_tol=1e-9)


def test_a_bump_in_the_measured_curve_does_not_stop_algorithm_1():
    bumpy = Costs(np.array([1.0, 1.0, 3.0, 1.05, 1.1, 1.15]), [0.0, 0.0, 0.0, 0.0, 0.0])
    sure = [[0.9, 0.8, 0.7, 0.6]]
    assert lengths_by_throughput(sure, bumpy.steps_per_second(4))[0] == [0]
    assert lengths_by_throughput(sure, bumpy.smooth(1).steps_per_second(4))[0] == [4]
