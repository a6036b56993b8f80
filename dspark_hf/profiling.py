"""
Measuring a [`Profile`]: what steps of the target take by their tokens, drafts by their rows, choosing by its tokens.

The steps are those of the engine: a flattened stream, opened after a prompt that `generate` prepared. Rows of any
length are lent it as memory of that size. What stands in there makes no difference to the time, and neither does
which tokens are run, so there is no text in this (a mixture of experts is routed by it, a little).

How the time depends on rows: B tokens of R rows take what B tokens of one row take and something for every row more,
since each has keys of its own to be read. So the curve over B, with all the steps in it that a machine's kernels make,
is measured on one row, and each of 2, 4, 8, ... rows at two places: one token a row, and whole blocks.
"""

import copy
import datetime
import itertools
import logging
import math
import random
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch
from tqdm.auto import tqdm
from transformers import LogitsProcessorList, PreTrainedModel

from .candidate_generator import DSparkCandidateGenerator, check_fits
from .environment import machine
from .flattened_stream import FlattenedStream
from .processing import ProcessorChain
from .profiles import DraftCurve, Profile, StepCurve, profile_key, profile_path
from .sampling import Verification, pays_by_step, probabilities
from .scheduling import Scheduler
from .sequences import Sequences
from .slot_cache import SlotCache, UnsupportedAttention
from .target_limits import check_target
from .target_outputs import StreamOutput, prefill, text_config


logger = logging.getLogger(__name__)

CONTEXTS = (128, 512, 2048)
MOST_TOKENS = 256
BUDGET = 120.0
# Measured points in each doubling of the tokens, the densest grid first, and sweeps over them.
_DENSITIES = (8, 4, 2, 1)
_FEWEST_SWEEPS, _GOOD_SWEEPS, _MOST_SWEEPS = 3, 5, 9
# Points before and after one that tell how fast the machine was then, and passes of the fit.
_NEIGHBOURS, _FITS = 4, 4
# Blocks that a target is measured for where no drafter says.
_BLOCK_SIZE = 7
# Accepted tokens of each row that a draft takes in before it begins.
_ACCEPTED = 2
# The most rows of whole blocks that tokens are chosen for.
_JUDGED_ROWS = 8
# The share of the free memory that contexts may take.
_MEMORY = 0.5


def measure_profile(
    target: PreTrainedModel,
    drafter: Any = None,
    contexts: Sequence[int] = CONTEXTS,
    most_tokens: int = MOST_TOKENS,
    budget: float = BUDGET,
    save: bool = True,
) -> Profile:
    """
    Measure what rounds cost on this machine, for the schedules `"hardware_aware"` and `"hardware_aware_lagged"`. It
    holds for these devices, dtype, number of threads and versions, so measure under the conditions of use and with
    nothing else running.

    All points are measured in turn, several times over, in an order of chance, so that a slow minute falls on all of
    them; each gets its typical time, see [`typical_seconds`]. The first two sweeps, over a thin grid, warm up and tell
    how dense a grid the budget allows: every B up to 16, every 2nd to 32, every 4th to 64 and so on at best, powers of
    2 at least.

    Args:
        target (`PreTrainedModel`): The verifying model.
        drafter (`DSparkDraftModel`, *optional*): The draft model; without it drafts count as free.
        contexts (`Sequence[int]`): Tokens that rows hold. Those that go beyond the target's positions or take more
            than half of the free memory are capped or left out.
        most_tokens (`int`): The longest step, at least 1; capped at half of the target's positions. Rows are measured
            as far as whole blocks fit in it.
        budget (`float`): Seconds from the call to its end, above 0. A target too slow for three sweeps over the
            thinnest grid takes longer.
        save (`bool`): Whether to store the profile where `generate` looks for it.

    Returns:
        [`Profile`].

    Raises:
        `ValueError`: if the target is not verified in a flattened stream, or it and the drafter do not go together,
            or for arguments out of range.
    """
    _check_arguments(contexts, most_tokens, budget)
    deadline = time.monotonic() + budget
    if drafter is not None:
        check_fits(drafter, target)
    block_size = _BLOCK_SIZE if drafter is None else drafter.config.block_size
    seeded = [device for device in _devices(target, drafter) if device.type == "cuda"]
    with torch.no_grad(), torch.random.fork_rng(seeded):
        bench = _Bench(target, drafter, block_size, contexts, most_tokens)
        key = profile_key(bench.target, drafter)
        if save:
            profile_path(key).parent.mkdir(parents=True, exist_ok=True)
        seconds, sweeps = _run_sweeps(bench, deadline)
    profile = _profile(key, 0 if drafter is None else block_size, seconds, sweeps)
    if save:
        profile.save(profile_path(key))
    return profile


def _check_arguments(contexts: Sequence[int], most_tokens: int, budget: float) -> None:
    if not contexts or not all(isinstance(context, int) and context >= 1 for context in contexts):
        raise ValueError(f"`contexts` is {contexts!r}; it must hold integers of at least 1.")
    if not isinstance(most_tokens, int) or most_tokens < 1:
        raise ValueError(f"`most_tokens` is {most_tokens!r}; it must be an integer of at least 1.")
    if not 0 < budget < math.inf:
        raise ValueError(f"`budget` is {budget!r}; it must be a number of seconds above 0.")


def _devices(*models: torch.nn.Module | None) -> set[torch.device]:
    return {weight.device for model in models if model is not None for weight in model.parameters()}


# What is measured


@dataclass(frozen=True)
class _Step:
    """A step of the target: `tokens` in all, in equal shares of rows that hold `context` tokens."""

    context: int
    rows: int
    tokens: int


@dataclass(frozen=True)
class _Draft:
    """A draft of so many slots for so many rows."""

    rows: int
    slots: int
    do_sample: bool


@dataclass(frozen=True)
class _Judgement:
    """Choosing the tokens after a step with so many."""

    tokens: int
    do_sample: bool


_Point = _Step | _Draft | _Judgement


class _Bench:
    """
    Target and drafter, ready to be timed at any point.

    Args:
        target, drafter, contexts, most_tokens: As for [`measure_profile`].
        block_size (`int`): Of the drafter.

    Raises:
        `ValueError`: as [`measure_profile`] does.
    """

    def __init__(
        self, target: PreTrainedModel, drafter: Any, block_size: int, contexts: Sequence[int], most_tokens: int
    ):
        config = text_config(target)
        self.drafter, self.block_size, self.vocab_size = drafter, block_size, config.vocab_size
        self.accelerators = [device for device in _devices(target, drafter) if device.type not in ("cpu", "meta")]
        places = getattr(config, "max_position_embeddings", None) or sys.maxsize
        self.most_tokens = min(most_tokens, places // 2)
        contexts = sorted({min(context, places - self.most_tokens) for context in contexts})
        rows = [2**power for power in range(max(self.most_tokens // (1 + block_size), 1).bit_length())]
        taps = [config.num_hidden_layers - 1] if drafter is None else drafter.config.target_layer_ids
        self.generator = torch.Generator().manual_seed(0)
        try:
            self.target, self.stream = _open_stream(target, taps, rows[-1])
            self.device = self.stream.prompt.device
            self.lender = _Lender(self.stream)
            self.rows = self._rows_by_context(contexts, rows)
            for count in (1, max(map(max, self.rows.values()))):
                output = self._step(_Step(min(self.rows), count, count))()
        except UnsupportedAttention as reason:
            raise ValueError(
                f"{type(target).__name__} is not verified by a flattened stream (it has {reason}), and no profile "
                "describes another. Leave `num_assistant_tokens_schedule` at 'constant' or 'confidence'."
            ) from reason
        self.taps = output.taps.new_zeros(rows[-1] * _ACCEPTED, output.taps.shape[1])
        self.drafts: dict[int, DSparkCandidateGenerator] = {}
        judged = min(rows[-1], _JUDGED_ROWS)
        noise = torch.randn(judged * (1 + 2 * block_size), output.logits.shape[1], generator=self.generator)
        self.judged_logits = noise[: judged * (1 + block_size)].to(output.logits)
        self.judged_probs = probabilities(noise[judged * (1 + block_size) :].to(self.device))
        self.judged_probs = self.judged_probs.view(judged, block_size, -1)

    def _rows_by_context(self, contexts: Sequence[int], rows: Sequence[int]) -> dict[int, list[int]]:
        """For each context that fits in memory the numbers of rows that do."""
        fitting = {}
        for context in contexts:
            if self.lender.has_room(self._slots(context, 1)):
                fitting[context] = [r for r in rows if r == 1 or self.lender.has_room(r * self._slots(context, r))]
        if not fitting:
            raise ValueError(
                f"`contexts` is {contexts}, and the memory that is free holds no row of that; give shorter ones."
            )
        if fitting != dict.fromkeys(contexts, rows):
            logger.info("For want of memory not all is measured; rows by context are %s.", fitting)
        self.lender.reserve(max(r * self._slots(context, r) for context, counts in fitting.items() for r in counts))
        return fitting

    def _slots(self, context: int, rows: int) -> int:
        """Tokens of each row that there must be room for."""
        return context + (self.most_tokens if rows == 1 else 1 + self.block_size)

    def points(self, density: int) -> list[_Point]:
        """All points, with so many steps of one row in each doubling of the tokens."""
        points: list[_Point] = []
        for context, counts in self.rows.items():
            points += [_Step(context, 1, tokens) for tokens in token_grid(self.most_tokens, density)]
            points += [_Step(context, r, r * each) for r in counts[1:] for each in (1, 1 + self.block_size)]
        points.append(_Judgement(len(self.judged_logits), do_sample=False))
        if not pays_by_step(self.device):  # by steps, what is sent and rejected takes no time
            points.append(_Judgement(len(self.judged_logits), do_sample=True))
        if self.drafter is not None:
            counts, slots = max(self.rows.values(), key=len), sorted({1, self.block_size})
            points += [_Draft(*place) for place in itertools.product(counts, slots, (False, True))]
        return points

    def seconds(self, point: _Point) -> float:
        """Time one point."""
        work = {_Step: self._step, _Draft: self._draft, _Judgement: self._judgement}[type(point)](point)
        self._synchronize()
        begin = time.perf_counter()
        work()
        self._synchronize()
        return time.perf_counter() - begin

    def _synchronize(self) -> None:
        for device in self.accelerators:
            torch.accelerator.synchronize(device)

    def _step(self, point: _Step) -> Callable[[], StreamOutput]:
        stream = self.lender.lend(self.stream, point.rows, point.context, self._slots(point.context, point.rows))
        tokens, counts = self._tokens(point.tokens), [point.tokens // point.rows] * point.rows
        return lambda: stream.verify(tokens, counts)

    def _draft(self, point: _Draft) -> Callable[[], Any]:
        rows = list(range(point.rows))
        if point.rows not in self.drafts:
            self.drafts[point.rows] = DSparkCandidateGenerator(
                self.drafter,
                self.target,
                starts=[0] * point.rows,
                processors=ProcessorChain(LogitsProcessorList(), point.rows),
                do_sample=point.do_sample,
                scheduler=Scheduler("constant", self.block_size),
                keep_confidences=True,
            )
        drafts = self.drafts[point.rows]
        drafts.do_sample = point.do_sample
        drafts.context.lengths = [list(self.rows)[len(self.rows) // 2]] * point.rows
        drafts.observe(self.taps[: point.rows * _ACCEPTED], [_ACCEPTED] * point.rows)
        sequences = Sequences(self._tokens(point.rows, 1), room=self.block_size + 1)
        room = [self.block_size] * point.rows
        return lambda: drafts.get_candidates(sequences, rows, room, point.slots)

    def _judgement(self, point: _Judgement) -> Callable[[], Any]:
        rows = len(self.judged_probs)
        drafts = self._tokens(rows, self.block_size)

        def judge() -> None:
            verification = Verification(drafts, [self.block_size] * rows)
            if point.do_sample:
                verdict = verification.sampled(probabilities(self.judged_logits), self.judged_probs)
            else:
                verdict = verification.greedy(self.judged_logits)
            verdict.accepted.tolist()

        return judge

    def _tokens(self, *shape: int) -> torch.LongTensor:
        return torch.randint(self.vocab_size, shape, generator=self.generator).to(self.device)


def _open_stream(target: PreTrainedModel, taps: Sequence[int], rows: int) -> tuple[PreTrainedModel, FlattenedStream]:
    """A stream of so many rows after a short prompt, as a decode opens it, and the target that `generate` hands on."""

    def open_stream(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
        check_target(model, keep_attentions=False)
        prompt = prefill(model, input_ids, generation_config, model_kwargs, taps)
        return model, FlattenedStream(model, prompt, taps, keep_hidden=False)

    ids = torch.ones(rows, 2, dtype=torch.long, device="cpu" if target.device.type == "meta" else target.device)
    options = {"max_new_tokens": 1, "do_sample": False, "num_beams": 1, "use_cache": True}
    return target.generate(input_ids=ids, attention_mask=torch.ones_like(ids), custom_generate=open_stream, **options)


class _Lender:
    """
    Lends a stream rows of any number and length, all over the same memory.

    Args:
        stream ([`FlattenedStream`]): As it was opened; its own memory is let go.
    """

    def __init__(self, stream: FlattenedStream):
        self.windows = stream.cache.windows
        # A slot of each layer, `(1, key_heads, 1, head_dim)`; layers that use another's keys have none.
        self.slots = [
            [states[:1, :, :1].clone() for states in (buffer.keys, buffer.values) if states is not None]
            for buffer in stream.cache.buffers
        ]
        stream.cache = None
        self.free = {states.device: _free_bytes(states.device) for layer in self.slots for states in layer}

    def has_room(self, slots: int) -> bool:
        """Whether so many slots are but a share of the free memory."""
        needed = dict.fromkeys(self.free, 0)
        for layer in self.slots:
            for states in layer:
                needed[states.device] += slots * states.numel() * states.element_size()
        return all(needed[device] <= _MEMORY * free for device, free in self.free.items())

    def reserve(self, slots: int) -> None:
        """Have memory for so many slots."""
        self.memory = [[states.new_zeros(slots * states.numel()) for states in layer] for layer in self.slots]

    def lend(self, stream: FlattenedStream, rows: int, context: int, slots: int) -> FlattenedStream:
        """The stream with so many rows that hold `context` tokens and have room for `slots`."""
        cache = SlotCache(rows, self.windows, capacity=slots)
        cache.lengths = [context] * rows
        for buffer, layer, memory in zip(cache.buffers, self.slots, self.memory, strict=True):
            if layer:
                shapes = [(rows, states.shape[1], slots, states.shape[3]) for states in layer]
                buffer.keys, buffer.values = (
                    piece[: math.prod(shape)].view(shape) for piece, shape in zip(memory, shapes, strict=True)
                )
        lent = copy.copy(stream)
        lent.cache, lent.rows = cache, stream.rows[:rows]
        return lent


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    return psutil.virtual_memory().available


def token_grid(most_tokens: int, density: int) -> list[int]:
    """
    Numbers of tokens from 1 to `most_tokens`, so many in each doubling where there are as many.

    Args:
        most_tokens (`int`): At least 1.
        density (`int`): A power of 2.
    """
    grid, low = [1], 1
    while low < most_tokens:
        step = max(low // density, 1)
        grid += [tokens for tokens in range(low + step, 2 * low + 1, step) if tokens <= most_tokens]
        low *= 2
    return grid if grid[-1] == most_tokens else [*grid, most_tokens]


# How it is measured


def _run_sweeps(bench: _Bench, deadline: float) -> tuple[dict[_Point, float], int]:
    """The typical seconds of each point, and the number of sweeps they are of. The deadline is by time.monotonic()."""
    thin, order = bench.points(_DENSITIES[-1]), random.Random(0)
    with tqdm(total=2 * len(thin), desc="Profiling", unit="point") as progress:

        def sweep(points: Sequence[_Point], name: str) -> tuple[dict[_Point, float], float]:
            """Seconds of each point, and of all with what is done between them."""
            progress.set_postfix_str(name)
            begin, seconds = time.monotonic(), {}
            for point in order.sample(points, len(points)):  # none always after the same one
                seconds[point] = bench.seconds(point)
                progress.update()
            return seconds, time.monotonic() - begin

        sweep(thin, "warm-up 1 of 2")
        warm, spent = sweep(thin, "warm-up 2 of 2")
        between = spent / sum(warm.values())
        left = deadline - time.monotonic()
        expected = {density: between * _expected_seconds(bench.points(density), warm) for density in _DENSITIES}
        fitting = [density for density in _DENSITIES if _GOOD_SWEEPS * expected[density] <= left]
        density = (fitting or _DENSITIES[-1:])[0]
        sweeps = min(max(int(left / expected[density]), _FEWEST_SWEEPS), _MOST_SWEEPS)
        points = bench.points(density)
        progress.total += sweeps * len(points)
        runs: list[dict[_Point, float]] = []
        while len(runs) < _FEWEST_SWEEPS or len(runs) < sweeps and time.monotonic() + spent <= deadline:
            run, spent = sweep(points, f"sweep {len(runs) + 1} of {sweeps}")
            runs.append(run)
        progress.total = progress.n
    typical = typical_seconds([measured for run in runs for measured in run.items()])
    return {point: typical[point] for point in points}, len(runs)


def typical_seconds(measured: Sequence[tuple[Hashable, float]]) -> dict[Hashable, float]:
    """
    What each of several things takes on a machine whose speed wanders: the median of its times, each divided by how
    slow the machine was then, which is told by the things timed shortly before and after. (The fastest time would
    be that of the machine's best moments, which fall on some things and not on others.)

    Args:
        measured (`Sequence[tuple[Hashable, float]]`): Thing and seconds, in the order of time.
    """
    places: dict[Hashable, list[int]] = {}
    for place, (thing, _) in enumerate(measured):
        places.setdefault(thing, []).append(place)
    logs = np.log([seconds for _, seconds in measured])
    around = np.arange(len(logs))[:, None] + np.arange(-_NEIGHBOURS, _NEIGHBOURS + 1)
    outside = (around < 0) | (around >= len(logs))
    slow, typical = np.zeros(len(logs)), np.zeros(len(logs))
    for _ in range(_FITS):
        for at in places.values():
            typical[at] = np.median(logs[at] - slow[at])
        near = np.ma.array((logs - typical)[np.where(outside, 0, around)], mask=outside)
        slow = np.ma.median(near, axis=1).filled(0.0)
        slow -= np.median(slow)
    fair = np.array([seconds for _, seconds in measured]) / np.exp(slow)
    return {thing: float(np.median(fair[at])) for thing, at in places.items()}


def _expected_seconds(points: Iterable[_Point], known: dict[_Point, float]) -> float:
    """What a sweep is going to take, by one over the thin grid."""
    curves: dict[int, tuple[list[int], list[float]]] = {}
    for point, seconds in known.items():
        if isinstance(point, _Step) and point.rows == 1:
            tokens, times = curves.setdefault(point.context, ([], []))
            tokens.append(point.tokens)
            times.append(seconds)
    return sum(
        known[point] if point in known else float(np.interp(point.tokens, *curves[point.context])) for point in points
    )


def _profile(key: dict[str, str | int], block_size: int, seconds: dict[_Point, float], sweeps: int) -> Profile:
    """The profile that the fastest of all sweeps make."""
    curves: dict[tuple[int, int], StepCurve] = {}
    for point, value in seconds.items():
        if isinstance(point, _Step):
            place = (point.context, point.rows)
            curve = curves.setdefault(place, StepCurve(point.context, [], [], point.rows))
            curve.tokens.append(point.tokens)
            curve.seconds.append(value)
    judge = {
        point.do_sample: value / point.tokens for point, value in seconds.items() if isinstance(point, _Judgement)
    }
    return Profile(
        key=key,
        block_size=block_size,
        steps=[curve for curve in curves.values() if curve.rows == 1],
        draft_greedy=_draft_curve(block_size, seconds, do_sample=False),
        draft_sampled=_draft_curve(block_size, seconds, do_sample=True),
        judge_greedy=judge[False],
        judge_sampled=judge.get(True, 0.0),
        measured=True,
        made={
            "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "sweeps": sweeps,
            "machine": machine(),
        },
        row_steps=[curve for curve in curves.values() if curve.rows > 1],
    )


def _draft_curve(block_size: int, seconds: dict[_Point, float], do_sample: bool) -> DraftCurve | None:
    rows = sorted({point.rows for point in seconds if isinstance(point, _Draft)})
    if not rows:
        return None
    return DraftCurve(
        rows, *([seconds[_Draft(count, slots, do_sample)] for count in rows] for slots in (1, block_size))
    )
