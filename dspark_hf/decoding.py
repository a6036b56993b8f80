"""The decode loop: draft, schedule, verify, commit, over any number of rows."""

import functools
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from . import sampling
from .candidate_generator import Candidates, DSparkCandidateGenerator, check_fits
from .compat import CACHE_NAME
from .processing import ProcessorChain
from .profiles import explain_missing, find_profile
from .sampling import Verdict, Verification
from .schedule_options import ScheduleOptions
from .scheduling import HARDWARE_AWARE, Costs, Scheduler
from .sequences import Sequences
from .slot_cache import UnsupportedAttention
from .slot_stream import SlotStream
from .statistics import Decision, SpeculativeStats
from .streaming import DSparkStreamer
from .synthetic import synthetic_in_force
from .target_limits import places_for
from .target_outputs import StreamOutput, prefill
from .target_stream import mark_unstreamable, open_stream


logger = logging.getLogger(__name__)


@dataclass
class DSparkGenerateOutput(GenerateDecoderOnlyOutput):
    """
    What `generate(return_dict_in_generate=True)` returns with a DSpark drafter: the fields of plain `generate` and

    Args:
        speculative_stats ([`SpeculativeStats`]): Rounds, acceptance and seconds of the call.
    """

    speculative_stats: SpeculativeStats | None = None


class _Stops:
    """Stopping criteria, asked token by token as plain `generate` asks them; length and end tokens without a call."""

    def __init__(self, criteria: StoppingCriteriaList):
        self.max_length = min((c.max_length for c in criteria if type(c) is MaxLengthCriteria), default=None)
        self.end_tokens = {
            int(token) for c in criteria if type(c) is EosTokenCriteria for token in c.eos_token_id.flatten().tolist()
        }
        self.others = [c for c in criteria if type(c) not in (MaxLengthCriteria, EosTokenCriteria)]
        # Plain `generate` fills up finished rows only if something here knows end tokens; otherwise they go on.
        self.fill_up = any(hasattr(c, "eos_token_id") for c in criteria)

    def __call__(self, sequences: Sequences, row: int, token: int, scores: tuple[torch.Tensor, ...] | None) -> bool:
        """Whether a row that ends with `token` is finished."""
        length = sequences.lengths[row]
        stopped = token in self.end_tokens or (self.max_length is not None and length >= self.max_length)
        for criterion in self.others:  # all are asked, since they may keep count
            answer = criterion(sequences.prefix(row), scores)
            stopped |= bool(answer.all() if isinstance(answer, torch.Tensor) else answer)
        return stopped


class _Recorder:
    """What `return_dict_in_generate` asks for: for each row and generated token scores, logits, states, weights."""

    def __init__(self, config: GenerationConfig, rows: int):
        wanted = config.return_dict_in_generate
        self.scores = [[] for _ in range(rows)] if wanted and config.output_scores else None
        self.logits = [[] for _ in range(rows)] if wanted and config.output_logits else None
        self.hidden_states = [[] for _ in range(rows)] if wanted and config.output_hidden_states else None
        self.attentions = [[] for _ in range(rows)] if wanted and config.output_attentions else None
        self.prompt_hidden_states = self.prompt_attentions = None

    @property
    def keeps_scores(self) -> bool:
        """Whether scores or logits are wanted."""
        return self.scores is not None or self.logits is not None

    def prompt(self, outputs: Any) -> None:
        """Take the prompt's own states and weights, which stand at the first token."""
        self.prompt_hidden_states = outputs.hidden_states if self.hidden_states is not None else None
        self.prompt_attentions = outputs.attentions if self.attentions is not None else None

    def token(self, row: int, scores: torch.Tensor, logits: torch.Tensor | None, place: int) -> None:
        """Take the scores and raw logits that a row's token was chosen by: a place of `(positions, vocab_size)`."""
        if self.scores is not None:
            self.scores[row].append(scores[place : place + 1])
        if self.logits is not None:
            self.logits[row].append(logits[place : place + 1])

    def states(self, row: int, count: int, output: StreamOutput, first: int, index: int) -> None:
        """Take states and weights of the first `count` of a row's tokens in a stream."""
        for step in range(count):
            if self.hidden_states is not None:
                place = first + step
                self.hidden_states[row].append(tuple(layer[:, place : place + 1] for layer in output.hidden_states))
            if self.attentions is not None:
                self.attentions[row].append(output.attentions[index][step])

    def scores_of(self, row: int) -> tuple[torch.Tensor, ...] | None:
        """A row's scores so far, as stopping criteria get them."""
        return tuple(self.scores[row]) if self.scores is not None else None

    def output(self, lengths: Sequence[int]) -> dict[str, tuple | None]:
        """All that was recorded, cut to `lengths` tokens a row, as fields of `generate`'s output."""
        fields = {"scores": _steps(self.scores, lengths), "logits": _steps(self.logits, lengths)}
        later = [length - 1 for length in lengths]  # the first token's states are the prompt's
        for name in ("hidden_states", "attentions"):
            steps = getattr(self, name)
            if steps is not None:
                layers = len(getattr(self, f"prompt_{name}"))
                by_layer = [_steps([[s[layer] for s in row] for row in steps], later) for layer in range(layers)]
                fields[name] = (getattr(self, f"prompt_{name}"), *zip(*by_layer, strict=True))
        return fields


def _steps(rows: list[list[torch.Tensor]] | None, lengths: Sequence[int]) -> tuple[torch.Tensor, ...] | None:
    """Steps of each row as steps of all rows; a row that is finished is filled with zeros."""
    if rows is None:
        return None
    rows = [row[:length] for row, length in zip(rows, lengths, strict=True)]
    steps = []
    for step in range(max(map(len, rows))):
        like = next(row[step] for row in rows if step < len(row))
        steps.append(torch.cat([row[step] if step < len(row) else torch.zeros_like(like) for row in rows]))
    return tuple(steps)


@torch.no_grad()
def dspark_decode(
    target: PreTrainedModel,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: BaseStreamer | None = None,
    inputs_tensor: torch.Tensor | None = None,
    assistant_model: Any = None,
    assistant_tokenizer: Any = None,
    tokenizer: Any = None,
    **model_kwargs,
) -> DSparkGenerateOutput | torch.LongTensor:
    """
    Generate with a target and a DSpark drafter: what `generate(assistant_model=drafter)` calls, with everything
    prepared by `generate`.

    Args:
        target (`PreTrainedModel`): The verifying model.
        input_ids (`torch.LongTensor` of shape `(batch_size, prompt_length)`): Left-padded prompts.
        logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, model_kwargs:
            As `generate` hands them to a decoding method.
        assistant_model (`DSparkDraftModel`): The drafter, wrapped or not.
        inputs_tensor, assistant_tokenizer, tokenizer: Of no use here.

    Returns:
        `torch.LongTensor` of shape `(batch_size, length)`, or [`DSparkGenerateOutput`].

    Raises:
        `ValueError`: if the call, the target or the drafter cannot go together, saying what to do.

    Source: DSpark (arXiv 2607.05147), the full decode loop.
    """
    check_call(target, assistant_model, generation_config, synced_gpus)
    run = _Run(target, assistant_model, input_ids, logits_processor, stopping_criteria, generation_config, streamer)
    return run(model_kwargs)


def check_call(target: PreTrainedModel, drafter: Any, generation_config: GenerationConfig, synced_gpus: bool) -> None:
    """
    Check what can be known before the prompt is run.

    Raises:
        `ValueError`: if the call, the target or the drafter cannot go together, saying what to do.
    """
    if synced_gpus:
        raise ValueError(
            "`synced_gpus` is True; a drafter cannot be used while ranks must step together. Set it to False."
        )
    if generation_config.assistant_ensemble_weight is not None:
        raise ValueError(
            f"`assistant_ensemble_weight` is {generation_config.assistant_ensemble_weight}; it changes the target's "
            "distribution, which DSpark never does. Leave it out."
        )
    check_fits(drafter, target)
    ScheduleOptions.of_call(drafter, generation_config)


class _Run:
    """One call of [`dspark_decode`]."""

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: Any,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None,
    ):
        self.target, self.drafter, self.config = target, drafter, generation_config
        batch, prompt_length = input_ids.shape
        self.input_ids = input_ids
        self.taps = drafter.config.target_layer_ids
        self.do_sample = generation_config.do_sample
        self.synthetic = synthetic_in_force()
        self.stops = _Stops(stopping_criteria)
        self.processors = ProcessorChain(logits_processor, batch, self.stops.end_tokens)
        self.recorder = _Recorder(generation_config, batch)
        self.stats = SpeculativeStats(rows=[SpeculativeStats() for _ in range(batch)])
        drafter.last_call.stats = self.stats  # now, so that a call that fails leaves what it did
        block_size = drafter.config.block_size
        expected = (self.stops.max_length or prompt_length) - prompt_length
        self.sequences = Sequences(input_ids, room=min(max(expected, 0), 1024) + block_size + 1)
        self.pad_token_id = _pad_token(generation_config)
        self.output_streamer = _OutputStreamer(streamer, batch, self.pad_token_id)
        self.active = list(range(batch))
        self.rounds = 0
        self.stopped_at: dict[int, int] = {}  # length of each row that is finished

    def __call__(self, model_kwargs: dict[str, Any]) -> DSparkGenerateOutput | torch.LongTensor:
        clock = _Clock()
        self.prompt = prompt = prefill(self.target, self.input_ids, self.config, model_kwargs, self.taps)
        asked_for = self.config.return_dict_in_generate and self.config.use_cache
        self.returns_cache = asked_for or getattr(prompt.cache, "_is_user_defined", False)
        self.recorder.prompt(prompt.outputs)
        prompt.outputs = None
        self.stream = open_stream(self.target, prompt, self.config, self.taps)
        self.stream.keep_finished = self.returns_cache
        self.places = places_for(self.target, prompt.cache)
        self.prompt_tokens = prompt.visible.sum(dim=1).tolist()  # of each row, without padding
        options = ScheduleOptions.of_call(self.drafter, self.config)
        self.scheduler = _scheduler(self.target, self.drafter, options, bool(self.do_sample))
        self.drafts = DSparkCandidateGenerator(
            self.drafter,
            self.target,
            prompt.cached,
            self.processors,
            self.do_sample,
            self.scheduler,
            temperature=self.config.temperature,
            keep_confidences=bool(self.config.return_dict_in_generate),
            synthetic=self.synthetic,
            context_window=options.context_window,
            top_k=options.top_k,
        )
        self.drafts.observe(prompt.taps, prompt.tap_counts)
        self.stats.seconds_prefill += clock.lap()
        self._choose_first(prompt.logits)
        self.stats.seconds_rest += clock.lap()
        while self.active:
            candidates = self._draft()
            self.stats.seconds_draft += clock.lap()
            output = self._verify(candidates)
            self.stats.seconds_verify += clock.lap()
            self._commit(candidates, output)
            self.stats.seconds_rest += clock.lap()
        return self._result()

    def _choose_first(self, logits: torch.Tensor) -> None:
        """The first anchors: the target's own tokens after the prompt."""
        scores, raw = self._process(logits, [(row, self.sequences.prefix(row), 0) for row in self.active])
        if self.by_step:
            tokens = sampling.draw_among(*self._law(scores))
        elif self.do_sample:
            tokens = sampling.draw_tokens(sampling.probabilities(scores))
        else:
            tokens = sampling.most_likely(scores)
        self.processors.commit(len(self.active))
        self.sequences.put(self.active, tokens[:, None])
        for row, token in enumerate(tokens.tolist()):
            self._append(row, [token], 0, scores, raw, row)
        self._retire()
        self.output_streamer.flush(self.active)

    def _draft(self) -> Candidates | None:
        """Draft for each row as much as fits; nothing if that does not pay or the next token is the last anyway."""
        self.sequences.reserve(self.drafts.block_size + 1)
        room = [self._room(row) for row in self.active]
        if max(room) <= 0:
            return None
        held = [self.prompt_tokens[row] + self.sequences.generated(row) for row in self.active]
        slots = self.scheduler.slots(self.active, sum(held) / len(held), [drafts + 1 for drafts in room])
        slots = min(slots, max(room))
        return self.drafts.get_candidates(self.sequences, self.active, room, slots) if slots else None

    def _room(self, row: int) -> int:
        """Drafts of a row that can still be of use: all but the last token that may come."""
        ends = [self._common_length() if row in self.stopped_at else self.stops.max_length]
        if self.places is not None:  # what is run ends one token before the text does
            ends.append(self.places - self.prompt.visible.shape[1] + self.sequences.prompt_length + 1)
        ends = [end for end in ends if end is not None]
        left = min(ends) - self.sequences.lengths[row] - 1 if ends else self.drafts.block_size
        return max(left, 0)

    def _common_length(self) -> int:
        """The length that all rows are going to have at least, where finished rows are not filled up but go on."""
        return max(self.stopped_at.get(row, length + 1) for row, length in enumerate(self.sequences.lengths))

    def _verify(self, candidates: Candidates | None) -> StreamOutput:
        """Run each row's anchor and scheduled drafts through the target."""
        anchors = self.sequences.anchors(self.active)
        lengths = candidates.verify_lengths if candidates else [0] * len(self.active)
        if candidates is None:
            tokens = anchors
        elif len(anchors) == 1:
            tokens = torch.cat([anchors, candidates.tokens[0, : lengths[0]]])
        else:
            block = torch.cat([anchors[:, None], candidates.tokens], dim=1)
            width = block.shape[1]
            places = [row * width + step for row, length in enumerate(lengths) for step in range(length + 1)]
            tokens = block.flatten()[torch.tensor(places, device=block.device)]
        tokens = tokens.to(self.prompt.device)
        counts = [length + 1 for length in lengths]
        try:
            output = self.stream.verify(tokens, counts)
        except UnsupportedAttention as reason:
            self._leave_flattened_stream(reason)
            output = self.stream.verify(tokens, counts)
        if not self.returns_cache and isinstance(self.stream, SlotStream):
            self.prompt.cache = None  # its keys and values are in slots now
        return output

    def _leave_flattened_stream(self, reason: UnsupportedAttention) -> None:
        """The first stream showed that this target's attention does not go through the interface."""
        if self.stats.rounds:
            raise RuntimeError(f"{type(self.target).__name__} changed its attention while generating: {reason}.")
        logger.info("%s is not flattened: its attention has %s.", type(self.target).__name__, reason)
        mark_unstreamable(self.target, len(self.active))
        self.stream = open_stream(self.target, self.prompt, self.config, self.taps)
        self.stream.keep_finished = self.returns_cache
        self.stream.keep_rows(self.active)

    def _commit(self, candidates: Candidates | None, output: StreamOutput) -> None:
        """Keep what the target accepts and its own token after that, up to where a row stops."""
        rows = list(self.active)
        lengths = candidates.verify_lengths if candidates else [0] * len(rows)
        ends = list(accumulate(length + 1 for length in lengths))
        starts = [0, *ends[:-1]]
        prefixes = ()
        if self.processors.reads_tokens:
            if candidates is not None:
                self.sequences.put(rows, candidates.tokens)
            prefixes = [
                (row, self.sequences.prefix(row, step), step)
                for row, length in zip(rows, lengths, strict=True)
                for step in range(length + 1)
            ]
        scores, raw = self._process(output.logits, prefixes)
        verdict = self._judge(candidates, lengths, scores)
        outcome = torch.cat([verdict.accepted[:, None], verdict.tokens], dim=1).tolist()  # the round's one wait
        self._learn(rows, candidates, [accepted for accepted, *_ in outcome])
        self.sequences.put(rows, verdict.tokens)
        kept = []
        for index, (row, (accepted, *tokens)) in enumerate(zip(rows, outcome, strict=True)):
            if row not in self.stopped_at:
                drafted = candidates.tokens.shape[1] if candidates is not None else 0
                for stats in (self.stats, self.stats.rows[row]):
                    stats.record(drafted, lengths[index], accepted)
            count = self._append(row, tokens[: accepted + 1], accepted, scores, raw, starts[index])
            self.recorder.states(row, count, output, starts[index], index)
            kept.append(count)
        self.processors.commit(kept[0])
        self.stream.advance(kept)
        places = [start + step for start, count in zip(starts, kept, strict=True) for step in range(count)]
        taps = output.taps if len(places) == len(output.taps) else output.taps[places]
        self.drafts.observe(taps, kept)
        self._retire()
        self.output_streamer.flush(self.active)

    def _learn(self, rows: list[int], candidates: Candidates | None, accepted: list[int]) -> None:
        """Tell the scheduler and the log how a round went."""
        self.rounds += 1
        if candidates is not None and candidates.survivals is not None:
            self.scheduler.observe(rows, candidates.survivals, candidates.verify_lengths, accepted)
        if self.config.return_dict_in_generate:
            self.stats.decisions.append(
                Decision(
                    round=self.rounds,
                    rows=rows,
                    survivals=candidates.survivals if candidates is not None else None,
                    confidence_logits=candidates.confidence_logits if candidates is not None else None,
                    throughput=candidates.choice.throughput if candidates is not None else None,
                    capacity=candidates.choice.capacity if candidates is not None else None,
                    verify_lengths=candidates.verify_lengths if candidates is not None else [0] * len(rows),
                    accepted=accepted,
                )
            )

    def _process(
        self, logits: torch.Tensor, prefixes: Sequence[tuple[int, torch.LongTensor, int]]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Processed scores in float32 or better, or logits if they are not needed or later, and raw ones if wanted."""
        logits = logits.to(self.sequences.tokens.device)
        if self.by_step or not (self.do_sample or self.processors or self.recorder.keeps_scores):
            return logits, None
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
        raw = scores.clone() if self.recorder.logits is not None else None
        return (self.processors(prefixes, scores, record=True) if self.processors else scores), raw

    @property
    def by_step(self) -> bool:
        """Whether positions are processed only once it is known that a row gets there."""
        wanted = self.recorder.keeps_scores or self.processors.reads_tokens
        return self.do_sample and not wanted and sampling.pays_by_step(self.sequences.tokens.device)

    def _law(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.LongTensor | None]:
        """Probabilities of the tokens at some positions, and the tokens if not all, on a CPU."""
        if self.processors.ends_in_nucleus:
            scores, ids = self.processors.nuclei(logits)
            return sampling.probabilities(scores), ids
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return sampling.probabilities(self.processors((), scores) if self.processors else scores), None

    def _judge(self, candidates: Candidates | None, lengths: list[int], scores: torch.Tensor) -> Verdict:
        """Accept or reject."""
        if candidates is None:
            none = self.sequences.tokens.new_zeros(len(lengths), 0)
            verification, synthetic, draft_ids = Verification(none, lengths), None, None
            draft_probs = scores.new_zeros(len(lengths), 0, scores.shape[-1])
        else:
            verification, synthetic = Verification(candidates.tokens, lengths), candidates.synthetic
            draft_probs, draft_ids = candidates.draft_probs, candidates.draft_ids
        if self.by_step:
            return verification.sampled_by_step(
                lambda places: self._law(scores[places]), draft_probs, synthetic, draft_ids
            )
        if self.do_sample:
            return verification.sampled(sampling.probabilities(scores), draft_probs, synthetic, draft_ids)
        return verification.greedy(scores, synthetic)

    def _append(
        self, row: int, tokens: list[int], accepted: int, scores: torch.Tensor, raw: torch.Tensor | None, first: int
    ) -> int:
        """Commit a row's tokens one by one until one of them stops it: how many were."""
        goes_on = row in self.stopped_at
        for step, token in enumerate(tokens):
            if goes_on and self.sequences.lengths[row] >= self._common_length():
                return step
            self.recorder.token(row, scores, raw, first + step)
            self.sequences.lengths[row] += 1
            self.output_streamer.push(row, token, drafted=step < accepted)
            if self.stops(self.sequences, row, token, self.recorder.scores_of(row)) and not goes_on:
                self.stopped_at[row] = self.sequences.lengths[row]
                return step + 1
        return len(tokens)

    def _leaves(self, row: int) -> bool:
        """Whether nothing is to come of a row: it is finished and, with no end token to fill it up, as long as all."""
        if row not in self.stopped_at or self.stops.fill_up:
            return row in self.stopped_at
        all_finished = len(self.stopped_at) == len(self.sequences.lengths)
        return self.sequences.lengths[row] == (self._common_length() if all_finished else self.stops.max_length)

    def _retire(self) -> None:
        """Let finished rows leave the stream."""
        keep = [index for index, row in enumerate(self.active) if not self._leaves(row)]
        if len(keep) == len(self.active):
            return
        if not self.returns_cache:  # nothing keeps the rows in order: the last ones fill the gaps, so that few move
            stay, moved = set(keep), [index for index in keep if index >= len(keep)]
            keep = [index if index in stay else moved.pop() for index in range(len(keep))]
        self.stream.keep_rows(keep)
        if keep:
            self.drafts.keep_rows(keep)
        self.active = [self.active[index] for index in keep]

    def _result(self) -> DSparkGenerateOutput | torch.LongTensor:
        self.output_streamer.end()
        sequences = self.sequences.padded(self.pad_token_id)
        if self.returns_cache:
            # Plain `generate` runs finished rows on, end token and filling, until all are done.
            lengths = self.sequences.lengths
            self.stream.catch_up([tokens[length - 1 : -1] for tokens, length in zip(sequences, lengths, strict=True)])
            self.stream.close()
        if not self.config.return_dict_in_generate:
            return sequences
        generated = [self.sequences.generated(row) for row in range(len(sequences))]
        return DSparkGenerateOutput(
            sequences=sequences,
            speculative_stats=self.stats,
            **self.recorder.output(generated),
            **{CACHE_NAME: self.prompt.cache if self.returns_cache else None},
        )


class _Clock:
    def __init__(self) -> None:
        self.last = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        before, self.last = self.last, time.perf_counter()
        return self.last - before


class _OutputStreamer:
    """Hands tokens to the user's streamer as plain `generate` does: one step of all rows after the other."""

    def __init__(self, streamer: BaseStreamer | None, rows: int, pad_token_id: int):
        self.streamer, self.pad_token_id = streamer, pad_token_id
        self.waiting: list[deque[tuple[int, bool]]] = [deque() for _ in range(rows)]

    def push(self, row: int, token: int, drafted: bool) -> None:
        """A row's next token."""
        if self.streamer is not None:
            self.waiting[row].append((token, drafted))

    def flush(self, active: Sequence[int]) -> None:
        """Put all steps that are complete: those that every row has reached or finished before."""
        while any(self.waiting) and all(self.waiting[row] for row in active):
            step = [tokens.popleft() if tokens else (self.pad_token_id, False) for tokens in self.waiting]
            value = torch.tensor([token for token, _ in step])
            if isinstance(self.streamer, DSparkStreamer):
                self.streamer.put(value, drafted=any(drafted for _, drafted in step))
            else:
                self.streamer.put(value)

    def end(self) -> None:
        """Nothing comes after this."""
        if self.streamer is not None:
            self.streamer.end()


def _scheduler(target: PreTrainedModel, drafter: Any, options: ScheduleOptions, do_sample: bool) -> Scheduler:
    """The schedule of a call; without a profile of the pair a hardware-aware one falls back to the threshold."""
    schedule, costs, block_size = options.schedule, None, drafter.config.block_size
    if schedule in HARDWARE_AWARE:
        profile = find_profile(target, drafter)
        if profile is None:
            schedule = "confidence"
            _warn_once(
                "`num_assistant_tokens_schedule` is %r but %s, so %s. Measure one "
                "with `dspark profile` or `dspark_hf.measure_profile(target, drafter)`; it holds for one dtype, "
                "attention and number of threads, and for these versions.",
                options.schedule,
                explain_missing(target, drafter),
                f"drafts are cut at a survival of {options.threshold:g}"
                if options.threshold
                else "whole blocks are sent",
            )
        else:

            def costs(rows: int, context: float) -> Costs:
                return profile.costs(rows, context, block_size, do_sample)

    return Scheduler(
        schedule, block_size, options.threshold, costs, options.min_verify_length, options.max_starved_rounds
    )


@functools.cache
def _warn_once(message: str, *values: Any) -> None:
    logger.warning(message, *values)


def _pad_token(generation_config: GenerationConfig) -> int:
    """The token that fills up finished rows."""
    token = getattr(generation_config, "_pad_token_tensor", None)
    return int(token) if token is not None else 0
