"""What `dspark eval` shows of its numbers: tables for the terminal, Markdown for a model card, plots."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .bench_report import format_number
from .evaluation import blocks_of, describe, fitted_temperatures
from .loading import regime
from .reliability import ReliabilityRow, draw_reliability


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console
    from rich.table import Table

    from .evaluation import Batch, Setting
    from .modeling import DSparkConfig

# Of positions that fewer rounds reached, plots show hollow points.
FEW_ROUNDS = 30
NOTE = (
    "tokens a round: `mean_acceptance_length`, the target's own token included; accepted: `draft_acceptance_rate`, of "
    "the drafts verified; in brackets 95% intervals, by resampling prompts. By position: accepted among the rounds "
    "that reached it. ECE: calibration error of the survival, mean over positions, before and after the drafter's "
    "temperatures."
)


def setting_name(entry: dict[str, Any]) -> str:
    """
    A setting in words.

    Args:
        entry (`dict`): Of `settings` in the results.
    """
    words = [regime(entry["temperature"])]
    if entry["temperature"] > 0:
        words += [f"top_p {entry['top_p']:g}", f"top_k {entry['top_k']}"]
    return ", ".join([*words, *([] if entry["thinking"] is None else [f"thinking {entry['thinking']}"])])


def print_report(results: dict[str, Any], console: Console) -> None:
    """
    Two tables a setting, within 80 columns: acceptance with intervals, then acceptance and calibration by position.

    Args:
        results (`dict`): As they go to the JSON file.
        console (`rich.console.Console`): Prints.
    """
    for entry in results["settings"]:
        console.print(_acceptance_table(entry))
        console.print(_position_table(entry, results["drafter"]["block_size"]))
    console.print(NOTE.replace("`", ""), highlight=False)


def _acceptance_table(entry: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(title=f"Acceptance, {setting_name(entry)}", box=None, padding=(0, 1))
    table.add_column("task", no_wrap=True)
    for column in ("prompts", "rounds", "tokens a round", "accepted", "tok/s"):
        table.add_column(column, justify="right", no_wrap=True)
    for task, values in entry["tasks"].items():
        table.add_row(task, str(values["prompts"]), str(values["rounds"]), *_shown(values))
    table.add_row("macro", "", "", *_shown(entry["macro"]))
    return table


def _shown(values: dict[str, Any]) -> tuple[str, str, str]:
    return (
        _with_interval(values, "mean_acceptance_length", ".2f"),
        _with_interval(values, "draft_acceptance_rate", ".1%"),
        format_number(values["tokens_per_second"], ".1f"),
    )


def _with_interval(values: dict[str, Any], name: str, style: str) -> str:
    interval = values[f"{name}_interval"]
    text = format_number(values[name], style)
    return text if interval is None else f"{text} [{interval[0]:{style}}, {interval[1]:{style}}]".replace("%,", ",")


def _position_table(entry: dict[str, Any], block_size: int) -> Table:
    from rich.table import Table

    table = Table(title="Accepted by position, and mean ECE", box=None, padding=(0, 1))
    table.add_column("task", no_wrap=True)
    for column in (*map(str, range(1, block_size + 1)), "ECE"):
        table.add_column(column, justify="right", no_wrap=True)
    for task, values in entry["tasks"].items():
        table.add_row(task, *_positions(values), _mean_ece(values["calibration"]))
    return table


def _positions(values: dict[str, Any]) -> list[str]:
    return [format_number(value, ".2f") for value in values["acceptance_by_position"]]


def _mean_ece(calibration: dict[str, Any] | None) -> str:
    if calibration is None:
        return "–"
    means = [statistics.fmean(part["ece"]) for part in (calibration["before"], calibration["after"]) if part]
    return " → ".join(f"{mean:.1%}" for mean in means)


def markdown_report(results: dict[str, Any]) -> str:
    """
    The tables of a model card: one a setting, a row a task, and what the columns mean.

    Args:
        results (`dict`): As they go to the JSON file.
    """
    target, drafter = results["target"], results["drafter"]
    header = ["task", "prompts", "tokens a round", "accepted"]
    header += [f"pos. {position}" for position in range(1, drafter["block_size"] + 1)]
    header.append("ECE")
    lines = [
        f"Target `{target['id']}`, drafter `{drafter['id']}` ({drafter['parameters'] / 1e6:.1f} M parameters), "
        f"{target['dtype']}, schedule `{results['schedule']}`.",
    ]
    for entry in results["settings"]:
        name = setting_name(entry)
        lines += ["", f"**{name[0].upper()}{name[1:]}**, {entry['max_new_tokens']} new tokens at most", ""]
        lines += [_row(header), _row(["---", *["---:"] * (len(header) - 1)])]
        for task, values in entry["tasks"].items():
            ratios = _shown(values)[:2]
            ece = _mean_ece(values["calibration"])
            lines.append(_row([task, str(values["prompts"]), *ratios, *_positions(values), ece]))
        empty = [""] * (drafter["block_size"] + 1)
        prompts = sum(values["prompts"] for values in entry["tasks"].values())
        lines.append(_row(["macro", str(prompts), *_shown(entry["macro"])[:2], *empty]))
    return "\n".join([*lines, "", f"{NOTE[0].upper()}{NOTE[1:]}"]) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def write_plots(
    folder: Path,
    results: dict[str, Any],
    settings: Sequence[Setting],
    batches: Sequence[Sequence[Batch]],
    config: DSparkConfig,
) -> list[Path]:
    """
    Draw `acceptance_by_position.png`, `temperature_sweep.png` if there are several temperatures, and for each setting
    a `reliability-….png` with a row a task.

    Args:
        folder (`Path`): For the PNG files; made if it is not there.
        results (`dict`): As they go to the JSON file.
        settings (`Sequence[Setting]`): In the order of the results.
        batches (`Sequence[Sequence[Batch]]`): Those of each setting.
        config (`DSparkConfig`): The drafter's.

    Returns:
        `list[Path]`: what was written.

    Source: DSpark, Figures 2 and 6.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "acceptance_by_position.png"]
    _draw_positions(results["settings"], paths[0])
    if len({entry["temperature"] for entry in results["settings"]}) > 1:
        paths.append(folder / "temperature_sweep.png")
        _draw_sweep(results["settings"], paths[-1])
    for setting, own in zip(settings, batches, strict=True):
        temperatures = fitted_temperatures(config, setting.temperature)
        rows = []
        for task in dict.fromkeys(batch.task for batch in own):
            blocks = blocks_of([batch for batch in own if batch.task == task], setting)
            if blocks is not None:
                label = f"{task}\n{describe(setting)}, {len(blocks)} blocks"
                rows.append(ReliabilityRow(label, blocks.confidence_logits, blocks.accepted, temperatures))
        if rows:
            thinking = "" if setting.thinking is None else f"-thinking-{setting.thinking}"
            paths.append(folder / f"reliability-t{setting.temperature:g}{thinking}.png")
            draw_reliability(rows, paths[-1])
    return paths


def _draw_positions(entries: Sequence[dict[str, Any]], path: Path) -> None:
    """Acceptance by position, a panel a setting and a line a task."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(entries) + 1.5, 4), layout="constrained")
    panels = figure.subplots(1, len(entries), sharex=True, sharey=True, squeeze=False)[0]
    for axes, entry in zip(panels, entries, strict=True):
        for index, (task, values) in enumerate(entry["tasks"].items()):
            _draw_line(axes, values, task, f"C{index}")
        places = range(1, 1 + len(values["reached_by_position"]))
        axes.set(title=setting_name(entry), xlabel=f"position (hollow: under {FEW_ROUNDS} rounds)", xticks=places)
    panels[0].set(ylabel="accepted, of the rounds that reached it", ylim=(-0.03, 1.03))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    figure.savefig(path, format="png", dpi=120)


def _draw_line(axes: Axes, values: dict[str, Any], task: str, color: str) -> None:
    pairs = zip(values["acceptance_by_position"], values["reached_by_position"], strict=True)
    points = [(place, *pair) for place, pair in enumerate(pairs, start=1) if pair[0] is not None]
    axes.plot([place for place, _, _ in points], [value for _, value, _ in points], color=color, label=task)
    for place, value, reached in points:
        filling = "white" if reached < FEW_ROUNDS else color
        axes.plot(place, value, marker="o", markersize=5, color=color, markerfacecolor=filling)


def _draw_sweep(entries: Sequence[dict[str, Any]], path: Path) -> None:
    """Tokens a round against the temperature, a panel a way of thinking and a line a task."""
    from matplotlib.figure import Figure

    modes = list(dict.fromkeys(entry["thinking"] for entry in entries))
    figure = Figure(figsize=(5 * len(modes) + 1.5, 4), layout="constrained")
    panels = figure.subplots(1, len(modes), sharey=True, squeeze=False)[0]
    for axes, mode in zip(panels, modes, strict=True):
        own = sorted((e for e in entries if e["thinking"] == mode), key=lambda entry: entry["temperature"])
        temperatures = [entry["temperature"] for entry in own]
        # Side by side, so that intervals do not hide each other.
        shift = (temperatures[-1] - temperatures[0]) / 100
        for index, task in enumerate(own[0]["tasks"]):
            points = [(entry["temperature"] + shift * index, entry["tasks"][task]) for entry in own]
            _draw_lengths(axes, points, task, f"C{index}")
        _draw_lengths(axes, [(entry["temperature"] - shift, entry["macro"]) for entry in own], "macro", "black")
        axes.set(title="" if mode is None else f"thinking {mode}", xlabel="temperature (0 is greedy)")
        axes.set_xticks(temperatures)
    panels[0].set_ylabel("tokens a round, with 95% intervals")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    figure.savefig(path, format="png", dpi=120)


def _draw_lengths(axes: Axes, points: Sequence[tuple[float, dict[str, Any]]], label: str, color: str) -> None:
    name = "mean_acceptance_length"
    points = [(at, values) for at, values in points if values[name] is not None]
    lengths = [values[name] for _, values in points]
    ends = [values[f"{name}_interval"] or (values[name], values[name]) for _, values in points]
    # Percentiles of resamples need not lie around the value itself.
    below = [max(length - low, 0.0) for length, (low, _) in zip(lengths, ends, strict=True)]
    above = [max(high - length, 0.0) for length, (_, high) in zip(lengths, ends, strict=True)]
    axes.errorbar(
        [at for at, _ in points], lengths, yerr=[below, above], label=label, color=color, marker="o", capsize=2,
        linewidth=2.5 if label == "macro" else 1,
    )  # fmt: skip
