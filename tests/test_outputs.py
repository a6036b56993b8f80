"""Everything that `generate` can return is what plain `generate` returns."""

from typing import Any

import pytest
import torch
from test_parity import PROMPTS, S_, SPACE, VALUES, assert_same_text, drafter_of, generate
from tiny import PATTERNS, encode, oracle

from dspark_hf import DSparkGenerateOutput
from dspark_hf.compat import CACHE_NAME


pytestmark = pytest.mark.usefixtures("no_grad")


def assert_close(ours: Any, plain: Any, shown: torch.Tensor | None = None) -> None:
    """Nested tuples of tensors of the same number, shapes and values; of a step's rows those that are `shown`."""
    if isinstance(plain, torch.Tensor):
        assert ours.shape == plain.shape and ours.dtype == plain.dtype
        if shown is not None:
            ours, plain = ours[shown], plain[shown]
        torch.testing.assert_close(ours, plain, atol=VALUES, rtol=0)
        return
    assert len(ours) == len(plain)
    for mine, theirs in zip(ours, plain, strict=True):
        assert_close(mine, theirs, shown)


EVERYTHING = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
}


@pytest.fixture
def eager_target(tiny_target):
    """Only this attention returns its weights."""
    tiny_target.set_attn_implementation("eager")
    yield tiny_target
    tiny_target.set_attn_implementation("sdpa")


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("attentions", [False, True])
def test_all_outputs(attentions, pattern, rows, eager_target, monkeypatch):
    inputs = encode(*PROMPTS[:rows])
    options = EVERYTHING | {"output_attentions": attentions, "repetition_penalty": 1.2}
    plain = generate(eager_target, inputs, **options)
    oracle(monkeypatch, plain.sequences, pattern)
    ours = generate(eager_target, inputs, assistant_model=drafter_of("deepspec-vanilla"), **options)
    assert isinstance(ours, DSparkGenerateOutput) and ours.speculative_stats is not None
    assert_same_text(ours.sequences, plain.sequences)
    assert set(plain.keys()) | {"speculative_stats"} == set(ours.keys())
    for name in ("scores", "logits", "hidden_states"):
        assert_close(ours[name], plain[name])
    if attentions:
        if rows == 1:
            assert_close(ours.attentions, plain.attentions)
        else:  # weights on padding are of no meaning
            shapes = [[layer.shape for layer in step] for step in plain.attentions]
            assert [[layer.shape for layer in step] for step in ours.attentions] == shapes
            for mine, theirs in zip(ours.attentions[1:], plain.attentions[1:], strict=True):
                assert_close(mine, theirs)
    assert ours[CACHE_NAME].get_seq_length() == plain[CACHE_NAME].get_seq_length()


def test_outputs_of_rows_that_end_at_different_times(tiny_target):
    inputs = encode(*PROMPTS)
    options = EVERYTHING | {"eos_token_id": [SPACE, S_], "pad_token_id": 95}
    plain = generate(tiny_target, inputs, **options)
    ours = generate(tiny_target, inputs, assistant_model=drafter_of("deepspec-rnn"), **options)
    assert_same_text(ours.sequences, plain.sequences)
    generated = plain.sequences[:, inputs["input_ids"].shape[1] :]
    shown = (generated != 95).T
    assert 0 < shown.sum() < shown.numel()
    for name in ("scores", "logits", "hidden_states"):
        assert len(ours[name]) == len(plain[name])
        for step, (mine, theirs) in enumerate(zip(ours[name], plain[name], strict=True)):
            assert_close(mine, theirs, shown[step])


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 1},
        {"max_new_tokens": 2},
        {"eos_token_id": list(range(96)), "pad_token_id": 95},
        {"use_cache": False},
    ],
)
def test_outputs_of_a_text_that_ends_at_once(options, rows, tiny_target):
    inputs = encode(*PROMPTS[:rows])
    plain = generate(tiny_target, inputs, **EVERYTHING | options)
    ours = generate(tiny_target, inputs, assistant_model=drafter_of("deepspec-vanilla"), **EVERYTHING | options)
    assert_same_text(ours.sequences, plain.sequences)
    assert set(plain.keys()) | {"speculative_stats"} == set(ours.keys())
    for name in ("scores", "logits", "hidden_states")[: 2 if options.get("use_cache") is False else 3]:
        assert_close(ours[name], plain[name])
    if CACHE_NAME in plain:
        assert ours[CACHE_NAME].get_seq_length() == plain[CACHE_NAME].get_seq_length()


def test_outputs_that_were_not_asked_for_are_none(tiny_target):
    inputs = encode(PROMPTS[1])
    plain = generate(tiny_target, inputs, return_dict_in_generate=True)
    ours = generate(tiny_target, inputs, return_dict_in_generate=True, assistant_model=drafter_of("deepspec-vanilla"))
    assert set(plain.keys()) == {"sequences", CACHE_NAME}
    assert set(ours.keys()) == {"sequences", CACHE_NAME, "speculative_stats"}
    assert type(ours[CACHE_NAME]) is type(plain[CACHE_NAME])
