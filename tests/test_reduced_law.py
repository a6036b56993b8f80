"""Every outcome of a drafter that drafts only some tokens: the texts have the target's own probabilities, to 1e-9."""

import pytest
import torch
from test_exactness import (
    PROCESSORS,
    PROMPT,
    Favour,
    Walk,
    after,
    check,
    largest_difference,
    only_neighbours,
    speculative_distribution,
    target_distribution,
)
from tiny import HEADS, random_drafter, random_target, reduced_drafter
from transformers import LogitsProcessor, LogitsProcessorList

from dspark_hf import sampling
from dspark_hf.sampling import Verification


pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.mark.parametrize("head", HEADS)
def test_every_outcome(head, monkeypatch):
    target, walk, options = random_target(), Walk(monkeypatch, width=1), after(3)
    found = speculative_distribution(target, reduced_drafter(head), walk, options, walkers=512)
    check(found, target_distribution(target, options), walk)


def test_every_outcome_of_a_drafter_that_owns_its_head(monkeypatch):
    target, walk, options = random_target(seed=4), Walk(monkeypatch, width=1), after(3, top_k=3)
    drafter = reduced_drafter("gated", owns_embedding=True, owns_lm_head=True)
    check(speculative_distribution(target, drafter, walk, options), target_distribution(target, options), walk)


@pytest.mark.parametrize("threshold", [0.3, 0.7])
def test_thresholds(threshold, monkeypatch):
    target, walk = random_target(vocab_size=5, seed=1), Walk(monkeypatch, width=1)
    drafter = reduced_drafter("rnn", (1, 2, 4), vocab_size=5, seed=9, block_size=3)
    drafter.confidence_head.proj.bias.fill_(3.0)
    options = after(3, top_k=2, assistant_confidence_threshold=threshold)
    check(speculative_distribution(target, drafter, walk, options), target_distribution(target, options), walk)


@pytest.mark.parametrize("name", PROCESSORS)
def test_processors(name, monkeypatch):
    target, walk, options = random_target(seed=2), Walk(monkeypatch, width=1), after(3, **PROCESSORS[name])
    found = speculative_distribution(target, reduced_drafter(seed=6), walk, options)
    check(found, target_distribution(target, options), walk)


class Only(LogitsProcessor):
    """The user's own: allows some tokens and no others."""

    def __init__(self, *tokens: int):
        self.tokens = tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        left = torch.full_like(scores, float("-inf"))
        left[:, list(self.tokens)] = scores[:, list(self.tokens)]
        return left


# Processors that leave none of the drafter's tokens 0 and 3, now and then or always.
MASKING = {
    "two others": {"logits_processor": lambda: LogitsProcessorList([Only(1, 2)])},
    "two others, tempered": {"logits_processor": lambda: LogitsProcessorList([Only(1, 2)]), "temperature": 0.3},
    "two others, then a favour": {"logits_processor": lambda: LogitsProcessorList([Only(1, 2), Favour()])},
    "two others, nucleus": {"logits_processor": lambda: LogitsProcessorList([Only(1, 2)]), "top_p": 0.6},
    "one other": {"logits_processor": lambda: LogitsProcessorList([Only(2)]), "temperature": 0.01},
    "a grammar": {"prefix_allowed_tokens_fn": only_neighbours},
    "suppressed": {"suppress_tokens": [0, 3]},
    "bad words and a penalty": {"bad_words_ids": [[0], [3]], "repetition_penalty": 5.0, "temperature": 3.0},
}


@pytest.mark.parametrize("name", MASKING)
def test_processors_that_mask_all_that_could_be_drafted(name, monkeypatch):
    target, walk, options = random_target(seed=2), Walk(monkeypatch, width=1), after(3, **MASKING[name])
    found = speculative_distribution(target, reduced_drafter(ids=(0, 3), seed=6), walk, options)
    expected = target_distribution(target, options)
    if name == "one other":  # a forced text has one outcome, and the drafter finds it
        assert found == pytest.approx({((2, 2, 2),): 1.0}) and set(walk.accepted) == {2}
        return
    check(found, expected, walk)


@pytest.mark.parametrize("name", MASKING)
def test_the_same_greedily(name):
    target = random_target(seed=2, dtype=torch.float32)
    drafter = reduced_drafter(ids=(0, 3), seed=6, dtype=torch.float32)
    made = {key: value() if key == "logits_processor" else value for key, value in MASKING[name].items()}
    options = {name: value for name, value in made.items() if name not in ("temperature", "top_p")}
    inputs = torch.tensor([PROMPT])
    options |= {"attention_mask": torch.ones_like(inputs), "max_new_tokens": 9, "do_sample": False}
    assert torch.equal(target.generate(inputs, assistant_model=drafter, **options), target.generate(inputs, **options))


def test_rows_of_a_batch(monkeypatch):
    target, walk = random_target(seed=1), Walk(monkeypatch, width=2)
    prompts = [PROMPT, [3, 3, 1, 2]]
    options = after(2, top_k=2, assistant_confidence_threshold=0.3)
    found = speculative_distribution(target, reduced_drafter("gated", seed=5), walk, options, prompts, walkers=128)
    rows = [target_distribution(target, options, prompt) for prompt in prompts]
    expected = {(*a, *b): p * q for a, p in rows[0].items() for b, q in rows[1].items()}
    check(found, expected, walk)


@pytest.mark.parametrize("head", ["none", "vanilla"])
def test_every_outcome_where_slot_0_is_no_draft(head, monkeypatch):
    target, walk, options = random_target(seed=3), Walk(monkeypatch, width=1), after(3, top_k=3)
    drafter = random_drafter(head, sample_from_anchor=False, causal_layer_types=["full_attention"], seed=8)
    check(speculative_distribution(target, drafter, walk, options), target_distribution(target, options), walk)
    assert set(walk.verify_lengths) == {2}


def test_a_map_that_was_not_drafted_through_is_found_out(monkeypatch):
    """The same check fails if verification takes draft ids for the target's."""
    target, walk, options = random_target(), Walk(monkeypatch, width=1), after(3, top_k=3)
    sampled = sampling.Verification.sampled_by_step

    def unmapped(self, target_law, draft_probs, synthetic=None, draft_ids=None):
        return sampled(self, target_law, draft_probs, synthetic, torch.tensor([0, 2, 3]) - torch.tensor([0, 1, 0]))

    expected = target_distribution(target, options)
    assert largest_difference(speculative_distribution(target, reduced_drafter(), walk, options), expected) < 1e-9
    monkeypatch.setattr(sampling.Verification, "sampled_by_step", unmapped)
    assert largest_difference(speculative_distribution(target, reduced_drafter(), walk, options), expected) > 1e-3


def test_reduced_probabilities_are_judged_as_their_full_rows(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor([1, 4, 6, 7])
    for _ in range(20):
        part = (2 * torch.randn(3, 2, 4, generator=generator).double()).softmax(-1)
        full = torch.zeros(3, 2, 9).double().index_copy_(2, ids, part)
        drafts = ids[torch.multinomial(part.flatten(0, 1), 1, generator=generator).view(3, 2)]
        target_probs = torch.randn(3 + 5, 9, generator=generator).double().softmax(-1)
        coins, given = torch.rand(3, 2, generator=generator).double(), []
        monkeypatch.setattr(sampling, "draw_accepts", lambda probs, coins=coins: coins[:, : probs.shape[1]] < probs)
        monkeypatch.setattr(
            sampling, "draw_tokens", lambda probs, given=given: given.append(probs) or probs.argmax(-1)
        )
        verdicts = [
            Verification(drafts, [2, 1, 2]).sampled(target_probs, part, draft_ids=ids),
            Verification(drafts, [2, 1, 2]).sampled(target_probs, full),
        ]
        assert torch.equal(verdicts[0].accepted, verdicts[1].accepted)
        assert torch.equal(verdicts[0].tokens, verdicts[1].tokens)
        torch.testing.assert_close(given[0], given[1])


def test_no_full_row_is_made_where_nobody_reads_it(monkeypatch):
    target, shapes = random_target(vocab_size=24, dtype=torch.float32), []
    draw = sampling.draw_tokens
    monkeypatch.setattr(sampling, "draw_tokens", lambda probs: shapes.append(probs.shape[1]) or draw(probs))
    drafter = reduced_drafter(ids=(0, 5, 7), vocab_size=24, dtype=torch.float32)
    inputs = torch.tensor([[3, 4, 5]])
    options = {"attention_mask": torch.ones_like(inputs), "max_new_tokens": 6, "do_sample": True}
    target.generate(inputs, assistant_model=drafter, temperature=0.8, top_k=2, top_p=0.9, min_p=0.01, **options)
    assert set(shapes) == {3, 24}
    shapes.clear()
    target.generate(inputs, assistant_model=drafter, repetition_penalty=1.2, **options)
    assert set(shapes) == {24}
