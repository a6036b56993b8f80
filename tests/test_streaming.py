"""Streamers get what plain `generate` gives them: the prompt, then each token once, in order, none after the stop."""

import io
import threading
from contextlib import redirect_stdout
from functools import cache

import pytest
import torch
from conftest import load_drafter
from tiny import PATTERNS, character_tokenizer, encode, oracle
from transformers import StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer, TextStreamer
from transformers.generation.streamers import BaseStreamer

import dspark_hf
from dspark_hf import DSparkStreamer


PROMPTS = ("Tom has 5 apples and buys 3 more. How many", "The quick", " A farmer sold\n")
SPACE = 1
ENDS = {
    "length": {"eos_token_id": None},
    "end token": {"eos_token_id": [SPACE, 84], "pad_token_id": 95},
    "first token": {"eos_token_id": list(range(96)), "pad_token_id": 95},
}

drafter_of = cache(load_drafter)
tokenizer = character_tokenizer()


class Recorder(BaseStreamer):
    """Writes down all it gets."""

    def __init__(self):
        self.values: list[torch.Tensor] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        assert not self.ended
        self.values.append(value.clone())

    def end(self) -> None:
        self.ended += 1


class Told(DSparkStreamer):
    """Writes down what it is told of each token."""

    def __init__(self):
        self.values: list[torch.Tensor] = []
        self.drafted: list[bool] = []
        self.ended = 0

    def put(self, value: torch.Tensor, drafted: bool = False) -> None:
        self.values.append(value.clone())
        self.drafted.append(drafted)

    def end(self) -> None:
        self.ended += 1


def generate(target, inputs, **options):
    return target.generate(**inputs, **{"do_sample": False, "max_new_tokens": 20, "eos_token_id": None} | options)


def assert_same_values(ours: Recorder | Told, plain: Recorder) -> None:
    assert [value.shape for value in ours.values] == [value.shape for value in plain.values]
    assert [value.dtype for value in ours.values] == [value.dtype for value in plain.values]
    assert [value.tolist() for value in ours.values] == [value.tolist() for value in plain.values]
    assert ours.ended == plain.ended == 1


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_same_values_as_plain(pattern, end, rows, tiny_target, monkeypatch):
    inputs = encode(*PROMPTS[:rows])
    oracle(monkeypatch, generate(tiny_target, inputs, max_new_tokens=40), pattern)
    plain, ours = Recorder(), Recorder()
    generate(tiny_target, inputs, streamer=plain, **ENDS[end])
    generate(tiny_target, inputs, streamer=ours, assistant_model=drafter_of("deepspec-vanilla"), **ENDS[end])
    assert_same_values(ours, plain)
    assert plain.values[0].tolist() == inputs["input_ids"].tolist()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_rows_that_go_on_after_their_stop(pattern, tiny_target, monkeypatch):
    class StopAtSpace(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return input_ids[:, -1] == SPACE

    inputs = encode(*PROMPTS)
    oracle(monkeypatch, generate(tiny_target, inputs, max_new_tokens=40), pattern)
    plain, ours, criteria = Recorder(), Recorder(), StoppingCriteriaList([StopAtSpace()])
    generate(tiny_target, inputs, streamer=plain, stopping_criteria=criteria)
    drafter = drafter_of("deepspec-vanilla")
    generate(tiny_target, inputs, streamer=ours, stopping_criteria=criteria, assistant_model=drafter)
    assert_same_values(ours, plain)


def test_tokens_come_while_the_text_grows(tiny_target, monkeypatch):
    """After each round what it committed is out; nothing waits for the end."""
    inputs, lengths = encode(PROMPTS[0]), []
    streamer = Recorder()

    class Watch(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            lengths.append((input_ids.shape[1] - inputs["input_ids"].shape[1], len(streamer.values) - 1))
            return torch.zeros(1, dtype=torch.bool)

    oracle(monkeypatch, generate(tiny_target, inputs), "alternately")
    criteria = StoppingCriteriaList([Watch()])
    generate(
        tiny_target,
        inputs,
        streamer=streamer,
        stopping_criteria=criteria,
        assistant_model=drafter_of("deepspec-vanilla"),
    )
    assert len(lengths) == 20
    assert all(generated - streamed <= 8 for generated, streamed in lengths)


@pytest.mark.parametrize("skip_prompt", [False, True])
def test_text_streamer(skip_prompt, tiny_target):
    inputs, drafter = encode(PROMPTS[0]), drafter_of("deepspec-gated")
    printed = []
    for assistant in (None, drafter):
        with redirect_stdout(io.StringIO()) as out:
            streamer = TextStreamer(tokenizer, skip_prompt=skip_prompt)
            output = generate(tiny_target, inputs, streamer=streamer, assistant_model=assistant)
        printed.append(out.getvalue())
    assert printed[0] == printed[1]
    text = tokenizer.decode(output[0])
    assert printed[0] == (text.removeprefix(PROMPTS[0]) if skip_prompt else text) + "\n"


def test_text_iterator_streamer(tiny_target):
    inputs = encode(PROMPTS[0])
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    drafter = drafter_of("deepspec-rnn")
    options = {"streamer": streamer, "assistant_model": drafter}
    thread = threading.Thread(target=lambda: generate(tiny_target, inputs, **options))
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == tokenizer.decode(generate(tiny_target, inputs)[0]).removeprefix(PROMPTS[0])


@pytest.mark.parametrize("right", [7, 0, 3])
def test_flags_tell_drafts_from_the_targets_own_tokens(right, tiny_target, monkeypatch):
    inputs, streamer = encode(PROMPTS[0]), Told()
    whole = generate(tiny_target, inputs, max_new_tokens=40)
    monkeypatch.setitem(PATTERNS, "some", [right])
    oracle(monkeypatch, whole, "some")
    drafter = drafter_of("deepspec-vanilla")
    plain = Recorder()
    generate(tiny_target, inputs, streamer=plain)
    generate(tiny_target, inputs, streamer=streamer, assistant_model=drafter)
    assert_same_values(streamer, plain)
    # The prompt and the token after it, then rounds of some drafts and one token of the target's own, as is the last.
    expected = [False, False] + ([True] * right + [False]) * 20
    assert streamer.drafted == expected[:20] + [False]
    assert sum(streamer.drafted) == drafter.speculative_stats.accepted


def test_a_stop_on_a_draft_is_told_as_a_draft(tiny_target, monkeypatch):
    inputs, streamer = encode(PROMPTS[0]), Told()
    whole = generate(tiny_target, inputs)
    length = inputs["input_ids"].shape[1]
    oracle(monkeypatch, whole, "everything")
    stop = int(whole[0, length + 4])
    assert stop not in whole[0, length : length + 4]
    drafter = drafter_of("deepspec-vanilla")
    generate(tiny_target, inputs, streamer=streamer, assistant_model=drafter, eos_token_id=stop, pad_token_id=95)
    assert streamer.drafted == [False, False, True, True, True, True]


def test_a_step_of_a_batch_is_drafted_if_any_row_is(tiny_target, monkeypatch):
    inputs, streamer = encode(*PROMPTS), Told()
    oracle(monkeypatch, generate(tiny_target, inputs, max_new_tokens=40), "everything")
    generate(tiny_target, inputs, streamer=streamer, assistant_model=drafter_of("deepspec-vanilla"))
    assert streamer.drafted == [False, False] + [True] * 7 + [False] + [True] * 7 + [False] + [True] * 2 + [False]
    assert [value.shape for value in streamer.values[1:]] == [(3,)] * 20


def test_custom_generate_streams_as_well(tiny_target):
    """`generate` keeps its streamer from such a method but for the prompt, so it is handed to the method itself."""
    inputs, plain, ours = encode(PROMPTS[0]), Recorder(), Recorder()
    text = generate(tiny_target, inputs, streamer=plain)
    method = dspark_hf.custom_generate(drafter_of("deepspec-vanilla"), streamer=ours)
    assert generate(tiny_target, inputs, custom_generate=method).tolist() == text.tolist()
    assert [value.tolist() for value in ours.values] == [value.tolist() for value in plain.values[1:]]
    assert ours.ended == 1


def test_a_streamer_that_fails_ends_the_call_and_nothing_else(tiny_target):
    class Full(Recorder):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.values) == 6:
                raise OSError("the disk is full")

    inputs, drafter = encode(PROMPTS[0]), drafter_of("deepspec-vanilla")
    with pytest.raises(OSError, match="the disk is full"):
        generate(tiny_target, inputs, streamer=Full(), assistant_model=drafter)
    plain, ours = Recorder(), Recorder()
    generate(tiny_target, inputs, streamer=plain)
    generate(tiny_target, inputs, streamer=ours, assistant_model=drafter)
    assert_same_values(ours, plain)
