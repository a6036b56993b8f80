"""Acceptance measured by decoding: the counts are those of the calls, and nothing else is touched."""

import numpy as np
import pytest
import torch
from tiny import character_tokenizer
from transformers import GenerationConfig

from dspark_hf import SpeculativeStats, calibration, evaluation
from dspark_hf.blocks import record_blocks
from dspark_hf.evaluation import Batch, Setting, Text, measure, measure_acceptance, summarise
from dspark_hf.loading import CommandError, Pair


PROMPTS = {
    "sums": ["Tom has 5 apples and buys 3 more. How many", "12 - 7 = ", "What is 3 times 4?"],
    "tales": ["Once upon a time", "A baker makes 72 rolls and sells 50. How many are left?", "Hello"],
}
SIZE = 7
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking %} think hard:{% endif %}"
)


@pytest.fixture
def pair(tiny_target, load_drafter) -> Pair:
    return Pair(tiny_target, load_drafter("deepspec-vanilla"), character_tokenizer(), ("target", "drafter"))


def without_speed(results: dict) -> dict:
    """All but what no two runs have in common."""
    if isinstance(results, dict):
        return {name: without_speed(value) for name, value in results.items() if name != "tokens_per_second"}
    return results


@pytest.mark.parametrize("batch_size", [1, 2])
def test_the_numbers_are_those_of_the_calls(pair, batch_size):
    found = measure_acceptance(pair, PROMPTS, max_new_tokens=24, batch_size=batch_size)
    assert {name: found[name] for name in ("temperature", "top_p", "top_k", "thinking", "max_new_tokens")} == {
        "temperature": 0.0, "top_p": None, "top_k": None, "thinking": None, "max_new_tokens": 24,
    }  # fmt: skip
    assert list(found["tasks"]) == list(PROMPTS)
    for task, prompts in PROMPTS.items():
        calls, tokens = [], 0
        for prompt in prompts:
            inputs = pair.encode(prompt)
            out = pair.target.generate(
                **inputs,
                assistant_model=pair.drafter,
                do_sample=False,
                max_new_tokens=24,
                return_dict_in_generate=True,
            )
            calls.append(out.speculative_stats)
            tokens += out.sequences.shape[1] - inputs["input_ids"].shape[1]
        total = SpeculativeStats.total(calls, SIZE)
        values = found["tasks"][task]
        assert (values["prompts"], values["rounds"], values["tokens"]) == (3, total.rounds, tokens)
        assert values["mean_acceptance_length"] == total.mean_acceptance_length > 1
        assert values["draft_acceptance_rate"] == total.draft_acceptance_rate
        assert values["acceptance_by_position"] == total.acceptance_by_position
        assert values["reached_by_position"] == total.sent_by_position
        # A batch drafts for all rows what fits into the one with the most room.
        drafted = total.drafted / total.rounds
        assert drafted == values["drafted_per_round"] if batch_size == 1 else drafted <= values["drafted_per_round"]
        assert values["verified_per_round"] == total.verified / total.rounds
        assert values["tokens_per_second"] > 0
        for name in ("mean_acceptance_length", "draft_acceptance_rate"):
            low, high = values[f"{name}_interval"]
            assert low <= values[name] <= high
    for name in ("mean_acceptance_length", "draft_acceptance_rate", "drafted_per_round", "tokens_per_second"):
        values = [found["tasks"][task][name] for task in PROMPTS]
        assert found["macro"][name] == pytest.approx(np.mean(values))
    low, high = found["macro"]["mean_acceptance_length_interval"]
    assert low <= found["macro"]["mean_acceptance_length"] <= high


def test_calibration_is_that_of_the_recorded_blocks(pair):
    fit = {"sampling_temperature": 0.0, "temperatures": [2.0, 0.5, 1.5, 1.0, 3.0, 1.0, 0.7]}
    pair.drafter.config.confidence_temperatures = [fit]
    found = measure_acceptance(pair, PROMPTS, max_new_tokens=24)
    for task, prompts in PROMPTS.items():
        blocks = record_blocks(pair, {task: prompts}, max_new_tokens=24)
        kept = found["tasks"][task]["calibration"]
        assert kept["blocks"] == len(blocks)
        for when, temperatures in (("before", [1.0] * SIZE), ("after", fit["temperatures"])):
            metrics = calibration.position_metrics(blocks.confidence_logits, blocks.accepted, temperatures)
            for name in ("ece", "brier", "roc_auc"):
                expected = [getattr(each, name) for each in metrics]
                assert kept[when][name] == pytest.approx(expected, abs=1e-5)
        assert kept["before"] != kept["after"]


def test_without_a_fit_there_is_no_after_and_without_a_head_no_calibration(pair, tiny_target, load_drafter):
    pair.drafter.config.confidence_temperatures = [{"sampling_temperature": 1.0, "temperatures": [2.0] * SIZE}]
    for temperature, fitted in ((0.0, False), (0.7, True)):
        found = measure_acceptance(pair, PROMPTS, temperature, max_new_tokens=24)
        assert [values["calibration"]["after"] is not None for values in found["tasks"].values()] == [fitted, fitted]
    mute = Pair(tiny_target, load_drafter("deepspec-noconf"), pair.tokenizer, ("target", "mute"))
    found = measure_acceptance(mute, PROMPTS, max_new_tokens=24)
    assert found["tasks"]["sums"]["calibration"] is None
    assert found["tasks"]["sums"]["mean_acceptance_length"] > 1


def test_sampled_texts_follow_the_seed_and_leave_the_random_state(pair):
    torch.manual_seed(17)
    expected = torch.rand(3)
    torch.manual_seed(17)
    first, second, other = (
        measure_acceptance(pair, PROMPTS, 1.0, top_p=0.9, max_new_tokens=24, seed=seed) for seed in (3, 3, 4)
    )
    torch.testing.assert_close(torch.rand(3), expected)
    assert without_speed(first) == without_speed(second) != without_speed(other)
    assert (first["temperature"], first["top_p"], first["top_k"]) == (1.0, 0.9, 50)  # 50 is Transformers' default


def test_the_targets_own_truncation_is_told(pair, monkeypatch):
    monkeypatch.setattr(pair.target, "generation_config", GenerationConfig(eos_token_id=0, top_k=7))
    assert measure_acceptance(pair, {"a": ["Hello"]}, 0.5, max_new_tokens=8)["top_k"] == 7


@pytest.mark.parametrize("fails", [False, True])
def test_modes_and_schedules_are_put_back(pair, monkeypatch, fails):
    pair.drafter.train()
    pair.drafter.fc.eval()
    own = pair.drafter.generation_config = GenerationConfig(assistant_confidence_threshold=0.9)
    modes = []
    generate = type(pair.target).generate

    def watched(self, *arguments, **keywords):
        modes.append(pair.drafter.training)
        if fails:
            raise ZeroDivisionError
        return generate(self, *arguments, **keywords)

    monkeypatch.setattr(type(pair.target), "generate", watched)
    if fails:
        with pytest.raises(ZeroDivisionError):
            measure_acceptance(pair, PROMPTS, max_new_tokens=16)
    else:
        found = measure_acceptance(pair, PROMPTS, max_new_tokens=16)
        whole = [values["verified_per_round"] for values in found["tasks"].values()]
        assert min(whole) > 4  # whatever the drafter's own threshold would cut
    assert modes and not any(modes)
    assert pair.drafter.training and not pair.drafter.fc.training and pair.drafter.layers.training
    assert pair.drafter.generation_config is own


def test_a_text_is_as_long_as_to_its_end_token(pair):
    """The tiny target ends a text with a newline."""
    inputs = [pair.encode(prompt) for prompt in PROMPTS["sums"]]
    texts, seconds = evaluation.decode_texts(pair, inputs, Setting(max_new_tokens=60), seed=0)
    alone = [pair.target.generate(**one, do_sample=False, max_new_tokens=60) for one in inputs]
    lengths = [out.shape[1] - one["input_ids"].shape[1] for out, one in zip(alone, inputs, strict=True)]
    assert [text.tokens for text in texts] == lengths and seconds > 0


def test_thinking_goes_to_the_chat_template(pair, monkeypatch):
    pair.tokenizer.chat_template = TEMPLATE
    assert pair.tokenizer.decode(pair.encode("Hello", thinking=True)["input_ids"][0]) == "Hello think hard:"
    assert pair.tokenizer.decode(pair.encode("Hello", thinking=False)["input_ids"][0]) == "Hello"
    found = {mode: measure_acceptance(pair, PROMPTS, max_new_tokens=24, thinking=mode) for mode in ("on", "off", None)}
    assert [found[mode]["thinking"] for mode in found] == ["on", "off", None]
    assert found["off"]["tasks"]["tales"]["rounds"] == found[None]["tasks"]["tales"]["rounds"]
    assert without_speed(found["on"]["tasks"]) != without_speed(found["off"]["tasks"])


@pytest.mark.parametrize("template", [None, "{{ messages[0]['content'] }}"])
def test_thinking_without_a_choice_of_it(pair, template):
    pair.tokenizer.chat_template = template
    with pytest.raises(CommandError, match="--thinking on.*'target' has no `enable_thinking`"):
        measure_acceptance(pair, PROMPTS, thinking="on")


def test_errors_name_the_argument(pair):
    with pytest.raises(CommandError, match="--top-p 0.9.*--temperature above 0"):
        measure_acceptance(pair, PROMPTS, top_p=0.9)
    with pytest.raises(CommandError, match="--max-new-tokens 500.*more than the target's 512"):
        measure_acceptance(pair, PROMPTS, max_new_tokens=500)


def test_known_batches_are_left_out_and_batches_survive_a_file(pair):
    settings = [Setting(max_new_tokens=16), Setting(1.0, max_new_tokens=16)]
    batches = list(measure(pair, PROMPTS, settings, batch_size=2, progress=False))
    assert [batch.place for batch in batches] == [
        (setting, task, first) for setting in (0, 1) for task in PROMPTS for first in (0, 2)
    ]
    assert [Batch.from_dict(batch.to_dict()) for batch in batches] == batches
    again = list(measure(pair, PROMPTS, settings, batch_size=2, known=batches[:5], progress=False))
    assert [batch.texts for batch in again] == [batch.texts for batch in batches[5:]]


def counted(rounds: int, verified: int, accepted: int, *blocks: int) -> Text:
    counts = {"rounds": rounds, "drafted": 7 * rounds, "verified": verified, "accepted": accepted}
    counts |= {
        "sent_by_position": [rounds] if verified else [],
        "accepted_by_position": [accepted] if verified else [],
    }
    return Text(rounds + accepted + 1, counts, [[0.0] * SIZE for _ in blocks], list(blocks))


def test_what_has_no_value_is_none(pair):
    """A task whose texts ended at once, one without drafts, one of a single prompt."""
    texts = {"ended": [counted(0, 0, 0)] * 2, "bare": [counted(3, 0, 0)] * 2, "one": [counted(4, 20, 4, 1, 1)]}
    batches = [Batch(0, task, 0, 0.5, each) for task, each in texts.items()]
    found = summarise(pair, Setting(), batches)
    ended, bare, one = found["tasks"].values()
    assert ended["mean_acceptance_length"] is ended["drafted_per_round"] is ended["calibration"] is None
    assert bare["mean_acceptance_length"] == 1.0 and bare["draft_acceptance_rate"] is None
    assert bare["mean_acceptance_length_interval"] == [1.0, 1.0] and bare["acceptance_by_position"] == [None] * SIZE
    assert one["mean_acceptance_length"] == 2.0 and one["mean_acceptance_length_interval"] is None
    assert one["acceptance_by_position"] == [1.0] + [None] * 6 and one["reached_by_position"] == [4] + [0] * 6
    assert one["tokens_per_second"] == 18.0
    assert found["macro"]["mean_acceptance_length"] == 1.5 and found["macro"]["draft_acceptance_rate"] == 0.2
    assert found["macro"]["mean_acceptance_length_interval"] is None


def test_a_schedule_that_chose_the_blocks_says_nothing_of_calibration(pair):
    setting = Setting(max_new_tokens=24, schedule="confidence", threshold=0.5)
    batches = list(measure(pair, PROMPTS, [setting], batch_size=3, progress=False))
    found = summarise(pair, setting, batches)
    whole = measure_acceptance(pair, PROMPTS, max_new_tokens=24)
    for task in PROMPTS:
        assert found["tasks"][task]["calibration"] is None
        assert found["tasks"][task]["verified_per_round"] < whole["tasks"][task]["verified_per_round"]
        assert found["tasks"][task]["tokens"] == whole["tasks"][task]["tokens"]
