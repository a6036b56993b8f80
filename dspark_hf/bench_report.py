"""What `dspark bench` makes of timed calls: medians, Equation 1's bound, tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .timing import BareForwards


if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from .statistics import SpeculativeStats


def round_costs(stats: SpeculativeStats, seconds: float, bare: BareForwards) -> dict[str, float]:
    """What a round cost, and Equation 1's bound.

    Args:
        stats (`SpeculativeStats`): of one call with at least one round.
        seconds (`float`): the whole call, measured from outside.
        bare (`BareForwards`): the same forwards outside the loop.

    Returns:
        `dict[str, float]`: `t_draft`, `t_verify` and `t_outside` (seconds a round; the last is all that is neither
        forward nor prefill), `outside_share` (of a round), `draft_share` (`t_draft` over T(1)), `bare_draft` and
        `bare_verify`, `bound` (Equation 1 with the bare forwards) and `reached` (of the bound, by the speed after the
        prefill against a loop of bare one-token steps).

    Source: Equation 1 of arXiv 2607.05147.
    """
    t_draft, t_verify = stats.seconds_draft / stats.rounds, stats.seconds_verify / stats.rounds
    t_round = (seconds - stats.seconds_prefill) / stats.rounds
    return {
        "t_draft": t_draft,
        "t_verify": t_verify,
        "t_outside": t_round - t_draft - t_verify,
        "outside_share": 1 - (t_draft + t_verify) / t_round,
        "draft_share": t_draft / bare.step,
        "bare_draft": bare.draft,
        "bare_verify": bare.verify,
        "bound": stats.mean_acceptance_length * bare.step / (bare.draft + bare.verify),
        "reached": (bare.draft + bare.verify) / t_round,
    }


def summarise(records: Sequence[dict[str, Any]]) -> dict[str, dict[str, dict[str, float | int | None]]]:
    """Medians and ratios by set and method, and their mean over the sets under `"macro"`.

    Args:
        records (`Sequence[dict]`): as [`run_methods`] returns them.

    Returns:
        `dict`: set name to method name to values. Speeds, ratios and costs are medians over the calls;
        `mean_acceptance_length` and `draft_acceptance_rate` are those of all the set's rounds together.
    """
    summary: dict[str, dict[str, dict[str, float | int | None]]] = {}
    for record in records:
        summary.setdefault(record["set"], {}).setdefault(record["method"], {})
    for name, methods in summary.items():
        for method in methods:
            methods[method] = _summarise_calls([r for r in records if r["set"] == name and r["method"] == method])
    macro: dict[str, dict[str, float | int | None]] = {}
    for method in next(iter(summary.values())):
        rows = [methods[method] for methods in summary.values()]
        keys = dict.fromkeys(key for row in rows for key in row)
        macro[method] = {key: _mean([row.get(key) for row in rows]) for key in keys}
    return summary | {"macro": macro}


def _summarise_calls(calls: Sequence[dict[str, Any]]) -> dict[str, float | int | None]:
    values: dict[str, float | int | None] = {
        "calls": len(calls),
        "same_text": sum(call["same_text"] for call in calls) / len(calls),
    }
    for key in ("tokens_per_second", "ratio", "t1"):
        values[key] = statistics.median(call[key] for call in calls)
    with_rounds = [call for call in calls if "stats" in call]
    if not with_rounds:
        return values
    rounds = sum(call["stats"]["rounds"] for call in with_rounds)
    accepted = sum(call["stats"]["accepted"] for call in with_rounds)
    verified = sum(call["stats"]["verified"] for call in with_rounds)
    tokens = sum(call["stats"]["mean_acceptance_length"] * call["stats"]["rounds"] for call in with_rounds)
    values["mean_acceptance_length"] = tokens / rounds
    values["draft_acceptance_rate"] = accepted / verified if verified else None
    costs = ("t_draft", "t_verify", "t_outside", "outside_share", "draft_share", "bare_draft", "bare_verify")
    for key in (*costs, "bound", "reached"):
        values[key] = statistics.median(call[key] for call in with_rounds)
    return values


def _mean(values: Sequence[float | int | None]) -> float | None:
    present = [value for value in values if value is not None]
    return statistics.fmean(present) if present else None


def print_tables(summary: dict[str, dict[str, dict[str, float | int | None]]], console: Console, greedy: bool) -> None:
    """Tables within 80 columns: speed by set and method, then where a round's time goes against Equation 1.

    Args:
        summary (`dict`): as [`summarise`] returns it.
        console (`rich.console.Console`): prints.
        greedy (`bool`): whether texts are expected to be identical.
    """
    from rich.table import Table

    names = [name for name in summary if name != "macro" or len(summary) > 2]
    methods = list(summary["macro"])
    speed = Table(title="Speed (medians; ratio between neighbouring calls)", box=None, padding=(0, 1))
    speed.add_column("prompts", no_wrap=True)
    speed.add_column("method")  # long names break at their comma, so that no figure is cut
    for column in ("tok/s", "ratio", "tokens\na round", "accepted", "same\ntext"):
        speed.add_column(column, justify="right", no_wrap=True)
    for name in names:
        for method in methods:
            row = summary[name][method]
            # Drawn text differs by nature, and synthetic text is not meant to agree.
            comparable = greedy and "synthetic" not in method and method != methods[0]
            speed.add_row(
                name if method == methods[0] else "",
                method,
                format_number(row["tokens_per_second"], ".1f"),
                format_number(row["ratio"], ".2f"),
                format_number(row.get("mean_acceptance_length"), ".2f"),
                format_number(row.get("draft_acceptance_rate"), ".2f"),
                format_number(row["same_text"], ".0%") if comparable else "–",
            )
    console.print(speed)
    for method in methods:
        if summary["macro"][method].get("bound") is not None:
            with_rounds = [name for name in names if "bound" in summary[name][method]]
            console.print(_round_table(method, {name: summary[name][method] for name in with_rounds}))
    for method in methods:
        row = summary["macro"][method]
        ratio, length = row["ratio"], row.get("mean_acceptance_length")
        if length is not None and ratio < 1 and "synthetic" not in method:
            console.print(
                f"{method} does not pay here: a round costs about {length / ratio:.2f} plain steps and yields "
                f"{length:.2f} tokens.",
                highlight=False,
            )


def _round_table(method: str, rows: dict[str, dict[str, float | int | None]]) -> Table:
    """What a round of one method costs, by prompt set; times in milliseconds."""
    from rich.table import Table

    table = Table(
        title=f"{method}: a round against Equation 1 (ms; bare is a forward outside the loop)",
        box=None,
        padding=(0, 1),
        pad_edge=False,
    )
    table.add_column("prompts", no_wrap=True)
    columns = (
        "T(1)",
        "draft",
        "bare\ndraft",
        "verify",
        "bare\nverify",
        "out-\nside",
        "draft\n/T(1)",
        "bound",
        "reach-\ned",
    )
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for name, row in rows.items():
        seconds = [row[key] for key in ("t1", "t_draft", "bare_draft", "t_verify", "bare_verify")]
        table.add_row(
            name,
            *(format_number(None if value is None else 1000 * value, ".1f") for value in seconds),
            format_number(row["outside_share"], ".0%"),
            format_number(row["draft_share"], ".2f"),
            format_number(row["bound"], ".2f"),
            format_number(row["reached"], ".0%"),
        )
    return table


def format_number(value: float | int | None, style: str) -> str:
    """A number for a table; a dash for one that there is not."""
    return "–" if value is None else format(value, style)
