"""What the benchmark over batches found: medians by setting and way of decoding, tables and Markdown."""

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .bench_report import format_number
from .decoding_methods import PLAIN
from .files import image_format


def summarise(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """
    One row a setting and way of decoding.

    Args:
        records (`Sequence[dict]`): As [`BatchBench.measure`] returns them.

    Returns:
        `list[dict]`: In the order of settings and ways. Speeds and ratios are medians over the calls, `same_text` and
        `past_end` means. `verify_length` (drafts sent a round), `draft_acceptance_rate`, `mean_acceptance_length` and
        `undrafted_share` (of rounds; a row's last round has nothing to draft) are those of all rounds together,
        `outside_share` (of the time of rounds, what is neither draft nor verification) that of all their time; `None`
        for plain `generate`.
    """
    cells: dict[tuple, list[dict[str, Any]]] = {}
    for record in records:
        cells.setdefault((record["batch_size"], record["accept_prob"], record["method"]), []).append(record)
    rows = []
    for (batch_size, accept_prob, method), calls in cells.items():
        cell = {"batch_size": batch_size, "accept_prob": accept_prob, "method": method}
        cell |= {"threshold": calls[0]["threshold"], "calls": len(calls)}
        for key in ("tokens_per_second", "decode_tokens_per_second", "ratio", "decode_ratio"):
            cell[key] = statistics.median(call[key] for call in calls)
        for key in ("constant_ratio", "constant_decode_ratio"):
            cell[key] = None if calls[0][key] is None else statistics.median(call[key] for call in calls)
        for key in ("same_text", "past_end"):
            cell[key] = statistics.fmean(call[key] for call in calls)
        rows.append(cell | _summarise_rounds([call for call in calls if "stats" in call]))
    return rows


def _summarise_rounds(calls: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    names = ("rounds", "verified", "accepted", "seconds_draft", "seconds_verify", "seconds_rest")
    rounds, verified, accepted, *seconds = (sum(call["stats"][name] for call in calls) for name in names)
    return {
        "verify_length": verified / rounds if rounds else None,
        "draft_acceptance_rate": accepted / verified if verified else None,
        "mean_acceptance_length": 1 + accepted / rounds if rounds else None,
        "undrafted_share": 1 - sum(call["drafted_rounds"] for call in calls) / rounds if rounds else None,
        "outside_share": seconds[-1] / sum(seconds) if rounds else None,
    }


_SPEED_COLUMNS = (
    ("tok/s", "tokens_per_second", ".1f"),
    ("of\nplain", "ratio", ".2f"),
    ("of con-\nstant", "constant_ratio", ".2f"),
    ("decode\ntok/s", "decode_tokens_per_second", ".1f"),
    ("of\nplain", "decode_ratio", ".2f"),
    ("of con-\nstant", "constant_decode_ratio", ".2f"),
)
_ROUND_COLUMNS = (
    ("verify_\nlength", "verify_length", ".2f"),
    ("accep-\nted", "draft_acceptance_rate", ".2f"),
    ("tokens\na round", "mean_acceptance_length", ".2f"),
    ("no\ndraft", "undrafted_share", ".0%"),
    ("out-\nside", "outside_share", ".1%"),
)
_TEXT_COLUMN = ("same\ntext", "same_text", ".0%")


def print_tables(
    summary: Sequence[dict[str, Any]],
    scheduling: Sequence[dict[str, Any]],
    console: Console,
    compare_texts: bool,
) -> None:
    """
    Tables within 80 columns, by batch size: speed, rounds, and what scheduling takes.

    Args:
        summary (`Sequence[dict]`): As [`summarise`] returns it.
        scheduling (`Sequence[dict]`): Of [`scheduling_costs`]; may be empty.
        console (`rich.console.Console`): Prints.
        compare_texts (`bool`): Whether texts are expected to be those of plain `generate`.
    """
    console.print(_table("Speed (medians; ratios between neighbouring calls)", summary, _SPEED_COLUMNS))
    with_rounds = [cell for cell in summary if cell["method"] != PLAIN]
    columns = (*_ROUND_COLUMNS, _TEXT_COLUMN) if compare_texts else _ROUND_COLUMNS
    console.print(_table("Rounds", with_rounds, columns))
    if scheduling:
        table = Table(title="Scheduling by itself", box=None, padding=(0, 1))
        for column in ("schedule", "rows", "ms", "of a round"):
            table.add_column(column, justify="left" if column == "schedule" else "right", no_wrap=True)
        for costs in scheduling:
            share = format_number(costs["share"], ".2%")
            table.add_row(costs["schedule"], str(costs["rows"]), format_number(1000 * costs["seconds"], ".2f"), share)
        console.print(table)
    behind = statistics.fmean(cell["past_end"] for cell in summary if cell["method"] == PLAIN)
    console.print(f"{behind:.0%} of plain generate's tokens stand behind their row's own end.", highlight=False)


def _table(title: str, cells: Sequence[dict[str, Any]], columns: Sequence[tuple[str, str, str]]) -> Table:
    table = Table(title=title, box=None, padding=(0, 1, 0, 0))
    synthetic = any(cell["accept_prob"] is not None for cell in cells)
    for column in ("batch", *(["accept_\nprob"] if synthetic else []), "method"):
        table.add_column(column, no_wrap=True)
    for column, _, _ in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for (batch_size, accept_prob), group in itertools.groupby(cells, lambda c: (c["batch_size"], c["accept_prob"])):
        setting = [str(batch_size), *([f"{accept_prob:g}"] if synthetic else [])]
        for cell in group:
            name = cell["method"] if cell["threshold"] is None else f"{cell['method']} {cell['threshold']:g}"
            table.add_row(*setting, name, *(format_number(cell[key], style) for _, key, style in columns))
            setting = [""] * len(setting)
        table.add_row()
    return table


def markdown_table(summary: Sequence[dict[str, Any]], caption: str) -> str:
    """
    One row a setting, one column a way of decoding.

    Args:
        summary (`Sequence[dict]`): As [`summarise`] returns it.
        caption (`str`): What was measured, in one sentence.

    Returns:
        `str`: Markdown that ends with a newline.
    """
    schedules = list(dict.fromkeys(cell["method"] for cell in summary if cell["method"] != PLAIN))
    synthetic = any(cell["accept_prob"] is not None for cell in summary)
    header = ["batch", *(["accept_prob"] if synthetic else []), "plain tok/s", "decoding tok/s", *schedules]
    settings: dict[tuple, dict[str, dict[str, Any]]] = {}
    for cell in summary:
        settings.setdefault((cell["batch_size"], cell["accept_prob"]), {})[cell["method"]] = cell
    lines = [header, ["---"] * len(header)]
    for (batch_size, accept_prob), cells in settings.items():
        plain = [f"{cells[PLAIN][key]:.1f}" for key in ("tokens_per_second", "decode_tokens_per_second")]
        setting = [str(batch_size), *([f"{accept_prob:g}"] if synthetic else [])]
        lines.append(setting + plain + [_markdown_cell(cells[schedule]) for schedule in schedules])
    legend = (
        "A cell: speed over plain `generate` of the whole call · of decoding alone · mean `verify_length` · "
        "`draft_acceptance_rate`" + (" (threshold)." if "confidence" in schedules else ".")
    )
    rows = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{caption}\n{legend}\n\n{rows}\n"


def _markdown_cell(cell: dict[str, Any]) -> str:
    styles = (("ratio", ".2f"), ("decode_ratio", ".2f"), ("verify_length", ".1f"), ("draft_acceptance_rate", ".0%"))
    text = " · ".join(format_number(cell[key], style) for key, style in styles)
    return text if cell["threshold"] is None else f"{text} ({cell['threshold']:g})"


def draw_speeds(summary: Sequence[dict[str, Any]], path: Path) -> None:
    """
    Draw the speed of decoding over plain `generate` by batch size: a line a way of decoding, a panel an `accept_prob`.

    Args:
        summary (`Sequence[dict]`): As [`summarise`] returns it.
        path (`Path`): The image file.
    """
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys(cell["accept_prob"] for cell in summary))
    sizes = sorted({cell["batch_size"] for cell in summary})
    figure = Figure(figsize=(1 + 5 * len(panels), 4), layout="constrained")
    for axes, accept_prob in zip(figure.subplots(1, len(panels), squeeze=False, sharey=True)[0], panels, strict=True):
        lines: dict[str, list[tuple[int, float]]] = {}
        for cell in summary:
            if cell["accept_prob"] == accept_prob:
                lines.setdefault(cell["method"], []).append((cell["batch_size"], cell["decode_ratio"]))
        for method, points in lines.items():
            style = {"color": "black", "linestyle": ":"} if method == PLAIN else {"marker": "o"}
            axes.plot(*zip(*sorted(points), strict=True), label=method, **style)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, map(str, sizes))
        title = "" if accept_prob is None else f"accept_prob {accept_prob:g}"
        axes.set(xlabel="rows in the batch", ylabel="decoding speed over plain generate", ylim=(0, None), title=title)
        axes.label_outer()
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=120, format=image_format(path))
