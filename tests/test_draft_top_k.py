"""`draft_top_k`: each slot's token is drafted among those that the backbone ranks highest, and no text changes."""

import pytest
import torch
from conftest import load_drafter
from test_exactness import (
    PROCESSORS,
    PROMPT,
    Walk,
    after,
    check,
    largest_difference,
    speculative_distribution,
    target_distribution,
)
from test_reduced_law import MASKING
from tiny import HEADS, encode, random_drafter, random_target, reduced_drafter

from dspark_hf import sampling
from dspark_hf.sampling import Verification


pytestmark = pytest.mark.usefixtures("no_grad")


def restricted(drafter, top_k):
    drafter.generation_config.draft_top_k = top_k
    return drafter


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("head", HEADS)
def test_logits_are_those_of_the_highest_base_logits(head, reduced):
    changes = {"vocab_size": 9, "owns_embedding": True, "owns_lm_head": True}
    ids = (0, 2, 3, 5, 8)
    drafter = reduced_drafter(head, ids, **changes) if reduced else random_drafter(head, **changes)
    hidden, anchors = torch.randn(3, 2, 8, dtype=torch.float64), torch.tensor([5, 8, 0])
    chosen, seen = torch.tensor([[7, 3], [4, 0], [1, 1]]), ([], [])

    def into(found):
        def choose(slot, logits, ids):
            found.append((logits, ids))
            return chosen[:, slot]

        return choose

    drafter.draft(hidden, anchors, select=into(seen[0]))
    drafter.draft(hidden, anchors, select=into(seen[1]), top_k=3)
    base = drafter.base_logits(hidden)
    for slot, ((whole, names), (part, kept)) in enumerate(zip(*seen, strict=True)):
        assert names is None or names.tolist() == list(ids)
        places = base[:, slot].topk(3).indices.sort().values
        assert torch.equal(kept, places if names is None else names[places])
        torch.testing.assert_close(part, whole.gather(1, places))
    tokens = drafter.draft(hidden, anchors, top_k=1).tokens
    best = base.argmax(-1)
    assert torch.equal(tokens, best if drafter.d2t is None else drafter.d2t[best])
    for much in (5 if reduced else 9, 100):
        assert torch.equal(drafter.draft(hidden, anchors, top_k=much).tokens, drafter.draft(hidden, anchors).tokens)


def test_the_correction_is_computed_for_those_tokens_alone():
    drafter = random_drafter(vocab_size=9, owns_embedding=True, owns_lm_head=True)
    hidden, anchors = torch.randn(3, 2, 8, dtype=torch.float64), torch.tensor([5, 8, 0])
    expected = drafter.draft(hidden, anchors, top_k=4).tokens

    def refuse(*args):
        raise AssertionError("the whole vocabulary was corrected")

    w2 = drafter.markov_head.markov_w2
    forward, w2.forward = w2.forward, refuse
    with pytest.raises(AssertionError, match="whole vocabulary"):  # a head with a hook or an adapter is called
        drafter.draft(hidden, anchors, top_k=4)
    w2.forward = lambda inputs: forward(inputs)
    assert torch.equal(drafter.draft(hidden, anchors, top_k=4).tokens, expected)
    del w2.forward
    called = torch.nn.functional.linear

    def narrow(inputs, weight, bias=None):
        assert weight is not w2.weight
        return called(inputs, weight, bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", narrow)
        assert torch.equal(drafter.draft(hidden, anchors, top_k=4).tokens, expected)


@pytest.mark.parametrize("top_k", [1, 5])
@pytest.mark.parametrize(
    "folder", ["deepspec-vanilla", "deepspec-rnn", "speculators-reduced-vocab", "dflash-top-level"]
)
def test_greedy_text_is_plain_generates(folder, top_k, tiny_target):
    drafter = restricted(load_drafter(folder), top_k)
    inputs = encode("a baker makes 6 rolls. ", "the box holds ", "ann has 3 pens and ")
    for options in ({}, {"repetition_penalty": 1.3}, {"bad_words_ids": [[7], [3, 5]]}):
        options |= {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None}
        plain = tiny_target.generate(**inputs, **options)
        assert torch.equal(tiny_target.generate(**inputs, **options, assistant_model=drafter), plain)
    assert drafter.speculative_stats.accepted > 0


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("head", HEADS)
def test_every_outcome(head, top_k, monkeypatch):
    target, walk, options = random_target(), Walk(monkeypatch, width=1), after(3)
    drafter = restricted(random_drafter(head), top_k)
    check(
        speculative_distribution(target, drafter, walk, options, walkers=512),
        target_distribution(target, options),
        walk,
    )


def test_every_outcome_of_a_reduced_vocabulary(monkeypatch):
    target, walk, options = random_target(vocab_size=5, seed=1), Walk(monkeypatch, width=1), after(3, top_k=3)
    drafter = restricted(reduced_drafter("rnn", (1, 2, 4), vocab_size=5, seed=9), 2)
    check(speculative_distribution(target, drafter, walk, options), target_distribution(target, options), walk)


@pytest.mark.parametrize("name", PROCESSORS)
def test_processors(name, monkeypatch):
    target, walk, options = random_target(seed=2), Walk(monkeypatch, width=1), after(3, **PROCESSORS[name])
    drafter = restricted(random_drafter(seed=6), 2)
    check(speculative_distribution(target, drafter, walk, options), target_distribution(target, options), walk)


@pytest.mark.parametrize("name", sorted(MASKING.keys() - {"one other"}))
def test_processors_that_mask_what_could_be_drafted(name, monkeypatch):
    target, walk, options = random_target(seed=2), Walk(monkeypatch, width=1), after(3, **MASKING[name])
    drafter = restricted(random_drafter(seed=6), 1)
    check(speculative_distribution(target, drafter, walk, options), target_distribution(target, options), walk)


def test_rows_of_a_batch(monkeypatch):
    target, walk = random_target(seed=1), Walk(monkeypatch, width=2)
    prompts = [PROMPT, [3, 3, 1, 2]]
    options = after(2, top_k=2, assistant_confidence_threshold=0.3)
    drafter = restricted(random_drafter("gated", seed=5), 3)
    found = speculative_distribution(target, drafter, walk, options, prompts, walkers=128)
    rows = [target_distribution(target, options, prompt) for prompt in prompts]
    expected = {(*a, *b): p * q for a, p in rows[0].items() for b, q in rows[1].items()}
    check(found, expected, walk)


def test_a_distribution_that_was_not_drawn_from_is_found_out(monkeypatch):
    """The same check fails if verification takes the few tokens in another order than they were drawn in."""
    target, walk, options = random_target(), Walk(monkeypatch, width=1), after(3, top_k=3)
    drafter, sampled = restricted(random_drafter(), 2), sampling.Verification.sampled_by_step

    def misled(self, target_probs, draft_probs, synthetic=None, draft_ids=None):
        return sampled(self, target_probs, draft_probs.flip(2), synthetic, draft_ids)

    expected = target_distribution(target, options)
    assert largest_difference(speculative_distribution(target, drafter, walk, options), expected) < 1e-9
    monkeypatch.setattr(sampling.Verification, "sampled_by_step", misled)
    assert largest_difference(speculative_distribution(target, drafter, walk, options), expected) > 1e-3


def test_probabilities_of_a_few_tokens_are_judged_as_their_full_rows(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        ids = torch.rand(3, 2, 9, generator=generator).topk(4).indices.sort().values
        part = (2 * torch.randn(3, 2, 4, generator=generator).double()).softmax(-1)
        full = torch.zeros(3, 2, 9).double().scatter_(2, ids, part)
        places = torch.randint(4, (3, 2, 1), generator=generator)
        drafts = ids.gather(2, places).squeeze(2)
        target_probs = torch.randn(8, 9, generator=generator).double().softmax(-1)
        given, verdicts = [], []
        for probs, names in ((part, ids), (full, None)):
            draws = torch.Generator().manual_seed(7)
            monkeypatch.setattr(sampling, "draw_accepts", lambda p, d=draws: torch.rand(p.shape, generator=d) < p)
            monkeypatch.setattr(sampling, "draw_tokens", lambda p, g=given: g.append(p) or p.argmax(-1))
            verdicts.append(Verification(drafts, [2, 1, 2]).sampled(target_probs, probs, draft_ids=names))
        assert torch.equal(verdicts[0].accepted, verdicts[1].accepted)
        assert torch.equal(verdicts[0].tokens, verdicts[1].tokens)
        torch.testing.assert_close(given[0], given[1])


def test_no_full_row_is_drawn_from_where_a_few_tokens_do(monkeypatch):
    target, shapes = random_target(vocab_size=24, dtype=torch.float32), []
    draw = sampling.draw_tokens
    monkeypatch.setattr(sampling, "draw_tokens", lambda probs: shapes.append(probs.shape[1]) or draw(probs))
    drafter = restricted(random_drafter(vocab_size=24, dtype=torch.float32), 3)
    inputs = torch.tensor([[3, 4, 5]])
    options = {"attention_mask": torch.ones_like(inputs), "max_new_tokens": 6, "do_sample": True}
    target.generate(inputs, assistant_model=drafter, temperature=0.8, top_k=2, top_p=0.9, min_p=0.01, **options)
    assert set(shapes) == {3, 24}
