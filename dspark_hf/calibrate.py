"""Fit a drafter's confidence temperatures, or check those it has: `dspark calibrate`."""

from __future__ import annotations

import datetime
import json
import os
import random
import shutil
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .blocks import Blocks, record_blocks
from .calibration import (
    FEWEST_REACHED,
    PositionMetrics,
    calibration_error_by_chance,
    fit_temperatures,
    position_metrics,
    scaled_survivals,
)
from .command_files import check_parent, check_plot, check_writable, read_prompts
from .files import whole_folder, write_json
from .loading import DEMO, CommandError, Pair, generation_options, load_pair, regime, reporting, sampling_in_force
from .reliability import ReliabilityRow, draw_reliability


if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

KEY = "confidence_temperatures"
# Fitted unless others are asked for: greedy decoding is a regime of its own, where the label is agreement.
TEMPERATURES = (0.0, 1.0)

PromptSets = dict[str, list[str]]
# `record_blocks` but for what differs from part to part: the prompts, `temperature`, `top_p` and `top_k`.
Record = Callable[..., Blocks]


@dataclass(frozen=True)
class Fit:
    """
    Temperatures fitted for one sampling temperature, and the blocks they are judged on.

    Attributes:
        temperatures (`list[float]`): One a slot.
        fitted ([`Blocks`]): What they were fitted on.
        held_out ([`Blocks`], *optional*): Of prompts that had no part in the fit.
        sampling (`dict`): `top_p` and `top_k` in force; empty for greedy decoding.
    """

    temperatures: list[float]
    fitted: Blocks
    held_out: Blocks | None
    sampling: dict[str, float | int]

    @property
    def judged_on(self) -> Blocks:
        """The held-out blocks if there are any, else those of the fit."""
        return self.fitted if self.held_out is None else self.held_out

    @property
    def recorded(self) -> Blocks:
        """All blocks."""
        return self.fitted if self.held_out is None else self.fitted + self.held_out


def run(
    *,
    target: str,
    drafter: str | None,
    prompts: str | None,
    limit: int | None,
    max_new_tokens: int,
    batch_size: int,
    temperatures: list[float] | None,
    top_p: float | None,
    top_k: int | None,
    seed: int,
    holdout: float,
    check: bool,
    output: str | None,
    plot: str | None,
    blocks: str | None,
    dtype: str,
    device: str,
    threads: int | None,
) -> int:
    """`dspark calibrate`: fit, print, write; or check. The command line's help says what is what.

    Returns:
        `int`: the exit code, 0, or 1 if `--check` advises a refit.

    Raises:
        `CommandError`: something given cannot be used.
    """
    generation_options(max_new_tokens, max(temperatures or TEMPERATURES), top_p, top_k)  # refuses what has no effect
    check_files(check, output, plot, blocks)
    prompt_sets = read_prompts(prompts, limit)
    parts = ({}, prompt_sets) if check else split_prompts(prompt_sets, holdout, seed)
    destination = None if check else output_folder(drafter, output)

    from rich.console import Console

    pair = load_pair(target, drafter, dtype, device, threads)
    console = Console()
    console.print(pair.description, highlight=False)

    def record(part: PromptSets, temperature: float, **sampling: Any) -> Blocks:
        return record_blocks(pair, part, max_new_tokens, temperature, batch_size=batch_size, seed=seed, **sampling)

    if destination is None:
        entries = stored_entries(pair, temperatures)
        return int(any([check_fit(pair, prompt_sets, record, entry, top_p, top_k, console) for entry in entries]))
    fits = []
    for temperature in dict.fromkeys(temperatures or TEMPERATURES):
        fits.append(
            record_and_fit(parts, record, temperature, sampling_in_force(pair.target, temperature, top_p, top_k))
        )
        print_fit(fits[-1], console)
    written = [write_fits(pair, fits, parts, max_new_tokens, *destination)]
    if blocks is not None:
        written += save_blocks(fits, Path(blocks).expanduser())
    if plot is not None:
        plot_reliability(fits, Path(plot).expanduser())
        written.append(plot)
    console.print(f"Written: {', '.join(map(str, written))}", highlight=False)
    return 0


def check_files(check: bool, output: str | None, plot: str | None, blocks: str | None) -> None:
    """
    Refuse, before anything long is begun, files that could not be written.

    Raises:
        `CommandError`: naming the argument.
    """
    for argument, value in (("--output", output), ("--plot", plot), ("--blocks", blocks)):
        if check and value is not None:
            raise CommandError(f"{argument} {value!r}: --check writes nothing; leave one of the two out")
    check_parent("--output", output)
    check_writable("--blocks", blocks)
    check_plot(plot)


def output_folder(drafter: str | None, output: str | None) -> tuple[Path, bool]:
    """
    Where the temperatures go, and whether that is the drafter's own folder.

    Raises:
        `CommandError`: nothing can be written there.
    """
    own = None if drafter in (None, DEMO) else Path(drafter).expanduser().absolute()
    if output is not None:
        path = Path(output).expanduser().absolute()
    elif own is not None and own.is_dir():
        path = own
    else:
        name = "the demo's" if drafter in (None, DEMO) else repr(drafter)
        raise CommandError(
            f"--output is missing: only a --drafter that is a folder on this machine is changed in place, and it is "
            f"{name}; give --output a new folder, to which the drafter is copied"
        )
    in_place = own is not None and own.is_dir() and path.is_dir() and path.samefile(own)
    if not in_place and path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise CommandError(
            f"--output {output!r}: it exists and is not empty; give a new folder, or leave --output out to change the "
            "drafter's own"
        )
    if not os.access(path if in_place else path.parent, os.W_OK):
        raise CommandError(f"--output {str(path)!r}: it cannot be written; give another folder")
    return path, in_place


def split_prompts(prompt_sets: PromptSets, holdout: float, seed: int) -> tuple[PromptSets, PromptSets]:
    """
    Divide prompts into those to fit on and those kept out.

    Args:
        prompt_sets (`dict[str, list[str]]`): Prompts by set.
        holdout (`float`): Share kept out, in [0, 1), drawn over all sets together.
        seed (`int`): Of the draw.

    Raises:
        `CommandError`: one part would be empty.
    """
    everything = [(name, prompt) for name, prompts in prompt_sets.items() for prompt in prompts]
    count = round(holdout * len(everything))
    if count == len(everything) or (holdout > 0 and count == 0):
        raise CommandError(
            f"--holdout {holdout:g}: of {len(everything)} prompts it would keep {count} out of the fit; give more "
            "prompts, or --holdout 0 to learn nothing of other prompts"
        )
    kept_out = set(random.Random(seed).sample(range(len(everything)), count))
    parts: tuple[PromptSets, PromptSets] = ({}, {})
    for index, (name, prompt) in enumerate(everything):
        parts[index in kept_out].setdefault(name, []).append(prompt)
    return parts


def record_and_fit(
    parts: tuple[PromptSets, PromptSets], record: Record, temperature: float, sampling: dict[str, float | int]
) -> Fit:
    """
    Record blocks at one sampling temperature and fit.

    Args:
        parts (`tuple`): Prompts to fit on, and prompts kept out; the latter may be none.
        record (`Callable`): Records blocks of prompts.
        temperature (`float`): 0 is greedy decoding.
        sampling (`dict`): `top_p` and `top_k` in force.
    """
    fitted = record(parts[0], temperature, **sampling)
    held_out = record(parts[1], temperature, **sampling) if parts[1] else None
    temperatures = fit_temperatures(fitted.confidence_logits, fitted.accepted)
    return Fit(temperatures.tolist(), fitted, held_out, sampling)


def before_and_after(
    blocks: Blocks, temperatures: Sequence[float]
) -> tuple[list[PositionMetrics], list[PositionMetrics]]:
    """Metrics by position with raw confidences, and with temperatures."""
    raw = [1.0] * len(temperatures)
    before, after = (
        position_metrics(blocks.confidence_logits, blocks.accepted, values) for values in (raw, temperatures)
    )
    return before, after


def mean_ece(positions: Sequence[PositionMetrics]) -> float:
    """Mean of the calibration errors over a block's positions."""
    return statistics.fmean(metrics.ece for metrics in positions)


def error_by_chance(blocks: Blocks, temperatures: Sequence[float]) -> float:
    """What [`mean_ece`] would hardly exceed if the temperatures were right."""
    return calibration_error_by_chance(scaled_survivals(blocks.confidence_logits, temperatures))


def print_fit(fit: Fit, console: Console) -> None:
    """The table of a fit, and its mean calibration errors in and out of sample."""
    part = "of the fit" if fit.held_out is None else "kept out of the fit"
    name = regime(fit.fitted.sampling_temperature)
    title = f"Survival, {name}, over {len(fit.judged_on)} blocks of prompts {part}"
    console.print(metrics_table(title, fit.temperatures, fit.judged_on))
    few = sum(metrics.reached < FEWEST_REACHED for metrics in before_and_after(fit.fitted, fit.temperatures)[0])
    if few:
        positions = (
            f"position {len(fit.temperatures) - few + 1} on" if few < len(fit.temperatures) else "all positions"
        )
        console.print(
            f"Not fitted, left at 1: {positions}, reached by fewer than {FEWEST_REACHED} of {len(fit.fitted)} blocks. "
            "More prompts or a higher --max-new-tokens give more."
        )
    before, after = map(mean_ece, before_and_after(fit.fitted, fit.temperatures))
    console.print(f"Mean ECE in sample: {before:.2%} before, {after:.2%} after ({len(fit.fitted)} blocks).")
    if fit.held_out is None:
        console.print("No prompts were kept out (--holdout 0): nothing is known of others.")
        return
    before, after = map(mean_ece, before_and_after(fit.held_out, fit.temperatures))
    chance = error_by_chance(fit.held_out, fit.temperatures)
    console.print(f"On prompts kept out: {before:.2%} before, {after:.2%} after; up to {chance:.2%} is chance.")
    if after > before:
        console.print("[bold]That is no better than raw confidences: fit on more prompts or longer texts.[/]")


def metrics_table(title: str, temperatures: Sequence[float], blocks: Blocks) -> Table:
    """A row a position: blocks that reached it, temperature, and what it changes."""
    from rich.table import Table

    table = Table(title=title)
    for column in ("pos.", "reached", "T"):
        table.add_column(column, justify="right", no_wrap=True)
    for name in ("ROC-AUC", "ECE", "Brier"):
        for when in ("before", "after"):
            table.add_column(f"{name}\n{when}", justify="right", no_wrap=True)
    positions = zip(temperatures, *before_and_after(blocks, temperatures), strict=True)
    for position, (temperature, *pair) in enumerate(positions, start=1):
        values = ["–" if metrics.roc_auc is None else f"{metrics.roc_auc:.3f}" for metrics in pair]
        values += [f"{metrics.ece:.1%}" for metrics in pair] + [f"{metrics.brier:.3f}" for metrics in pair]
        table.add_row(str(position), str(pair[0].reached), f"{temperature:.2f}", *values)
    return table


def write_fits(
    pair: Pair,
    fits: Sequence[Fit],
    parts: tuple[PromptSets, PromptSets],
    max_new_tokens: int,
    folder: Path,
    in_place: bool,
) -> Path:
    """
    Put fits into the drafter's own folder or a copy of it.

    Returns:
        `Path`: the config that was written.

    Raises:
        `CommandError`: it could not be; the old one is as it was.
    """
    entries = [config_entry(pair, fit, parts, max_new_tokens) for fit in fits]
    with reporting(f"--output {str(folder)!r}"):
        if in_place:
            write_temperatures(folder, entries)
        else:
            copy_with_temperatures(drafter_folder(pair.names[1]), folder, entries)
    return folder / "config.json"


def config_entry(pair: Pair, fit: Fit, parts: tuple[PromptSets, PromptSets], max_new_tokens: int) -> dict[str, Any]:
    """A fit as an entry of the config's `confidence_temperatures`."""
    from .environment import ENGINE, package_versions

    prompts = [{name: len(prompts) for name, prompts in part.items()} for part in parts]
    return {
        "sampling_temperature": fit.fitted.sampling_temperature,
        "temperatures": fit.temperatures,
        "made_with": {
            "prompts": {"fit": prompts[0], "held_out": prompts[1]},
            "blocks": {"fit": len(fit.fitted), "held_out": len(fit.recorded) - len(fit.fitted)},
            "ece": {"fit": _errors(fit, fit.fitted), "held_out": _errors(fit, fit.held_out)},
            "top_p": fit.sampling.get("top_p"),
            "top_k": fit.sampling.get("top_k"),
            "max_new_tokens": max_new_tokens,
            "dtype": str(pair.target.dtype).removeprefix("torch."),
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "versions": package_versions(ENGINE),
        },
    }


def _errors(fit: Fit, blocks: Blocks | None) -> dict[str, list[float]] | None:
    if blocks is None:
        return None
    pairs = zip(("before", "after"), before_and_after(blocks, fit.temperatures), strict=True)
    return {name: [round(metrics.ece, 5) for metrics in positions] for name, positions in pairs}


def write_temperatures(folder: Path, entries: Sequence[dict[str, Any]]) -> None:
    """
    Put fitted temperatures into a checkpoint's `config.json`, in one step and touching no other key. Entries of other
    sampling temperatures stay, those of the same are replaced.

    Args:
        folder (`Path`): A checkpoint folder, of any format that can be read.
        entries (`Sequence[dict]`): See `confidence_temperatures` of [`DSparkConfig`].
    """
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    by_temperature = {entry["sampling_temperature"]: entry for entry in [*(config.get(KEY) or []), *entries]}
    config[KEY] = [by_temperature[temperature] for temperature in sorted(by_temperature)]
    write_json(path, config)


# What a training leaves beside the drafter that is no part of it.
TRAINING_STATE = ("checkpoint-*", "training_args.bin", "trainer_state.json", "runs", "*.pt", "*.pth")


def copy_with_temperatures(source: Path, folder: Path, entries: Sequence[dict[str, Any]]) -> None:
    """
    Copy a checkpoint folder file by file and put fitted temperatures into the copy, which appears in one step.

    Args:
        source (`Path`): The drafter's folder.
        folder (`Path`): Does not exist, or is empty; its parent exists.
        entries (`Sequence[dict]`): As for [`write_temperatures`].
    """
    with whole_folder(folder) as unfinished:
        shutil.copytree(source, unfinished, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*TRAINING_STATE))
        write_temperatures(unfinished, entries)


def drafter_folder(drafter: str) -> Path:
    """A drafter's files on this machine; a Hub repository is fetched whole."""
    from huggingface_hub import snapshot_download

    from .demo_target import demo_drafter_folder

    if drafter == DEMO:
        return demo_drafter_folder()
    path = Path(drafter).expanduser()
    return path if path.is_dir() else Path(snapshot_download(drafter))


def save_blocks(fits: Sequence[Fit], path: Path) -> list[Path]:
    """Save what was recorded: in the file if it is of one sampling temperature, else in one file each, named so."""
    paths = []
    for fit in fits:
        name = f"{path.stem}-t{fit.fitted.sampling_temperature:g}{path.suffix}"
        paths.append(path if len(fits) == 1 else path.with_name(name))
        fit.recorded.save(paths[-1])
    return paths


def plot_reliability(fits: Sequence[Fit], path: Path) -> None:
    """
    Reliability diagrams: a row a sampling temperature, a panel a position, before and after.

    Args:
        fits (`Sequence[Fit]`): Shown on the blocks they are judged on.
        path (`Path`): The file to write.

    Source: DSpark, Figure 6.
    """
    rows = []
    for fit in fits:
        blocks = fit.judged_on
        part = "in sample" if fit.held_out is None else "kept out of the fit"
        label = f"{regime(blocks.sampling_temperature)}\n{part}, {len(blocks)} blocks"
        rows.append(ReliabilityRow(label, blocks.confidence_logits, blocks.accepted, fit.temperatures))
    draw_reliability(rows, path)


def stored_entries(pair: Pair, temperatures: Sequence[float] | None) -> list[dict[str, Any]]:
    """
    The stored fits to check: those of the given sampling temperatures, by default all.

    Raises:
        `CommandError`: there is none, or none of a given temperature.
    """
    entries = {entry["sampling_temperature"]: entry for entry in pair.drafter.config.confidence_temperatures or []}
    wanted = list(dict.fromkeys(temperatures or entries))
    if not wanted or any(temperature not in entries for temperature in wanted):
        asked = f" but --temperature is {' '.join(f'{t:g}' for t in temperatures)}" if temperatures else ""
        raise CommandError(
            f"--check: --drafter {pair.names[1]!r} has fits for {', '.join(map(regime, entries)) or 'nothing'}"
            f"{asked}; fit first, with `dspark calibrate` without --check"
        )
    return [entries[temperature] for temperature in wanted]


def check_fit(
    pair: Pair,
    prompt_sets: PromptSets,
    record: Record,
    entry: dict[str, Any],
    top_p: float | None,
    top_k: int | None,
    console: Console,
) -> bool:
    """
    Measure stored temperatures on new prompts and print what came out.

    Args:
        pair ([`Pair`]): Its drafter has the temperatures.
        prompt_sets (`dict[str, list[str]]`): Prompts by set.
        record (`Callable`): Records blocks of prompts.
        entry (`dict`): Of the config's `confidence_temperatures`.
        top_p, top_k (*optional*): By default those of the fit.
        console (`rich.console.Console`): Prints.

    Returns:
        `bool`: whether they should be fitted again.
    """
    temperature, temperatures = entry["sampling_temperature"], entry["temperatures"]
    made_with = entry.get("made_with") or {}
    top_p, top_k = (
        made_with.get(name) if given is None else given for name, given in (("top_p", top_p), ("top_k", top_k))
    )
    blocks = record(prompt_sets, temperature, **sampling_in_force(pair.target, temperature, top_p, top_k))
    title = f"Survival, {regime(temperature)}, over {len(blocks)} new blocks"
    console.print(metrics_table(title, temperatures, blocks))
    raw, now = map(mean_ece, before_and_after(blocks, temperatures))
    errors = made_with.get("ece") or {}
    kept = errors.get("held_out") or errors.get("fit")
    stored = statistics.fmean(kept["after"]) if kept else None
    known = "not known" if stored is None else f"{stored:.2%}" + ("" if errors.get("held_out") else " in sample")
    console.print(f"Mean ECE as stored {now:.2%}, without temperatures {raw:.2%}; after the fit it was {known}.")
    reason = refit_reason(now, raw, stored, error_by_chance(blocks, temperatures))
    within = " (what they differ by can be chance)" if now > min(raw, raw if stored is None else stored) else ""
    console.print(f"No refit needed{within}." if reason is None else f"[bold]Refit:[/] {reason}.", highlight=False)
    return reason is not None


def refit_reason(now: float, raw: float, stored: float | None, chance: float) -> str | None:
    """
    Why temperatures should be fitted again, or `None` if they need not be.

    Args:
        now, raw (`float`): Mean calibration error on new prompts with the stored temperatures, and with none.
        stored (`float`, *optional*): That after the fit; `None` if it is not known.
        chance (`float`): What [`error_by_chance`] says of the new blocks.
    """
    # A bin's gap is what its confidences are off by plus chance, so a mean ECE is at most the one plus the other. If
    # the first has not grown since the fit, `now` stays below `stored + chance` in 95 checks of 100 (and in more, for
    # `stored` holds some chance itself). In the same way it stays below `raw + chance` unless the temperatures do
    # harm. That the blocks of a text follow from each other does no damage: given all that came before, a calibrated
    # survival is right on average, so what chance adds is uncorrelated from block to block.
    if stored is not None and now > stored + chance:
        return f"{now:.2%} is more than the {stored:.2%} after the fit and the {chance:.2%} that chance can add"
    if now > raw + chance:
        return f"{now:.2%} is more than the {raw:.2%} without temperatures and the {chance:.2%} that chance can add"
    return None
