"""Prompts in a cache, as embeddings, padded, or half seen before: the text is plain `generate`'s."""

from typing import Any

import pytest
import torch
from test_parity import (
    NEW_TOKENS,
    PROMPTS,
    S_,
    SPACE,
    VALUES,
    Own,
    assert_same_text,
    drafter_of,
    generate,
    made,
    processors,
)
from tiny import encode, oracle
from transformers import (
    DynamicCache,
    PreTrainedModel,
    StaticCache,
)

from dspark_hf.compat import CACHE_NAME


pytestmark = pytest.mark.usefixtures("no_grad")


def a_cache(kind: str, target: PreTrainedModel) -> dict[str, Any]:
    if kind == "the user's dynamic":
        return {CACHE_NAME: DynamicCache(config=target.config)}
    if kind == "the user's static":
        return {CACHE_NAME: StaticCache(config=target.config, max_cache_len=200)}
    return {"cache_implementation": "static"} if kind == "static" else {}


@pytest.mark.parametrize("second_with", [True, False], ids=["drafter again", "then plain"])
@pytest.mark.parametrize("kind", ["default", "the user's dynamic", "the user's static"])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_second_turn_with_the_returned_cache(rows, kind, second_with, tiny_target, monkeypatch):
    inputs = encode(*PROMPTS[:rows])
    more = encode(*["\nNow Bob has 7 cats"] * rows)
    drafter = drafter_of("deepspec-vanilla")
    texts, rounds = [], []
    for assistant in (drafter, None):
        options = {"return_dict_in_generate": True}
        first = generate(tiny_target, inputs, assistant_model=assistant, **a_cache(kind, tiny_target), **options)
        longer = {
            "input_ids": torch.cat([first.sequences, more["input_ids"]], dim=1),
            "attention_mask": torch.cat(
                [inputs["attention_mask"], torch.ones(rows, NEW_TOKENS + more["input_ids"].shape[1]).long()], dim=1
            ),
        }
        options[CACHE_NAME] = first[CACHE_NAME]
        held = int(first[CACHE_NAME].get_seq_length())
        assert held == first.sequences.shape[1] - 1
        again = drafter if assistant is not None and second_with else None
        second = generate(tiny_target, longer, assistant_model=again, **options)
        texts.append((first.sequences.tolist(), second.sequences.tolist()))
        if again is not None:
            rounds.append(second.speculative_stats.mean_acceptance_length)
    assert texts[0] == texts[1]
    if rounds:  # the drafter picks up at the true positions
        assert rounds[0] > 1.2


@pytest.mark.parametrize("kind", ["the user's dynamic", "the user's static"])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_cache_handed_in_without_return_dict_is_filled(rows, kind, tiny_target):
    inputs = encode(*PROMPTS[:rows])
    caches = [a_cache(kind, tiny_target) for _ in range(2)]
    ours = generate(tiny_target, inputs, assistant_model=drafter_of("deepspec-rnn"), **caches[0])
    plain = generate(tiny_target, inputs, **caches[1])
    assert_same_text(ours, plain)
    mine, theirs = (cache[CACHE_NAME] for cache in caches)
    assert int(mine.get_seq_length()) == int(theirs.get_seq_length())
    shown = torch.cat([inputs["attention_mask"], torch.ones(rows, NEW_TOKENS - 1).long()], dim=1).bool()
    for layer, other in zip(mine.layers, theirs.layers, strict=True):
        for name in ("keys", "values"):
            held, wanted = (getattr(of, name)[:, :, : shown.shape[1]].transpose(1, 2)[shown] for of in (layer, other))
            torch.testing.assert_close(held, wanted, atol=VALUES, rtol=0)


def test_a_stopped_row_leaves_a_cache_that_can_be_continued(tiny_target, monkeypatch):
    """The cache holds the text up to the stop, not the block that was verified."""
    inputs = encode(PROMPTS[0])
    whole = generate(tiny_target, inputs)
    options = {"return_dict_in_generate": True, "eos_token_id": int(whole[0, -13]), "pad_token_id": 95}
    drafter = drafter_of("deepspec-vanilla")
    oracle(monkeypatch, whole, "everything")
    first = generate(tiny_target, inputs, assistant_model=drafter, **options)
    assert first[CACHE_NAME].get_seq_length() == first.sequences.shape[1] - 1
    longer = {"input_ids": first.sequences, "attention_mask": torch.ones_like(first.sequences)}
    missing = whole.shape[1] - first.sequences.shape[1]
    assert missing > 3
    second = generate(
        tiny_target, longer, assistant_model=drafter, max_new_tokens=missing, **{CACHE_NAME: first[CACHE_NAME]}
    )
    assert_same_text(second, whole)


def test_a_cache_with_the_whole_prompt_but_its_end(tiny_target):
    """A prefix that came in a cache has no hidden states for the drafter; the text is right all the same."""
    inputs = encode(PROMPTS[0])
    whole = generate(tiny_target, inputs)
    for held in (inputs["input_ids"].shape[1] - 1, 5):
        cache = DynamicCache(config=tiny_target.config)
        tiny_target(inputs["input_ids"][:, :held], use_cache=True, **{CACHE_NAME: cache})
        ours = generate(tiny_target, inputs, assistant_model=drafter_of("deepspec-vanilla"), **{CACHE_NAME: cache})
        assert_same_text(ours, whole)


@pytest.mark.parametrize("rows", [1, 3])
def test_inputs_embeds(rows, tiny_target):
    """With the prompt's tokens or without, and with processors that then see no prompt."""
    inputs = encode(*PROMPTS[:rows])
    embeds = tiny_target.get_input_embeddings()(inputs["input_ids"])
    given_both = inputs | {"inputs_embeds": embeds}
    given = {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]}
    for each in (given, given_both):
        plain = generate(tiny_target, each)
        assert_same_text(generate(tiny_target, each, assistant_model=drafter_of("deepspec-vanilla")), plain)
    assert generate(tiny_target, given, assistant_model=drafter_of("deepspec-rnn")).shape == (rows, NEW_TOKENS)
    options = {
        "eos_token_id": [SPACE, S_],
        "pad_token_id": 95,
        "min_new_tokens": 5,
        "logits_processor": processors(Own),
    }
    plain = generate(tiny_target, given, **made(options))
    assert_same_text(generate(tiny_target, given, assistant_model=drafter_of("deepspec-rnn"), **made(options)), plain)


@pytest.mark.parametrize("padding", [1, 7, 30])
def test_left_padding(padding, tiny_target):
    inputs = encode(PROMPTS[1])
    padded = {
        "input_ids": torch.nn.functional.pad(inputs["input_ids"], (padding, 0), value=95),
        "attention_mask": torch.nn.functional.pad(inputs["attention_mask"], (padding, 0)),
    }
    drafter = drafter_of("deepspec-vanilla")
    ours = generate(tiny_target, padded, assistant_model=drafter)
    rounds = drafter.speculative_stats.rounds
    assert_same_text(ours, generate(tiny_target, padded))
    assert_same_text(ours[:, padding:], generate(tiny_target, inputs, assistant_model=drafter))
    assert drafter.speculative_stats.rounds == rounds


def test_no_attention_mask(tiny_target):
    inputs = {"input_ids": encode(PROMPTS[1])["input_ids"]}
    plain = generate(tiny_target, inputs)
    assert_same_text(generate(tiny_target, inputs, assistant_model=drafter_of("deepspec-vanilla")), plain)


def test_the_targets_own_defaults(tiny_target):
    """End token and length from the generation config."""
    inputs = encode(PROMPTS[0])
    plain = tiny_target.generate(**inputs, max_new_tokens=200)
    assert_same_text(
        tiny_target.generate(**inputs, max_new_tokens=200, assistant_model=drafter_of("deepspec-rnn")), plain
    )
    assert plain[0, -1] == 0 and plain.shape[1] < 200
