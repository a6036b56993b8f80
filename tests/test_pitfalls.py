"""What has gone wrong elsewhere, one test each: paraphrased from public issue threads about speculative decoding."""

import copy
import inspect
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from conftest import DEEPSPEC, FIXTURES, load_drafter, load_golden
from tiny import encode, oracle, random_drafter, random_target
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from dspark_hf import candidate_generator, sampling
from dspark_hf.candidate_generator import DSparkCandidateGenerator
from dspark_hf.compat import CACHE_NAME
from dspark_hf.sampling import Verification


pytestmark = pytest.mark.usefixtures("no_grad")

LONG = "Tom has 5 apples and buys 3 more. How many"
SHORT = "The quick"
drafter_of = cache(load_drafter)


def generate(target: PreTrainedModel, inputs: dict[str, torch.Tensor], **options: Any) -> Any:
    return target.generate(**inputs, **{"do_sample": False, "max_new_tokens": 24, "eos_token_id": None} | options)


def other_target(target: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """A target of the same shape that says something else."""
    other, generator = copy.deepcopy(target), torch.Generator().manual_seed(seed)
    for weight in other.parameters():
        weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
    return other


@pytest.fixture
def candidates_seen(monkeypatch) -> list[candidate_generator.Candidates]:
    """Every block that is drafted."""
    seen, original = [], DSparkCandidateGenerator.get_candidates

    def get_candidates(self, *args):
        seen.append(original(self, *args))
        return seen[-1]

    monkeypatch.setattr(DSparkCandidateGenerator, "get_candidates", get_candidates)
    return seen


# Commit boundary


def test_an_end_token_accepted_inside_a_block_ends_the_text(tiny_target, monkeypatch):
    inputs, drafter = encode(LONG), drafter_of("deepspec-vanilla")
    whole = generate(tiny_target, inputs)
    length = inputs["input_ids"].shape[1]
    oracle(monkeypatch, whole, "everything")
    end = int(whole[0, length + 3])
    ours = generate(tiny_target, inputs, assistant_model=drafter, eos_token_id=end, pad_token_id=95)
    assert ours.tolist() == whole[:, : length + 4].tolist()
    assert drafter.speculative_stats.accepted > 2


def test_a_criterion_that_stops_at_five_tokens_stops_at_five_tokens(tiny_target, monkeypatch):
    class Five(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.tensor([input_ids.shape[1] == length + 5])

    inputs = encode(LONG)
    length = inputs["input_ids"].shape[1]
    oracle(monkeypatch, generate(tiny_target, inputs), "everything")
    options = {"stopping_criteria": StoppingCriteriaList([Five()]), "assistant_model": drafter_of("deepspec-vanilla")}
    assert generate(tiny_target, inputs, max_new_tokens=30, **options).shape[1] == length + 5


def test_nothing_is_said_twice_after_a_fully_accepted_round(tiny_target, monkeypatch):
    inputs, drafter = encode(LONG), drafter_of("deepspec-vanilla")
    whole = generate(tiny_target, inputs, max_new_tokens=1 + 3 * 8)
    oracle(monkeypatch, whole, "everything")
    assert generate(tiny_target, inputs, max_new_tokens=25, assistant_model=drafter).tolist() == whole.tolist()
    assert (drafter.speculative_stats.rounds, drafter.speculative_stats.accepted) == (3, 21)


def test_a_draft_is_never_longer_than_what_may_come(tiny_target, monkeypatch):
    """A static cache has no room for more."""
    inputs, sent = encode(LONG), []
    original = Verification.__init__

    def record(self, drafts, verify_lengths):
        sent.append(list(verify_lengths))
        original(self, drafts, verify_lengths)

    whole = generate(tiny_target, inputs)
    oracle(monkeypatch, whole, "everything")
    monkeypatch.setattr(Verification, "__init__", record)
    drafter = drafter_of("deepspec-vanilla")
    generate(tiny_target, inputs, max_new_tokens=12, cache_implementation="static", assistant_model=drafter)
    assert sent == [[7], [2]]
    sent.clear()
    generate(tiny_target, inputs, max_new_tokens=10, assistant_model=drafter)
    assert sent == [[7], [0]]


# What the draft was drawn from


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_tensor_drawn_from_is_the_one_in_the_ratio(dtype, tiny_target, monkeypatch, candidates_seen):
    target, drafter = copy.deepcopy(tiny_target).to(dtype), load_drafter("deepspec-gated").to(dtype)
    drawn, ratios = [], []
    draw_tokens, sampled = sampling.draw_tokens, Verification.sampled_by_step

    def record_draw(probs):
        drawn.append(probs.clone())
        return draw_tokens(probs)

    def record_ratio(self, target_law, draft_probs, *args):
        target_probs = []

        def record_law(places):
            target_probs.append(target_law(places))
            return target_probs[-1]

        ratios.append((target_probs, draft_probs.clone()))
        return sampled(self, record_law, draft_probs, *args)

    monkeypatch.setattr(sampling, "draw_tokens", record_draw)
    monkeypatch.setattr(Verification, "sampled_by_step", record_ratio)
    torch.manual_seed(0)
    options = {"do_sample": True, "top_k": 5, "temperature": 0.8, "assistant_model": drafter}
    generate(target, encode(LONG), max_new_tokens=12, **options)
    # The first token, then for each round a draw a slot and one for the target's own token.
    blocks, start = [], 1
    for seen in candidates_seen:
        slots = seen.tokens.shape[1]
        blocks.append(torch.stack(drawn[start : start + slots], dim=1))
        start += slots + 1
    assert len(drawn) - start in (0, 1) and len(blocks) >= 2  # a last round may have no room for drafts
    for (target_probs, draft_probs), block, candidates in zip(ratios, blocks, candidates_seen, strict=False):
        target_probs = torch.cat([probs for probs, ids in target_probs if ids is None])
        assert draft_probs.dtype == target_probs.dtype == torch.float32
        assert torch.equal(draft_probs, block) and torch.equal(draft_probs, candidates.draft_probs)
        for probs in (draft_probs, target_probs):  # a few more than five where bfloat16 logits are equal
            assert (probs > 0).sum(dim=-1).max() <= (5 if dtype == torch.float32 else 10)


def test_a_greedy_draft_is_not_drawn_and_has_no_distribution(tiny_target, monkeypatch, candidates_seen):
    def fail(*args):
        raise AssertionError("greedy decoding drew something")

    for name in ("draw_tokens", "draw_accepts"):
        monkeypatch.setattr(sampling, name, fail)
    for name in ("sampled", "sampled_by_step"):
        monkeypatch.setattr(Verification, name, fail)
    state = torch.random.get_rng_state()
    generate(tiny_target, encode(LONG), assistant_model=drafter_of("deepspec-vanilla"))
    assert torch.equal(state, torch.random.get_rng_state())
    assert candidates_seen and all(candidates.draft_probs is None for candidates in candidates_seen)


def test_acceptance_at_a_temperature_does_not_look_at_argmaxes(tiny_target, monkeypatch):
    def fail(*args):
        raise AssertionError("sampling compared argmaxes")

    monkeypatch.setattr(Verification, "greedy", fail)
    torch.manual_seed(0)
    options = {"do_sample": True, "temperature": 1.5, "assistant_model": drafter_of("deepspec-vanilla")}
    generate(tiny_target, encode(LONG), **options)


def test_a_drafter_that_agrees_exactly_leaves_no_residual(monkeypatch):
    probs = torch.tensor([0.5, 0.25, 0.25, 0.0])
    monkeypatch.setattr(
        sampling, "draw_accepts", lambda accept_probs: torch.zeros_like(accept_probs, dtype=torch.bool)
    )
    verdict = Verification(torch.tensor([[0, 1]]), [2]).sampled(probs.repeat(3, 1), probs.repeat(1, 2, 1))
    assert verdict.accepted.item() == 0 and verdict.tokens[0, 0].item() in (0, 1, 2)


def test_no_candidates_at_all(tiny_target):
    """A threshold that nothing reaches sends no draft; sampling and greedy decoding go on alone."""
    inputs, drafter = encode(LONG, SHORT), drafter_of("deepspec-vanilla")
    plain = generate(tiny_target, inputs)
    ours = generate(tiny_target, inputs, assistant_model=drafter, assistant_confidence_threshold=1.0)
    assert ours.tolist() == plain.tolist() and drafter.speculative_stats.verified == 0
    torch.manual_seed(0)
    options = {"do_sample": True, "assistant_confidence_threshold": 1.0, "assistant_model": drafter}
    assert generate(tiny_target, inputs, **options).shape == plain.shape


# Processors


def test_a_penalty_counts_inside_a_block(tiny_target, monkeypatch):
    """With a penalty that forbids every repetition nothing is said twice, though whole blocks are accepted."""
    inputs, options = encode(SHORT), {"repetition_penalty": 1e6}
    whole = generate(tiny_target, inputs, **options)
    oracle(monkeypatch, whole, "everything")
    drafter = drafter_of("deepspec-vanilla")
    ours = generate(tiny_target, inputs, assistant_model=drafter, **options)
    assert ours.tolist() == whole.tolist()
    assert drafter.speculative_stats.mean_acceptance_length > 5
    said = ours[0, inputs["input_ids"].shape[1] :].tolist()
    assert len(set(said)) == len(said)


@pytest.mark.parametrize("prompts", [(LONG,), (LONG, SHORT)])
@pytest.mark.parametrize("do_sample", [False, True])
def test_processors_see_two_dimensions_and_one_position(do_sample, prompts, tiny_target):
    class Check(LogitsProcessor):
        def __call__(self, input_ids, scores):
            assert input_ids.shape[0] == scores.shape[0] == 1 and scores.shape[1] == 96
            assert input_ids.ndim == scores.ndim == 2 and scores.dtype == torch.float32
            assert input_ids.shape[1] >= len(LONG)
            return scores

    options = {"logits_processor": LogitsProcessorList([Check()]), "assistant_model": drafter_of("deepspec-rnn")}
    generate(tiny_target, encode(*prompts), do_sample=do_sample, **options)


@pytest.mark.parametrize("do_sample", [False, True])
def test_the_drafter_is_under_the_processors_too(do_sample, tiny_target):
    """Where a constraint leaves one token, the drafter drafts it: it loses nothing to rules it does not know."""

    def alphabet(batch_id: int, tokens: torch.Tensor) -> list[int]:
        return [(int(tokens[-1]) + 1) % 96]

    drafter = drafter_of("deepspec-vanilla")
    options = {"prefix_allowed_tokens_fn": alphabet, "assistant_model": drafter, "do_sample": do_sample}
    ours = generate(tiny_target, encode(LONG), max_new_tokens=25, **options)
    assert (ours[0, -25:].diff() % 96).tolist() == [1] * 24
    assert drafter.speculative_stats.mean_acceptance_length == 8


def test_a_constraint_is_not_asked_about_what_comes_after_the_end(tiny_target, monkeypatch):
    """A function that knows no continuation after the end token: plain generation never asks for one."""
    inputs = encode(LONG)
    length = inputs["input_ids"].shape[1]
    text = generate(tiny_target, inputs)[0, length:].tolist()
    end = next(token for place, token in enumerate(text) if place > 2 and token not in text[:place])
    allowed = {tuple(text[:place]): [text[place], (text[place] + 1) % 96] for place in range(text.index(end) + 1)}
    asked: list[tuple[int, ...]] = []

    def follow(batch_id: int, tokens: torch.Tensor) -> list[int]:
        asked.append(tuple(tokens[length:].tolist()))
        said = asked[-1]
        return allowed.get(said) or ([1] if not said or end not in said else allowed[said])

    class FollowToo(LogitsProcessor):
        def __call__(self, input_ids, scores):
            assert end not in input_ids[0, length:].tolist()
            return scores

    options = {"prefix_allowed_tokens_fn": follow, "eos_token_id": end, "pad_token_id": 95}
    options["logits_processor"] = LogitsProcessorList([FollowToo()])
    plain = generate(tiny_target, inputs, **options)
    for pattern in ("everything", "alternately"):
        with monkeypatch.context() as patch:
            oracle(patch, torch.tensor([inputs["input_ids"][0].tolist() + text]), pattern)
            ours = generate(tiny_target, inputs, assistant_model=drafter_of("deepspec-vanilla"), **options)
        assert ours.tolist() == plain.tolist() and ours[0, -1] == end
    assert not any(end in said for said in asked)


def test_a_users_processor_is_left_as_plain_generation_leaves_it(tiny_target, monkeypatch):
    """Its own objects included: a list that somebody else holds has what was generated, and no drafts."""

    class Count(LogitsProcessor):
        def __init__(self, log: list[int]):
            self.log, self.calls, self.last = log, 0, None

        def __call__(self, input_ids, scores):
            self.calls += 1
            self.log.append(int(input_ids[0, -1]))
            self.last = {"row": input_ids[0].tolist()}
            scores[:, self.log[-1]] -= 3.0
            return scores

    inputs, logs, processors, texts = encode(LONG), ([], []), [], []
    for log, drafter in zip(logs, (None, drafter_of("deepspec-vanilla")), strict=True):
        processors.append(Count(log))
        if drafter is not None:
            oracle(monkeypatch, torch.tensor(texts[0]), "alternately")
        options = {"logits_processor": LogitsProcessorList([processors[-1]]), "assistant_model": drafter}
        texts.append(generate(tiny_target, inputs, **options).tolist())
    assert texts[0] == texts[1]
    assert logs[0] == logs[1] and len(logs[0]) == 24
    assert vars(processors[0]) == vars(processors[1])


def test_a_users_processor_may_keep_what_it_was_given(tiny_target, monkeypatch):
    """At each call it finds the text of the call before and one token more."""

    class Follow(LogitsProcessor):
        before: torch.Tensor | None = None

        def __call__(self, input_ids, scores):
            if self.before is not None:
                assert torch.equal(input_ids[:, :-1], self.before)
            self.before = input_ids
            return scores.scatter_add(1, input_ids[:, -2:-1], torch.full_like(scores[:, :1], -2.0))

    inputs = encode(LONG)
    plain = generate(tiny_target, inputs, logits_processor=LogitsProcessorList([Follow()]))
    oracle(monkeypatch, plain, "alternately")
    follow = Follow()
    options = {"logits_processor": LogitsProcessorList([follow]), "assistant_model": drafter_of("deepspec-rnn")}
    assert generate(tiny_target, inputs, **options).tolist() == plain.tolist()
    assert torch.equal(follow.before, plain[:, :-1])


# Cache and state


def test_a_cache_that_comes_back_is_right_token_for_token(tiny_target):
    """Stock assisted generation gets six of eight tokens wrong here."""
    inputs, drafter = encode(LONG), drafter_of("deepspec-vanilla")
    whole = generate(tiny_target, inputs, max_new_tokens=40)
    cache = DynamicCache(config=tiny_target.config)
    tokens = inputs["input_ids"]
    for _ in range(5):
        step = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        tokens = generate(tiny_target, step, max_new_tokens=8, assistant_model=drafter, **{CACHE_NAME: cache})
        assert cache.get_seq_length() == tokens.shape[1] - 1
    assert tokens.tolist() == whole.tolist()


def test_a_prefix_from_a_cache_is_a_cold_start_at_the_true_positions(tiny_target, monkeypatch):
    inputs = encode(LONG)
    starts = []
    original = candidate_generator.DraftContext

    def record(config, positions, **options):
        starts.append(list(positions))
        return original(config, positions, **options)

    monkeypatch.setattr(candidate_generator, "DraftContext", record)
    cache = DynamicCache(config=tiny_target.config)
    tiny_target(inputs["input_ids"][:, :30], use_cache=True, **{CACHE_NAME: cache})
    drafter = drafter_of("deepspec-vanilla")
    ours = generate(tiny_target, inputs, assistant_model=drafter, **{CACHE_NAME: cache})
    assert ours.tolist() == generate(tiny_target, inputs).tolist()
    assert starts == [[30]]
    assert drafter.speculative_stats.accepted > 0


def test_a_short_prompt_after_a_long_one(tiny_target):
    drafter = load_drafter("deepspec-vanilla")
    fresh = generate(tiny_target, encode(SHORT), assistant_model=load_drafter("deepspec-vanilla")).tolist()
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    attributes = set(vars(drafter))
    generate(tiny_target, encode(LONG * 4), assistant_model=drafter)
    assert generate(tiny_target, encode(SHORT), assistant_model=drafter).tolist() == fresh
    assert all(torch.equal(value, before[name]) for name, value in drafter.state_dict().items())
    assert set(vars(drafter)) == attributes


def test_two_targets_in_turn_with_one_drafter(tiny_target):
    targets, drafter = (tiny_target, other_target(tiny_target)), drafter_of("deepspec-rnn")
    inputs = encode(LONG, SHORT)
    texts = [generate(target, inputs).tolist() for target in targets]
    assert texts[0] != texts[1]
    for _ in range(2):
        for target, text in zip(targets, texts, strict=True):
            assert generate(target, inputs, assistant_model=drafter).tolist() == text


class _Fails(Exception):
    pass


def _fail_in_a_criterion(target: PreTrainedModel) -> tuple[dict[str, Any], Callable]:
    class Criterion(StoppingCriteria):
        calls = 0

        def __call__(self, input_ids, scores, **kwargs):
            self.calls += 1
            if self.calls == 9:
                raise _Fails
            return torch.zeros(len(input_ids), dtype=torch.bool)

    return {"stopping_criteria": StoppingCriteriaList([Criterion()])}, lambda: None


def _fail_in_a_processor(target: PreTrainedModel) -> tuple[dict[str, Any], Callable]:
    class Processor(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] > len(LONG) + 9:
                raise _Fails
            return scores

    return {"logits_processor": LogitsProcessorList([Processor()])}, lambda: None


def _fail_in_the_target(target: PreTrainedModel) -> tuple[dict[str, Any], Callable]:
    calls = []

    def fail(*args):
        calls.append(1)
        if len(calls) == 4:
            raise _Fails

    hook = target.model.layers[3].self_attn.register_forward_pre_hook(fail)
    return {}, hook.remove


def _fail_in_the_prefill(target: PreTrainedModel) -> tuple[dict[str, Any], Callable]:
    def fail(*args):
        raise _Fails

    hook = target.model.layers[3].register_forward_pre_hook(fail)
    return {}, hook.remove


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(
    "cause", [_fail_in_a_criterion, _fail_in_a_processor, _fail_in_the_target, _fail_in_the_prefill]
)
def test_an_exception_in_between(cause, rows, tiny_target):
    inputs, drafter = encode(*[LONG, SHORT][:rows]), load_drafter("deepspec-vanilla")
    expected = generate(tiny_target, inputs).tolist()
    attention, forward_hooks = tiny_target.config._attn_implementation, dict(tiny_target._forward_hooks)
    options, undo = cause(tiny_target)
    with pytest.raises(_Fails):
        generate(tiny_target, inputs, assistant_model=drafter, **options)
    undo()
    assert tiny_target.config._attn_implementation == attention
    assert dict(tiny_target._forward_hooks) == forward_hooks
    assert generate(tiny_target, inputs).tolist() == expected
    assert generate(tiny_target, inputs, assistant_model=drafter).tolist() == expected
    # Another thread is not locked out either.
    texts: list[Any] = []
    thread = threading.Thread(target=lambda: texts.append(generate(tiny_target, inputs, assistant_model=drafter)))
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive() and texts[0].tolist() == expected


def run_together(*jobs: Callable[[], Any], times: int = 3) -> list[list[Any]]:
    """The results of each job, run several times in a thread of its own beside the others."""
    results: list[list[Any]] = [[] for _ in jobs]
    errors: list[BaseException] = []
    gate = threading.Barrier(len(jobs))

    def work(job: Callable[[], Any], found: list[Any]) -> None:
        try:
            gate.wait()
            for _ in range(times):
                with torch.no_grad():
                    found.append(job())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(jobs, results, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    if errors:
        raise errors[0]
    return results


def test_two_threads_with_one_drafter_and_two_targets(tiny_target):
    targets, drafter = (tiny_target, other_target(tiny_target)), drafter_of("deepspec-vanilla")
    inputs = (encode(LONG, SHORT), encode(SHORT))

    def job(number: int) -> tuple[list, int]:
        text = generate(targets[number], inputs[number], assistant_model=drafter).tolist()
        return text, drafter.speculative_stats.rounds

    alone = [job(number) for number in (0, 1)]
    assert [text for text, _ in alone] == [generate(t, i).tolist() for t, i in zip(targets, inputs, strict=True)]
    for number, results in enumerate(run_together(lambda: job(0), lambda: job(1))):
        assert results == [alone[number]] * 3  # text and statistics of this thread's own call


def test_two_threads_with_one_target_while_a_third_generates_without_a_drafter(tiny_target):
    drafters = (drafter_of("deepspec-vanilla"), drafter_of("deepspec-rnn"))
    inputs = (encode(LONG, SHORT), encode(SHORT), encode(LONG))
    expected = [generate(tiny_target, each).tolist() for each in inputs]

    def job(number: int, **options: Any) -> list:
        return generate(tiny_target, inputs[number], **options).tolist()

    results = run_together(
        lambda: job(0, assistant_model=drafters[0]),
        lambda: job(1, assistant_model=drafters[1]),
        lambda: job(2),
    )
    for text, found in zip(expected, results, strict=True):
        assert found == [text] * 3
    assert tiny_target.config._attn_implementation == "sdpa"


# Alignment


def golden_rounds(folder: str) -> list[tuple[list[int], list[int], int]]:
    """Prompt, text and number of rounds of each reference decode that verifies whole blocks."""
    decodes = load_golden(folder)[0]["decodes"]
    whole = [decode for decode in decodes if decode.get("threshold", 0) == 0]
    return [(decode["prompt_ids"], decode["output_ids"], len(decode["acceptance_lengths"])) for decode in whole]


def rounds_of(folder: str, target: PreTrainedModel, **config: Any) -> list[tuple[list[int], int]]:
    """Text and number of rounds of our own decodes; `config` changes the drafter's."""
    drafter, found = load_drafter(folder), []
    for name, value in config.items():
        setattr(drafter.config, name, value)
    for prompt, text, _ in golden_rounds(folder):
        inputs = {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt)).long()}
        options = {"max_new_tokens": len(text) - len(prompt), "assistant_model": drafter}
        ours = generate(target, inputs, **options)
        found.append((ours[0].tolist(), drafter.speculative_stats.rounds))
    return found


def target_of(folder: str, tiny_target: PreTrainedModel) -> PreTrainedModel:
    own = FIXTURES / folder / "target"
    return AutoModelForCausalLM.from_pretrained(own) if own.exists() else tiny_target


@pytest.mark.parametrize("folder", DEEPSPEC)
def test_acceptance_does_not_fall_below_the_references(folder, tiny_target):
    found = rounds_of(folder, target_of(folder, tiny_target))
    for (_, text, most), (ours, rounds) in zip(golden_rounds(folder), found, strict=True):
        assert ours == text
        # DeepSpec drafts past the length limit, which may take it one round more.
        assert most - 1 <= rounds <= most


def test_taps_off_by_one_are_what_the_floor_catches(tiny_target):
    found = rounds_of("deepspec-vanilla", tiny_target, target_layer_ids=[0, 1, 3])
    golden = golden_rounds("deepspec-vanilla")
    assert [text for text, _ in found] == [text for _, text, _ in golden]
    assert any(rounds > most for (_, rounds), (_, _, most) in zip(found, golden, strict=True))


# Batches and devices


def test_only_the_tapped_layers_are_kept(tiny_target, monkeypatch):
    requests, forward = [], type(tiny_target).forward

    def record(self, *args, **kwargs):
        requests.append(kwargs.get("output_hidden_states"))
        return forward(self, *args, **kwargs)

    record.__signature__ = inspect.signature(forward)
    monkeypatch.setattr(type(tiny_target), "forward", record)
    drafter = drafter_of("deepspec-vanilla")
    generate(tiny_target, encode(LONG), assistant_model=drafter)
    assert len(requests) > 3
    assert all(isinstance(request, list) and len(request) == 3 for request in requests)


# Confidence


def test_the_threshold_is_on_the_cumulative_product(tiny_target, monkeypatch):
    """Confidences of 0.8 each: survival is 0.8, 0.64, 0.51, 0.41 and so on."""
    drafter = load_drafter("deepspec-vanilla")
    drafter.confidence_head.proj.weight.zero_()
    drafter.confidence_head.proj.bias.fill_(float(torch.logit(torch.tensor(0.8))))
    whole = generate(tiny_target, encode(LONG))
    oracle(monkeypatch, whole, "everything")
    for threshold, length in ((0.85, 0), (0.7, 1), (0.6, 2), (0.5, 3), (0.4, 4), (0.01, 7)):
        drafter.generation_config.assistant_confidence_threshold = threshold
        assert generate(tiny_target, encode(LONG), assistant_model=drafter).tolist() == whole.tolist()
        longest = len(drafter.speculative_stats.sent_by_position)
        assert longest == length


def test_what_is_cut_is_not_verified(tiny_target, monkeypatch):
    """The target's forward passes get the anchor and the drafts that were sent, no more."""
    widths, forward = [], type(tiny_target).forward

    def record(self, *args, **kwargs):
        widths.append(kwargs["input_ids"].shape[1])
        return forward(self, *args, **kwargs)

    record.__signature__ = inspect.signature(forward)
    monkeypatch.setattr(type(tiny_target), "forward", record)
    drafter = drafter_of("deepspec-vanilla")
    for options in ({}, {"assistant_confidence_threshold": 0.3}):
        widths.clear()
        generate(tiny_target, encode(LONG, SHORT), assistant_model=drafter, **options)
        stats = drafter.speculative_stats
        assert sum(widths[1:]) == stats.verified + stats.rounds
    assert stats.verified < stats.drafted / 2


# Statistics and seeds


@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"assistant_confidence_threshold": 0.3}])
@pytest.mark.parametrize("prompts", [(LONG,), (LONG, SHORT, "A")])
def test_statistics_add_up(prompts, options, tiny_target):
    drafter, rows = drafter_of("deepspec-vanilla"), len(prompts)
    torch.manual_seed(3)
    output = generate(tiny_target, encode(*prompts), assistant_model=drafter, return_dict_in_generate=True, **options)
    stats = output.speculative_stats
    assert stats is drafter.speculative_stats and len(stats.rows) == rows
    for part, generated in [(row, 24) for row in stats.rows] + [(stats, 24 * rows)]:
        first = generated // 24  # each row's first token comes from the prompt
        assert part.rounds + part.accepted == generated - first
        assert part.accepted == sum(part.accepted_by_position) <= sum(part.sent_by_position) <= part.verified
        assert part.verified <= part.drafted <= 7 * part.rounds
        assert part.mean_acceptance_length == pytest.approx((generated - first) / part.rounds)
        pairs = zip(part.sent_by_position[1:], part.accepted_by_position, strict=False)
        assert all(sent <= accepted for sent, accepted in pairs)
    for name in ("rounds", "drafted", "verified", "accepted"):
        assert getattr(stats, name) == sum(getattr(row, name) for row in stats.rows)
    seconds = (stats.seconds_prefill, stats.seconds_draft, stats.seconds_verify, stats.seconds_rest)
    assert all(part > 0 for part in seconds)


def test_statistics_of_a_stop_inside_a_block(tiny_target, monkeypatch):
    """They count what the target accepted; the stop drops the rest of the last block from the text."""
    inputs, drafter = encode(LONG), drafter_of("deepspec-vanilla")
    whole = generate(tiny_target, inputs)
    length = inputs["input_ids"].shape[1]
    oracle(monkeypatch, whole, "everything")
    end = int(whole[0, length + 4])
    ours = generate(tiny_target, inputs, assistant_model=drafter, eos_token_id=end, pad_token_id=95)
    stats = drafter.speculative_stats
    assert ours.shape[1] == length + 5
    assert (stats.rounds, stats.accepted, stats.verified) == (1, 7, 7)


def test_statistics_belong_to_the_thread_and_the_last_call(tiny_target):
    drafter = load_drafter("deepspec-vanilla")
    assert drafter.speculative_stats is None
    generate(tiny_target, encode(LONG), assistant_model=drafter)
    first = drafter.speculative_stats
    seen: list[Any] = []

    def work() -> None:
        seen.append(drafter.speculative_stats)
        generate(tiny_target, encode(SHORT), assistant_model=drafter, max_new_tokens=5)
        seen.append(drafter.speculative_stats)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen[0] is None and seen[1] is not first
    assert drafter.speculative_stats is first
    generate(tiny_target, encode(SHORT), assistant_model=drafter, max_new_tokens=5)
    assert drafter.speculative_stats.to_dict()["rounds"] == seen[1].to_dict()["rounds"]


@pytest.mark.parametrize("prompts", [(LONG,), (LONG, SHORT)])
def test_a_seed_repeats_the_text(prompts, tiny_target):
    drafter, texts = drafter_of("deepspec-rnn"), []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        texts.append(generate(tiny_target, encode(*prompts), assistant_model=drafter, do_sample=True).tolist())
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("head", ["none", "vanilla", "gated", "rnn"])
def test_random_drafters_in_float64_and_small_vocabularies(head):
    """Sizes where everything is rejected or accepted by chance."""
    target, inputs = random_target(vocab_size=3), {"input_ids": torch.tensor([[1, 2, 0]])}
    plain = generate(target, inputs, max_new_tokens=20)
    for block_size in (1, 2, 5):
        drafter = random_drafter(head, vocab_size=3, block_size=block_size)
        assert generate(target, inputs, max_new_tokens=20, assistant_model=drafter).tolist() == plain.tolist()
