"""Caches of every kind: prepared by `generate` or by the user, handed over and continued, past the sliding window."""

from typing import Any

import pytest
import torch
from families import decoder, drafter_for, prompts
from test_targets import assert_same, only_row, plain_and_ours, streams  # noqa: F401
from tiny import oracle
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import QuantizedLayer

from dspark_hf.compat import CACHE_NAME


pytestmark = [pytest.mark.usefixtures("no_grad"), pytest.mark.filterwarnings("ignore::UserWarning")]
OPTIONS = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "no_repeat_ngram_size": 2}
# One whose layers all slide, one with mixed layers, one that is padded, one with convolution states.
FAMILIES = ("mistral", "gemma3_text", "xglm", "lfm2")


def inputs_of(rows: int) -> dict[str, torch.Tensor]:
    inputs = prompts((9, 6, 12))
    return only_row(inputs, 2) if rows == 1 else inputs


def make_cache(kind: str, target) -> dict[str, Any]:
    if kind == "the user's dynamic":
        return {CACHE_NAME: DynamicCache(config=target.config)}
    if kind == "the user's without a config":
        return {CACHE_NAME: DynamicCache()}
    if kind == "the user's static":
        return {CACHE_NAME: StaticCache(config=target.config, max_cache_len=120)}
    return {}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", ["default", "the user's dynamic", "the user's without a config", "the user's static"])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("second_with", ["drafter", "nothing"])
def test_two_turns(name, kind, rows, second_with, monkeypatch):
    """Both turns together pass the window; the second starts from the cache that the first returned."""
    if name == "lfm2" and (kind == "the user's without a config" or "static" in kind):
        pytest.skip("such a cache has no place for convolution states")
    target = decoder(name)
    drafter = drafter_for(target)
    inputs = inputs_of(rows)
    turns = {}
    for assistant in (None, drafter):
        first = target.generate(
            **inputs,
            **OPTIONS,
            **make_cache(kind, target),
            max_new_tokens=14,
            return_dict_in_generate=True,
            assistant_model=assistant,
        )
        again = torch.cat([first.sequences, inputs["input_ids"][:, -5:]], dim=1)
        ones = inputs["attention_mask"].new_ones(rows, again.shape[1] - inputs["attention_mask"].shape[1])
        mask = torch.cat([inputs["attention_mask"], ones], dim=1)
        second = target.generate(
            again,
            attention_mask=mask,
            **OPTIONS,
            **{CACHE_NAME: first[CACHE_NAME]},
            max_new_tokens=20,
            return_dict_in_generate=True,
            assistant_model=assistant if second_with == "drafter" else None,
        )
        turns[assistant] = [first.sequences.tolist(), second.sequences.tolist()]
        turns[assistant] += [int(first[CACHE_NAME].get_seq_length(1)), int(second[CACHE_NAME].get_seq_length(1))]
        if assistant is None:
            oracle(monkeypatch, second.sequences, "alternately")
    assert turns[drafter] == turns[None]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text"])
def test_a_static_cache_past_its_window(name, rows, streams, monkeypatch):  # noqa: F811
    target = decoder(name)
    drafter = drafter_for(target)
    plain, ours = plain_and_ours(monkeypatch, target, drafter, inputs_of(rows), cache_implementation="static")
    assert_same(plain, ours, drafter)
    assert streams == ["flattened"]


def test_a_static_cache_that_has_forgotten_is_refused():
    """Row by row, a static sliding cache past its window cannot go back."""
    target = decoder("mistral")
    target.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="MistralForCausalLM keeps StaticSlidingWindowLayer in its cache"):
        target.generate(
            **inputs_of(1),
            **OPTIONS,
            max_new_tokens=20,
            cache_implementation="static",
            return_dict_in_generate=True,
            output_attentions=True,
            assistant_model=drafter_for(target),
        )


class RoundedLayer(QuantizedLayer):
    """A quantised layer that needs no library."""

    def _quantize(self, tensor, axis):
        return tensor.bfloat16()

    def _dequantize(self, tensor):
        return tensor.float()


def test_a_quantised_cache_is_refused():
    target = decoder("llama")
    cache = DynamicCache(config=target.config)
    cache.layers = [RoundedLayer() for _ in cache.layers]
    with pytest.raises(ValueError, match="LlamaForCausalLM keeps RoundedLayer in its cache, .*`cache_implementation`"):
        target.generate(
            **inputs_of(1), **OPTIONS, max_new_tokens=4, assistant_model=drafter_for(target), **{CACHE_NAME: cache}
        )


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_use_cache_false(name, monkeypatch):
    target = decoder(name)
    drafter = drafter_for(target)
    plain, ours = plain_and_ours(monkeypatch, target, drafter, inputs_of(3), use_cache=False)
    assert_same(plain, ours, drafter)


@pytest.mark.parametrize("after_the_end", ["hidden", "shown"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "bloom"])
def test_two_turns_of_rows_that_end_at_different_times(name, after_the_end, streams):  # noqa: F811
    """A finished row's end token and what it is filled with are in the returned cache, as in plain `generate`'s."""
    target = decoder(name)
    drafter = drafter_for(target)
    inputs = inputs_of(3)
    length = inputs["input_ids"].shape[1]
    alone = target.generate(**inputs, **OPTIONS, max_new_tokens=14)[:, length:]
    ends = sorted({int(alone[0, 3]), int(alone[1, 8])})
    turns = []
    for assistant in (None, drafter):
        options = OPTIONS | {"eos_token_id": ends, "max_new_tokens": 14, "return_dict_in_generate": True}
        first = target.generate(**inputs, **options, assistant_model=assistant)
        text = first.sequences[:, length:]
        is_end = torch.isin(text, torch.tensor(ends)).long()
        assert len({int(row.argmax()) if row.any() else -1 for row in is_end}) > 1, "all rows ended together"
        behind = (is_end.cumsum(dim=1) - is_end) > 0 if after_the_end == "hidden" else torch.zeros_like(text).bool()
        again = torch.cat([first.sequences, inputs["input_ids"][:, -5:]], dim=1)
        mask = torch.cat([inputs["attention_mask"], (~behind).long(), torch.ones(3, 5, dtype=torch.long)], dim=1)
        second = target.generate(
            again, attention_mask=mask, **OPTIONS, **{CACHE_NAME: first[CACHE_NAME]}, max_new_tokens=10
        )
        turns.append([first.sequences.tolist(), int(first[CACHE_NAME].get_seq_length()), second.tolist()])
    assert turns[1] == turns[0]
