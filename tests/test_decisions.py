"""The log of a schedule's decisions says what was decided and why."""

import itertools
import json
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import pytest
import torch
from conftest import load_drafter
from test_schedules import LAGGED
from tiny import encode
from transformers import PreTrainedModel

from dspark_hf import DSparkDraftModel, scheduling
from dspark_hf.profiles import DraftCurve, Profile, StepCurve, use_profile
from dspark_hf.scheduling import (
    HARDWARE_AWARE,
    SCHEDULES,
    Scheduler,
)
from dspark_hf.statistics import Decision


pytestmark = pytest.mark.usefixtures("no_grad")


PLAIN_SECONDS, BY_TOKEN, BY_CONTEXT, JUDGE = 1.0, 0.06, 0.002, 0.01


def linear_profile(draft: float = 1.0) -> Profile:
    """Everything in straight lines, so that a line tells what a round costs; `draft` scales the drafter's part."""
    tokens, rows = [1, 8, 24], [1, 4]
    steps = [
        StepCurve(context, tokens, [PLAIN_SECONDS + BY_TOKEN * count + BY_CONTEXT * context for count in tokens])
        for context in (1, 100)
    ]
    one, whole = [draft * (0.03 + 0.01 * count) for count in rows], [draft * (0.06 + 0.04 * count) for count in rows]
    return Profile({}, 7, steps, DraftCurve(rows, one, whole), judge_greedy=JUDGE)


def seconds_of_a_round(rows: int, sent: int, context: float, slots: int) -> float:
    verify = PLAIN_SECONDS + (BY_TOKEN + JUDGE) * (rows + sent) + BY_CONTEXT * context
    one, whole = 0.03 + 0.01 * rows, 0.06 + 0.04 * rows
    return verify + one + (whole - one) * (slots - 1) / 6


TEXTS = ("Tom has 5 apples and buys 3 more. How many", "The quick", " A farmer sold\n")


def decode(target: PreTrainedModel, drafter: DSparkDraftModel, profile: Profile | None = None, **options: Any) -> Any:
    inputs = encode(*options.pop("texts", TEXTS))
    options = {"do_sample": False, "max_new_tokens": 40, "return_dict_in_generate": True} | options
    with use_profile(profile) if profile is not None else nullcontext():
        return target.generate(**inputs, **options, assistant_model=drafter)


@pytest.mark.parametrize("temperatures", [None, [0.5, 1.0, 1.5, 2.0, 2.0, 2.0, 2.0]])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_log_says_what_was_decided_and_why(schedule, temperatures, tiny_target, monkeypatch):
    monkeypatch.setattr(Scheduler, "_pays", lambda *arguments: True)  # so that there is something to log
    drafter = load_drafter("deepspec-vanilla")
    if temperatures is not None:
        drafter.config.confidence_temperatures = [{"sampling_temperature": 0.0, "temperatures": temperatures}]
    stats = decode(tiny_target, drafter, linear_profile(), num_assistant_tokens_schedule=schedule).speculative_stats
    held = {row: len(text) + 1 for row, text in enumerate(TEXTS)}  # padding does not count
    total = Counter()
    assert [decision.round for decision in stats.decisions] == list(range(1, len(stats.decisions) + 1))
    compared = []
    drafted = [decision for decision in stats.decisions if decision.survivals is not None]
    assert {len(decision.survivals[0]) for decision in drafted} > {7} and len(drafted) > 8
    assert {len(decision.rows) for decision in drafted} > {3}
    for decision in stats.decisions:
        rows, lengths, slots = len(decision.rows), decision.verify_lengths, 0
        if decision in drafted:
            slots = len(decision.survivals[0])
            check_survivals(decision, (temperatures or [1.0] * 7)[:slots])
            context = sum(held[row] for row in decision.rows) / rows
            expected = rows + sum(sum(v[:length]) for v, length in zip(decision.survivals, lengths, strict=True))
            theta = expected / seconds_of_a_round(rows, sum(lengths), context, slots)
            assert decision.throughput == (pytest.approx(theta) if schedule in HARDWARE_AWARE else None)
            assert (decision.capacity is not None) == (schedule == LAGGED and decision.round > 2)
            if decision.capacity is not None:
                before = stats.decisions[decision.round - 3]
                known = dict(zip(before.rows, before.survivals, strict=True))
                past = [value for row in decision.rows for value in known[row][:slots]]
                if len(past) == rows * slots:  # that round drew as many
                    compared.append(decision)
                    assert decision.capacity == capacity_of(past, rows, context, slots)
                assert sum(lengths) <= decision.capacity
        for row, length, accepted in zip(decision.rows, lengths, decision.accepted, strict=True):
            assert 0 <= accepted <= length <= slots
            assert held[row] - len(TEXTS[row]) + length < 40  # and there is room for the target's own
            held[row] += accepted + 1
            total.update({(row, "rounds"): 1, (row, "drafted"): slots})
            total.update({(row, "verified"): length, (row, "accepted"): accepted})
        json.dumps(asdict(decision))
    for name in ("rounds", "drafted", "verified", "accepted"):
        counts = [total[row, name] for row in range(3)]
        assert counts == [getattr(row, name) for row in stats.rows] and sum(counts) == getattr(stats, name)
    assert stats.accepted > 0
    assert schedule != LAGGED or len(compared) > len(drafted) / 2


def capacity_of(survivals: list[float], rows: int, context: float, slots: int) -> int:
    """The number of drafts, the likeliest first, that promises the most tokens a second."""
    best = sorted(survivals, reverse=True)
    rates = [
        (rows + sum(best[:sent])) / seconds_of_a_round(rows, sent, context, slots) for sent in range(len(best) + 1)
    ]
    return rates.index(max(rates))


def check_survivals(decision: Decision, temperatures: list[float]) -> None:
    """Of each row as many as were drawn, and what the confidence logits and temperatures make them."""
    for survivals, logits in zip(decision.survivals, decision.confidence_logits, strict=True):
        calibrated = torch.tensor(logits, dtype=torch.float64) / torch.tensor(temperatures)
        assert survivals == pytest.approx(calibrated.sigmoid().cumprod(dim=0).tolist())


def test_rounds_without_drafts_are_logged_and_counted(tiny_target, monkeypatch):
    monkeypatch.setattr(scheduling, "_PROBE_SHARE", 100.0)  # dear as it is, the drafter is tried again in this text
    drafter = load_drafter("deepspec-vanilla")
    out = decode(tiny_target, drafter, linear_profile(draft=100.0), num_assistant_tokens_schedule="hardware_aware")
    stats = out.speculative_stats
    drafted = [decision.survivals is not None for decision in stats.decisions]
    assert drafted[:18] == [True, True, *[False] * 16] and drafted[18]
    assert stats.rounds == sum(len(decision.rows) for decision in stats.decisions) and stats.drafted > 0
    for decision in itertools.compress(stats.decisions, [not each for each in drafted]):
        assert decision.confidence_logits is decision.throughput is decision.capacity is None
        assert decision.verify_lengths == decision.accepted == [0] * len(decision.rows)
    plain = decode(tiny_target, None)
    assert out.sequences.tolist() == plain.sequences.tolist()


def test_whole_blocks_are_logged_with_survivals_if_there_are_any(tiny_target):
    for folder in ("deepspec-vanilla", "deepspec-noconf"):
        decisions = decode(tiny_target, load_drafter(folder)).speculative_stats.decisions
        block_size = 7 if folder == "deepspec-vanilla" else 6
        assert decisions[0].verify_lengths == [block_size] * 3
        for decision in decisions[:-1]:
            assert (decision.survivals is None) == (decision.confidence_logits is None) == (block_size == 6)
            assert decision.throughput is decision.capacity is None and max(decision.verify_lengths) > 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nothing_is_logged_unless_a_dict_is_returned(schedule, tiny_target):
    drafter = load_drafter("deepspec-rnn")
    decode(
        tiny_target, drafter, linear_profile(), num_assistant_tokens_schedule=schedule, return_dict_in_generate=False
    )
    stats = drafter.speculative_stats
    assert stats.decisions == [] and stats.verified > 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_statistics_stay_plain_values(schedule, tiny_target):
    out = decode(tiny_target, load_drafter("deepspec-gated"), linear_profile(), num_assistant_tokens_schedule=schedule)
    values = out.speculative_stats.to_dict()
    assert json.loads(json.dumps(values)) == values
    assert "decisions" not in values and len(values["rows"]) == 3


def test_seeds_give_the_same_decisions_again(tiny_target):
    drafter, runs = load_drafter("deepspec-rnn"), []
    for _ in range(2):
        torch.manual_seed(5)
        out = decode(
            tiny_target, drafter, linear_profile(), num_assistant_tokens_schedule=LAGGED, do_sample=True, top_k=0
        )
        runs.append((out.sequences.tolist(), list(map(asdict, out.speculative_stats.decisions))))
    assert runs[0] == runs[1]
