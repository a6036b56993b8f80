"""A row of a batch is its solo run, whatever the schedule makes of the rows together."""

import itertools
import math
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from conftest import load_drafter
from hypothesis import given, settings
from hypothesis import strategies as st
from test_exactness import PROMPT, after, target_distribution
from tiny import PATTERNS, character_tokenizer, encode, oracle, random_drafter, random_target
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from dspark_hf.profiles import DraftCurve, Profile, StepCurve, use_profile
from dspark_hf.scheduling import HARDWARE_AWARE, SCHEDULES


pytestmark = pytest.mark.usefixtures("no_grad")

DRAFTERS = ("deepspec-vanilla", "deepspec-gated", "deepspec-rnn", "deepspec-nomarkov")
E_, SPACE, S_, PAD = ord("e") - 31, 1, ord("s") - 31, 95
MOST_NEW = 14

drafter_of = cache(load_drafter)
tokenizer = character_tokenizer()


def profile(step_seconds: list[float], draft: float) -> Profile:
    """Seconds of steps with 1, 2, ... tokens, the last slope beyond, and of a draft for any number of rows."""
    curve = DraftCurve([1], [draft], [1.5 * draft])
    steps = [StepCurve(1, list(range(1, len(step_seconds) + 1)), step_seconds)]
    return Profile({}, 7, steps, curve, curve)


PROFILES = {
    "drafts cost little": profile([1.0 + 0.01 * tokens for tokens in range(50)], draft=0.05),
    "steps": profile([1.0 + 0.4 * (tokens // 4) for tokens in range(50)], draft=0.05),
    "teeth": profile([1.0 + 0.05 * tokens + 0.3 * (tokens % 3) for tokens in range(50)], draft=0.1),
    "drafts never pay": profile([1.0 + 0.05 * tokens for tokens in range(50)], draft=9.0),
}


class FavourNext(LogitsProcessor):
    """Reads the last token only, which is the row's own even in a batch of padded prompts."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        favoured = (input_ids[:, -1:] * 7 + 3) % scores.shape[1]
        return scores.scatter_add(1, favoured, torch.full_like(scores[:, :1], 3.0))


class StopAt(StoppingCriteria):
    """Stops a row at the first of some tokens."""

    def __init__(self, *tokens: int):
        self.tokens = torch.tensor(tokens)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.isin(input_ids[:, -1], self.tokens)


def no_vowel_after_a_vowel(batch_id: int, tokens: torch.Tensor) -> list[int]:
    vowels = {ord(char) - 31 for char in "aeiou"}
    return [token for token in range(96) if token not in vowels or int(tokens[-1]) not in vowels]


# Options that treat a padded prompt as the prompt alone; callables are called for each run.
STOPS: list[dict[str, Any]] = [
    {},
    {"eos_token_id": [SPACE, S_], "pad_token_id": PAD},
    {"eos_token_id": [E_, 0], "pad_token_id": PAD, "min_new_tokens": 3},
    {"stop_strings": ["re", "o", "d "], "tokenizer": tokenizer},
    {"stopping_criteria": lambda: StoppingCriteriaList([StopAt(S_, 0)]), "eos_token_id": E_, "pad_token_id": PAD},
    {"stopping_criteria": lambda: StoppingCriteriaList([StopAt(E_)])},  # finished rows go on until all have ended
]
PROCESSORS: dict[str, Any] = {
    "bad_words_ids": [[SPACE]],
    "suppress_tokens": [E_],
    "sequence_bias": {(S_,): 4.0},
    "begin_suppress_tokens": [SPACE, E_, S_],
    "prefix_allowed_tokens_fn": no_vowel_after_a_vowel,
    "logits_processor": lambda: LogitsProcessorList([FavourNext()]),
}
FRESH = ("stopping_criteria", "logits_processor")


def generate(target: PreTrainedModel, texts: list[str], **options: Any) -> list[list[int]]:
    """New tokens of each row, without the target's own end token unless an option names one."""
    inputs = encode(*texts)
    made = {name: value() if name in FRESH else value for name, value in options.items()}
    rows = target.generate(**inputs, **{"do_sample": False, "eos_token_id": None} | made)
    return rows[:, inputs["input_ids"].shape[1] :].tolist()


def script_of(target: PreTrainedModel, texts: list[str], processors: dict[str, Any]) -> torch.Tensor:
    """Padded prompts and what the target says after them without stops: drafts for an oracle."""
    new = generate(target, texts, **processors, max_new_tokens=2 * MOST_NEW)
    return torch.cat([encode(*texts)["input_ids"], torch.tensor(new)], dim=1)


@st.composite
def calls(draw, schedule: str) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
    """Prompts of different lengths, what changes the text, and what must not."""
    chance = draw(st.randoms(use_true_random=True))  # spreads a few examples over all there is
    lengths = draw(st.lists(st.integers(1, 12), min_size=2, max_size=4))
    texts = [draw(st.text(st.sampled_from(" aehost.3\n"), min_size=n, max_size=n)) for n in lengths]
    options = {name: PROCESSORS[name] for name in chance.sample(sorted(PROCESSORS), chance.randint(0, 2))}
    options |= chance.choice(STOPS)
    options["max_new_tokens"] = chance.randint(options.get("min_new_tokens", 0) + 1, MOST_NEW)
    how = {
        "schedule": schedule,
        "profile": chance.choice(list(PROFILES.values())),
        "drafter": drafter_of(chance.choice(DRAFTERS)),
        "floors": chance.choice([{}, {"min_verify_length": 1}, {"max_starved_rounds": 1}]),
        "pattern": chance.choice([None, *PATTERNS]),
    }
    return texts, options, how


def scheduled(
    target: PreTrainedModel, texts: list[str], options: dict[str, Any], how: dict[str, Any], copies: int = 1
) -> list[list[int]]:
    """With a drafter, or with one that knows the answer and is wrong by a pattern."""
    drafter, config = how["drafter"], how["drafter"].generation_config
    with pytest.MonkeyPatch.context() as patch, use_profile(how["profile"]):
        for name in ("min_verify_length", "max_starved_rounds"):
            patch.setattr(config, name, how["floors"].get(name), raising=False)
        if how["schedule"] == "confidence":
            patch.setattr(config, "assistant_confidence_threshold", 0.3)
        if how["pattern"] is not None:
            processors = {name: value for name, value in options.items() if name in PROCESSORS}
            oracle(patch, script_of(target, texts, processors).repeat_interleave(copies, dim=0), how["pattern"])
        return generate(
            target, texts, **options, assistant_model=drafter, num_assistant_tokens_schedule=how["schedule"]
        )


def walked(how: dict[str, Any], seen: Counter) -> None:
    """Count what a call came across, to know afterwards that there was something to go wrong."""
    stats = how["drafter"].speculative_stats
    seen["rejected"] += stats.verified - stats.accepted
    seen["not sent"] += stats.drafted - stats.verified
    seen["several accepted"] += sum(stats.accepted_by_position[1:])


def check_walked(seen: Counter, schedule: str) -> None:
    assert seen["rejected"] and seen["several accepted"] and (schedule == "constant" or seen["not sent"])


few = settings(deadline=None, derandomize=True, max_examples=6)
many = settings(deadline=None, derandomize=True, max_examples=30)
EXTENTS = [few, pytest.param(many, marks=pytest.mark.slow)]


@pytest.mark.parametrize("extent", EXTENTS, ids=["few", "many"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_row_of_any_batch_is_its_solo_run(schedule, extent, tiny_target):
    seen: Counter[str] = Counter()

    @extent
    @given(call=calls(schedule), data=st.data())
    def any_batch(call, data):
        texts, options, how = call
        together = scheduled(tiny_target, texts, options, how)
        walked(how, seen)
        assert together == generate(tiny_target, texts, **options)
        alone = [scheduled(tiny_target, [text], options, how)[0] for text in texts]
        for row, own in zip(together, alone, strict=True):
            assert row[: len(own)] == own
            assert "eos_token_id" not in options or set(row[len(own) :]) <= {PAD}
        index = data.draw(st.integers(0, len(texts) - 1))
        assert [alone[index]] == generate(tiny_target, [texts[index]], **options)

    any_batch()
    check_walked(seen, schedule)


@pytest.mark.parametrize("extent", EXTENTS, ids=["few", "many"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_sample_of_any_prompt_is_its_solo_run(schedule, extent, tiny_target):
    """Of the likeliest token alone, so that what is drawn is certain: samples of a prompt are its greedy text."""
    seen: Counter[str] = Counter()

    @extent
    @given(call=calls(schedule), copies=st.integers(2, 3))
    def any_samples(call, copies):
        texts, options, how = call
        sampled = options | {"do_sample": True, "top_k": 1, "num_return_sequences": copies}
        rows = scheduled(tiny_target, texts[:3], sampled, how, copies)
        walked(how, seen)
        greedy = generate(tiny_target, texts[:3], **options)
        assert rows == list(itertools.chain.from_iterable([row] * copies for row in greedy))

    any_samples()
    check_walked(seen, schedule)


NEW = 5


@cache
def last_tokens() -> Counter[int]:
    """How likely each last token is, from the target alone."""
    expected: Counter[int] = Counter()
    for (text,), probability in target_distribution(random_target(seed=1), after(NEW, top_k=3)).items():
        expected[text[-1]] += probability
    return expected


@pytest.mark.parametrize("schedule", HARDWARE_AWARE)
def test_samples_that_share_a_budget_are_independent(schedule):
    """Neighbours of one large batch: all pairs of their last tokens come as often as independent ones would."""
    target, drafter = random_target(seed=1), random_drafter("vanilla", seed=5, block_size=2)
    expected, rows = last_tokens(), 4000
    # Room for a quarter more tokens than there are rows, then a step dear enough to stop there.
    steps = StepCurve(1, [1, rows, rows * 5 // 4, rows * 5 // 4 + 50, 3 * rows], [1.0, 1.1, 1.2, 3.0, 9.0])
    inputs = torch.tensor([PROMPT])
    torch.manual_seed(0)
    with use_profile(Profile({}, 2, [steps])):
        options = after(NEW, top_k=3, num_assistant_tokens_schedule=schedule, num_return_sequences=rows)()
        output = target.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            assistant_model=drafter,
            return_dict_in_generate=True,
            **options,
        )
    tokens = output.sequences[:, -1].tolist()
    decisions = output.speculative_stats.decisions
    assert any(set(decision.verify_lengths) >= {0, 1} for decision in decisions)
    assert schedule == "hardware_aware" or any(decision.capacity for decision in decisions)
    counts = Counter(zip(tokens[::2], tokens[1::2], strict=True))
    cells = {pair: rows / 2 * expected[pair[0]] * expected[pair[1]] for pair in itertools.product(expected, repeat=2)}
    assert min(cells.values()) > 5 and len(cells) >= 9 and counts.keys() <= cells.keys()
    statistic = math.fsum((counts[pair] - wanted) ** 2 / wanted for pair, wanted in cells.items())
    freedom = len(cells) - 1
    # Wilson and Hilferty's approximation of the 0.999 quantile.
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
