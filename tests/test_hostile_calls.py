"""Calls that asked for more than the loop had thought of, each against plain `generate`."""

import copy
import threading

import pytest
import torch
from families import decoder, drafter_for, prompts
from tiny import random_drafter, random_target, scramble
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, StaticCache

from dspark_hf import flattened_stream
from dspark_hf.compat import CACHE_NAME


PROMPT = torch.tensor([[1, 2, 3]])


@pytest.fixture
def pair():
    """A float32 target and drafter over 32 tokens."""
    return random_target(vocab_size=32, dtype=torch.float32), random_drafter(vocab_size=32, dtype=torch.float32)


def greedy(target, drafter=None, input_ids=PROMPT, **options):
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0} | options
    return target.generate(input_ids, assistant_model=drafter, **options)


def test_drafts_stay_inside_a_table_of_positions():
    """The text ends by an end token just inside the table; drafts must not look past it."""
    config = GPT2Config(
        vocab_size=32, n_positions=32, n_embd=8, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None
    )
    drafter = random_drafter(vocab_size=32, dtype=torch.float32, block_size=5)
    tried = 0
    for seed in range(60):
        target = scramble(GPT2LMHeadModel(config), seed, scale=0.6)
        text = greedy(target, max_new_tokens=29)[0].tolist()
        late = [place for place in (29, 30, 31) if text[place] not in text[3:place]]
        if not late:
            continue
        options = {"max_new_tokens": 57, "eos_token_id": text[late[0]]}
        assert torch.equal(greedy(target, drafter, **options), greedy(target, **options))
        tried += 1
    assert tried, "no text with a late end token was found"


@pytest.mark.parametrize(("family", "field"), [("mpt", "max_seq_len"), ("whisper", "max_target_positions")])
@pytest.mark.parametrize("lengths", [(30,), (30, 11)])
def test_drafts_stay_inside_a_table_of_another_name(family, field, lengths):
    target, inputs = decoder(family, **{field: 40}), prompts(lengths)
    options = {"do_sample": False, "pad_token_id": 0, "suppress_tokens": [0]}
    ends = [row[38] for row in target.generate(**inputs, **options, max_new_tokens=9).tolist()]
    options |= {"max_new_tokens": 60, "eos_token_id": ends}
    plain = target.generate(**inputs, **options)
    assert torch.equal(target.generate(**inputs, **options, assistant_model=drafter_for(target)), plain)


def test_drafts_stay_inside_a_static_cache(pair):
    target, drafter = pair
    target.set_attn_implementation("eager")

    def call(assistant):
        cache = StaticCache(config=target.config, max_cache_len=8)
        options = {"max_new_tokens": 6, "return_dict_in_generate": True, "output_attentions": True}
        return greedy(target, assistant, **options, **{CACHE_NAME: cache})

    assert torch.equal(call(drafter).sequences, call(None).sequences)


def test_targets_that_share_a_config_in_two_threads(pair):
    first, drafter = pair
    second = scramble(LlamaForCausalLM(first.config).float(), seed=5, scale=0.6)
    expected = {id(target): greedy(target) for target in (first, second)}
    failures = []

    def work(target):
        for _ in range(15):
            try:
                if not torch.equal(greedy(target, drafter), expected[id(target)]):
                    failures.append("text")
            except Exception as error:  # noqa: BLE001 - reported below
                failures.append(repr(error))

    threads = [threading.Thread(target=work, args=(target,)) for target in (first, second) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert first.config._attn_implementation == "sdpa"


def test_running_out_of_memory_says_so(pair, monkeypatch):
    target, drafter = pair

    def no_memory(*args, **kwargs):
        raise torch.OutOfMemoryError("no memory left")

    greedy(target, drafter)
    monkeypatch.setattr(flattened_stream.StreamPlan, "by_row", no_memory)
    with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
        greedy(target, drafter)
    monkeypatch.undo()
    assert torch.equal(greedy(target, drafter), greedy(target))


@pytest.mark.parametrize("do_sample", [False, True])
def test_int32_prompts(pair, do_sample):
    target, drafter = pair
    out = greedy(target, drafter, input_ids=PROMPT.int(), do_sample=do_sample)
    assert out.dtype == torch.int64
    if not do_sample:
        assert torch.equal(out, greedy(target, input_ids=PROMPT.int()))


def test_a_prompt_that_is_all_padding(pair):
    target, drafter = pair
    mask = torch.zeros_like(PROMPT)
    assert torch.equal(greedy(target, drafter, attention_mask=mask), greedy(target, attention_mask=mask))


def test_statistics_of_a_call_that_fails(pair):
    target, drafter = pair
    greedy(target, drafter)
    before = drafter.speculative_stats

    def stop(ids, scores, **kwargs):
        raise KeyError("user's own")

    with pytest.raises(KeyError):
        greedy(target, drafter, stopping_criteria=[stop])
    assert drafter.speculative_stats is not before
    assert copy.deepcopy(drafter).speculative_stats is None
    seen = []
    thread = threading.Thread(target=lambda: seen.append(drafter.speculative_stats))
    thread.start()
    thread.join()
    assert seen == [None]


def test_a_drafter_that_overflows_is_named(pair):
    target, drafter = pair
    with torch.no_grad():
        drafter.norm.weight.fill_(float("nan"))
    assert torch.equal(greedy(target, drafter), greedy(target))
    with pytest.raises(ValueError, match=r"The drafter \(torch.float32\)"):
        greedy(target, drafter, do_sample=True)


def test_autocast_is_the_targets_affair(pair):
    target, drafter = pair
    with torch.autocast("cpu", dtype=torch.float16):
        assert greedy(target, drafter.bfloat16()).shape == (1, 15)
