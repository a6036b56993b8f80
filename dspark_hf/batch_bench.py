"""Measure batches: plain batched `generate` and DSpark's schedules in turn, over batch sizes.

All ways of decoding a batch run one after the other, beginning with another one each time, and the batch sizes take
turns, so that a machine's slow minutes fall on all of them; ratios are taken between neighbours and their median is
reported.

Work is equal: every row runs to its full length, since the end token is set to an id that no token has.
`min_new_tokens` would do the same, but by a logits processor that is asked for each drafted and each verified
position, which no call in earnest has, and which changes the distribution. What a row says behind its own end means
little; how much of the text that is, is reported as `past_end`.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from tqdm.auto import tqdm
from transformers.generation.streamers import BaseStreamer

from .batch_report import draw_speeds, markdown_table, print_tables, summarise
from .bench import bench_options, check_lengths, introduce, pair_settings
from .command_files import check_plot, check_writable, read_prompts, write_results
from .decoding_methods import PLAIN, Method, plain_method
from .files import write_text
from .loading import CommandError, Pair, check_drafting, left_padded, load_pair, machine_profile
from .profiles import Profile
from .schedule_options import drafter_schedule
from .scheduling import HARDWARE_AWARE, SCHEDULES, Scheduler, survivals
from .statistics import SpeculativeStats
from .synthetic import concentration_of, synthetic_acceptance
from .timing import timed_rows, warm_up


# Candidates for the schedule "confidence", and batches that the choice between them rests on.
THRESHOLDS = (0.2, 0.4, 0.7)
TUNING_TURNS = 1
# Rows that a cell decodes at least: one text says little.
LEAST_ROWS = 8
# Scheduling is timed by itself, for so many rows besides those of the batches, over so many rounds.
MANY_ROWS = 64
SCHEDULING_ROUNDS = 64


@dataclass(frozen=True)
class Setting:
    """
    What the ways of decoding are compared at.

    Attributes:
        batch_size (`int`): Rows.
        accept_prob, auc (`float`, *optional*): Of [`synthetic_acceptance`], if that is to be in force.
    """

    batch_size: int
    accept_prob: float | None = None
    auc: float | None = None


@dataclass(frozen=True)
class BatchCall:
    """
    One timed call of `generate`.

    Attributes:
        rows (`list[list[int]]`): Each row's new tokens, all of one length of at least 2.
        seconds, decode_seconds (`float`): Of the whole call, and from its first tokens on.
        stats ([`SpeculativeStats`], *optional*): Of a call with a drafter.
        drafted_rounds (`int`): Rounds that drafted, counted for each row, as `stats.rounds` is.
    """

    rows: list[list[int]]
    seconds: float
    decode_seconds: float
    stats: SpeculativeStats | None = None
    drafted_rounds: int = 0

    @property
    def tokens_per_second(self) -> float:
        """New tokens a second of the whole call, all rows together."""
        return len(self.rows) * len(self.rows[0]) / self.seconds

    @property
    def decode_tokens_per_second(self) -> float:
        """The same without the prefill and the first tokens, which come of it."""
        return len(self.rows) * (len(self.rows[0]) - 1) / self.decode_seconds


class _DecodeClock(BaseStreamer):
    """Times a call from its first tokens to its end; `generate` puts the prompts before them."""

    def __init__(self) -> None:
        self.puts = 0
        self.first = self.last = 0.0

    def put(self, value: torch.Tensor) -> None:
        self.puts += 1
        if self.puts == 2:
            self.first = time.perf_counter()

    def end(self) -> None:
        self.last = time.perf_counter()


@contextmanager
def scheduled(drafter: Any, schedule: str, threshold: float | None, setting: Setting) -> Iterator[None]:
    """
    Let every call with a drafter go by a schedule at a setting.

    Args:
        drafter, schedule, threshold: As for [`drafter_schedule`].
        setting ([`Setting`]): Its synthetic acceptance is in force.
    """
    given = setting.accept_prob is not None
    synthetic = synthetic_acceptance(setting.accept_prob, setting.auc) if given else nullcontext()
    with drafter_schedule(drafter, schedule, threshold), synthetic:
        yield


@contextmanager
def _counting_drafts(drafter: Any) -> Iterator[list[int]]:
    """The rows of each block that is drafted meanwhile."""
    rows: list[int] = []
    handle = drafter.register_forward_pre_hook(lambda module, arguments: rows.append(len(arguments[0])))
    try:
        yield rows
    finally:
        handle.remove()


def interleaved(prompt_sets: dict[str, list[str]]) -> list[str]:
    """The prompts of all sets, one of each set in turn, so that every batch holds some of all."""
    turns = itertools.zip_longest(*prompt_sets.values())
    return [prompt for turn in turns for prompt in turn if prompt is not None]


class BatchBench:
    """
    Times calls on batches of the same prompts.

    Args:
        pair ([`Pair`]): Target and drafter.
        prompt_sets (`dict[str, list[str]]`): Prompts by set, see [`read_prompts`].
        options (`dict`): Arguments of `generate` that all ways of decoding share.
        schedules (`Sequence[str]`): Those to compare, each one of `SCHEDULES`.
        thresholds (`Sequence[float]`): Candidates for `"confidence"`.
        seed (`int`): Each call is seeded with this number plus its batch's.

    Raises:
        `CommandError`: if a prompt leaves no room for the text.
    """

    def __init__(
        self,
        pair: Pair,
        prompt_sets: dict[str, list[str]],
        options: dict[str, Any],
        schedules: Sequence[str],
        thresholds: Sequence[float],
        seed: int,
    ):
        self.pair, self.schedules, self.thresholds, self.seed = pair, schedules, thresholds, seed
        encoded = {name: [pair.encode(prompt) for prompt in prompts] for name, prompts in prompt_sets.items()}
        check_lengths(pair, encoded, options["max_new_tokens"])
        self.prompts = interleaved(encoded)
        self.pad_token_id = 0 if pair.tokenizer.pad_token_id is None else pair.tokenizer.pad_token_id
        no_token = pair.target.config.get_text_config().vocab_size
        self.options = options | {"eos_token_id": no_token, "pad_token_id": self.pad_token_id}

    def batch(self, size: int, number: int) -> dict[str, torch.Tensor]:
        """The next prompts for each number, from the first again after the last."""
        first = size * number
        chosen = [self.prompts[place % len(self.prompts)] for place in range(first, first + size)]
        return left_padded(chosen, self.pad_token_id)

    def method(self, schedule: str, setting: Setting, threshold: float | None = None) -> Method:
        """DSpark by a schedule; only `"confidence"` takes the threshold, which would make `"constant"` another one."""
        cut_at = threshold if schedule == "confidence" else None
        surroundings = partial(scheduled, self.pair.drafter, schedule, cut_at, setting)
        return Method(schedule, {"assistant_model": self.pair.drafter}, surroundings, speculative=True)

    def call(self, method: Method, setting: Setting, number: int) -> BatchCall:
        """Decode batch `number` of a setting's size in one way."""
        clock, inputs = _DecodeClock(), self.batch(setting.batch_size, number)
        with _counting_drafts(self.pair.drafter) as drafted:
            rows, seconds = timed_rows(
                self.pair, inputs, method, self.options | {"streamer": clock}, self.seed + number
            )
        stats = self.pair.drafter.speculative_stats if method.speculative else None
        return BatchCall(rows, seconds, clock.last - clock.first, stats, sum(drafted))

    def warm_up(self, setting: Setting) -> None:
        """
        Decode a few tokens in each way, so that no first-time cost is measured.

        Raises:
            `CommandError`: if target, drafter and options do not go together.
        """
        schedules = [self.method(schedule, setting, self.thresholds[0]) for schedule in self.schedules]
        warm_up(self.pair, self.batch(setting.batch_size, 0), [plain_method(), *schedules], self.options)

    def tune(self, settings: Sequence[Setting], first: int) -> list[dict[str, Any]]:
        """
        Try the thresholds on batches of their own, so that the best one's speed is no maximum over noise.

        Args:
            settings (`Sequence[Setting]`): Where each is to have its own best threshold.
            first (`int`): Number of the first batch.

        Returns:
            `list[dict]`: For each setting `seconds` of decoding by threshold, one of each batch, and the `chosen`
            threshold; nothing is tried where there is only one.
        """
        tried: list[dict[float, list[float]]] = [{value: [] for value in self.thresholds} for _ in settings]
        turns = list(itertools.product(range(TUNING_TURNS), range(len(settings)))) if len(self.thresholds) > 1 else []
        with tqdm(total=len(turns) * len(self.thresholds), desc="Thresholds", unit="call", disable=not turns) as bar:
            for turn, place in turns:
                for value in _rotated(self.thresholds, turn + place):
                    method = self.method("confidence", settings[place], value)
                    call = self.call(method, settings[place], first + turn)
                    tried[place][value].append(call.decode_seconds)
                    bar.set_postfix_str(_told(settings[place], f"threshold {value:g}", call), refresh=False)
                    bar.update()
        return [
            {
                "batch_size": setting.batch_size,
                "accept_prob": setting.accept_prob,
                "seconds": seconds,
                "chosen": choose_threshold(seconds),
            }
            for setting, seconds in zip(settings, tried, strict=True)
        ]

    def measure(
        self, settings: Sequence[Setting], thresholds: Sequence[float | None], repetitions: int
    ) -> list[dict[str, Any]]:
        """
        All timed calls: in each repetition each setting with a new batch, by each way of decoding in turn.

        Args:
            settings (`Sequence[Setting]`): What to compare at.
            thresholds (`Sequence[float]`): For each setting that of the schedule `"confidence"`.
            repetitions (`int`): Batches of each setting; more of those that are so small that they would hold fewer
                than [`LEAST_ROWS`] rows in all.

        Returns:
            `list[dict]`: One record a call, of plain values.
        """
        records = []
        most = max(batches_of(setting, repetitions) for setting in settings)
        turns = [
            (repetition, place)
            for repetition, place in itertools.product(range(most), range(len(settings)))
            if repetition < batches_of(settings[place], repetitions)
        ]
        with tqdm(total=len(turns) * (1 + len(self.schedules)), desc="Benchmark", unit="call") as bar:
            for repetition, place in turns:
                setting, threshold = settings[place], thresholds[place]
                schedules = [self.method(schedule, setting, threshold) for schedule in self.schedules]
                methods, calls = [plain_method(), *schedules], {}
                for method in _rotated(methods, repetition + place):
                    calls[method.name] = self.call(method, setting, repetition)
                    bar.set_postfix_str(_told(setting, method.name, calls[method.name]), refresh=False)
                    bar.update()
                for method in methods:
                    where = {
                        "batch_size": setting.batch_size,
                        "accept_prob": setting.accept_prob,
                        "repetition": repetition,
                        "method": method.name,
                        "threshold": threshold if method.name == "confidence" else None,
                    }
                    records.append(where | self._record(method.name, calls))
        return records

    def _record(self, name: str, calls: dict[str, BatchCall]) -> dict[str, Any]:
        call, plain, constant = calls[name], calls[PLAIN], calls.get("constant")
        values: dict[str, Any] = {
            "seconds": call.seconds,
            "decode_seconds": call.decode_seconds,
            "tokens_per_second": call.tokens_per_second,
            "decode_tokens_per_second": call.decode_tokens_per_second,
            "ratio": plain.seconds / call.seconds,
            "decode_ratio": plain.decode_seconds / call.decode_seconds,
            "constant_ratio": None if constant is None else constant.seconds / call.seconds,
            "constant_decode_ratio": None if constant is None else constant.decode_seconds / call.decode_seconds,
            "same_text": statistics.fmean(row == other for row, other in zip(call.rows, plain.rows, strict=True)),
            "past_end": past_end(call.rows, self.pair.target.generation_config.eos_token_id),
        }
        if call.stats is not None:
            values["drafted_rounds"] = call.drafted_rounds
            values["stats"] = {key: value for key, value in call.stats.to_dict().items() if key != "rows"}
        return values


def batches_of(setting: Setting, repetitions: int) -> int:
    """How many batches are decoded at a setting."""
    return max(repetitions, math.ceil(LEAST_ROWS / setting.batch_size))


def choose_threshold(tried: dict[float, list[float]]) -> float:
    """The threshold under which the same work took least time in all; of equal ones the first."""
    return min(tried, key=lambda threshold: sum(tried[threshold]))


def _rotated(values: Sequence[Any], shift: int) -> list[Any]:
    shift %= len(values)
    return [*values[shift:], *values[:shift]]


def _told(setting: Setting, method: str, call: BatchCall) -> str:
    told = f"batch {setting.batch_size}, {method}: {call.tokens_per_second:.1f} tok/s"
    if call.stats is not None:
        told += f", mean_acceptance_length {call.stats.mean_acceptance_length:.2f}"
    return told


def past_end(rows: Sequence[Sequence[int]], eos_token_id: int | Sequence[int] | None) -> float:
    """
    Share of the tokens of a text that stand behind the first end token of their row.

    Args:
        rows (`Sequence[Sequence[int]]`): New tokens of each row.
        eos_token_id (`int` or `Sequence[int]`, *optional*): What ends a text in earnest.
    """
    ends = {eos_token_id} if isinstance(eos_token_id, int) else set(eos_token_id or ())
    kept = sum(next((place + 1 for place, token in enumerate(row) if token in ends), len(row)) for row in rows)
    return 1 - kept / sum(map(len, rows))


def scheduling_costs(
    schedule: str, profile: Profile, rows: int, block_size: int, do_sample: bool
) -> dict[str, str | int | float]:
    """
    Time a scheduler by itself, over rounds of survivals as a good drafter gives them (accepted with 0.8, AUC 0.8).

    Args:
        schedule (`str`): One of `HARDWARE_AWARE`.
        profile ([`Profile`]): What it goes by.
        rows (`int`): Rows of each round.
        block_size (`int`): Slots of a block.
        do_sample (`bool`): Whether tokens are drawn.

    Returns:
        `dict`: `schedule`, `rows`, and medians over the rounds that drafted: `seconds` a round, and `share`, what that
        is of the draft and the verification it asked for, by the profile.
    """
    numbers, concentration = np.random.default_rng(0), concentration_of(0.8, 0.8)
    scheduler = Scheduler(
        schedule, block_size, costs=lambda count, context: profile.costs(count, context, block_size, do_sample)
    )
    names, context = list(range(rows)), profile.steps[0].context
    seconds, shares = [], []
    for _ in range(SCHEDULING_ROUNDS):
        slots, deciding = _timed(scheduler.slots, names, context)
        if not slots:
            continue
        confidences = numbers.beta(0.8 * concentration, 0.2 * concentration, (rows, slots))
        outcomes = numbers.random((rows, slots)) < confidences
        known, multiplying = _timed(lambda values: [survivals(row) for row in values], confidences.tolist())
        choice, choosing = _timed(scheduler.choose, names, known)
        accepted = np.minimum(outcomes.cumprod(axis=1).sum(axis=1), choice.lengths).tolist()
        _, observing = _timed(scheduler.observe, names, known, choice.lengths, accepted)
        seconds.append(deciding + multiplying + choosing + observing)
        costs = scheduler.round_costs
        shares.append(
            seconds[-1] / (costs.draft_seconds[slots] + float(costs.verify_seconds[rows + sum(choice.lengths)]))
        )
    return {
        "schedule": schedule,
        "rows": rows,
        "seconds": statistics.median(seconds),
        "share": statistics.median(shares),
    }


def _timed(function: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    begin = time.perf_counter()
    value = function(*arguments)
    return value, time.perf_counter() - begin


def run(
    *,
    batch_sizes: Sequence[int],
    schedules: Sequence[str] = SCHEDULES,
    target: str,
    drafter: str | None,
    prompts: str | None,
    limit: int | None,
    max_new_tokens: int,
    temperature: float,
    top_p: float | None,
    top_k: int | None,
    threshold: float | None,
    repetitions: int,
    dtype: str,
    device: str,
    threads: int | None,
    seed: int,
    synthetic: Sequence[float],
    synthetic_auc: float | None = None,
    output: str | None,
    markdown: str | None = None,
    plot: str | None = None,
) -> int:
    """`dspark bench --batch-sizes`: measure, print the tables, write the files. The command line's help says what is
    what.

    Returns:
        `int`: the exit code, 0.

    Raises:
        `CommandError`: something given cannot be used.
    """
    batch_sizes, schedules = list(dict.fromkeys(batch_sizes)), list(dict.fromkeys(schedules))
    _check_arguments(max_new_tokens, schedules, threshold, synthetic, synthetic_auc)
    check_writable("--output", output)
    check_writable("--markdown", markdown)
    check_plot(plot)
    options = bench_options(max_new_tokens, temperature, top_p, top_k)
    prompt_sets = read_prompts(prompts, limit)
    pair = load_pair(target, drafter, dtype, device, threads)
    profile = _profile_for(pair, schedules)
    console = Console()
    introduce(pair, console, bool(synthetic))
    settings = [Setting(size, prob, synthetic_auc) for size in batch_sizes for prob in (synthetic or (None,))]
    thresholds = THRESHOLDS if threshold is None else (threshold,)
    bench = BatchBench(pair, prompt_sets, options, schedules, thresholds, seed)
    for setting in settings:
        bench.warm_up(setting)
    first = max(batches_of(setting, repetitions) for setting in settings)
    tuning = bench.tune(settings, first) if "confidence" in schedules else []
    records = bench.measure(settings, [one["chosen"] for one in tuning] or [None] * len(settings), repetitions)
    summary = summarise(records)
    scheduling = [
        scheduling_costs(schedule, profile, rows, pair.drafter.config.block_size, temperature > 0)
        for schedule in schedules
        if schedule in HARDWARE_AWARE
        for rows in sorted({*batch_sizes, MANY_ROWS})
    ]
    print_tables(summary, scheduling, console, compare_texts=temperature == 0 and not synthetic)
    if output is not None:
        described = pair_settings(pair, target, prompts) | options | {
            "limit": limit, "batch_sizes": batch_sizes, "schedules": schedules, "threshold": threshold,
            "repetitions": repetitions, "seed": seed, "synthetic": list(synthetic), "synthetic_auc": synthetic_auc,
        }  # fmt: skip
        results = {"settings": described, "profile": None if profile is None else profile.key, "summary": summary}
        write_results(output, results | {"scheduling": scheduling, "thresholds": tuning, "calls": records})
    if markdown is not None:
        text = markdown_table(summary, _caption(pair, options, repetitions, synthetic_auc))
        write_text(Path(markdown).expanduser(), text)
    if plot is not None:
        draw_speeds(summary, Path(plot).expanduser())
    for path in filter(None, (output, markdown, plot)):
        console.print(f"Written: {path}", highlight=False)
    return 0


def _check_arguments(
    max_new_tokens: int,
    schedules: Sequence[str],
    threshold: float | None,
    synthetic: Sequence[float],
    synthetic_auc: float | None,
) -> None:
    check_drafting(max_new_tokens)
    if threshold is not None and "confidence" not in schedules:
        raise CommandError(f"--threshold {threshold:g}: only the schedule confidence has one; add it to --schedules")
    if synthetic_auc is None:
        return
    if not synthetic:
        raise CommandError(f"--synthetic-auc {synthetic_auc:g}: it needs --synthetic-acceptance; give that as well")
    for probability in synthetic:
        if not 0 < probability < 1:
            raise CommandError(
                f"--synthetic-acceptance {probability:g}: with --synthetic-auc it must lie between 0 and 1; what is "
                "certain has no AUC"
            )


def _profile_for(pair: Pair, schedules: Sequence[str]) -> Profile | None:
    """The profile that the hardware-aware schedules among these go by, if the pair can do all of them."""
    confident = [schedule for schedule in schedules if schedule != "constant"]
    if confident and not pair.drafter.config.enable_confidence_head:
        raise CommandError(
            f"--schedules {' '.join(schedules)}: the drafter {pair.names[1]!r} has no confidence head; give constant "
            "alone"
        )
    aware = [schedule for schedule in schedules if schedule in HARDWARE_AWARE]
    return machine_profile(pair, f"--schedules {' '.join(aware)}") if aware else None


def _caption(pair: Pair, options: dict[str, Any], repetitions: int, synthetic_auc: float | None) -> str:
    """What was measured, in one sentence."""
    sampling = "greedy"
    if options["do_sample"]:
        sampling = ", ".join(f"{name} {options[name]:g}" for name in ("temperature", "top_p", "top_k"))
    synthetic = "" if synthetic_auc is None else f", synthetic acceptance with confidences of AUC {synthetic_auc:g}"
    return (
        f"{pair.description}, {torch.get_num_threads()} threads; {sampling}{synthetic}; "
        f"{options['max_new_tokens']} new tokens a row; medians of {repetitions} paired calls, of more where that "
        f"would be fewer than {LEAST_ROWS} rows."
    )
