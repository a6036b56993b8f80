"""The tables of a drafter's card in Markdown: acceptance, speed and calibration."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .card_inputs import MACRO, Acceptance, Benchmark, EvaluatedSetting, Evaluation, Sampling, Speed, by_domain, mean


if TYPE_CHECKING:
    from .modeling import DSparkConfig


def acceptance_table(evaluation: Evaluation) -> str:
    """`mean_acceptance_length` by domain and set of prompts, a column a way of drawing tokens."""
    settings = evaluation.settings
    names = dict.fromkeys(name for setting in settings for name in setting.tasks)
    rows = []
    for domain, tasks in by_domain(names).items():
        rows += [[domain, task, *(_accepted(setting.tasks.get(task)) for setting in settings)] for task in tasks]
        if len(tasks) > 1:
            means = (mean(_lengths(setting, tasks)) for setting in settings)
            rows.append([f"**{domain}**", "mean", *(_bold(value, ".2f") for value in means)])
    totals = (setting.macro.mean_acceptance_length for setting in settings)
    rows.append(["**macro**", "", *(_bold(value, ".2f") for value in totals)])
    return markdown_table(["domain", "prompts", *(setting.sampling.words for setting in settings)], rows)


def _lengths(setting: EvaluatedSetting, tasks: Iterable[str]) -> list[float | None]:
    return [setting.tasks[task].mean_acceptance_length for task in tasks if task in setting.tasks]


def _accepted(task: Acceptance | None) -> str:
    if task is None:
        return "–"
    interval = "" if task.interval is None else f" [{task.interval[0]:.2f}, {task.interval[1]:.2f}]"
    return _number(task.mean_acceptance_length, ".2f") + interval


def acceptance_details(evaluation: Evaluation) -> list[str]:
    """What the caption of [`acceptance_table`] says of how it was measured."""
    settings = evaluation.settings
    details = []
    counts = [mean([task.prompts]) for task in settings[0].tasks.values()]
    if None not in counts:
        details.append(f"{int(sum(counts))} prompts")
    lengths = [setting.max_new_tokens for setting in settings if setting.max_new_tokens is not None]
    if lengths:
        details.append(f"up to {max(lengths)} new tokens")
    if any(task.interval is not None for setting in settings for task in setting.tasks.values()):
        details.append("confidence intervals in brackets")
    return details


def position_table(evaluation: Evaluation) -> str | None:
    """Acceptance by position over all sets of prompts, a row a way of drawing tokens; `None` if it was not told."""
    rows = [(setting.sampling.words, setting.macro.by_position) for setting in evaluation.settings]
    rows = [(words, shares) for words, shares in rows if shares]
    if not rows:
        return None
    width = max(len(shares) for _, shares in rows)
    padded = [(words, [*shares, *[None] * (width - len(shares))]) for words, shares in rows]
    head = ["decoding", *(f"pos. {position}" for position in range(1, width + 1))]
    return markdown_table(head, [[words, *(_number(share, ".0%") for share in shares)] for words, shares in padded])


def speed_table(benchmark: Benchmark) -> str:
    """Speed-ups by domain and set of prompts, or by batch size and schedule."""
    if benchmark.batched:
        rows = [
            [str(speed.batch_size), f"`{speed.place}`", *_speed_cells([speed], _number)] for speed in benchmark.speeds
        ]
        return markdown_table(["batch size", "schedule", "plain tok/s", "speed-up", "mean_acceptance_length"], rows)
    by_place = {speed.place: speed for speed in benchmark.speeds}
    macro = by_place.pop(MACRO, None)
    looked_up = any(speed.prompt_lookup is not None for speed in benchmark.speeds)
    rows = []
    for domain, places in by_domain(by_place).items():
        rows += [[domain, place, *_speed_cells([by_place[place]], _number, looked_up)] for place in places]
        if len(places) > 1:
            group = [by_place[place] for place in places]
            rows.append([f"**{domain}**", "mean", *_speed_cells(group, _bold, looked_up)])
    if macro is not None:
        rows.append(["**macro**", "", *_speed_cells([macro], _bold, looked_up)])
    head = ["domain", "prompts", "plain tok/s", "speed-up", "mean_acceptance_length"]
    return markdown_table(head + ["prompt lookup's speed-up"] * looked_up, rows)


def _speed_cells(speeds: Sequence[Speed], style: Any, looked_up: bool = False) -> list[str]:
    cells = [
        style(mean(speed.plain for speed in speeds), ".1f"),
        style(mean(speed.ratio for speed in speeds), ".2f"),
        style(mean(speed.mean_acceptance_length for speed in speeds), ".2f"),
    ]
    return cells + [style(mean(speed.prompt_lookup for speed in speeds), ".2f")] * looked_up


def calibration_table(config: DSparkConfig) -> str:
    """
    The temperatures of each fit in the config and its calibration errors, a column a position.

    Args:
        config ([`DSparkConfig`]): With `confidence_temperatures`.
    """
    rows = []
    for fit in config.confidence_temperatures:
        words = Sampling(fit["sampling_temperature"]).words
        rows.append([words, "temperature", *(f"{value:.2f}" for value in fit["temperatures"])])
        errors = (fit.get("made_with") or {}).get("ece") or {}
        kept_out = bool(errors.get("held_out"))
        shown = errors.get("held_out") or errors.get("fit") or {}
        for when in ("before", "after"):
            told = f"ECE {when}, {'prompts kept out of the fit' if kept_out else 'in sample'}"
            if when in shown:
                rows.append([words, told, *(f"{value:.1%}" for value in shown[when])])
    head = ["decoding", "", *(f"pos. {position}" for position in range(1, config.block_size + 1))]
    return markdown_table(head, rows)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table of texts."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _number(value: float | None, style: str) -> str:
    return "–" if value is None else format(value, style)


def _bold(value: float | None, style: str) -> str:
    return "–" if value is None else f"**{value:{style}}**"
