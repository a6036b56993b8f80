"""`dspark profile`: measure what steps and drafts cost on this machine, or show what was measured before."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .command_files import check_plot, check_writable
from .files import image_format
from .loading import load_pair, load_target, reporting


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console
    from rich.table import Table
    from transformers import PreTrainedModel

    from .modeling import DSparkDraftModel
    from .profiles import DraftCurve, Profile

NO_DRAFTER = "none"


def run(
    *,
    target: str,
    drafter: str | None,
    contexts: Sequence[int] | None,
    most_tokens: int | None,
    budget: float | None,
    force: bool,
    plot: str | None,
    output: str | None,
    dtype: str,
    device: str,
    threads: int | None,
) -> int:
    """`dspark profile`: measure or look up, print the tables, write the files. The command line's help says the rest.

    Returns:
        `int`: the exit code, 0.

    Raises:
        `CommandError`: something given cannot be used.
    """
    check_writable("--output", output)
    check_plot(plot)

    import torch
    from rich.console import Console

    from .profiles import profile_key, profile_path, stored_profile
    from .profiling import measure_profile

    console = Console()
    model, draft_model, description = _load(target, drafter, dtype, device, threads)
    console.print(f"{description}, {torch.get_num_threads()} CPU thread(s)", highlight=False)
    key = profile_key(model, draft_model)
    profile = None if force else stored_profile(key)
    if profile is None:
        given = {"contexts": contexts, "most_tokens": most_tokens, "budget": budget}
        with reporting(f"--target {target!r}"):
            profile = measure_profile(
                model, draft_model, **{name: value for name, value in given.items() if value is not None}
            )
        console.print(f"Stored: {profile_path(key)}", highlight=False, soft_wrap=True)
    else:
        date = profile.made.get("date", "an unknown date")
        console.print(
            f"Measured on {date} and stored; --force measures anew: {profile_path(key)}",
            highlight=False,
            soft_wrap=True,
        )
    print_profile(profile, console)
    if output is not None:
        profile.save(Path(output).expanduser())
        console.print(f"Written: {output}", highlight=False)
    if plot is not None:
        draw_profile(profile, Path(plot).expanduser())
        console.print(f"Written: {plot}", highlight=False)
    return 0


def _load(
    target: str, drafter: str | None, dtype: str, device: str, threads: int | None
) -> tuple[PreTrainedModel, DSparkDraftModel | None, str]:
    """Target, drafter or none, and a line about them."""
    if drafter != NO_DRAFTER:
        pair = load_pair(target, drafter, dtype, device, threads)
        return pair.target, pair.drafter, pair.description
    model, _ = load_target(target, dtype, device, threads)
    name = str(model.dtype).removeprefix("torch.")
    return model, None, f"target {target} ({model.num_parameters() / 1e6:.0f} M), {name} on {model.device}"


def print_profile(profile: Profile, console: Console) -> None:
    """Tables of steps by tokens, of steps and drafts by rows.

    Args:
        profile (`Profile`): what to print.
        console (`rich.console.Console`): prints.
    """
    console.print(_step_table(profile))
    if profile.row_steps:
        console.print(_row_table(profile))
    if drafts := _drafts(profile):
        console.print(_draft_table(drafts))
    drawn = "for those that come alone" if profile.judge_sampled == 0 else f"{1000 * profile.judge_sampled:.3f} ms"
    console.print(
        f"Choosing: {1000 * profile.judge_greedy:.3f} ms for each token of a step, {drawn} where tokens are drawn.",
        highlight=False,
    )


def _table(title: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(title=title, box=None, padding=(0, 1))
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1000 * seconds:.2f}"


def _step_table(profile: Profile) -> Table:
    """Steps of one row; the two rates are of the middle context."""
    middle = profile.steps[len(profile.steps) // 2]
    table = _table(
        "Steps of B tokens of one row, by the tokens that it holds",
        "B",
        *(f"ms\nat {curve.context}" for curve in profile.steps),
        f"steps/s\nat {middle.context}",
        f"tokens/s\nat {middle.context}",
    )
    by_tokens = [dict(zip(curve.tokens, curve.seconds, strict=True)) for curve in profile.steps]
    for tokens, seconds in zip(middle.tokens, middle.seconds, strict=True):
        times = (_milliseconds(known.get(tokens)) for known in by_tokens)
        table.add_row(str(tokens), *times, f"{1 / seconds:.1f}", f"{tokens / seconds:.0f}")
    return table


def _row_table(profile: Profile) -> Table:
    """Steps of several rows, at the fewest and the most tokens."""
    contexts = [curve.context for curve in profile.steps]
    table = _table(
        "Steps of several rows: ms with one token a row, and with whole blocks",
        "rows",
        *(f"{kind}\nat {context}" for context in contexts for kind in ("one", "whole")),
    )
    known = {(curve.rows, curve.context): curve.seconds for curve in profile.row_steps}
    for rows in sorted({rows for rows, _ in known}):
        ends = [known.get((rows, context), [None]) for context in contexts]
        table.add_row(str(rows), *(_milliseconds(value) for seconds in ends for value in (seconds[0], seconds[-1])))
    return table


def _drafts(profile: Profile) -> dict[str, DraftCurve]:
    curves = {"greedy": profile.draft_greedy, "sampled": profile.draft_sampled}
    return {kind: curve for kind, curve in curves.items() if curve is not None}


def _draft_table(drafts: dict[str, DraftCurve]) -> Table:
    """Drafts by rows."""
    columns = (f"{kind}\n{slots}" for kind in drafts for slots in ("one slot", "block"))
    table = _table("Drafts: ms", "rows", *columns)
    for index, rows in enumerate(next(iter(drafts.values())).rows):
        times = (value for curve in drafts.values() for value in (curve.one_slot[index], curve.whole_block[index]))
        table.add_row(str(rows), *map(_milliseconds, times))
    return table


def draw_profile(profile: Profile, path: Path) -> None:
    """Draw SPS(B) and B * SPS(B) by context, and what drafts cost by rows.

    Args:
        profile (`Profile`): what to draw.
        path (`Path`): the image file.
    """
    from matplotlib.figure import Figure

    drafts = _drafts(profile)
    figure = Figure(figsize=(15 if drafts else 10, 4), layout="constrained")
    steps, tokens, *rest = figure.subplots(1, 3 if drafts else 2)
    for curve in profile.steps:
        rates = [1 / seconds for seconds in curve.seconds]
        _draw(steps, curve.tokens, rates, f"{curve.context} tokens of context")
        _draw(tokens, curve.tokens, [count * rate for count, rate in zip(curve.tokens, rates, strict=True)], None)
    steps.set(xlabel="B, tokens a step", ylabel="SPS(B), steps a second", ylim=(0, None))
    tokens.set(xlabel="B, tokens a step", ylabel="B · SPS(B), tokens a second", ylim=(0, None))
    for axes in rest:
        for kind, curve in drafts.items():
            for label, seconds in ((f"{kind}, one slot", curve.one_slot), (f"{kind}, block", curve.whole_block)):
                _draw(axes, curve.rows, [1000 * value for value in seconds], label)
        axes.set(xlabel="rows", ylabel="ms a draft", ylim=(0, None))
    for axes in (steps, *rest):
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=120, format=image_format(path))


def _draw(axes: Axes, counts: Sequence[int], values: Sequence[Any], label: str | None) -> None:
    axes.plot(counts, values, marker=".", label=label)
    axes.set_xscale("log", base=2)
