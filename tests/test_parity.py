"""Greedy decoding in float32 with a drafter is plain greedy decoding, whatever the options, whatever is accepted."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from conftest import load_drafter
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import PATTERNS, character_tokenizer, encode, oracle
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation import stopping_criteria as host_stopping_criteria


pytestmark = pytest.mark.usefixtures("no_grad")

TRAINED = ("deepspec-vanilla", "deepspec-gated", "deepspec-rnn", "deepspec-nomarkov", "deepspec-noconf")
PROMPTS = ("Tom has 5 apples and buys 3 more. How many", "The quick", " A farmer sold\n")
NEW_TOKENS = 20
VALUES = 1e-4

drafter_of = cache(load_drafter)
tokenizer = character_tokenizer()


def generate(target: PreTrainedModel, inputs: dict[str, torch.Tensor], **options: Any) -> Any:
    """Greedy, without the target's own end token unless an option names one."""
    return target.generate(
        **inputs, **{"do_sample": False, "max_new_tokens": NEW_TOKENS, "eos_token_id": None} | options
    )


def assert_same_text(ours: torch.Tensor, plain: torch.Tensor) -> None:
    assert ours.tolist() == plain.tolist()


def new_tokens(target: PreTrainedModel, prompt: str, **options: Any) -> list[int]:
    """What plain greedy decoding adds to a prompt."""
    inputs = encode(prompt)
    return generate(target, inputs, **options)[0, inputs["input_ids"].shape[1] :].tolist()


# Processors and stopping criteria of the user's own


class Favour(LogitsProcessor):
    """Without a state: the token after the last but one is likelier."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        favoured = (input_ids[:, -2:-1] + 1) % scores.shape[1]
        return scores.scatter_add(1, favoured, torch.full_like(scores[:, :1], 6.0))


class FavourInPlace(Favour):
    """The same, written into the scores."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores.copy_(super().__call__(input_ids, scores))
        return scores


class Alternate(LogitsProcessor):
    """With a state: forbids what it saw last at every third call, and counts in a number, a list and a tensor."""

    def __init__(self):
        self.calls, self.seen, self.counts = 0, [], torch.zeros(96)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(int(input_ids[0, -1]))
        self.counts[self.seen[-1]] += 1
        scores = scores - 0.8 * self.counts
        if self.calls % 3 == 0:
            scores[:, self.seen[-3:]] = -float("inf")
        return scores


class Own(LogitsProcessor):
    """Without a state: what was said last is said no more."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter(1, input_ids[:, -2:], -float("inf"))


class StopAt(StoppingCriteria):
    """Stops a row at the first of some tokens, or once it has a length."""

    def __init__(self, tokens: tuple[int, ...] = (), length: int = 10**6):
        self.tokens, self.length = tokens, length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        stopped = torch.full((len(input_ids),), input_ids.shape[1] >= self.length)
        for token in self.tokens:
            stopped |= input_ids[:, -1] == token
        return stopped


class Witness(StoppingCriteria):
    """Writes down all it is asked."""

    def __init__(self):
        self.prefixes: list[list[int]] = []
        self.scores: list[list[torch.Tensor] | None] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.prefixes += input_ids.tolist()
        self.scores.append(None if scores is None else [step.clone() for step in scores])
        return torch.zeros(len(input_ids), dtype=torch.bool)


def processors(*kinds: type[LogitsProcessor]) -> Callable[[], LogitsProcessorList]:
    return lambda: LogitsProcessorList([kind() for kind in kinds])


def no_vowels_after_vowels(batch_id: int, tokens: torch.Tensor) -> list[int]:
    vowels = [ord(char) - 31 for char in "aeiou"]
    banned = set(vowels) if int(tokens[-1]) in vowels else {(7 * batch_id + 2) % 96}
    return [token for token in range(96) if token not in banned]


E_, SPACE, S_ = ord("e") - 31, 1, ord("s") - 31

# Options by name; callables are called for each run. The batch does not need to have an option that names one row.
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "max_length": {"max_new_tokens": None, "max_length": 50},
    "max_new_tokens 1": {"max_new_tokens": 1},
    "max_new_tokens 2": {"max_new_tokens": 2},
    "eos": {"eos_token_id": SPACE, "pad_token_id": 95},
    "eos list": {"eos_token_id": [2, S_, SPACE], "pad_token_id": 95},
    "eos that never comes": {"eos_token_id": 94, "pad_token_id": 95},
    "stop_strings": {"stop_strings": ["re", "o", "d "], "tokenizer": tokenizer},
    "custom criterion": {"stopping_criteria": lambda: StoppingCriteriaList([StopAt((E_,))]), "eos_token_id": 94},
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": SPACE, "pad_token_id": 95},
    "min_length": {"min_length": 30, "max_new_tokens": 40, "eos_token_id": [SPACE, E_], "pad_token_id": 95},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.6},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[E_], [SPACE, S_]]},
    "sequence_bias": {"sequence_bias": {(E_,): -4.0, (SPACE, S_): 5.0}},
    "suppress_tokens": {"suppress_tokens": [SPACE, E_]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [SPACE, E_, S_]},
    "forced_eos_token_id": {"forced_eos_token_id": 7},
    "forced_bos_token_id": {"forced_bos_token_id": 7},
    "exponential_decay": {
        "exponential_decay_length_penalty": (5, 1.5),
        "eos_token_id": SPACE,
        "min_new_tokens": 3,
        "pad_token_id": 95,
    },
    "renormalize_logits": {"renormalize_logits": True, "remove_invalid_values": True},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=3.0)},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": no_vowels_after_vowels},
    "the user's processor": {"logits_processor": processors(Favour)},
    "the user's processor in place": {"logits_processor": processors(FavourInPlace, Favour)},
    "prefill_chunk_size": {"prefill_chunk_size": 4},
    "static cache": {"cache_implementation": "static"},
    "use_cache": {"use_cache": False},
    "all together": {
        "logits_processor": processors(Favour),
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[E_]],
        "eos_token_id": [S_, 8],
        "pad_token_id": 95,
        "min_new_tokens": 4,
        "prefill_chunk_size": 5,
    },
}
ONE_ROW = {"the user's processor with a state": {"logits_processor": processors(Alternate, FavourInPlace)}}


def made(options: dict[str, Any]) -> dict[str, Any]:
    """Options for one run."""
    fresh = ("logits_processor", "stopping_criteria")
    return {name: value() if name in fresh else value for name, value in options.items()}


def continuation(target: PreTrainedModel, inputs: dict[str, torch.Tensor], options: dict[str, Any]) -> torch.Tensor:
    """What the target says with the options but without stops: drafts for an oracle."""
    stops = ("stop_strings", "tokenizer", "stopping_criteria", "max_length", "eos_token_id", "max_new_tokens")
    kept = {name: value for name, value in made(options).items() if name not in stops}
    if options.get("eos_token_id") is not None and kept.keys() & {"min_new_tokens", "min_length"}:
        return generate(target, inputs, **made(options))
    return generate(target, inputs, **kept, max_new_tokens=2 * NEW_TOKENS)


@pytest.mark.parametrize("pattern", ["everything", "alternately"])
@pytest.mark.parametrize("name", OPTIONS | ONE_ROW)
def test_an_oracle_with_every_option(name, pattern, tiny_target, monkeypatch):
    options = (OPTIONS | ONE_ROW)[name]
    inputs = encode(PROMPTS[0] if name in ONE_ROW else PROMPTS[1])
    plain = generate(tiny_target, inputs, **made(options))
    oracle(monkeypatch, continuation(tiny_target, inputs, options), pattern)
    drafter = drafter_of("deepspec-vanilla")
    ours = generate(tiny_target, inputs, assistant_model=drafter, **made(options))
    assert_same_text(ours, plain)
    if pattern == "everything" and plain.shape[1] - inputs["input_ids"].shape[1] > 9:
        assert drafter.speculative_stats.mean_acceptance_length > 4


@pytest.mark.parametrize("name", ["nothing", "eos list", "all together", "stop_strings", "static cache", "min_length"])
def test_an_oracle_that_is_always_wrong(name, tiny_target, monkeypatch):
    options, inputs, drafter = OPTIONS[name], encode(PROMPTS[0]), drafter_of("deepspec-vanilla")
    plain = generate(tiny_target, inputs, **made(options))
    oracle(monkeypatch, continuation(tiny_target, inputs, options), "nothing")
    assert_same_text(generate(tiny_target, inputs, assistant_model=drafter, **made(options)), plain)
    assert drafter.speculative_stats.accepted == 0


@pytest.mark.parametrize("name", OPTIONS)
def test_a_ragged_batch_with_every_option(name, tiny_target, monkeypatch):
    options, inputs = OPTIONS[name], encode(*PROMPTS)
    plain = generate(tiny_target, inputs, **made(options))
    oracle(monkeypatch, continuation(tiny_target, inputs, options), "alternately")
    ours = generate(tiny_target, inputs, assistant_model=drafter_of("deepspec-rnn"), **made(options))
    assert_same_text(ours, plain)


@pytest.mark.parametrize("folder", TRAINED)
@pytest.mark.parametrize("name", ["nothing", "eos list", "all together", "stop_strings"])
def test_trained_drafters(name, folder, tiny_target):
    for inputs in (encode(PROMPTS[0]), encode(*PROMPTS)):
        plain = generate(tiny_target, inputs, **made(OPTIONS[name]))
        ours = generate(tiny_target, inputs, assistant_model=drafter_of(folder), **made(OPTIONS[name]))
        assert_same_text(ours, plain)


@pytest.mark.parametrize("threshold", [0.2, 0.5, 1.0])
@pytest.mark.parametrize("folder", TRAINED[:4])
def test_thresholds(folder, threshold, tiny_target):
    drafter = load_drafter(folder)
    drafter.generation_config.assistant_confidence_threshold = threshold
    inputs = encode(*PROMPTS)
    plain = generate(tiny_target, inputs, max_new_tokens=40)
    assert_same_text(generate(tiny_target, inputs, max_new_tokens=40, assistant_model=drafter), plain)
    assert drafter.speculative_stats.verified < drafter.speculative_stats.drafted


# Stops at each offset of a block


@pytest.mark.parametrize("offset", range(10))  # the first token comes from the prompt, then a block of 7 and one more
@pytest.mark.parametrize("how", ["eos", "eos list", "stop string", "criterion", "max_new_tokens", "max_length"])
def test_a_stop_at_every_offset(how, offset, tiny_target, monkeypatch):
    inputs = encode(PROMPTS[0])
    whole = generate(tiny_target, inputs)
    length = inputs["input_ids"].shape[1]
    token = int(whole[0, length + offset])
    text = tokenizer.decode(whole[0, length + max(offset - 2, 0) : length + offset + 1])
    options = {
        "eos": {"eos_token_id": token, "pad_token_id": 95},
        "eos list": {"eos_token_id": [94, token], "pad_token_id": 95},
        "stop string": {"stop_strings": [text], "tokenizer": tokenizer},
        "criterion": {"stopping_criteria": StoppingCriteriaList([StopAt(length=length + offset + 1)])},
        "max_new_tokens": {"max_new_tokens": offset + 1},
        "max_length": {"max_length": length + offset + 1, "max_new_tokens": None},
    }[how]
    plain = generate(tiny_target, inputs, **options)
    oracle(monkeypatch, whole, "everything")  # the block always reaches past the stop, or ends with it
    ours = generate(tiny_target, inputs, assistant_model=drafter_of("deepspec-vanilla"), **options)
    assert_same_text(ours, plain)


def test_a_criterion_sees_every_prefix_once_in_order(tiny_target, monkeypatch):
    inputs = encode(PROMPTS[0])
    options = {"return_dict_in_generate": True, "output_scores": True}
    plain, ours = Witness(), Witness()
    output = generate(tiny_target, inputs, stopping_criteria=StoppingCriteriaList([plain]), **options)
    oracle(monkeypatch, output.sequences, "alternately")
    criteria = StoppingCriteriaList([ours])
    generate(
        tiny_target, inputs, assistant_model=drafter_of("deepspec-vanilla"), stopping_criteria=criteria, **options
    )
    assert ours.prefixes == plain.prefixes and len(ours.prefixes) == NEW_TOKENS
    assert [len(scores) for scores in ours.scores] == list(range(1, NEW_TOKENS + 1))
    for mine, theirs in zip(ours.scores[-1], plain.scores[-1], strict=True):
        torch.testing.assert_close(mine, theirs, atol=VALUES, rtol=0)


def test_a_criterion_gets_no_scores_that_were_not_asked_for(tiny_target):
    witness = Witness()
    criteria = StoppingCriteriaList([witness])
    generate(tiny_target, encode(PROMPTS[1]), assistant_model=drafter_of("deepspec-rnn"), stopping_criteria=criteria)
    assert witness.scores == [None] * NEW_TOKENS


def test_a_criterion_sees_each_row_of_a_batch_in_order(tiny_target):
    inputs, witness = encode(*PROMPTS), Witness()
    criteria = StoppingCriteriaList([witness])
    rows = generate(
        tiny_target, inputs, assistant_model=drafter_of("deepspec-rnn"), stopping_criteria=criteria
    ).tolist()
    first = inputs["input_ids"].shape[1] + 1
    wanted = [row[:length] for row in rows for length in range(first, len(row) + 1)]
    assert sorted(witness.prefixes) == sorted(wanted)
    for row in rows:
        assert [prefix for prefix in witness.prefixes if row[: len(prefix)] == prefix] == [
            row[:length] for length in range(first, len(row) + 1)
        ]


def test_max_time(tiny_target, monkeypatch):
    class Clock:
        """A second a look."""

        now = 0.0

        @classmethod
        def time(cls) -> float:
            cls.now += 1.0
            return cls.now

    monkeypatch.setattr(host_stopping_criteria, "time", Clock)
    inputs = encode(PROMPTS[0])
    plain = generate(tiny_target, inputs, max_time=11.5)
    ours = generate(tiny_target, inputs, max_time=11.5, assistant_model=drafter_of("deepspec-vanilla"))
    assert_same_text(ours, plain)
    assert plain.shape[1] == inputs["input_ids"].shape[1] + 12


# Batches


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("offsets", [(0, 5, 11), (18, 3, 4), (7, 7, 0), (1, 19, 2)])
def test_rows_end_at_different_times(offsets, pattern, tiny_target, monkeypatch):
    """With an end token finished rows are padded; where only a criterion stops them they go on until all ended."""

    class StopRows(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            ends = [whole[row, : length + offset + 1].tolist() for row, offset in enumerate(offsets)]
            return torch.tensor([row in ends for row in input_ids.tolist()])

    inputs = encode(*PROMPTS)
    length = inputs["input_ids"].shape[1]
    whole = generate(tiny_target, inputs)
    drafter = drafter_of("deepspec-vanilla")
    criteria = StoppingCriteriaList([StopRows()])
    plain = generate(tiny_target, inputs, stopping_criteria=criteria)
    padded = generate(tiny_target, inputs, stopping_criteria=criteria, eos_token_id=94, pad_token_id=93)
    assert plain.shape[1] == length + max(offsets) + 1 and not torch.equal(plain, padded)
    oracle(monkeypatch, whole, pattern)
    ours = generate(tiny_target, inputs, assistant_model=drafter, stopping_criteria=criteria)
    assert_same_text(ours, plain)
    ours = generate(
        tiny_target, inputs, assistant_model=drafter, stopping_criteria=criteria, eos_token_id=94, pad_token_id=93
    )
    assert_same_text(ours, padded)


def test_a_row_of_a_batch_is_its_solo_run(tiny_target):
    drafter = drafter_of("deepspec-gated")
    together = generate(tiny_target, encode(*PROMPTS), assistant_model=drafter)
    rounds = [row.rounds for row in drafter.speculative_stats.rows]
    for row, prompt in enumerate(PROMPTS):
        alone = generate(tiny_target, encode(prompt), assistant_model=drafter)
        assert together[row, -NEW_TOKENS:].tolist() == alone[0, -NEW_TOKENS:].tolist()
        assert drafter.speculative_stats.rounds == rounds[row]


def test_num_return_sequences(tiny_target):
    """Each prompt's samples stand together, and functions that are told a number are told the one plain ones are."""
    told: list[dict[int, set[tuple[int, ...]]]] = []

    def only(batch_id: int, tokens: torch.Tensor) -> list[int]:
        told[-1].setdefault(batch_id, set()).add(tuple(tokens[:length].tolist()))
        return [10 + 3 * batch_id, 11 + 3 * batch_id, 12 + 3 * batch_id]

    inputs = encode(*PROMPTS)
    length = inputs["input_ids"].shape[1]
    options = {"do_sample": True, "num_return_sequences": 4, "max_new_tokens": 10, "prefix_allowed_tokens_fn": only}
    options |= {"repetition_penalty": 1.1, "encoder_repetition_penalty": 1.1}
    torch.manual_seed(0)
    for drafter in (None, drafter_of("deepspec-vanilla")):
        told.append({})
        ours = generate(tiny_target, inputs, assistant_model=drafter, **options)
    assert told[0] == told[1]
    assert ours.shape == (12, length + 10)
    assert torch.equal(ours[:, :length], inputs["input_ids"].repeat_interleave(4, dim=0))
    samples = 12 // len(told[1])  # up to 5.22 each sample has a number of its own
    for row, tokens in enumerate(ours[:, length:].tolist()):
        assert {token - 3 * (row // samples) for token in tokens} <= {10, 11, 12}
    assert all(len({tuple(tokens) for tokens in ours[row : row + 4].tolist()}) > 1 for row in (0, 4, 8))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_batch_is_the_plain_batch(tiny_target, data):
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    texts = [data.draw(st.text(st.sampled_from(" aehost.3\n"), min_size=n, max_size=n)) for n in lengths]
    options: dict[str, Any] = {"max_new_tokens": data.draw(st.integers(1, 20))}
    ends = data.draw(st.lists(st.sampled_from([0, 1, E_, S_, 66, 85]), max_size=3, unique=True))
    if ends:
        options |= {"eos_token_id": ends, "pad_token_id": data.draw(st.sampled_from([0, 1, 95]))}
    stops = tuple(data.draw(st.lists(st.sampled_from([1, E_, 80]), max_size=2, unique=True)))
    options["stopping_criteria"] = lambda: StoppingCriteriaList([StopAt(stops)] if stops else [])
    choices = {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
        "bad_words_ids": [[SPACE]],
        "prefix_allowed_tokens_fn": no_vowels_after_vowels,
        "logits_processor": processors(Favour),
        "prefill_chunk_size": 3,
    }
    for name in data.draw(st.lists(st.sampled_from(sorted(choices)), max_size=3, unique=True)):
        options[name] = choices[name]
    drafter = drafter_of(data.draw(st.sampled_from(TRAINED)))
    inputs = encode(*texts)
    plain = generate(tiny_target, inputs, **made(options))
    assert_same_text(generate(tiny_target, inputs, assistant_model=drafter, **made(options)), plain)


# What is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2, 3])},
            "SynthIDTextWatermarkLogitsProcessor.*cannot follow rejected drafts",
        ),
        ({"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidance.*cannot follow rejected drafts"),
        ({"num_beams": 2}, "num_beams"),
        ({"penalty_alpha": 0.6, "top_k": 4, "trust_remote_code": True}, "penalty_alpha"),
        ({"assistant_ensemble_weight": 0.5}, "`assistant_ensemble_weight` is 0.5"),
        ({"assistant_confidence_threshold": 1.5}, "`assistant_confidence_threshold` is 1.5"),
        ({"assistant_confidence_threshold": -0.1}, "`assistant_confidence_threshold` is -0.1"),
    ],
)
def test_refused(options, message, tiny_target):
    with pytest.raises(ValueError, match=message):
        generate(tiny_target, encode(PROMPTS[1]), assistant_model=drafter_of("deepspec-vanilla"), **options)


def test_a_threshold_needs_a_confidence_head(tiny_target):
    with pytest.raises(ValueError, match="no confidence head"):
        generate(
            tiny_target,
            encode(PROMPTS[1]),
            assistant_model=drafter_of("deepspec-noconf"),
            assistant_confidence_threshold=0.3,
        )


@pytest.mark.parametrize("new", [1, 12])
def test_a_processor_with_a_state_is_refused_in_a_batch(new, tiny_target):
    with pytest.raises(ValueError, match="Alternate changes its attributes while it is called.*one row at a time"):
        generate(
            tiny_target,
            encode(*PROMPTS),
            assistant_model=drafter_of("deepspec-vanilla"),
            logits_processor=processors(Alternate)(),
            max_new_tokens=new,
        )


def test_a_processor_that_needs_all_rows_is_refused(tiny_target):
    class Biased(LogitsProcessor):
        def __init__(self):
            self.bias = torch.zeros(3, 96)

        def __call__(self, input_ids, scores):
            return scores + self.bias

    with pytest.raises(ValueError, match=r"Biased turned scores of shape \(1, 96\) into \(3, 96\)"):
        generate(
            tiny_target,
            encode(*PROMPTS),
            assistant_model=drafter_of("deepspec-vanilla"),
            logits_processor=LogitsProcessorList([Biased()]),
        )


def test_a_processor_whose_state_cannot_be_put_back_is_refused(tiny_target):
    class Endless(LogitsProcessor):
        def __init__(self):
            self.tokens = (token for token in range(10**6))

        def __call__(self, input_ids, scores):
            return scores

    with pytest.raises(ValueError, match=r"Endless\['tokens'\] is a generator, which cannot be put back"):
        generate(
            tiny_target,
            encode(PROMPTS[0]),
            assistant_model=drafter_of("deepspec-vanilla"),
            logits_processor=LogitsProcessorList([Endless()]),
        )
