"""What a call's statistics say of its rounds."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_hf import SpeculativeStats


def recorded(*rounds: tuple[int, int, int]) -> SpeculativeStats:
    stats = SpeculativeStats()
    for each in rounds:
        stats.record(*each)
    return stats


def test_before_the_first_round_there_are_no_ratios():
    stats = SpeculativeStats()
    assert stats.mean_acceptance_length is None and stats.draft_acceptance_rate is None
    assert stats.acceptance_by_position == []


def test_three_rounds():
    stats = recorded((4, 4, 2), (4, 3, 3), (4, 1, 0))
    assert (stats.rounds, stats.drafted, stats.verified, stats.accepted) == (3, 12, 8, 5)
    assert stats.mean_acceptance_length == pytest.approx(1 + 5 / 3)
    assert stats.draft_acceptance_rate == pytest.approx(5 / 8)
    # The first slot was sent three times and accepted twice; the fourth never had all before it accepted.
    assert stats.sent_by_position == [3, 2, 2, 0]
    assert stats.accepted_by_position == [2, 2, 1, 0]
    assert stats.acceptance_by_position == [pytest.approx(2 / 3), 1.0, 0.5, None]


def test_a_round_without_drafts_is_a_round():
    stats = recorded((0, 0, 0), (7, 0, 0))
    assert (stats.rounds, stats.drafted, stats.verified) == (2, 7, 0)
    assert stats.mean_acceptance_length == 1.0 and stats.draft_acceptance_rate is None


rounds = st.integers(0, 8).flatmap(lambda n: st.integers(0, n).flatmap(lambda m: st.tuples(*map(st.just, (8, n, m)))))


@settings(deadline=None, derandomize=True)
@given(st.lists(rounds, max_size=20))
def test_positions_add_up(each):
    stats = recorded(*each)
    assert sum(stats.accepted_by_position) == stats.accepted
    assert all(a <= s for a, s in zip(stats.accepted_by_position, stats.sent_by_position, strict=True))
    later = zip(stats.sent_by_position[1:], stats.accepted_by_position, strict=False)
    assert all(sent <= accepted for sent, accepted in later)
    if stats.sent_by_position:
        assert stats.sent_by_position[0] == sum(verified > 0 for _, verified, _ in each)


def test_plain_values():
    stats = recorded((4, 4, 2))
    stats.seconds_draft = 0.5
    stats.rows = [recorded((4, 4, 2))]
    values = json.loads(json.dumps(stats.to_dict()))
    assert values["rounds"] == 1 and values["mean_acceptance_length"] == 3.0 and values["seconds_draft"] == 0.5
    assert values["acceptance_by_position"] == [1.0, 1.0, 0.0, None]
    assert values["rows"][0]["accepted"] == 2
    assert "rows" not in SpeculativeStats().to_dict()


def test_rounds_counted_from_their_outcome():
    stats = SpeculativeStats.of_rounds(verified=[4, 3, 1], accepted=[2, 3, 0])
    assert stats == recorded((4, 4, 2), (3, 3, 3), (1, 1, 0))
    with pytest.raises(ValueError, match="2 rounds and `accepted` 1"):
        SpeculativeStats.of_rounds([1, 1], [1])
    with pytest.raises(ValueError, match="-1 in `accepted`"):
        SpeculativeStats.of_rounds([1], [-1])


@settings(deadline=None, derandomize=True)
@given(st.lists(st.lists(rounds, max_size=5), max_size=5))
def test_the_total_of_calls_is_that_of_all_their_rounds(calls):
    total = SpeculativeStats.total([recorded(*call) for call in calls], block_size=8)
    together = recorded(*(each for call in calls for each in call))
    missing = 8 - len(together.sent_by_position)
    together.sent_by_position += [0] * missing
    together.accepted_by_position += [0] * missing
    assert total == together
