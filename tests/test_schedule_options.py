"""Options of the schedules: on the call, on the drafter, refused, and without a profile."""

import logging
from dataclasses import asdict
from typing import Any

import pytest
from conftest import load_drafter
from test_decisions import TEXTS, decode, linear_profile
from test_schedules import LAGGED
from tiny import encode
from transformers import GenerationConfig

from dspark_hf import DSparkDraftModel, decoding
from dspark_hf.scheduling import (
    HARDWARE_AWARE,
    SCHEDULES,
)


pytestmark = pytest.mark.usefixtures("no_grad")


def lengths_sent(output: Any) -> list[list[int]]:
    return [decision.verify_lengths for decision in output.speculative_stats.decisions]


@pytest.mark.parametrize("where", ["call", "drafter"])
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_assistant_tokens_schedule", "heuristic", "'heuristic'; .* one of constant, confidence, hardware_aware"),
        ("assistant_confidence_threshold", 1.1, "is 1.1; it is a probability"),
        ("assistant_confidence_threshold", True, "is True"),
        ("min_verify_length", -1, "is -1; it must be an integer of at least 0"),
        ("min_verify_length", 1.0, "is 1.0; it must be an integer"),
        ("min_verify_length", True, "is True; it must be an integer"),
        ("max_starved_rounds", 0, "is 0; it must be an integer of at least 1"),
        ("max_starved_rounds", "3", "is '3'; it must be an integer"),
        ("draft_context_window", 0, "is 0; it must be an integer of at least 1"),
        ("draft_context_window", True, "is True; it must be an integer"),
        ("draft_top_k", 0, "is 0; it must be an integer of at least 1"),
    ],
)
def test_values_that_cannot_be_are_refused(where, name, value, message, tiny_target):
    drafter = load_drafter("deepspec-vanilla")
    config = GenerationConfig(max_new_tokens=4, **({name: value} if where == "call" else {}))
    if where == "drafter":
        setattr(drafter.generation_config, name, value)
    with pytest.raises(ValueError, match=f"`{name}` {message}" if message.startswith("is ") else message):
        tiny_target.generate(**encode(TEXTS[0]), generation_config=config, assistant_model=drafter)


@pytest.mark.parametrize("schedule", SCHEDULES[1:])
def test_schedules_by_confidence_need_a_confidence_head(schedule, tiny_target):
    drafter = load_drafter("deepspec-noconf")
    with pytest.raises(ValueError, match="no confidence head; set it to"):
        decode(tiny_target, drafter, num_assistant_tokens_schedule=schedule)
    drafter.generation_config.num_assistant_tokens_schedule = schedule
    with pytest.raises(ValueError, match="no confidence head; set it to"):
        decode(tiny_target, drafter)
    drafter.generation_config.num_assistant_tokens_schedule = "constant"
    assert decode(tiny_target, drafter).speculative_stats.verified > 0


def test_the_drafters_defaults_hold_and_a_call_goes_before_them(tiny_target):
    drafter = load_drafter("deepspec-vanilla")
    whole = lengths_sent(decode(tiny_target, drafter))
    cut = lengths_sent(decode(tiny_target, drafter, assistant_confidence_threshold=0.7))
    assert sum(map(sum, cut)) / len(cut) < sum(map(sum, whole)) / len(whole)
    drafter.generation_config.assistant_confidence_threshold = 0.7  # which is a schedule by itself
    assert lengths_sent(decode(tiny_target, drafter)) == cut
    assert lengths_sent(decode(tiny_target, drafter, assistant_confidence_threshold=0.0)) == whole
    drafter.generation_config.num_assistant_tokens_schedule = "hardware_aware"
    by_throughput = decode(tiny_target, drafter, linear_profile())
    assert by_throughput.speculative_stats.decisions[0].throughput is not None
    assert lengths_sent(decode(tiny_target, drafter, num_assistant_tokens_schedule="confidence")) == cut
    # Transformers' own default cannot be told from the same value given: whole blocks are asked for in another way.
    ignored = decode(tiny_target, drafter, linear_profile(), num_assistant_tokens_schedule="constant")
    assert lengths_sent(ignored) == lengths_sent(by_throughput)
    whole_blocks = {"num_assistant_tokens_schedule": "confidence", "assistant_confidence_threshold": 0.0}
    assert lengths_sent(decode(tiny_target, drafter, **whole_blocks)) == whole


def test_floors_hold_in_the_loop(tiny_target):
    drafter = load_drafter("deepspec-vanilla")
    options = {"num_assistant_tokens_schedule": "confidence", "assistant_confidence_threshold": 1.0}
    assert set(map(sum, lengths_sent(decode(tiny_target, drafter, **options)))) == {0}
    drafter.generation_config.min_verify_length = 2
    lengths = lengths_sent(decode(tiny_target, drafter, **options))
    assert {tuple(each) for each in lengths[:5]} == {(2, 2, 2)}
    call = GenerationConfig(min_verify_length=1, max_new_tokens=8, return_dict_in_generate=True, **options)
    out = tiny_target.generate(**encode(*TEXTS), generation_config=call, assistant_model=drafter)
    assert lengths_sent(out)[0] == [1, 1, 1]


def test_a_drafter_keeps_its_schedule_when_it_is_saved(tiny_target, tmp_path):
    drafter = load_drafter("deepspec-vanilla")
    given = {
        "num_assistant_tokens_schedule": LAGGED,
        "assistant_confidence_threshold": 0.3,
        "min_verify_length": 1,
        "max_starved_rounds": 5,
        "draft_context_window": 9,
        "draft_top_k": 20,
    }
    for name, value in given.items():
        setattr(drafter.generation_config, name, value)
    drafter.save_pretrained(tmp_path)
    loaded = DSparkDraftModel.from_pretrained(tmp_path)
    assert {name: getattr(loaded.generation_config, name) for name in given} == given
    first, second = (decode(tiny_target, each, linear_profile()).speculative_stats for each in (drafter, loaded))
    assert list(map(asdict, first.decisions)) == list(map(asdict, second.decisions))
    assert any(decision.capacity is not None for decision in second.decisions)


@pytest.mark.parametrize("schedule", HARDWARE_AWARE)
def test_without_a_profile_the_threshold_decides_and_that_is_said_once(schedule, tiny_target, caplog):
    decoding._warn_once.cache_clear()
    drafter = load_drafter("deepspec-vanilla")
    by_threshold = decode(tiny_target, drafter, num_assistant_tokens_schedule="confidence")
    drafter.generation_config.num_assistant_tokens_schedule = schedule
    with caplog.at_level(logging.WARNING, logger="dspark_hf"):
        fallen_back = [decode(tiny_target, drafter).speculative_stats for _ in range(2)]
    for stats in fallen_back:
        assert list(map(asdict, stats.decisions)) == list(map(asdict, by_threshold.speculative_stats.decisions))
        for decision in stats.decisions[:4]:  # while there is room for whole blocks
            for values, length in zip(decision.survivals, decision.verify_lengths, strict=True):
                assert length == sum(value >= 0.4 for value in values)
    messages = [record.getMessage() for record in caplog.records if "no profile" in record.getMessage()]
    assert len(messages) == 1
    assert schedule in messages[0] and "dspark profile" in messages[0] and "0.4" in messages[0]
