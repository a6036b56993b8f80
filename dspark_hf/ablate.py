"""`dspark ablate schedule` and `dspark ablate calibration`: what schedules, and temperatures of other prompts, are
worth over recorded blocks and the costs of a profile.

The confidences of the schedules go by the drafter's own temperatures where it has any for the recorded way of
decoding, else by temperatures that are fitted on the half of the prompts that a schedule is not judged on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .command_files import check_outputs, check_writable, write_results
from .files import write_text
from .loading import CommandError, generation_options, load_pair, regime, reporting
from .simulate import Start, check_blocks, profile_notes, read_config
from .tasks import read_tasks


if TYPE_CHECKING:
    from rich.console import Console

    from .ablate_report import Report
    from .ablation import Halves
    from .scheduling import Costs

SCHEDULE = "schedule"


def run(
    *,
    part: str,
    target: str,
    drafter: str | None,
    blocks: str | None,
    tasks: str | None,
    prompts: str | None,
    limit: int | None,
    max_new_tokens: int,
    batch_size: int,
    temperature: float,
    top_p: float | None,
    top_k: int | None,
    profile: str | None,
    gpu_like: bool,
    context: int,
    rows: Sequence[int],
    rounds: int,
    seed: int,
    save_blocks: str | None,
    output: str | None,
    markdown: str | None,
    plot: str | None,
    dtype: str,
    device: str,
    threads: int | None,
) -> int:
    """`dspark ablate schedule` (or `calibration`): record or read blocks, simulate, print the tables, write the files.
    The command line's help says what is what.

    Returns:
        `int`: the exit code, 0.

    Raises:
        `CommandError`: something given cannot be used.
    """
    check_outputs(output, markdown, plot)
    check_writable("--save-blocks", save_blocks)
    generation_options(max_new_tokens, temperature, top_p, top_k)  # refuses what has no effect
    check_blocks(blocks, {"tasks": tasks, "prompts": prompts, "limit": limit, "save-blocks": save_blocks})
    prompt_sets = read_tasks(tasks, prompts, limit) if blocks is None else {}

    from rich.console import Console

    from .blocks import record_blocks

    console = Console()
    start = Start.of_options(
        blocks, profile, gpu_like, max(rows), lambda: load_pair(target, drafter, dtype, device, threads), console
    )
    pair, recorded, profiles, block_size = start.pair, start.blocks, start.profiles, start.block_size
    own = None  # the config of the drafter that drafted the blocks
    if recorded is None:
        _check_prompts(prompt_sets)
        sampling = {} if temperature == 0 else {"top_p": top_p, "top_k": top_k}
        recorded = record_blocks(
            pair, prompt_sets, max_new_tokens, temperature, batch_size=batch_size, seed=seed, **sampling
        )
        own = pair.drafter.config
        if save_blocks is not None:
            recorded.save(Path(save_blocks).expanduser())
    elif drafter is not None:
        own = read_config(drafter, block_size)

    from .ablation import Halves

    with reporting("the prompts" if blocks is None else f"--blocks {blocks!r}"):
        halves = Halves(recorded)
    do_sample = recorded.sampling_temperature > 0
    rows = sorted(set(rows))
    costs = {
        name: {count: known.costs(count, context, block_size, do_sample) for count in rows}
        for name, known in profiles.items()
    }
    notes = profile_notes(profiles, max(rows), block_size, do_sample)
    if part == SCHEDULE:
        own_temperatures = None
        if own is not None:
            from .evaluation import fitted_temperatures

            own_temperatures = fitted_temperatures(own, recorded.sampling_temperature)
        report, values, draw = _schedules(halves, own_temperatures, costs, rounds, seed, notes)
    else:
        report, values, draw = _drifts(halves, costs, rounds, seed, notes)
    settings = {
        "target": None if pair is None else pair.names[0], "drafter": drafter if pair is None else pair.names[1],
        "blocks": blocks, "prompts": prompts, "tasks": halves.names, "limit": limit,
        "max_new_tokens": max_new_tokens if blocks is None else None,
        "sampling_temperature": recorded.sampling_temperature, "context": context, "rows": rows, "rounds": rounds,
        "seed": seed,
    }  # fmt: skip
    sizes = {
        "blocks": {name: int((halves.sets == name).sum()) for name in halves.names},
        "prompts": {name: int((halves.prompt_sets == name).sum()) for name in halves.names},
    }
    files = [] if save_blocks is None else [save_blocks]
    results = {"settings": settings, "sizes": sizes, "profiles": start.origins} | values
    write_report(console, report, results, draw, output, markdown, plot, files)
    return 0


def write_report(
    console: Console,
    report: Report,
    results: dict[str, Any],
    draw: Any,
    output: str | None,
    markdown: str | None,
    plot: str | None,
    written: Sequence[str] = (),
) -> None:
    """
    Print a report and write its files.

    Args:
        console (`rich.console.Console`): Prints.
        report ([`Report`]): Tables and notes.
        results (`dict`): For the JSON file.
        draw (`Callable[[Path], list[Path]]`): Draws into a folder.
        output, markdown, plot (`str`, *optional*): Where to, if anywhere.
        written (`Sequence[str]`): Files that were written before.
    """
    report.show(console)
    paths: list[str | Path] = list(written)
    if output is not None:
        write_results(output, results)
        paths.append(output)
    if markdown is not None:
        write_text(Path(markdown).expanduser(), report.markdown)
        paths.append(markdown)
    if plot is not None:
        paths += draw(Path(plot).expanduser())
    for path in paths:
        console.print(f"Written: {path}", highlight=False)


def _check_prompts(prompt_sets: dict[str, list[str]]) -> None:
    for name, prompts in prompt_sets.items():
        if len(prompts) < 2:
            raise CommandError(
                f"--tasks: {name!r} has {len(prompts)} prompt, and one half is judged by the other; give at least 2 "
                "prompts of each set (and --limit 2 or more)"
            )


def _told(halves: Halves) -> str:
    return (
        f"{len(halves.blocks)} blocks of {len(halves.prompt_sets)} prompts, "
        f"{regime(halves.blocks.sampling_temperature)}"
    )


def _schedules(
    halves: Halves,
    temperatures: list[float] | None,
    costs: dict[str, dict[int, Costs]],
    rounds: int,
    seed: int,
    notes: Sequence[str],
) -> tuple[Report, dict[str, Any], Any]:
    """Report, results and plots of the schedules."""
    from .ablate_report import plot_schedules, schedule_report
    from .ablation import ALL, ablate_schedules

    fits = halves.fits(ALL) if temperatures is None else [temperatures] * 2
    survivals = halves.survivals(fits)
    load = {name: ablate_schedules(halves, survivals, each, rounds, seed) for name, each in costs.items()}
    origin = "fitted on the half of the prompts that they are not used on" if temperatures is None else "the drafter's"
    values = {
        "confidence_temperatures": {"origin": origin, "halves": [list(map(float, fit)) for fit in fits]},
        "load": {name: [asdict(point) for point in points] for name, points in load.items()},
    }
    report = schedule_report(
        f"Schedules, one drafter: {_told(halves)}", load, [f"Temperatures of the confidences: {origin}.", *notes]
    )
    return report, values, lambda folder: plot_schedules(folder, load)


def _drifts(
    halves: Halves, costs: dict[str, dict[int, Costs]], rounds: int, seed: int, notes: Sequence[str]
) -> tuple[Report, dict[str, Any], Any]:
    """Report, results and plots of the calibration's drift."""
    from .ablate_report import drift_report, plot_drift
    from .ablation import calibration_drift
    from .calibration import FEWEST_REACHED

    drifts = {name: calibration_drift(halves, each, rounds, seed) for name, each in costs.items()}
    values = {"drift": {name: asdict(drift) for name, drift in drifts.items()}}
    accepted = halves.blocks.accepted
    last = halves.blocks.confidence_logits.shape[1] - 1
    few = [
        name
        for name in halves.names
        if min(((halves.sets == name) & (halves.half == half) & (accepted >= last)).sum() for half in (0, 1))
        < FEWEST_REACHED
    ]
    told = []
    if few:
        sets = "all sets" if len(few) == len(halves.names) else ", ".join(few)
        told.append(
            f"Positions that fewer than {FEWEST_REACHED} blocks of a half reached are not fitted and keep 1, the last "
            f"ones of {sets} at least; more prompts or a higher --max-new-tokens give more."
        )
    report = drift_report(f"Calibration used elsewhere: {_told(halves)}", drifts, [*told, *notes])
    return report, values, lambda folder: plot_drift(folder, drifts)
