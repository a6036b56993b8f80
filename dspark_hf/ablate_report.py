"""What `dspark ablate` shows of its numbers: the same tables for the terminal and for Markdown, and plots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .bench_report import format_number
from .card_tables import markdown_table
from .simulate import LABELS


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console

    from .ablation import Drift, DriftCell, Estimate, SchedulePoint

# A figure whose interval leaves out what it is compared with.
SURE = "*"
# Yardsticks, which no lossless schedule can be.
NO_SCHEDULE = ("oracle", "clairvoyant")
CONFIDENCE = ("confidence", "hardware_aware", "hardware_aware_lagged")
INTERVALS = "In brackets 95% intervals, by resampling prompts within their sets."
_DPI = 120


@dataclass(frozen=True)
class Sheet:
    """
    A table.

    Attributes:
        title (`str`): Stands above it.
        head (`list[str]`): Of the columns.
        rows (`list[list[str]]`): The first cell is what a row is about.
    """

    title: str
    head: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Report:
    """
    Tables, and what a reader has to know of them.

    Attributes:
        title (`str`): What was compared, in a line.
        sheets (`list[Sheet]`): The tables.
        notes (`list[str]`): Sentences, one a paragraph.
    """

    title: str
    sheets: list[Sheet] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def show(self, console: Console) -> None:
        """Print it."""
        from rich.table import Table

        for sheet in self.sheets:
            table = Table(title=sheet.title, box=None, padding=(0, 1))
            for index, column in enumerate(sheet.head):
                table.add_column(column, justify="right" if index else "left", overflow="fold")
            for row in sheet.rows:
                table.add_row(*row)
            console.print(table)
        for note in self.notes:
            console.print(note, highlight=False, markup=False)

    @property
    def markdown(self) -> str:
        """The same as Markdown."""
        parts = [f"# {self.title}"]
        for sheet in self.sheets:
            parts.append(f"**{sheet.title}**")
            lines = [[_escaped(cell) for cell in row] for row in sheet.rows]
            parts.append(markdown_table([name.replace("\n", " ") for name in sheet.head], lines))
        return "\n\n".join([*parts, *map(_escaped, self.notes)]) + "\n"


def _escaped(text: str) -> str:
    return text.replace(SURE, rf"\{SURE}")


def with_interval(estimate: Estimate, style: str = ".2f") -> str:
    """A figure with its interval in words."""
    low, high = estimate.interval
    return f"{estimate.value:{style}} [{low:{style}}, {high:{style}}]".replace("%,", ",")


def is_sure(interval: Sequence[float] | None, value: float = 0.0) -> bool:
    """Whether an interval leaves a value out."""
    return interval is not None and not interval[0] <= value <= interval[1]


def schedule_report(title: str, load: dict[str, Sequence[SchedulePoint]], notes: Iterable[str]) -> Report:
    """
    Tables of the schedules, one a profile and number of rows, and of what they miss of the oracle.

    Args:
        title (`str`): Of the whole.
        load (`dict[str, Sequence[SchedulePoint]]`): By profile.
        notes (`Iterable[str]`): On profiles and temperatures.
    """
    sheets = []
    head = ["schedule", "tok/s", "tokens verified\na request", "over whole\nblocks", "over no\ndrafts"]
    for name, points in load.items():
        for rows in dict.fromkeys(point.rows for point in points):
            lines = [
                [
                    _label(point.plan),
                    f"{point.throughput.value:.1f}",
                    f"{point.budget:.2f}",
                    with_interval(point.over_constant),
                    with_interval(point.over_no_drafts),
                ]
                for point in points
                if point.rows == rows
            ]
            sheets.append(Sheet(f"{name}: {rows} row{'s' if rows > 1 else ''}", head, lines))
        gaps = {(point.rows, point.plan): point.gap_to_oracle for point in points}
        lines = [
            [str(rows), *(with_interval(gaps[rows, plan]) for plan in CONFIDENCE)]
            for rows in dict.fromkeys(point.rows for point in points)
        ]
        title_of_gaps = f"{name}: % below the oracle, as each round's confidences expect it"
        sheets.append(Sheet(title_of_gaps, ["rows", *(_label(plan) for plan in CONFIDENCE)], lines))
    own = [
        INTERVALS,
        f"{SURE} Yardsticks, not schedules: the oracle searches all lengths by confidences that depend on the very "
        "drafts it admits, so that its text would not be the target's; the clairvoyant knows beforehand which drafts "
        "are going to be accepted, and no schedule can be faster.",
        "best threshold: chosen on one half of the prompts, judged on the other. All but `no drafts` draft whole "
        "blocks.",
    ]
    return Report(title, sheets, [*own, *notes])


def _label(plan: str) -> str:
    return LABELS[plan].replace("\n", " ").replace("constant", "whole blocks") + SURE * (plan in NO_SCHEDULE)


def drift_report(title: str, drifts: dict[str, Drift], notes: Iterable[str]) -> Report:
    """
    Matrices: origin of the temperatures down, the set they are used on across.

    Args:
        title (`str`): Of the whole.
        drifts (`dict[str, Drift]`): By profile; calibration errors are the same in all.
        notes (`Iterable[str]`): On profiles and temperatures.
    """
    first = next(iter(drifts.values()))
    sets = list(first.chance)
    head = ["fitted on", *sets]
    errors = _matrix(first.cells, sets, lambda cell: f"{cell.ece.value:.1%}" + _star(cell, cell.ece_excess))
    chance = ["(chance, up to)", *(f"{value:.1%}" for value in first.chance.values())]
    sheets = [Sheet("Calibration error (ECE, mean over positions) by the set it is used on", head, [*errors, chance])]
    for name, drift in drifts.items():
        for rows in drift.cells[0].lost:
            lost = _matrix(
                drift.cells,
                sets,
                lambda cell, rows=rows: f"{_signless_zero(cell.lost[rows].value)}" + _star(cell, cell.lost[rows]),
            )
            title_of_lost = f"{name}: % of tokens a second lost at {rows} row{'s' if rows > 1 else ''}"
            sheets.append(Sheet(title_of_lost, head, lost))
    own = [
        f"{SURE} The 95% interval of the difference to the set's own temperatures, by resampling prompts, leaves 0 "
        "out. A set's own temperatures are fitted on the half of its prompts that they are not judged on, as are all "
        "others. Below 0: faster than with its own.",
        "Tokens a second are those of Algorithm 1 (`hardware_aware`).",
    ]
    return Report(title, sheets, [*own, *notes])


def _matrix(cells: Sequence[DriftCell], sets: Sequence[str], shown: Any) -> list[list[str]]:
    origins = list(dict.fromkeys(cell.fitted_on for cell in cells))
    by_place = {(cell.fitted_on, cell.used_on): shown(cell) for cell in cells}
    return [[origin, *(by_place[origin, name] for name in sets)] for origin in origins]


def _star(cell: DriftCell, difference: Estimate) -> str:
    return SURE if cell.fitted_on != cell.used_on and is_sure(difference.interval) else ""


def _signless_zero(value: float) -> str:
    text = f"{value:.2f}"
    return "0.00" if text == "-0.00" else text


def plot_schedules(folder: Path, load: dict[str, Sequence[SchedulePoint]]) -> list[Path]:
    """
    Draw `schedules.png`: tokens a second over those of whole blocks, and the gap to the oracle, by rows.

    Args:
        folder (`Path`): For the PNG file; made if it is not there.
        load (`dict[str, Sequence[SchedulePoint]]`): By profile, each a row of panels.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4 * len(load)), layout="constrained")
    for panels, (name, points) in zip(figure.subplots(len(load), 2, squeeze=False), load.items(), strict=True):
        for plan in LABELS:
            own = [point for point in points if point.plan == plan]
            _draw_estimates(panels[0], own, [point.over_constant for point in own], plan)
            if plan in CONFIDENCE:
                _draw_estimates(panels[1], own, [point.gap_to_oracle for point in own], plan)
        panels[0].set(title=name, ylabel="tokens a second, over whole blocks")
        panels[1].set(title=name, ylabel="% below the oracle, expected")
        for axes in panels:
            axes.set_xscale("log", base=2)
            rows = list(dict.fromkeys(point.rows for point in points))
            axes.set_xticks(rows, [str(count) for count in rows])
            axes.set_xlabel("rows")
            axes.legend(fontsize="small")
    return [_saved(figure, folder, "schedules.png")]


def _draw_estimates(axes: Axes, points: Sequence[SchedulePoint], estimates: Sequence[Estimate], plan: str) -> None:
    values = [estimate.value for estimate in estimates]
    axes.errorbar(
        [point.rows for point in points], values, yerr=_bars(values, [estimate.interval for estimate in estimates]),
        label=_label(plan), color=f"C{tuple(LABELS).index(plan)}", marker=".", capsize=2,
        linestyle="--" if plan in NO_SCHEDULE else "-",
    )  # fmt: skip


def _bars(values: Sequence[float], intervals: Sequence[Sequence[float] | None]) -> list[list[float]]:
    """Lengths below and above; percentiles of resamples need not lie around the value itself."""
    ends = [interval or (value, value) for value, interval in zip(values, intervals, strict=True)]
    pairs = list(zip(values, ends, strict=True))
    return [
        [max(value - low, 0.0) for value, (low, _) in pairs],
        [max(high - value, 0.0) for value, (_, high) in pairs],
    ]


def plot_drift(folder: Path, drifts: dict[str, Drift]) -> list[Path]:
    """
    Draw `calibration_drift.png`: a matrix of calibration errors, and one of what is lost for each profile and number
    of rows.

    Args:
        folder (`Path`): For the PNG file; made if it is not there.
        drifts (`dict[str, Drift]`): By profile.
    """
    from matplotlib.figure import Figure

    first = next(iter(drifts.values()))
    sets, origins = list(first.chance), list(dict.fromkeys(cell.fitted_on for cell in first.cells))
    matrices = {"ECE, %": [100 * cell.ece.value for cell in first.cells]}
    for name, drift in drifts.items():
        for rows in drift.cells[0].lost:
            matrices[f"{name}\n% of tok/s lost, {rows} rows"] = [cell.lost[rows].value for cell in drift.cells]
    side = 1.8 + 0.75 * len(sets)
    figure = Figure(figsize=(side * len(matrices), side + 0.8), layout="constrained")
    for axes, (title, values) in zip(
        figure.subplots(1, len(matrices), squeeze=False)[0], matrices.items(), strict=True
    ):
        table = [values[start : start + len(sets)] for start in range(0, len(values), len(sets))]
        axes.imshow(table, cmap="Reds", aspect="auto", vmin=0)
        for row, line in enumerate(table):
            for column, value in enumerate(line):
                color = "white" if value > 0.6 * max(values) else "black"
                axes.text(column, row, f"{value:.1f}", ha="center", va="center", fontsize=8, color=color)
        axes.set_xticks(range(len(sets)), sets, rotation=45, ha="right", fontsize=8)
        axes.set_yticks(range(len(origins)), origins, fontsize=8)
        axes.set(xlabel="used on", ylabel="fitted on")
        axes.set_title(title, fontsize=9)
    return [_saved(figure, folder, "calibration_drift.png")]


def _saved(figure: Any, folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / name, format="png", dpi=_DPI)
    return folder / name


def differences_sheet(entries: Sequence[dict[str, Any]]) -> list[Sheet]:
    """
    Tables of drafters: the mean over tasks with what lies between them, then task by task.

    Args:
        entries (`Sequence[dict]`): Of `drafters` in the results; the first is what the others are compared with.
    """
    total = []
    for place, entry in enumerate(entries):
        macro, difference = entry["macro"], entry["difference"]["macro"]
        total.append(
            [
                entry["label"],
                _ranged(macro["mean_acceptance_length"], macro["mean_acceptance_length_interval"]),
                "" if place == 0 else _ranged(difference["value"], difference["interval"], "+.2f") + _sign(difference),
                format_number(macro["draft_acceptance_rate"], ".1%"),
                format_number(macro["tokens_per_second"], ".1f"),
            ]
        )
    tasks = []
    for task in entries[0]["tasks"]:
        cells = []
        for place, entry in enumerate(entries):
            value = format_number(entry["tasks"][task]["mean_acceptance_length"], ".2f")
            difference = entry["difference"]["tasks"][task]
            if place and difference["value"] is not None:
                value += f" ({difference['value']:+.2f}{_sign(difference)})"
            cells.append(value)
        tasks.append([task, *cells])
    return [
        Sheet("Mean over tasks", ["drafter", "tokens a round", "difference", "accepted", "tok/s"], total),
        Sheet("Tokens a round by task", ["task", *(entry["label"] for entry in entries)], tasks),
    ]


def _ranged(value: float | None, interval: Sequence[float] | None, style: str = ".2f") -> str:
    text = format_number(value, style)
    return text if interval is None else f"{text} [{interval[0]:{style}}, {interval[1]:{style}}]"


def _sign(difference: dict[str, Any]) -> str:
    return SURE if is_sure(difference["interval"]) else ""


def plot_drafters(folder: Path, entries: Sequence[dict[str, Any]]) -> list[Path]:
    """
    Draw `drafters.png`, tokens a round by task; and `block_size.png`, the same by block size and head, if there are
    several block sizes.

    Args:
        folder (`Path`): For the PNG files; made if it is not there.
        entries (`Sequence[dict]`): Of `drafters` in the results.

    Source: DSpark, Figure 4.
    """
    from matplotlib.figure import Figure

    name, tasks = "mean_acceptance_length", list(entries[0]["tasks"])
    figure = Figure(figsize=(2.5 + 1.2 * (1 + len(tasks)), 4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(entries)
    for place, entry in enumerate(entries):
        found = [*(entry["tasks"][task] for task in tasks), entry["macro"]]
        _draw_bars(axes, [index + width * place for index in range(len(found))], found, width, entry["label"])
    axes.set_xticks([index + 0.4 - width / 2 for index in range(1 + len(tasks))], [*tasks, "macro"], rotation=20)
    axes.set(ylabel="tokens a round, with 95% intervals")
    axes.legend(fontsize="small")
    paths = [_saved(figure, folder, "drafters.png")]
    if len({entry["facts"]["block_size"] for entry in entries}) > 1:
        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.subplots()
        for head in dict.fromkeys(entry["facts"]["head"] for entry in entries):
            own = sorted(
                (entry for entry in entries if entry["facts"]["head"] == head), key=lambda e: e["facts"]["block_size"]
            )
            own = [entry for entry in own if entry["macro"][name] is not None]
            values = [entry["macro"][name] for entry in own]
            bars = _bars(values, [entry["macro"][f"{name}_interval"] for entry in own])
            sizes = [entry["facts"]["block_size"] for entry in own]
            axes.errorbar(sizes, values, yerr=bars, marker="o", capsize=2, label=f"head: {head}")
        axes.set_xticks(sorted({entry["facts"]["block_size"] for entry in entries}))
        axes.set(xlabel="block_size", ylabel="tokens a round, mean over tasks")
        axes.legend(fontsize="small")
        paths.append(_saved(figure, folder, "block_size.png"))
    return paths


def _draw_bars(axes: Axes, places: Sequence[float], found: Sequence[dict[str, Any]], width: float, label: str) -> None:
    name = "mean_acceptance_length"
    known = [(place, values) for place, values in zip(places, found, strict=True) if values[name] is not None]
    heights = [values[name] for _, values in known]
    bars = _bars(heights, [values[f"{name}_interval"] for _, values in known])
    axes.bar([place for place, _ in known], heights, width, yerr=bars, capsize=2, label=label)


def plot_cost(folder: Path, shares: dict[str, float]) -> list[Path]:
    """
    Draw `cost.png`: the drafter's shares of the target's.

    Args:
        folder (`Path`): For the PNG file; made if it is not there.
        shares (`dict[str, float]`): By what is compared.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 1 + 0.4 * len(shares)), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(list(shares), [100 * value for value in shares.values()])
    axes.bar_label(bars, fmt="%.1f", padding=2)
    axes.invert_yaxis()
    axes.set(xlabel="% of the target's")
    axes.margins(x=0.12)
    return [_saved(figure, folder, "cost.png")]
