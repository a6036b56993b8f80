"""`dspark eval`: what a drafter's drafts are worth, task by task, for a table, a card and plots."""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .command_files import check_outputs, write_results
from .files import write_text
from .loading import CommandError, Pair, check_drafting, generation_options, load_pair, machine_profile, reporting
from .scheduling import HARDWARE_AWARE
from .tasks import read_tasks
from .work_file import WorkFile


if TYPE_CHECKING:
    from rich.console import Console

    from .evaluation import Batch, Setting

TEMPERATURES = (0.0, 1.0)


def run(
    *,
    target: str,
    drafter: str | None,
    tasks: str | None,
    prompts: str | None,
    limit: int | None,
    max_new_tokens: int,
    batch_size: int,
    temperatures: list[float] | None,
    top_p: float | None,
    top_k: int | None,
    seed: int,
    thinking: list[str] | None,
    schedule: str,
    threshold: float | None,
    time_limit: float | None,
    output: str | None,
    markdown: str | None,
    plot: str | None,
    dtype: str,
    device: str,
    threads: int | None,
) -> int:
    """`dspark eval`: decode, print the tables, write the files. The command line's help says what is what.

    Returns:
        `int`: the exit code, 0, or 1 if `--time-limit` ended it before it was done.

    Raises:
        `CommandError`: something given cannot be used.
    """
    temperatures = list(dict.fromkeys(temperatures or TEMPERATURES))
    generation_options(max_new_tokens, max(temperatures), top_p, top_k)  # refuses what has no effect
    _check_arguments(max_new_tokens, schedule, threshold, time_limit, output)
    check_outputs(output, markdown, plot)
    prompt_sets = read_tasks(tasks, prompts, limit)

    from rich.console import Console

    from .eval_report import markdown_report, print_report, write_plots
    from .evaluation import Batch, Setting, measure, summarise

    pair = load_pair(target, drafter, dtype, device, threads)
    cut_at = _threshold(pair, schedule, threshold)
    console = Console()
    console.print(pair.description, highlight=False)
    settings = [
        Setting(
            temperature,
            top_p if temperature > 0 else None,
            top_k if temperature > 0 else None,
            thought,
            max_new_tokens,
            schedule,
            cut_at,
        )
        for thought in dict.fromkeys(thinking or [None])
        for temperature in temperatures
    ]
    work = None
    if output is not None:
        path = Path(output).expanduser()
        asked = _asked_for(pair, prompt_sets, settings, batch_size, seed)
        work = WorkFile(path.with_name(f"{path.name}.work.jsonl"), asked)
    batches = [] if work is None else [Batch.from_dict(record) for record in work.records]
    if batches:
        console.print(f"Going on with {work.path}: {sum(len(b.texts) for b in batches)} prompts are done.")
    started = time.monotonic()
    total = len(settings) * sum(-(-len(each) // batch_size) for each in prompt_sets.values())
    with reporting(f"--target {target!r} with --drafter {pair.names[1]!r}"):
        for batch in measure(pair, prompt_sets, settings, batch_size, seed, known=batches):
            batches.append(batch)
            if work is not None:
                work.append(batch.to_dict())
            if time_limit is not None and len(batches) < total and time.monotonic() - started > 60 * time_limit:
                return _stop(console, work, len(batches), total, time_limit)
    by_setting = _in_order(batches, settings, prompt_sets)
    results = _described(pair) | {
        "batch_size": batch_size, "schedule": schedule, "seed": seed,
        "threshold": cut_at if schedule == "confidence" else None,
        "settings": [summarise(pair, setting, own) for setting, own in zip(settings, by_setting, strict=True)],
    }  # fmt: skip
    print_report(results, console)
    written = []
    if markdown is not None:
        write_text(Path(markdown).expanduser(), markdown_report(results))
        written.append(markdown)
    if plot is not None:
        written += write_plots(Path(plot).expanduser(), results, settings, by_setting, pair.drafter.config)
    if work is not None:
        write_results(output, results)
        work.remove()
        written.append(output)
    for path in written:
        console.print(f"Written: {path}", highlight=False)
    return 0


def _check_arguments(
    max_new_tokens: int, schedule: str, threshold: float | None, time_limit: float | None, output: str | None
) -> None:
    check_drafting(max_new_tokens)
    if threshold is not None and schedule != "confidence":
        raise CommandError(f"--threshold {threshold:g}: only --schedule confidence has one; give that as well")
    if time_limit is not None and output is None:
        raise CommandError(
            f"--time-limit {time_limit:g}: what is done by then is kept beside --output; give that as well"
        )


def _threshold(pair: Pair, schedule: str, threshold: float | None) -> float:
    """The threshold in force, where the schedule can be had at all."""
    if schedule == "constant":
        return 0.0
    if not pair.drafter.config.enable_confidence_head:
        raise CommandError(
            f"--schedule {schedule}: the drafter {pair.names[1]!r} has no confidence head; give constant"
        )
    if schedule in HARDWARE_AWARE:
        machine_profile(pair, f"--schedule {schedule}")
    if threshold is not None or schedule in HARDWARE_AWARE:
        return threshold or 0.0
    from transformers import GenerationConfig

    own = pair.drafter.generation_config.assistant_confidence_threshold
    return GenerationConfig._get_default_generation_params()["assistant_confidence_threshold"] if own is None else own


def _asked_for(
    pair: Pair, prompts: dict[str, list[str]], settings: Sequence[Setting], batch_size: int, seed: int
) -> dict[str, Any]:
    """All that the numbers depend on, speeds included, under the names of the arguments where there are such."""
    import torch

    from .environment import ENGINE, package_versions

    weights = 0
    for parameter in pair.drafter.state_dict().values():
        weights = zlib.crc32(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy(), weights)
    return {
        "target": pair.names[0],
        "drafter": [pair.names[1], weights],
        "tasks": {name: _digest(each) for name, each in prompts.items()},
        "temperature": list(dict.fromkeys(setting.temperature for setting in settings)),
        "top-p": max((setting.top_p for setting in settings if setting.top_p is not None), default=None),
        "top-k": max((setting.top_k for setting in settings if setting.top_k is not None), default=None),
        "thinking": list(dict.fromkeys(setting.thinking for setting in settings)),
        "max-new-tokens": settings[0].max_new_tokens,
        "schedule": settings[0].schedule,
        "threshold": settings[0].threshold,
        "batch-size": batch_size,
        "seed": seed,
        "dtype": str(pair.target.dtype),
        "device": str(pair.target.device),
        "threads": torch.get_num_threads(),
        "versions": package_versions(ENGINE),
    }


def _digest(prompts: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest()


def _stop(console: Console, work: WorkFile, done: int, total: int, time_limit: float) -> int:
    """Say where an evaluation was left."""
    console.print(
        f"Stopped at --time-limit {time_limit:g} after {done} of {total} batches, which are kept in {work.path}; the "
        "same command goes on from there.",
        highlight=False,
    )
    return 1


def _in_order(
    batches: Sequence[Batch], settings: Sequence[Setting], prompts: dict[str, list[str]]
) -> list[list[Batch]]:
    """The batches of each setting in the order of the tasks, however often the evaluation was left in between."""
    tasks = list(prompts)
    ordered = sorted(batches, key=lambda batch: (batch.setting, tasks.index(batch.task), batch.first))
    return [[batch for batch in ordered if batch.setting == index] for index in range(len(settings))]


def _described(pair: Pair) -> dict[str, Any]:
    """Target and drafter as plain values."""
    target, drafter = pair.target, pair.drafter
    return {
        "target": {
            "id": pair.names[0],
            "dtype": str(target.dtype).removeprefix("torch."),
            "device": str(target.device),
            "attention": target.config._attn_implementation,
            "parameters": sum(parameter.numel() for parameter in target.parameters()),
        },
        "drafter": {
            "id": pair.names[1],
            "parameters": sum(parameter.numel() for parameter in drafter.parameters()),
            "dtype": str(drafter.dtype).removeprefix("torch."),
            "block_size": drafter.config.block_size,
            "calibrated_at": [fit["sampling_temperature"] for fit in drafter.config.confidence_temperatures or []],
        },
    }
