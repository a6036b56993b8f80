"""The one place where Transformers is told about DSpark: what goes in, what is left alone, what is refused."""

import inspect
import subprocess
import sys
from typing import Any

import pytest
import torch
from conftest import FIXTURES
from families import decoder, drafter_for, prompts
from test_targets import only_row
from tiny import oracle
from transformers import (
    AutoModel,
    GenerationMixin,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    TextStreamer,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import dspark_hf
from dspark_hf import custom_generate, hook


HOOKED = ("_assisted_decoding", "_validate_generation_mode")


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return decoder("llama")


@pytest.fixture(scope="module")
def drafter(target):
    return drafter_for(target)


def generate(target: PreTrainedModel, **options: Any) -> Any:
    torch.manual_seed(0)
    defaults = {"max_new_tokens": 24, "eos_token_id": None, "pad_token_id": 0, "do_sample": False}
    return target.generate(**only_row(prompts(), 2), **defaults | options)


def flat(value: Any) -> list:
    """All tensors of an output, and everything else but the cache."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [item for key in sorted(value) if "cache" not in key and "past" not in key for item in flat(value[key])]
    if isinstance(value, (tuple, list)):
        return [item for part in value for item in flat(part)]
    return [value]


OTHER_CALLS = {
    "greedy": {},
    "sampled": {"do_sample": True},
    "beams": {"num_beams": 3},
    "several": {"do_sample": True, "num_return_sequences": 2},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "prompt lookup, sampled": {"prompt_lookup_num_tokens": 3, "do_sample": True},
    "another model": {"assistant_model": "llama"},
    "another model, sampled": {"assistant_model": "llama", "do_sample": True},
    "early exit": {"assistant_early_exit": 2},
}


@pytest.mark.parametrize("name", OTHER_CALLS)
def test_other_calls_are_as_before(name, target):
    options = OTHER_CALLS[name] | {"return_dict_in_generate": True, "output_scores": True}
    if "assistant_model" in options:
        options["assistant_model"] = decoder("llama", num_hidden_layers=1)
    with_hook = generate(target, **options)
    hook.uninstall()
    try:
        without = generate(target, **options)
    finally:
        hook.install()
    assert type(with_hook) is type(without)
    pairs = list(zip(flat(with_hook), flat(without), strict=True))
    assert len(pairs) > 20
    for ours, theirs in pairs:
        assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_return_sequences": 2, "assistant_model": "llama"}, "num_return_sequences has to be 1"),
        ({"assistant_model": "other vocabulary"}, "different tokenizers"),
    ],
)
def test_what_transformers_refuses_of_others_is_still_refused(options, message, target):
    changes = {"vocab_size": 50} if options["assistant_model"] == "other vocabulary" else {}
    with pytest.raises(ValueError, match=message):
        generate(target, **options | {"assistant_model": decoder("llama", **changes), "do_sample": True})


# Installing


def test_installing_again_changes_nothing():
    before = [getattr(GenerationMixin, name) for name in HOOKED]
    dspark_hf.install()
    assert [getattr(GenerationMixin, name) for name in HOOKED] == before


def test_uninstalling_gives_the_originals_back(target, drafter):
    hooked = [getattr(GenerationMixin, name) for name in HOOKED]
    dspark_hf.uninstall()
    try:
        originals = [getattr(GenerationMixin, name) for name in HOOKED]
        assert not any(hasattr(original, hook._MARK) for original in originals)
        assert {original.__module__ for original in originals} == {"transformers.generation.utils"}
        with pytest.raises((ValueError, AttributeError, TypeError, RuntimeError)):
            generate(target, assistant_model=drafter)
        dspark_hf.uninstall()  # once more is no error
    finally:
        dspark_hf.install()
    for name, original, before in zip(HOOKED, originals, hooked, strict=True):
        wrapped = getattr(GenerationMixin, name)
        assert inspect.signature(wrapped) == inspect.signature(before) == inspect.signature(original)
        assert (wrapped.__name__, wrapped.__doc__) == (original.__name__, original.__doc__)
    generate(target, assistant_model=drafter)


def test_importing_is_enough():
    code = f"""
import torch
from transformers import AutoModelForCausalLM, GenerationMixin
before = GenerationMixin._assisted_decoding
from dspark_hf import DSparkDraftModel
assert GenerationMixin._assisted_decoding is not before
target = AutoModelForCausalLM.from_pretrained({str(FIXTURES / "tiny-target")!r})
drafter = DSparkDraftModel.from_pretrained({str(FIXTURES / "deepspec-vanilla" / "drafter")!r})
text = target.generate(torch.tensor([[52, 80, 78]]), assistant_model=drafter, max_new_tokens=9, do_sample=False)
assert drafter.speculative_stats.rounds > 0
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_release_without_the_place_is_told(monkeypatch):
    monkeypatch.setattr(hook, "_wrap", hook._wrap)
    with pytest.raises(RuntimeError, match="no `GenerationMixin._gone`.*custom_generate"):
        hook._wrap("_gone", hook._decoding)


# Other ways in


@pytest.mark.parametrize(
    "options",
    [{}, {"do_sample": True}, {"return_dict_in_generate": True, "output_scores": True}, {"repetition_penalty": 1.3}],
    ids=["greedy", "sampled", "dict", "processor"],
)
def test_custom_generate_is_the_same(options, target, drafter, monkeypatch):
    script = generate(target, **{name: options[name] for name in options if name == "repetition_penalty"})
    oracle(monkeypatch, script, "alternately")
    by_hook = generate(target, **options, assistant_model=drafter)
    oracle(monkeypatch, script, "alternately")
    by_callable = generate(target, **options, custom_generate=custom_generate(drafter))
    stats = drafter.speculative_stats
    pairs = zip(flat(by_hook), flat(by_callable), strict=True)
    for first, second in pairs:
        assert torch.equal(first, second) if isinstance(first, torch.Tensor) else type(first) is type(second)
    assert stats.mean_acceptance_length > (1 if "do_sample" in options else 2)


def test_custom_generate_needs_no_hook(target, drafter):
    plain = generate(target)
    dspark_hf.uninstall()
    try:
        assert torch.equal(generate(target, custom_generate=custom_generate(drafter)), plain)
    finally:
        dspark_hf.install()


def test_custom_generate_streams(target, drafter):
    class Collected(TextStreamer):
        def __init__(self):
            self.tokens, self.ended = [], 0

        def put(self, value):
            self.tokens.extend(value.tolist())

        def end(self):
            self.ended += 1

    streamer = Collected()
    text = generate(target, custom_generate=custom_generate(drafter, streamer=streamer))
    assert streamer.tokens == text[0, 18:].tolist()  # `generate` puts the prompt itself where it knows the streamer
    assert streamer.ended == 1


def test_custom_generate_refuses_as_the_hook_does(drafter):
    refused = decoder("mamba")
    with pytest.raises(ValueError, match="MambaForCausalLM has a recurrent state"):
        generate(refused, custom_generate=custom_generate(drafter_for(refused)))


def test_a_remote_code_copy_is_a_drafter(target, drafter, tmp_path):
    """A second copy of the class, which no type check would know."""
    drafter.save_pretrained(tmp_path)
    code = f"""
import sys
sys.path.insert(0, {str(FIXTURES.parent)!r})
from transformers import AutoModel
copy = AutoModel.from_pretrained({str(tmp_path)!r}, trust_remote_code=True)
assert type(copy).__module__.startswith("transformers_modules"), type(copy).__module__
import dspark_hf, torch
from families import decoder, prompts
from test_targets import only_row
assert not isinstance(copy, dspark_hf.DSparkDraftModel)
target = decoder("llama")
options = dict(max_new_tokens=24, eos_token_id=None, pad_token_id=0, do_sample=False)
plain = target.generate(**only_row(prompts(), 2), **options)
ours = target.generate(**only_row(prompts(), 2), **options, assistant_model=copy)
assert torch.equal(plain, ours) and copy.speculative_stats.rounds > 0
"""
    # dspark_hf registers its own class for the type, so the copy is loaded before it is imported.
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=_environment(tmp_path))
    again = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(generate(target, assistant_model=again), generate(target, assistant_model=drafter))


def _environment(tmp_path) -> dict[str, str]:
    import os

    return os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")}


# Refused


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_beams": 3}, r"another kind of decoding: {'num_beams': 3}"),
        ({"num_beams": 2, "do_sample": True}, r"another kind of decoding: {'num_beams': 2}"),
        ({"penalty_alpha": 0.6, "top_k": 4, "trust_remote_code": True}, r"decoding: {'penalty_alpha': 0.6}"),
        ({"dola_layers": "high", "trust_remote_code": True}, r"decoding: {'dola_layers': 'high'}"),
        ({"synced_gpus": True}, "`synced_gpus` is True"),
        ({"assistant_ensemble_weight": 0.5}, "`assistant_ensemble_weight` is 0.5"),
    ],
)
def test_modes_without_a_place_for_a_drafter(options, message, target, drafter):
    with pytest.raises(ValueError, match=message):
        generate(target, **options, assistant_model=drafter)
    stray = drafter_for(target, block_size=2)
    generate(target, assistant_model=stray)  # nothing is left behind


@pytest.mark.parametrize("options", [{"constraints": [1]}, {"force_words_ids": [[3]], "num_beams": 2}])
def test_constrained_modes_are_refused_somewhere(options, target, drafter):
    with pytest.raises(ValueError):
        generate(target, **options, assistant_model=drafter)


def test_encoder_decoders(drafter):
    common = {"vocab_size": 99, "d_model": 32, "pad_token_id": 0, "decoder_start_token_id": 0}
    t5 = T5ForConditionalGeneration(T5Config(**common, d_kv=8, d_ff=64, num_layers=1, num_heads=4))
    with pytest.raises(ValueError, match="T5ForConditionalGeneration is an encoder-decoder model"):
        t5.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, assistant_model=drafter)
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes |= {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_mel_bins": 8, "max_source_positions": 10}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "suppress_tokens": None, "begin_suppress_tokens": None}
    whisper = WhisperForConditionalGeneration(WhisperConfig(**common, **sizes, **tokens))
    with pytest.raises(ValueError, match="WhisperForConditionalGeneration is an encoder-decoder model"):
        whisper.generate(torch.randn(1, 8, 20), max_new_tokens=4, assistant_model=drafter)


def test_a_target_with_a_generation_of_its_own(target, drafter, monkeypatch):
    from transformers.generation import GenerationMode

    monkeypatch.setattr(type(target), "_supported_generation_modes", [GenerationMode.GREEDY_SEARCH], raising=False)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM generates in its own way \(greedy_search only\)"):
        generate(target, assistant_model=drafter)
