"""Batches of a target alone: the tokens of plain `generate`, whatever leaves the batch when."""

import time

import pytest
import torch
from families import decoder
from tiny import random_target
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, GenerationConfig

from dspark_hf import batch_decoding
from dspark_hf.batch_decoding import GrowingLayer, Sampling, check_sampling, decode_rows, growing_cache


ALL = Sampling()
PROMPTS = [[1, 2, 3], [3], [2, 1, 1, 0, 3, 2, 2], [1, 1], [2, 0, 2, 1], [0], [3, 3, 1], [2, 2]]


def alone(target, prompt: list[int], room: int, ends: set[int] = frozenset()) -> list[int]:
    """What plain greedy `generate` makes of a prompt."""
    output = target.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=room,
        do_sample=False,
        eos_token_id=sorted(ends) or None,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


def decode(target, rooms, temperature=0.0, sampling=ALL, ends=frozenset(), **options) -> list[list[int]]:
    temperatures = [temperature] * len(PROMPTS)
    return decode_rows(target, PROMPTS, rooms, temperatures, sampling, ends, pad_token_id=0, **options)


@pytest.fixture(scope="module")
def sliding_target():
    """Layers with and without a window."""
    config = Gemma3TextConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return Gemma3ForCausalLM(config).double().eval()


@pytest.mark.parametrize("ends", [set(), {2}, {0, 1}], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_greedy_texts_are_those_of_single_rows(family, ends):
    target = random_target(family, vocab_size=8)
    rooms = [30, 3, 17, 30, 1, 9, 30, 24]
    expected = [alone(target, prompt, room, ends) for prompt, room in zip(PROMPTS, rooms, strict=True)]
    assert decode(target, rooms, ends=ends) == expected
    assert len(set(map(len, expected))) > 2


def test_a_window_does_not_change_the_texts(sliding_target):
    rooms = [20, 3, 17, 30, 1, 9, 30, 24]
    expected = [alone(sliding_target, prompt, room) for prompt, room in zip(PROMPTS, rooms, strict=True)]
    assert decode(sliding_target, rooms) == expected


def test_rows_that_are_done_leave(monkeypatch):
    target, sizes = random_target(), []
    target.register_forward_pre_hook(
        lambda model, args, inputs: sizes.append(len(inputs["input_ids"])), with_kwargs=True
    )
    decode(target, rooms=[2, 2, 2, 4, 4, 6, 8, 10])
    assert sizes == [8] * 4 + [3] * 4 + [1] * 2
    sizes.clear()
    monkeypatch.setattr(batch_decoding, "growing_cache", lambda target: None)
    decode(target, rooms=[2, 2, 2, 4, 4, 6, 8, 10])
    assert sizes == [8] * 10


def test_columns_of_padding_leave_too(monkeypatch):
    target = random_target()
    widths, select = [], batch_decoding._without_padding

    def seen(ids, mask, cache):
        ids, mask = select(ids, mask, cache)
        assert cache.get_seq_length() == ids.shape[1] - 1 == mask.shape[1] - 1
        widths.append(ids.shape[1])
        return ids, mask

    monkeypatch.setattr(batch_decoding, "_without_padding", seen)
    rooms = [12, 12, 3, 12, 3, 3, 3, 3]  # the longest prompt is done first
    assert decode(target, rooms)[1] == alone(target, PROMPTS[1], 12)
    assert widths == [3 + 3]


def test_a_few_rows_may_be_left():
    target = random_target()
    rooms = [4, 4, 4, 4, 4, 4, 20, 20]
    texts = decode(target, rooms, leave=2)
    assert list(map(len, texts)) == [4] * 8
    for prompt, text in zip(PROMPTS, texts, strict=True):
        assert text == alone(target, prompt, 4)
    # Those that were left go on as if nothing had been.
    rest = decode_rows(target, [PROMPTS[6] + texts[6]], [16], [0.0], ALL, frozenset(), 0)
    assert texts[6] + rest[0] == alone(target, PROMPTS[6], 20)


def test_all_rows_are_left_at_the_deadline():
    target, seen = random_target(), []

    def step(tokens: int) -> None:
        seen.append(tokens)
        if len(seen) == 5:
            time.sleep(1.1)

    texts = decode(target, [20] * 8, deadline=time.monotonic() + 1.0, on_step=step)
    assert list(map(len, texts)) == [5] * 8 and seen == [8] * 5


def test_steps_tell_of_tokens():
    counts: list[int] = []
    texts = decode(random_target(), [2, 2, 2, 4, 4, 6, 8, 10], on_step=counts.append)
    assert counts == [8, 8, 5, 5, 3, 3, 2, 2, 1, 1] and sum(counts) == sum(map(len, texts))


# What tokens are drawn from.


def draws(target, temperature: float, sampling: Sampling, count: int = 4000) -> torch.Tensor:
    torch.manual_seed(0)
    texts = decode_rows(target, [[1, 2, 3]] * count, [1] * count, [temperature] * count, sampling, set(), 0)
    return torch.tensor(texts).flatten().bincount(minlength=8) / count


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(top_k=3), Sampling(top_p=0.7), Sampling(top_k=5, top_p=0.9, min_p=0.2)],
    ids=["all", "top_k", "top_p", "all three"],
)
def test_tokens_are_drawn_from_what_generate_draws_from(sampling):
    target = random_target(vocab_size=8)
    output = target.generate(
        torch.tensor([[1, 2, 3]]),
        max_new_tokens=1,
        do_sample=True,
        temperature=0.8,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p or None,
        return_dict_in_generate=True,
        output_scores=True,
        pad_token_id=0,
    )
    law = output.scores[0][0].softmax(dim=-1)
    found = draws(target, 0.8, sampling)
    assert (found[law == 0] == 0).all()
    torch.testing.assert_close(found, law.float(), atol=0.03, rtol=0)


def test_each_row_has_its_own_temperature():
    target, temperatures = random_target(vocab_size=8), [0.0, 1.0] * 4
    torch.manual_seed(0)
    first = decode_rows(target, PROMPTS, [20] * 8, temperatures, ALL, set(), 0)
    torch.manual_seed(1)
    second = decode_rows(target, PROMPTS, [20] * 8, temperatures, ALL, set(), 0)
    for row, temperature in enumerate(temperatures):
        assert (first[row] == second[row]) == (temperature == 0)
        assert (first[row] == alone(target, PROMPTS[row], 20)) == (temperature == 0)
    torch.manual_seed(0)
    assert decode_rows(target, PROMPTS, [20] * 8, temperatures, ALL, set(), 0) == first


def test_the_targets_own_processors_apply(monkeypatch):
    target = random_target(vocab_size=8)
    config = GenerationConfig(repetition_penalty=5.0, temperature=0.3, top_p=0.5, top_k=2, do_sample=True)
    plain = decode(target, [20] * 8)
    monkeypatch.setattr(target, "generation_config", config)
    # In a batch, as the repetition penalty of older versions counts the padding.
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    expected = target.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=0)
    assert decode(target, [20] * 8) == expected[:, longest:].tolist() != plain


def test_sampling_that_is_not_done_is_refused(monkeypatch):
    target = random_target()
    check_sampling(target)
    monkeypatch.setattr(target, "generation_config", GenerationConfig(typical_p=0.9))
    with pytest.raises(ValueError, match="typical_p to 0.9.*set it to 1.0"):
        check_sampling(target)


# The cache.


def test_a_growing_layer_holds_what_a_plain_one_does():
    torch.manual_seed(0)
    target = random_target()
    cache = growing_cache(target)
    assert [type(layer) for layer in cache.layers] == [GrowingLayer, GrowingLayer]
    layer, keys = cache.layers[0], torch.zeros(3, 1, 0, 4)
    for count in (5, 1, 1, 200, 1):
        new = torch.randn(3, 1, count, 4)
        keys = torch.cat([keys, new], dim=2)
        held = layer.update(new, -new)
        assert torch.equal(held[0], keys) and torch.equal(held[1], -keys)
        assert layer.get_seq_length() == keys.shape[2]
    moves = {layer.spacious[0].data_ptr()}
    layer.update(keys[:, :, :1], keys[:, :, :1])
    assert {layer.spacious[0].data_ptr()} == moves  # there was room
    layer.batch_select_indices(torch.tensor([2, 0]))
    held, _ = layer.update(new[[2, 0]], new[[2, 0]])
    assert torch.equal(held, torch.cat([keys, keys[:, :, :1], new], dim=2)[[2, 0]])


def test_other_caches_are_left_to_generate(monkeypatch):
    target = random_target()
    monkeypatch.setattr(target, "generation_config", GenerationConfig(cache_implementation="static"))
    assert growing_cache(target) is None
    assert decode(target, [3] * 8) == [alone(target, prompt, 3) for prompt in PROMPTS]
    monkeypatch.setattr(target, "generation_config", GenerationConfig())
    monkeypatch.setattr(type(target), "_supports_default_dynamic_cache", lambda self: False)
    assert growing_cache(target) is None


@pytest.mark.parametrize("family", ["gemma4_text", "openai-gpt", "lfm2", "mamba"])
def test_other_families(family):
    """Windows and shared keys; no cache; a cache of convolutions; a recurrent state: as plain batched `generate`."""
    target, prompts = decoder(family).double(), [[5, 9, 2, 30, 7], [4, 8], [60, 2, 61], [3, 3, 8, 50]]
    rooms = [12, 3, 9, 5]
    longest = max(map(len, prompts))
    padded = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[int(place >= longest - len(prompt)) for place in range(longest)] for prompt in prompts]
    plain = target.generate(
        torch.tensor(padded), attention_mask=torch.tensor(mask), max_new_tokens=12, do_sample=False, pad_token_id=0
    )
    expected = [row[longest : longest + room] for row, room in zip(plain.tolist(), rooms, strict=True)]
    assert decode_rows(target, prompts, rooms, [0.0] * 4, ALL, frozenset(), pad_token_id=0) == expected
    assert (growing_cache(target) is not None) == (family == "gemma4_text")
