"""Stored costs: what lies between measurements, files that are whole or absent, and which profile goes for a pair."""

import json
import logging
import os
import threading
import time

import numpy as np
import peft
import pytest
import torch
from conftest import load_drafter
from tiny import random_drafter, random_target

from dspark_hf import Profile, decoding, environment, profiles, use_profile
from dspark_hf.locks import lock_of
from dspark_hf.profiles import (
    DraftCurve,
    StepCurve,
    explain_missing,
    find_profile,
    profile_key,
    profile_path,
    stored_profile,
)


STEPS = [StepCurve(100, [1, 2, 4, 8], [1.0, 3.0, 2.0, 6.0]), StepCurve(300, [1, 8], [3.0, 10.0])]


def a_profile(key: dict | None = None, **fields) -> Profile:
    return Profile(key or {}, fields.pop("block_size", 3), fields.pop("steps", STEPS), **fields)


def saved(key: dict, **fields) -> Profile:
    """A profile that is told from others by its seconds, stored under a key."""
    profile = a_profile(key, **fields)
    profile.save(profile_path(key))
    return profile


@pytest.fixture
def pair():
    return random_target(), random_drafter()


@pytest.fixture(autouse=True)
def _nothing_said_yet():
    """What is said once is said once a process."""
    profiles._warn_damaged.cache_clear()
    decoding._warn_once.cache_clear()


# Between measurements


def test_measured_steps_are_as_measured_and_lines_between():
    seconds = a_profile().step_seconds(8, context=100)
    assert seconds.shape == (9,)
    assert seconds[1:].tolist() == [1.0, 3.0, 2.5, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_measured_steps_that_fall_are_noise_and_given_ones_are_not():
    # 3.0, 2.5, 2.0, 3.0 at 2 to 5 tokens: the first three do not rise.
    assert a_profile(measured=True).step_seconds(8, 100)[1:].tolist() == [1.0, 2.5, 2.5, 2.5, 3.0, 4.0, 5.0, 6.0]
    assert a_profile(measured=False).step_seconds(8, 100)[2] == 3.0
    noisy = a_profile(steps=STEPS[:1], row_steps=ROWS, measured=True).step_seconds(8, 100, rows=2)
    assert (np.diff(noisy[2:]) >= 0).all() and noisy[8] == 7.0


def test_beyond_the_last_step_goes_the_slope_of_the_second_half():
    # From 4 tokens, 2 s, to 8 tokens, 6 s.
    assert a_profile().step_seconds(11, context=100)[9:].tolist() == [7.0, 8.0, 9.0]


def test_a_curve_that_falls_at_its_end_does_not_go_on_falling():
    falling = a_profile(steps=[StepCurve(1, [1, 2, 4], [3.0, 5.0, 4.0])])
    assert falling.step_seconds(9, context=1)[4:].tolist() == [4.0] * 6


def test_a_single_measurement_holds_for_all():
    assert a_profile(steps=[StepCurve(1, [4], [2.0])]).step_seconds(6, context=9)[1:].tolist() == [2.0] * 6


@pytest.mark.parametrize(
    ("context", "expected"), [(1, 6.0), (100, 6.0), (150, 7.0), (200.0, 8.0), (300, 10.0), (9999, 10.0)]
)
def test_contexts_are_blended_and_the_outer_ones_hold_outside(context, expected):
    assert a_profile().step_seconds(8, context)[8] == pytest.approx(expected)


def test_what_is_returned_may_be_written_to():
    profile = a_profile()
    profile.step_seconds(8, context=100)[:] = 0
    assert profile.step_seconds(8, context=100)[8] == 6.0


ROWS = [StepCurve(100, [2, 8], [5.0, 7.0], rows=2), StepCurve(100, [4, 16], [8.0, 17.0], rows=4)]


def test_several_rows_are_as_measured_at_both_ends():
    profile = a_profile(steps=STEPS[:1], row_steps=ROWS)
    two, four = profile.step_seconds(8, 100, rows=2), profile.step_seconds(16, 100, rows=4)
    assert (two[2], two[8]) == (5.0, 7.0)
    assert (four[4], four[16]) == (8.0, 17.0)


def test_between_the_ends_the_steps_of_one_row_show_through():
    # Two rows add 5 - 3 at 2 tokens and 7 - 6 at 8.
    two = a_profile(steps=STEPS[:1], row_steps=ROWS).step_seconds(8, 100, rows=2)
    added = [2.0 - tokens / 6 for tokens in range(7)]
    expected = [one + more for one, more in zip([3.0, 2.5, 2.0, 3.0, 4.0, 5.0, 6.0], added, strict=True)]
    assert two[2:] == pytest.approx(expected)


def test_between_numbers_of_rows_goes_a_line_at_equal_tokens_a_row():
    profile = a_profile(steps=STEPS[:1], row_steps=ROWS)
    # One token a row: 2 rows add 2 and 4 rows 8 - 2; three rows run 3 tokens, which take one row 2.5.
    assert profile.step_seconds(12, 100, rows=3)[3] == pytest.approx(2.5 + (2.0 + 6.0) / 2)
    # Four tokens a row: 7 - 6, and 17 - 14 (beyond the curve of one row); 12 tokens take one row 10.
    assert profile.step_seconds(12, 100, rows=3)[12] == pytest.approx(10.0 + (1.0 + 3.0) / 2)


def test_more_rows_than_measured_go_on_as_the_last():
    # With one token a row 2 s at 2 rows and 6 s at 4: 2 s a row, and 10 tokens take one row 8.
    assert a_profile(steps=STEPS[:1], row_steps=ROWS).step_seconds(40, 100, rows=10)[10] == pytest.approx(8 + 6 + 12)


def test_without_steps_of_several_rows_only_tokens_count():
    profile = a_profile()
    assert np.array_equal(profile.step_seconds(16, 100, rows=2), profile.step_seconds(16, 100))


def test_rows_that_seem_to_cost_less_than_nothing():
    profile = a_profile(steps=STEPS[:1], row_steps=[StepCurve(100, [2, 8], [0.1, 0.2], rows=2)])
    assert profile.step_seconds(8, 100, rows=2).min() == 1.0


def test_costs_of_a_round():
    greedy = DraftCurve([1, 3], [0.5, 1.5], [1.0, 4.0])
    sampled = DraftCurve([1, 3], [5.0, 5.0], [6.0, 6.0])
    profile = a_profile(
        steps=STEPS[:1], draft_greedy=greedy, draft_sampled=sampled, judge_greedy=0.25, judge_sampled=1.0
    )
    costs = profile.costs(rows=2, context=100, block_size=3, do_sample=False)
    assert costs.verify_seconds.shape == (9,)
    assert costs.verify_seconds[8] == 6.0 + 8 * 0.25
    assert costs.draft_seconds == [0.0, 1.0, 1.75, 2.5]  # one slot of two rows takes 1 s, all three 2.5
    costs = profile.costs(rows=2, context=100, block_size=3, do_sample=True)
    assert costs.verify_seconds[8] == 6.0 + 8 * 1.0
    assert costs.draft_seconds == [0.0, 5.0, 5.5, 6.0]
    assert profile.costs(5, 100, 3, False).draft_seconds[3] == pytest.approx(7.0)  # 1.5 s a row more
    assert profile.costs(1, 100, 1, False).draft_seconds == [0.0, 1.0]


def test_costs_take_rows_into_account():
    profile = a_profile(steps=STEPS[:1], row_steps=ROWS)
    assert profile.costs(2, 100, 3, False).verify_seconds[2] == 5.0


def test_without_a_drafter_drafts_are_free():
    assert a_profile(block_size=0).costs(2, 100, 3, True).draft_seconds == [0.0] * 4


def test_costs_of_a_large_round_take_less_than_a_millisecond():
    tokens = list(range(1, 257, 5))
    seconds = [float(count) for count in tokens]
    contexts, counts = (128, 512, 2048), (2, 4, 8, 16, 32)
    rows = [StepCurve(c, [r, 8 * r], [300.0 + r, 400.0 + r], r) for c in contexts for r in counts]
    profile = a_profile(steps=[StepCurve(c, tokens, seconds) for c in contexts], row_steps=rows)
    times = []
    for context in range(600, 630):
        begin = time.perf_counter()
        profile.costs(64, context, 7, False)
        times.append(time.perf_counter() - begin)
    assert min(times) < 1e-3


# Files


def test_a_profile_comes_back_from_its_file(tmp_path):
    profile = a_profile(
        {"device": "cpu: Zilog Z80", "threads": 2},
        draft_greedy=DraftCurve([1, 2], [0.1, 0.2], [0.3, 0.4]),
        judge_sampled=1e-7,
        made={"date": "1976-07-01", "machine": {"cores": 1}},
        row_steps=ROWS,
    )
    profile.save(tmp_path / "new" / "folder" / "profile.json")
    assert Profile.load(tmp_path / "new" / "folder" / "profile.json") == profile
    assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == ["profile.json"]


@pytest.mark.parametrize("failing", [(json, "dumps"), (os, "replace")], ids=["while writing", "at the end"])
def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch, failing):
    path = tmp_path / "profile.json"
    a_profile().save(path)
    before = path.read_bytes()

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(*failing, fail)
    with pytest.raises(OSError, match="disk full"):
        a_profile(block_size=99).save(path)
    assert path.read_bytes() == before
    assert len(list(tmp_path.glob("*.json"))) == 1


GOOD = {"key": {}, "block_size": 3, "steps": [{"context": 100, "tokens": [1, 2], "seconds": [1.0, 2.0], "rows": 1}]}


def curve(**changes) -> dict:
    return GOOD | {"steps": [GOOD["steps"][0] | changes]}


DAMAGED = {
    "empty": "",
    "cut off": json.dumps(GOOD)[:-20],
    "no text": b"\xff\xfe\x00",
    "a list": "[]",
    "nothing in it": "{}",
    "of another kind": '{"temperatures": [1.0]}',
    "a field too many": GOOD | {"colour": "blue"},
    "no steps": GOOD | {"steps": []},
    "steps of another kind": GOOD | {"steps": 3},
    "a step without tokens": GOOD | {"steps": [{"context": 100, "seconds": [1.0]}]},
    "words for numbers": curve(tokens=["one", "two"]),
    "numbers as words": curve(seconds=["1.0", "2.0"]),
    "falling tokens": curve(tokens=[2, 1]),
    "tokens from 0": curve(tokens=[0, 1]),
    "fewer seconds": curve(seconds=[1.0]),
    "seconds of 0": curve(seconds=[0.0, 1.0]),
    "seconds that are none": curve(seconds=[float("nan"), 1.0]),
    "endless seconds": curve(seconds=[1.0, float("inf")]),
    "equal contexts": GOOD | {"steps": GOOD["steps"] * 2},
    "a draft without rows": GOOD | {"draft_greedy": {"rows": [], "one_slot": [], "whole_block": []}},
    "judging in negative time": GOOD | {"judge_greedy": -1.0},
    "rows at a context of their own": GOOD | {"row_steps": [GOOD["steps"][0] | {"context": 7, "rows": 2}]},
    "one row among several": GOOD | {"row_steps": GOOD["steps"]},
    "a key that is a word": GOOD | {"key": "cpu"},
}


def write(path, content) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content) if isinstance(content, dict) else content
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


def test_the_file_that_the_damaged_ones_are_made_from_is_good(tmp_path):
    write(tmp_path / "profile.json", GOOD)
    assert Profile.load(tmp_path / "profile.json").step_seconds(2, 100).tolist() == [1.0, 1.0, 2.0]


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_file_is_named(tmp_path, content):
    write(tmp_path / "profile.json", content)
    with pytest.raises(ValueError, match=r"profile\.json is no profile.*`dspark profile`"):
        Profile.load(tmp_path / "profile.json")


# Which profile


def test_profiles_lie_in_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "own"))
    assert profile_path({"device": "a"}).parent == tmp_path / "own" / "profiles"
    assert profile_path({"device": "a"}) != profile_path({"device": "b"})


def test_no_test_sees_the_users_profiles(tmp_path_factory):
    assert environment.cache_folder().is_relative_to(tmp_path_factory.getbasetemp())


def test_the_profile_in_use_goes_before_the_pairs_before_the_targets(pair):
    target, drafter = pair
    assert find_profile(*pair) is None
    alone = saved(profile_key(target), block_size=0)
    assert find_profile(*pair) == alone
    of_pair = saved(profile_key(*pair), block_size=2)
    assert find_profile(*pair) == of_pair
    with use_profile(a_profile(block_size=77)) as nothing:
        assert nothing is None and find_profile(*pair).block_size == 77
    assert find_profile(*pair) == of_pair
    assert find_profile(target, random_drafter(block_size=5)) == alone
    assert find_profile(random_target(hidden_size=16), drafter) is None


def test_profiles_in_use_nest_and_end_with_their_block(pair):
    one, two = a_profile(block_size=1), a_profile(block_size=2)
    with use_profile(one):
        with pytest.raises(RuntimeError, match="on purpose"), use_profile(two):
            assert find_profile(*pair) is two
            raise RuntimeError("on purpose")
        assert find_profile(*pair) is one
    assert find_profile(*pair) is None


def test_a_profile_in_use_is_one_threads_own(pair):
    found = {}
    inside, seen = threading.Event(), threading.Event()

    def other() -> None:
        assert inside.wait(10)
        found["other"] = find_profile(*pair)
        seen.set()

    thread = threading.Thread(target=other)
    thread.start()
    with use_profile(a_profile()):
        inside.set()
        assert seen.wait(10)
        found["own"] = find_profile(*pair)
    thread.join()
    assert found["other"] is None and found["own"] is not None


def test_a_file_written_anew_is_read_anew(pair):
    key = profile_key(*pair)
    saved(key, block_size=2)
    assert find_profile(*pair).block_size == 2
    saved(key, block_size=4)
    assert find_profile(*pair).block_size == 4


def test_looking_up_takes_a_few_milliseconds(pair):
    saved(profile_key(*pair))
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        assert find_profile(*pair) is not None
        times.append(time.perf_counter() - begin)
    assert min(times) < 4e-3


def test_a_damaged_file_counts_as_absent_and_is_told_of_once(pair, caplog):
    target, drafter = pair
    write(profile_path(profile_key(*pair)), "{")
    alone = saved(profile_key(target), block_size=0)
    with caplog.at_level(logging.WARNING, "dspark_hf"):
        assert find_profile(*pair) == alone
        assert find_profile(*pair) == alone
    (record,) = caplog.records
    assert f"Delete {profile_path(profile_key(*pair))}" in record.getMessage()
    assert "--force" in record.getMessage()


def test_a_folder_in_the_place_of_a_file_counts_as_absent(pair, caplog):
    profile_path(profile_key(*pair)).mkdir(parents=True)
    assert find_profile(*pair) is None
    assert len(caplog.records) == 1


# What a profile holds for


def hashes(key: dict) -> tuple[str, str]:
    return key["target"], key["drafter"]


def test_the_key_names_what_the_issue_lists(pair):
    key = profile_key(*pair)
    assert key.keys() == {
        "device", "target", "drafter", "dtype", "attention", "threads", "dspark-hf", "torch", "transformers",
    }  # fmt: skip
    assert key["device"].startswith("cpu: ") and key["dtype"] == "float64" and key["attention"] == "sdpa"
    assert key["threads"] == torch.get_num_threads() and key["torch"] == torch.__version__
    assert key["target"].startswith("LlamaForCausalLM 2x8 ") and key["drafter"].startswith("DSparkDraftModel 1x8 ")
    assert profile_key(pair[0]) == key | {"drafter": ""}


def test_fine_tunes_of_one_architecture_share_a_profile(pair):
    target, drafter = random_target(seed=5), random_drafter(seed=6)
    target.config._name_or_path = "someone/finetune"
    target.config.eos_token_id, target.config.pad_token_id = [2, 3], 2
    target.config.attention_dropout = 0.1
    target.config.id2label = {0: "yes"}
    drafter.config.confidence_temperatures = [{"sampling_temperature": 0.0, "temperatures": [1.5, 2.0]}]
    assert profile_key(target, drafter) == profile_key(*pair)


@pytest.mark.parametrize("field", ["vocab_size", "intermediate_size", "num_key_value_heads", "num_hidden_layers"])
def test_other_sizes_are_another_target(pair, field):
    other = random_target(**{field: {"vocab_size": 5}.get(field, 2) if field != "num_hidden_layers" else 3})
    assert hashes(profile_key(other, pair[1]))[0] != hashes(profile_key(*pair))[0]


def test_another_block_head_or_dtype_is_another_drafter(pair):
    target, _ = pair
    drafters = [pair[1], random_drafter(block_size=4), random_drafter(head="rnn"), random_drafter().float()]
    assert len({profile_key(target, drafter)["drafter"] for drafter in drafters}) == len(drafters)


def test_threads_dtype_and_attention_are_part_of_the_key(pair, monkeypatch):
    target, drafter = pair
    before = profile_key(*pair)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert profile_key(*pair) == before | {"threads": 77}
    monkeypatch.undo()
    target.set_attn_implementation("eager")
    assert profile_key(*pair) == before | {"attention": "eager"}
    target.set_attn_implementation("sdpa")
    assert profile_key(target.bfloat16(), drafter) == before | {"dtype": "bfloat16"}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT's own
def test_adapters_are_part_of_the_key_until_they_are_merged(pair):
    target, drafter = pair
    before = profile_key(*pair)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(target, config)
    inner = wrapped.get_base_model()
    assert inner is target and profile_key(inner, drafter) != before
    assert profile_key(wrapped.merge_and_unload(), drafter) == before


def test_quantised_modules_are_part_of_the_key(pair):
    class FourBit(torch.nn.Linear):
        pass

    target, drafter = pair
    before = profile_key(*pair)
    target.model.layers[0].self_attn.q_proj = FourBit(8, 8, bias=False)
    modules = profile_key(*pair)
    target.config.quantization_config = {"quant_method": "made_up", "bits": 4}
    assert len({key["target"] for key in (before, modules, profile_key(*pair))}) == 3


def test_a_target_on_several_devices(pair, monkeypatch):
    target, _ = pair
    processor = profile_key(target)["device"]
    monkeypatch.setattr(target, "hf_device_map", {"model": "cpu", "lm_head": "disk"}, raising=False)
    assert profile_key(target)["device"] == f"{processor} + disk"
    monkeypatch.setattr(target, "hf_device_map", {"": "disk"})  # loaded there, moved since
    assert profile_key(target)["device"] == processor


def test_the_key_does_not_see_another_threads_stream(pair):
    """While a stream runs, its own attention stands in the config."""
    target, _ = pair
    lock, found = lock_of(target.config), []
    with lock:
        target.config._attn_implementation = "dspark_stream"
        thread = threading.Thread(target=lambda: found.append(profile_key(target)))
        thread.start()
        thread.join(0.1)
        target.config._attn_implementation = "sdpa"
    thread.join(10)
    assert [key["attention"] for key in found] == ["sdpa"]


# Why there is none


def test_nothing_of_the_kind_was_measured(pair):
    assert explain_missing(*pair) == "this machine has no profile of the pair"
    saved(profile_key(random_target(hidden_size=16)))
    saved(profile_key(pair[0], random_drafter(num_hidden_layers=2)))
    write(profile_path({"some": "key"}), "{")
    assert explain_missing(*pair) == "this machine has no profile of the pair"


def test_a_stale_profile_says_what_differs(pair):
    key = profile_key(*pair)
    saved(key | {"threads": 99, "torch": "1.0.0", "dtype": "float16"})
    saved(key | {"threads": 99, "torch": "1.0.0"})
    assert explain_missing(*pair) == (
        f"this machine's profile of the pair was measured with threads 99 instead of {key['threads']}, "
        f"torch 1.0.0 instead of {key['torch']}"
    )
    saved(key | {"drafter": "", "device": "cpu: Zilog Z80"})
    assert explain_missing(*pair).endswith(f"with device cpu: Zilog Z80 instead of {key['device']}")


def test_a_profile_of_the_same_sizes_with_another_config(pair):
    saved(profile_key(random_target(intermediate_size=20), pair[1]))
    assert explain_missing(*pair).endswith("was measured with another config, quantisation or adapter")


def hardware_aware(target, drafter) -> torch.LongTensor:
    drafter.generation_config.num_assistant_tokens_schedule = "hardware_aware"
    prompt = torch.tensor([[1, 2, 3]])
    return target.generate(prompt, assistant_model=drafter, max_new_tokens=6, do_sample=False)


def test_a_call_without_a_profile_falls_back_and_says_so_once(pair, caplog):
    with caplog.at_level(logging.WARNING, "dspark_hf"):
        texts = [hardware_aware(*pair) for _ in range(2)]
    (record,) = [record for record in caplog.records if record.name == "dspark_hf.decoding"]
    message = record.getMessage()
    assert "'hardware_aware' but this machine has no profile of the pair, so drafts are cut" in message
    assert "0.4" in message and "`dspark profile`" in message and "measure_profile" in message
    plain = pair[0].generate(torch.tensor([[1, 2, 3]]), max_new_tokens=6, do_sample=False)
    assert all(torch.equal(text, plain) for text in texts)


def test_a_call_with_a_stale_profile_says_what_is_stale(pair, caplog):
    saved(profile_key(*pair) | {"transformers": "4.0.0"})
    with caplog.at_level(logging.WARNING, "dspark_hf"):
        hardware_aware(*pair)
    (record,) = caplog.records
    assert "measured with transformers 4.0.0 instead of" in record.getMessage()


@pytest.mark.parametrize("content", ["{", GOOD], ids=["damaged", "good"])
def test_a_damaged_file_does_not_break_a_call(pair, caplog, content):
    write(profile_path(profile_key(*pair)), content)
    with caplog.at_level(logging.WARNING, "dspark_hf"):
        text = hardware_aware(*pair)
    assert len(caplog.records) == (2 if content == "{" else 0)  # the damage, and the fallback
    plain = pair[0].generate(torch.tensor([[1, 2, 3]]), max_new_tokens=6, do_sample=False)
    assert torch.equal(text, plain)


def test_stored_by_key():
    assert stored_profile({"device": "a"}) is None
    profile = saved({"device": "a"})
    assert stored_profile({"device": "a"}) == profile


def test_fixture_drafters_have_keys(tiny_target):
    """All heads and families."""
    keys = {profile_key(tiny_target, load_drafter(name))["drafter"] for name in ("deepspec-vanilla", "deepspec-rnn")}
    assert len(keys) == 2
