"""
The output distribution is the target's own: every random outcome of drafting, acceptance and replacement is walked, in
float64, and the probabilities of the texts are compared with the target's to 1e-9.
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import HEADS, random_drafter, random_target
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from dspark_hf import DSparkDraftModel, nucleus, processing, sampling, scheduling
from dspark_hf.scheduling import lengths_by_threshold, survivals
from dspark_hf.sequences import Sequences


pytestmark = pytest.mark.usefixtures("no_grad")

PROMPT = [1, 2, 3, 0]
TOLERANCE = 1e-9
# Less than this is a zero that batches of different sizes round differently.
ZERO = 1e-13

Options = Callable[[], dict[str, Any]]
Distribution = dict[tuple[tuple[int, ...], ...], float]


class Path:
    """One run through the tree of choices: a given beginning, then the first branch at every fork."""

    def __init__(self, beginning: list[int]):
        self.beginning, self.taken, self.others, self.probability = beginning, [], [], 1.0

    def choose(self, probs: Sequence[float]) -> int:
        # Numbered among those that are possible, and only where there are several: the column of a token, and whether
        # a coin that is certain is tossed, may depend on the other rows of the batch.
        branches = [branch for branch, probability in enumerate(probs) if probability > ZERO]
        if len(branches) == 1:
            return branches[0]
        number = 0
        if len(self.taken) < len(self.beginning):
            number = self.beginning[len(self.taken)]
            assert number < len(branches), "the tree changed between two visits"
        else:
            self.others += [[*self.taken, other] for other in range(1, len(branches))]
        self.taken.append(number)
        self.probability *= probs[branches[number]] / math.fsum(probs)
        return branches[number]


class Walk:
    """
    Takes the place of the two functions that all randomness goes through, for several walkers in one batch.

    A coin that cannot matter is not tossed: of a draft that was not sent, or behind a rejected one (test_sampling.py
    shows that `Verification` ignores these).
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, width: int):
        self.width = width  # rows of one walker
        self.verify_lengths: Counter[int] = Counter()
        self.accepted: Counter[int] = Counter()
        monkeypatch.setattr(sampling, "draw_tokens", self.draw_tokens)
        monkeypatch.setattr(sampling, "draw_accepts", self.draw_accepts)
        anchors, begin = Sequences.anchors, sampling.Verification.__init__

        def anchors_of(sequences: Sequences, rows: Sequence[int]) -> torch.Tensor:
            self.take(rows)
            return anchors(sequences, rows)

        def begin_with(verification: sampling.Verification, drafts: torch.Tensor, verify_lengths: list[int]) -> None:
            self.sent = verify_lengths
            self.take(self.rows)
            begin(verification, drafts, verify_lengths)

        def counted(verify: Callable[..., sampling.Verdict]) -> Callable[..., sampling.Verdict]:
            def verify_and_count(*args: Any) -> sampling.Verdict:
                verdict = verify(*args)
                self.verify_lengths.update(self.sent)
                self.accepted.update(verdict.accepted.tolist())
                return verdict

            return verify_and_count

        monkeypatch.setattr(Sequences, "anchors", anchors_of)
        monkeypatch.setattr(sampling.Verification, "__init__", begin_with)
        for name in ("sampled", "sampled_by_step"):
            monkeypatch.setattr(sampling.Verification, name, counted(getattr(sampling.Verification, name)))

    def begin(self, beginnings: list[list[int]]) -> list[Path]:
        self.paths = [Path(beginning) for beginning in beginnings]
        self.take(range(len(beginnings) * self.width))
        return self.paths

    def take(self, rows: Sequence[int]) -> None:
        """All of a batch's rows have a token to draw."""
        self.rows = list(rows)
        self.going_on = self.drawing = list(range(len(self.rows)))

    def in_order(self, places: list[int]) -> list[tuple[int, Path]]:
        """Number and path of each of some places in the order of rows: other walkers may have moved a walker's."""
        by_row = sorted(range(len(places)), key=lambda number: self.rows[places[number]])
        return [(number, self.paths[self.rows[places[number]] // self.width]) for number in by_row]

    def draw_tokens(self, probs: torch.Tensor) -> torch.Tensor:
        assert probs.shape[0] == len(self.drawing) and probs.dtype == torch.float64
        tokens = torch.zeros(len(self.drawing), dtype=torch.long)
        for number, path in self.in_order(self.drawing):
            tokens[number] = path.choose(probs[number].tolist())
        self.drawing = self.going_on
        return tokens

    def draw_accepts(self, accept_probs: torch.Tensor) -> torch.Tensor:
        accepts = torch.zeros_like(accept_probs, dtype=torch.bool)
        if accept_probs.dim() == 1:  # one step: those that end here draw their token before the others go on
            for number, path in self.in_order(self.going_on):
                accepts[number] = bool(path.choose([1 - accept_probs[number].item(), accept_probs[number].item()]))
            ended = [place for place, accept in zip(self.going_on, accepts.tolist(), strict=True) if not accept]
            self.going_on = [place for place in self.going_on if place not in ended]
            self.drawing = ended or self.going_on
            return accepts
        for index, path in self.in_order(list(range(len(self.rows)))):
            for slot in range(self.sent[index]):
                accept_prob = accept_probs[index, slot].item()
                if not path.choose([1 - accept_prob, accept_prob]):
                    break
                accepts[index, slot] = True
        return accepts


class StopAfter(StoppingCriteria):
    """
    A limit that the loop does not know beforehand, so that it never shortens a block: which draws there are then does
    not depend on the other walkers in the batch. Finished rows are filled up, as an end token would have it.
    """

    eos_token_id = ()

    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


def after(new_tokens: int, **options: Any) -> Options:
    """Options of `generate` for a walk: sampling from everything, unless the options say otherwise."""

    def make() -> dict[str, Any]:
        made = {name: value() if name == "logits_processor" else value for name, value in options.items()}
        stops = StoppingCriteriaList([StopAfter(len(PROMPT) + new_tokens)])
        return {"do_sample": True, "top_k": 0, "max_new_tokens": 30, "stopping_criteria": stops} | made

    return make


def speculative_distribution(
    target: PreTrainedModel,
    drafter: DSparkDraftModel,
    walk: Walk,
    options: Options,
    prompts: Sequence[Sequence[int]] = (PROMPT,),
    walkers: int = 256,
) -> Distribution:
    """
    The probability of each output of `generate` with the drafter.

    Args:
        prompts: Rows of one walker.
        walkers: How many run in one batch; 1 for processors with a state, or limits that the loop looks ahead to.
    """
    found: Distribution = defaultdict(float)
    open_paths: list[list[int]] = [[]]
    while open_paths:
        now, open_paths = open_paths[-walkers:], open_paths[:-walkers]
        paths = walk.begin(now)
        inputs = torch.tensor(prompts).repeat(len(now), 1)
        mask = torch.ones_like(inputs)
        rows = target.generate(inputs, attention_mask=mask, assistant_model=drafter, **options()).tolist()
        width = len(prompts)
        for number, path in enumerate(paths):
            outputs = rows[number * width : (number + 1) * width]
            found[tuple(tuple(row[len(prompts[0]) :]) for row in outputs)] += path.probability
            open_paths += path.others
    return found


def target_distribution(target: PreTrainedModel, options: Options, prompt: Sequence[int] = PROMPT) -> Distribution:
    """The same for the target alone: token by token, without cache, with the processors that `generate` prepares."""
    prepared: dict[str, Any] = {}

    def prepare(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        prepared.update(processors=logits_processor, stops=stopping_criteria)
        return input_ids

    logits: dict[tuple[int, ...], torch.Tensor] = {}

    def step(tokens: tuple[int, ...]) -> torch.Tensor:
        if tokens not in logits:
            logits[tokens] = target(torch.tensor([tokens])).logits[:, -1]
        return prepared["processors"](torch.tensor([tokens]), logits[tokens].clone())

    def stopped(tokens: tuple[int, ...]) -> bool:
        return len(tokens) > len(prompt) and bool(prepared["stops"](torch.tensor([tokens]), None).all())

    found: Distribution = {}
    growing = [(tuple(prompt), 1.0)]
    while growing:
        tokens, probability = growing.pop()
        inputs = torch.tensor([prompt])
        target.generate(inputs, attention_mask=torch.ones_like(inputs), custom_generate=prepare, **options())
        if stopped(tokens):
            found[(tokens[len(prompt) :],)] = probability
            continue
        for length in range(len(prompt), len(tokens)):  # a processor with a state has to see all of it
            step(tokens[:length])
        probs = step(tokens).softmax(dim=-1)[0].tolist()
        growing += [((*tokens, token), probability * p) for token, p in enumerate(probs) if p > 0]
    return found


def largest_difference(found: Distribution, expected: Distribution) -> float:
    return max(abs(found.get(key, 0.0) - expected.get(key, 0.0)) for key in found.keys() | expected.keys())


def check(found: Distribution, expected: Distribution, walk: Walk) -> None:
    assert math.isclose(math.fsum(expected.values()), 1.0, abs_tol=TOLERANCE)
    assert math.isclose(math.fsum(found.values()), 1.0, abs_tol=TOLERANCE)
    assert largest_difference(found, expected) < TOLERANCE
    assert len(walk.accepted) > 1, "drafts were all accepted or all rejected: nothing was shown"


# Heads, families, thresholds


@pytest.mark.parametrize("head", HEADS)
def test_every_outcome_of_each_head(head, monkeypatch):
    target, walk, options = random_target(), Walk(monkeypatch, width=1), after(3)
    found = speculative_distribution(target, random_drafter(head), walk, options, walkers=512)
    check(found, target_distribution(target, options), walk)
    assert set(walk.accepted) == {0, 1, 2}


@pytest.mark.parametrize("head", HEADS)
def test_alone_in_the_batch_and_under_a_limit_that_shortens_blocks(head, monkeypatch):
    target, walk = random_target("qwen3", seed=3), Walk(monkeypatch, width=1)
    options = after(9, top_k=2, max_new_tokens=3)
    found = speculative_distribution(target, random_drafter(head, seed=4), walk, options, walkers=1)
    check(found, target_distribution(target, options), walk)
    assert set(walk.verify_lengths) == {0, 1}


@pytest.mark.parametrize("threshold", [0.3, 0.7])
@pytest.mark.parametrize("head", HEADS)
def test_thresholds_do_not_show(head, threshold, monkeypatch):
    target, walk = random_target(vocab_size=5, seed=1), Walk(monkeypatch, width=1)
    drafter = random_drafter(head, vocab_size=5, seed=9, block_size=3)
    drafter.confidence_head.proj.bias.fill_(1.0)
    options = after(3, top_k=2, assistant_confidence_threshold=threshold)
    found = speculative_distribution(target, drafter, walk, options)
    check(found, target_distribution(target, options), walk)
    assert len(walk.verify_lengths) > 1, "every block had the same length"


def test_a_longer_text_over_several_rounds(monkeypatch):
    target, walk = random_target("qwen3", vocab_size=6, seed=2), Walk(monkeypatch, width=1)
    options = after(5, top_k=2)
    found = speculative_distribution(target, random_drafter("rnn", vocab_size=6), walk, options, walkers=512)
    check(found, target_distribution(target, options), walk)


def test_a_drafter_that_borrows_embedding_and_head(monkeypatch):
    target, walk, options = random_target(seed=4), Walk(monkeypatch, width=1), after(3, top_k=3)
    drafter = random_drafter("gated", owns_embedding=False, owns_lm_head=False)
    check(speculative_distribution(target, drafter, walk, options), target_distribution(target, options), walk)


@pytest.mark.parametrize("window", [1, 2])
def test_a_context_window_does_not_show(window, monkeypatch):
    target, walk, options = random_target(seed=4), Walk(monkeypatch, width=1), after(5, top_k=2)
    drafter = random_drafter("vanilla", sliding_window=4, layer_types=["sliding_attention"])
    drafter.generation_config.draft_context_window = window
    found = speculative_distribution(target, drafter, walk, options, walkers=512)
    check(found, target_distribution(target, options), walk)


# Processors


class Favour(LogitsProcessor):
    """The user's own, without a state: the token after the last one is likelier."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        favoured = (input_ids[:, -1:] + 1) % scores.shape[1]
        return scores.scatter_add(1, favoured, torch.full_like(scores[:, :1], 1.5))


class FavourInPlace(Favour):
    """The same, written into the scores."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores.copy_(super().__call__(input_ids, scores))
        return scores


class Remember(LogitsProcessor):
    """The user's own, with a state: counts its calls and keeps what it saw, and both change the scores."""

    def __init__(self):
        self.calls, self.seen, self.total = 0, [], torch.zeros(1)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(int(input_ids[0, -1]))
        self.total += self.seen[-1]
        bonus = torch.zeros_like(scores)
        bonus[0, (self.calls + sum(self.seen)) % scores.shape[1]] = 2.0
        bonus[0, 0] = 0.3 * self.total.item()
        return scores + bonus


def only_neighbours(batch_id: int, tokens: torch.Tensor) -> list[int]:
    """Two tokens are allowed after each."""
    last = int(tokens[-1])
    return sorted({(last + 1) % 4, (last + 2) % 4})


PROCESSORS = {
    "temperature": {"temperature": 0.6},
    "high temperature": {"temperature": 3.0, "top_k": 3},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "temperature, top_k and top_p": {"temperature": 0.7, "top_k": 3, "top_p": 0.9},
    "min_p": {"min_p": 0.15},
    "typical_p": {"typical_p": 0.7},
    "epsilon": {"epsilon_cutoff": 0.05, "top_k": 3},
    "repetition_penalty": {"repetition_penalty": 1.8, "top_k": 3},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2, "top_k": 3},
    "bad_words": {"bad_words_ids": [[2], [3, 1]]},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": only_neighbours},
    "the user's": {"logits_processor": lambda: LogitsProcessorList([Favour()]), "top_k": 3},
    "the user's, in place": {"logits_processor": lambda: LogitsProcessorList([FavourInPlace()]), "top_k": 3},
    "all together": {
        "logits_processor": lambda: LogitsProcessorList([Favour()]),
        "temperature": 1.7,
        "top_p": 0.95,
        "min_p": 0.02,
        "top_k": 3,
        "repetition_penalty": 1.2,
        "bad_words_ids": [[0, 1]],
    },
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_processors(name, monkeypatch):
    target, walk, options = random_target(seed=2), Walk(monkeypatch, width=1), after(3, **PROCESSORS[name])
    found = speculative_distribution(target, random_drafter("vanilla", seed=6), walk, options)
    check(found, target_distribution(target, options), walk)


def test_nuclei_that_most_tokens_are_not_looked_at_for(monkeypatch):
    monkeypatch.setattr(nucleus, "_FIRST_LOOK", 2)
    found_nuclei, sizes = nucleus.find_nuclei, Counter()

    def find(*args):
        scores, tokens = found_nuclei(*args)
        sizes[tokens is None] += 1
        return scores, tokens

    monkeypatch.setattr(processing, "find_nuclei", find)
    target, walk = random_target(vocab_size=6, seed=2), Walk(monkeypatch, width=1)
    options = after(3, temperature=1.0, top_p=0.75)
    found = speculative_distribution(target, random_drafter("vanilla", vocab_size=6, seed=6), walk, options, walkers=4)
    check(found, target_distribution(target, options), walk)
    assert sizes[True] and sizes[False]


@pytest.mark.parametrize("threshold", [0.0, 0.4])
@pytest.mark.parametrize("head", ["none", "rnn"])
def test_a_users_processor_with_a_state(head, threshold, monkeypatch):
    target, walk = random_target(seed=2), Walk(monkeypatch, width=1)
    options = after(
        9,
        max_new_tokens=3,
        top_k=2,
        assistant_confidence_threshold=threshold,
        logits_processor=lambda: LogitsProcessorList([Remember()]),
    )
    found = speculative_distribution(target, random_drafter(head, seed=6), walk, options, walkers=1)
    check(found, target_distribution(target, options), walk)


# End tokens and several rows


@pytest.mark.parametrize("ends", [3, [0, 2]])
def test_end_tokens_inside_a_block(ends, monkeypatch):
    target, walk = random_target(seed=1), Walk(monkeypatch, width=1)
    options = after(3, eos_token_id=ends, pad_token_id=0, top_k=3)
    found: Distribution = defaultdict(float)
    for (row,), probability in speculative_distribution(target, random_drafter("rnn"), walk, options).items():
        ended = next((place for place, token in enumerate(row) if token in torch.tensor(ends)), len(row)) + 1
        assert all(token == 0 for token in row[ended:])
        found[(row[:ended],)] += probability
    expected = target_distribution(target, options)
    assert any(len(row) < 3 for (row,) in expected)
    check(found, expected, walk)


def test_rows_of_a_batch_are_independent(monkeypatch):
    target, walk = random_target(seed=1), Walk(monkeypatch, width=2)
    drafter = random_drafter("gated", seed=5, block_size=2)
    prompts = [PROMPT, [3, 3, 1, 2]]
    options = after(3, top_k=2, assistant_confidence_threshold=0.3)
    found = speculative_distribution(target, drafter, walk, options, prompts, walkers=128)
    rows = [target_distribution(target, options, prompt) for prompt in prompts]
    pairs = itertools.product(rows[0].items(), rows[1].items())
    check(found, {(*first, *second): p * q for (first, p), (second, q) in pairs}, walk)


def test_rows_without_an_end_token_go_on_until_all_are_finished(monkeypatch):
    class StopOn(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return (input_ids[:, -1] == 3) | (input_ids.shape[1] >= len(PROMPT) + 3)

    target, walk = random_target(seed=1), Walk(monkeypatch, width=2)
    prompts = [PROMPT, [3, 3, 1, 2]]

    def allowed(batch_id: int, tokens: torch.Tensor) -> list[int]:  # the second row never stops early
        return [0, 1, 2, 3] if batch_id == 0 else [1]

    options = after(30, top_k=2, prefix_allowed_tokens_fn=allowed, stopping_criteria=StoppingCriteriaList([StopOn()]))
    found = speculative_distribution(target, random_drafter("vanilla"), walk, options, prompts, walkers=1)
    expected = {
        (first, (1, 1, 1)): probability
        for (first,), probability in target_distribution(target, after(3, top_k=2)).items()
    }
    assert any(3 in first[:-1] for first, _ in expected)
    check(found, expected, walk)


# Looking ahead


def test_a_scheduler_that_looks_ahead_is_found_out(monkeypatch):
    """The same check fails once whether slot 1 is sent depends on the confidence of slot 2, which knows token 1."""

    def retrospective(rows, threshold):
        return [len(row) if row[-1] >= threshold else 0 for row in rows]

    target = random_target(seed=1)
    drafter = random_drafter("vanilla", seed=4)
    drafter.confidence_head.proj.bias.fill_(1.0)
    options = after(3, assistant_confidence_threshold=0.3, top_k=3)
    expected = target_distribution(target, options)
    walk = Walk(monkeypatch, width=1)
    assert largest_difference(speculative_distribution(target, drafter, walk, options), expected) < TOLERANCE
    monkeypatch.setattr(scheduling, "lengths_by_threshold", retrospective)
    found = speculative_distribution(target, drafter, walk, options)
    assert math.isclose(math.fsum(found.values()), 1.0, abs_tol=TOLERANCE)
    assert largest_difference(found, expected) > 1e-3


def test_a_draft_distribution_that_was_not_drawn_from_is_found_out(monkeypatch):
    """The same check fails if the ratio uses the drafter's distribution in half precision."""
    target, walk, options = random_target(), Walk(monkeypatch, width=1), after(3, top_k=3)
    sampled = sampling.Verification.sampled_by_step

    def rounded(self, target_law, draft_probs, *args):
        return sampled(self, target_law, draft_probs.bfloat16().double(), *args)

    monkeypatch.setattr(sampling.Verification, "sampled_by_step", rounded)
    found = speculative_distribution(target, random_drafter("rnn"), walk, options)
    assert largest_difference(found, target_distribution(target, options)) > 1e-6


def appendix_a(verify_length_of: Callable[[int], int]) -> float:
    """
    The probability of token A (0) when the target says 0.7, the drafter 0.5, and the length depends on the draft.

    Source: DSpark (arXiv 2607.05147) Appendix A.
    """
    target_probs, draft_probs = torch.tensor([[0.7, 0.3], [0.5, 0.5]], dtype=torch.float64)
    of_a = 0.0
    for draft in (0, 1):
        if verify_length_of(draft) == 0:
            of_a += 0.5 * target_probs[0].item()
            continue
        accept_prob = min(1.0, (target_probs[draft] / draft_probs[draft]).item())
        replaced = sampling.residual(target_probs, draft_probs)[0].item()
        of_a += 0.5 * (accept_prob * (draft == 0) + (1 - accept_prob) * replaced)
    return of_a


def test_the_counterexample_of_appendix_a():
    speed = {1: 1.0, 2: 0.5, 3: 0.45}
    survival = {1: 0.8}

    def throughput(length: int, second: float) -> float:
        return (1 + sum(list([survival[1], second])[:length])) * speed[length + 1]

    def looks_ahead(draft: int) -> int:  # the second slot's confidence is 0.9 after A, 0 after B
        second = survival[1] * (0.9, 0.0)[draft]
        return max((0, 1, 2), key=lambda length: throughput(length, second))

    assert [looks_ahead(draft) for draft in (0, 1)] == [2, 0]
    assert math.isclose(appendix_a(looks_ahead), 0.85)
    assert math.isclose(appendix_a(lambda draft: 0), 0.7)
    assert math.isclose(appendix_a(lambda draft: 1), 0.7)
    # Our rule on the same confidences, at any threshold, decides on slot 1 without the second slot.
    for threshold in (0.0, 0.5, 0.8, 0.81, 1.0):
        lengths = [lengths_by_threshold([survivals([0.8, second])], threshold)[0] for second in (0.9, 0.0)]
        assert len({min(length, 1) for length in lengths}) == 1
        assert math.isclose(appendix_a(lambda draft, lengths=lengths: lengths[draft]), 0.7)


unit = st.floats(0, 1)


@settings(deadline=None, derandomize=True)
@given(st.lists(unit, min_size=1, max_size=8), st.lists(unit, max_size=8), unit, st.data())
def test_whether_a_slot_is_sent_does_not_depend_on_later_confidences(confidences, others, threshold, data):
    slot = data.draw(st.integers(1, len(confidences)))
    changed = confidences[:slot] + others
    first, second = lengths_by_threshold([survivals(confidences), survivals(changed)], threshold)
    assert (first >= slot) == (second >= slot)
    assert min(first, slot) == min(second, slot)


# End to end, with real randomness


@pytest.mark.parametrize("head", ["vanilla", "rnn"])
def test_chi_square_of_sampled_texts(head):
    target, drafter = random_target(seed=1), random_drafter(head, seed=5, block_size=3)
    options = after(3, temperature=1.0)
    expected = target_distribution(target, options)
    torch.manual_seed(0)
    counts: Counter[tuple[int, ...]] = Counter()
    inputs = torch.tensor([PROMPT])
    for _ in range(4):
        rows = target.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            assistant_model=drafter,
            num_return_sequences=1000,
            **options(),
        )
        counts.update(map(tuple, rows[:, len(PROMPT) :].tolist()))
    total = sum(counts.values())
    # Texts that are expected less than five times are counted together.
    rare = [key for key, probability in expected.items() if total * probability < 5]
    cells = [([key], total * p) for key, p in expected.items() if total * p >= 5]
    cells.append((rare, total * math.fsum(expected[key] for key in rare)))
    statistic = sum((sum(counts[k] for (k,) in keys) - wanted) ** 2 / wanted for keys, wanted in cells)
    freedom = len(cells) - 1
    # Wilson and Hilferty's approximation of the 0.999 quantile.
    quantile = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
    assert total == 4000 and freedom > 20
    assert statistic < quantile
    assert 0 < drafter.speculative_stats.draft_acceptance_rate < 1
