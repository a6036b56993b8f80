"""`dspark simulate`: the threshold sweep, and the schedules under load, over recorded blocks and a profile's costs.

Which confidence temperatures apply: blocks that are recorded here take those of the drafter that drafted them. A file
of blocks does not say who drafted them, so its confidences are taken as they are unless `--drafter` names a drafter;
then the temperatures in its config count, and nothing else of it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .bench_report import format_number
from .command_files import check_outputs, read_prompts, write_results
from .loading import DEMO, CommandError, Pair, check_source, load_pair, machine_profile, reporting


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console
    from rich.table import Table

    from .blocks import Blocks
    from .modeling import DSparkConfig
    from .profiles import Profile
    from .simulation import LoadPoint, SweepPoint

MACHINE, GPU_LIKE = "this machine", "GPU-like, made up"
LABELS = {
    "no_drafts": "no\ndrafts",
    "constant": "constant",
    "confidence": "best\nthreshold",
    "hardware_aware": "hardware\naware",
    "hardware_aware_lagged": "lagged",
    "oracle": "oracle",
    "clairvoyant": "clairvoyant",
}
DRAFTING = tuple(LABELS)[1:]
SCHEDULED = DRAFTING[:4]
# Thresholds in the table; the JSON file has all.
SHOWN = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95)
SHOWN_BY_SET = (0.0, 0.4, 0.8, 0.95)


def run(
    *,
    target: str,
    drafter: str | None,
    blocks: str | None,
    prompts: str | None,
    limit: int | None,
    max_new_tokens: int,
    temperature: float,
    profile: str | None,
    gpu_like: bool,
    context: int,
    rows: Sequence[int],
    rounds: int,
    seed: int,
    output: str | None,
    plot: str | None,
    dtype: str,
    device: str,
    threads: int | None,
) -> int:
    """`dspark simulate`: simulate, print the tables, write the files. The command line's help says what is what.

    Returns:
        `int`: the exit code, 0.

    Raises:
        `CommandError`: something given cannot be used.
    """
    check_outputs(output, None, plot)
    check_blocks(blocks, {"prompts": prompts, "limit": limit})
    prompt_sets = read_prompts(prompts, limit) if blocks is None else {}

    from rich.console import Console

    from .blocks import record_blocks
    from .calibration import scaled_survivals
    from .simulation import Outcomes, simulate_load, threshold_sweep

    console = Console()
    start = Start.of_options(
        blocks, profile, gpu_like, max(rows), lambda: load_pair(target, drafter, dtype, device, threads), console
    )
    pair, recorded, profiles, block_size = start.pair, start.blocks, start.profiles, start.block_size
    if recorded is None:
        recorded = record_blocks(pair, prompt_sets, max_new_tokens, temperature, seed=seed)
        temperatures = pair.drafter.config.temperatures_for(recorded.sampling_temperature)
    else:
        temperatures = _temperatures(drafter, recorded)

    do_sample = recorded.sampling_temperature > 0
    outcomes = Outcomes(scaled_survivals(recorded.confidence_logits, temperatures), recorded.accepted, recorded.sets)
    sweep = threshold_sweep(outcomes)
    load = {}
    for name, known in profiles.items():
        costs = {count: known.costs(count, context, block_size, do_sample) for count in rows}
        load[name] = simulate_load(outcomes, costs, rounds, seed)
    print_sweep(sweep, console)
    for name, points in load.items():
        print_load(name, points, console)
    notes = profile_notes(profiles, max(rows), block_size, do_sample)
    if set(temperatures) == {1.0}:
        notes.insert(
            0, "Confidences as the head gave them: all temperatures are 1 (fitted ones are read from --drafter)."
        )
    for note in notes:
        console.print(note, highlight=False)
    if output is not None:
        settings = {
            "target": None if pair is None else pair.names[0], "drafter": drafter if pair is None else pair.names[1],
            "blocks": blocks, "prompts": None if blocks else prompts or "school-maths (bundled)", "limit": limit,
            "max_new_tokens": None if blocks else max_new_tokens,
            "sampling_temperature": recorded.sampling_temperature, "confidence_temperatures": temperatures,
            "context": context, "rounds": rounds, "seed": seed,
        }  # fmt: skip
        results = {
            "settings": settings,
            "profiles": start.origins,
            "threshold_sweep": [asdict(point) for point in sweep],
            "load": {name: [asdict(point) for point in points] for name, points in load.items()},
        }
        write_results(output, results)
        console.print(f"Written: {output}", highlight=False)
    if plot is not None:
        for path in write_plots(Path(plot).expanduser(), sweep, load):
            console.print(f"Written: {path}", highlight=False)
    return 0


def check_blocks(blocks: str | None, others: Mapping[str, Any]) -> None:
    """Refuse what is only for recording blocks where they are given; `others` are values by option."""
    given = [name for name, value in others.items() if value is not None]
    if blocks is not None and given:
        raise CommandError(
            f"--blocks {blocks!r}: nothing is recorded then, and --{' --'.join(given)} has no effect; leave one of "
            "the two out"
        )


@dataclass(frozen=True)
class Start:
    """
    What schedules are simulated over.

    Attributes:
        blocks ([`Blocks`], *optional*): Of a file; `None` if some are to be recorded.
        profiles (`dict[str, Profile]`): Costs by name.
        pair ([`Pair`], *optional*): Loaded only where blocks or this machine's costs are not given.
    """

    blocks: Blocks | None
    profiles: dict[str, Profile]
    pair: Pair | None

    @classmethod
    def of_options(
        cls,
        blocks: str | None,
        profile: str | None,
        gpu_like: bool,
        rows: int,
        load: Callable[[], Pair],
        console: Console,
    ) -> Start:
        """
        Read, load and look up.

        Args:
            blocks, profile (`str`, *optional*): Files.
            gpu_like (`bool`): Whether made-up costs are wanted.
            rows (`int`): The most rows of a round.
            load (`Callable`): Loads the pair.
            console (`rich.console.Console`): Prints.

        Raises:
            `CommandError`: a file holds something else, or costs of another block size, or the costs of this machine
                are wanted and not known.
        """
        from .blocks import Blocks
        from .simulation import gpu_like_profile

        recorded, pair = None, None
        if blocks is not None:
            with reporting(f"--blocks {blocks!r}"):
                recorded = Blocks.load(Path(blocks).expanduser())
        profiles = {} if profile is None else {Path(profile).name: read_profile(profile)}
        of_machine = not (profiles or gpu_like)
        if recorded is None or of_machine:
            pair = load()
            console.print(pair.description, highlight=False)
        if of_machine:
            profiles[MACHINE] = machine_profile(pair, "--profile is missing", ", or give --profile FILE or --gpu-like")
        start = cls(recorded, profiles, pair)
        check_block_sizes(profiles, start.block_size)
        if gpu_like:
            profiles[GPU_LIKE] = gpu_like_profile(start.block_size, rows)
        return start

    @property
    def block_size(self) -> int:
        """Of the blocks, which are the pair's where none were read."""
        return self.pair.drafter.config.block_size if self.blocks is None else self.blocks.confidence_logits.shape[1]

    @property
    def origins(self) -> dict[str, Any]:
        """Where the costs come from, as plain values."""
        return {name: {"key": known.key, "made": known.made} for name, known in self.profiles.items()}


def read_profile(path: str) -> Profile:
    """What `--profile` names."""
    from .profiles import Profile

    with reporting(f"--profile {path!r}"):
        return Profile.load(Path(path).expanduser())


def _temperatures(drafter: str | None, recorded: Blocks) -> list[float]:
    """The confidence temperatures for recorded blocks: those in a drafter's config, or 1."""
    block_size = recorded.confidence_logits.shape[1]
    if drafter is None:
        return [1.0] * block_size
    return read_config(drafter, block_size).temperatures_for(recorded.sampling_temperature)


def read_config(drafter: str, block_size: int) -> DSparkConfig:
    """
    The config of the drafter of recorded blocks; nothing else of it is read.

    Raises:
        `CommandError`: it has none that can be used, or another block size.
    """
    from .demo_target import demo_drafter_folder
    from .modeling import DSparkConfig
    from .modeling.checkpoint_formats import find_reader
    from .modeling.checkpoint_loading import make_config, read_raw_config

    check_source("--drafter", drafter)
    with reporting(f"--drafter {drafter!r}"):
        raw = read_raw_config(demo_drafter_folder() if drafter == DEMO else drafter, {})
        config = make_config(DSparkConfig, find_reader(raw)(raw, set()).fields)
        config.validate_drafter()
    if config.block_size != block_size:
        raise CommandError(
            f"--drafter {drafter!r}: its block_size is {config.block_size}, that of the blocks {block_size}; give the "
            "drafter that drafted them"
        )
    return config


def check_block_sizes(profiles: dict[str, Profile], block_size: int) -> None:
    """Refuse profiles of another drafter than that of the blocks."""
    for name, profile in profiles.items():
        if profile.block_size not in (0, block_size):
            raise CommandError(
                f"--profile: {name} was measured with a drafter whose block_size is {profile.block_size}, that of the "
                f"blocks is {block_size}; give the profile of the drafter that drafted them"
            )


def profile_notes(profiles: dict[str, Profile], rows: int, block_size: int, do_sample: bool) -> list[str]:
    """What a reader of numbers that follow from profiles has to know of these."""
    notes = []
    for name, profile in profiles.items():
        if name == GPU_LIKE:
            notes.append(
                f"{name}: the costs come from a formula, not from any machine. Where the rows alone fill tiles of "
                f"{profile.made['tile']} tokens to the last, the first draft costs another tile and Algorithm 1 sends "
                "none: its worst case."
            )
            continue
        draft = profile.draft_sampled if do_sample else profile.draft_greedy
        if draft is None:
            notes.append(f"{name}: no draft was measured, so drafting counts as free.")
        tokens = min(curve.tokens[-1] for curve in profile.steps)
        measured = [(rows * (1 + block_size), tokens, f"steps of {tokens} tokens")]
        if profile.row_steps:
            most = max(curve.rows for curve in profile.row_steps)
            measured.append((rows, most, f"{most} rows a step"))
        if draft is not None:
            measured.append((rows, draft.rows[-1], f"drafts for {draft.rows[-1]} rows"))
        if any(wanted > most for wanted, most, _ in measured):
            upto = ", ".join(words for _, _, words in measured)
            notes.append(f"{name}: measured up to {upto}; beyond that, straight lines.")
    return notes


def print_sweep(sweep: Sequence[SweepPoint], console: Console) -> None:
    """Tables of what thresholds keep and prune: of all blocks, then acceptance and pruning by set.

    Args:
        sweep (`Sequence[SweepPoint]`): as `threshold_sweep` returns it.
        console (`rich.console.Console`): prints.
    """
    from rich.table import Table

    shown = [point for point in sweep if point.threshold in SHOWN]
    table = Table(title=f"Threshold sweep ({sweep[0].blocks} blocks)")
    for column in (
        "threshold",
        "accepted of\nverified",
        "pruned",
        "accepted\nkept",
        "verify_\nlength",
        "tokens\na round",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for point in shown:
        if point.set is None:
            table.add_row(
                format(point.threshold, ".2f"),
                format_number(point.draft_acceptance_rate, ".1%"),
                format(point.pruned, ".1%"),
                format_number(point.accepted_kept, ".1%"),
                format(point.verify_length, ".2f"),
                format(point.mean_acceptance_length, ".2f"),
            )
    console.print(table)
    by_set = Table(title="By prompt set and threshold: accepted of verified (pruned)", box=None, padding=(0, 1))
    by_set.add_column("prompts", no_wrap=True)
    for threshold in SHOWN_BY_SET:
        by_set.add_column(format(threshold, "g"), justify="right", no_wrap=True)
    for name in dict.fromkeys(point.set for point in shown if point.set is not None):
        points = [point for point in shown if point.set == name and point.threshold in SHOWN_BY_SET]
        by_set.add_row(name, *(f"{format_number(p.draft_acceptance_rate, '.0%')} ({p.pruned:.0%})" for p in points))
    console.print(by_set)


def print_load(name: str, points: Sequence[LoadPoint], console: Console) -> None:
    """Tables of one profile: budget, throughput and gaps by rows.

    Args:
        name (`str`): the profile's.
        points (`Sequence[LoadPoint]`): as `simulate_load` returns them.
        console (`rich.console.Console`): prints.
    """
    console.print(_load_table(f"{name}: tokens a request that are verified", points, DRAFTING, "budget", ".2f"))
    console.print(_load_table(f"{name}: tokens a second", points, tuple(LABELS), "throughput", ".0f"))
    gap = "% below the oracle, as each round's confidences expect it"
    console.print(_load_table(f"{name}: {gap}", points, SCHEDULED, "gap_to_oracle", ".2f"))
    gap = "% of tokens a second below the clairvoyant"
    console.print(_load_table(f"{name}: {gap}", points, DRAFTING[:-1], "gap_to_clairvoyant", ".1f"))


def _load_table(title: str, points: Sequence[LoadPoint], plans: Sequence[str], value: str, style: str) -> Table:
    from rich.table import Table

    table = Table(title=title, box=None, padding=(0, 1))
    table.add_column("rows", justify="right", no_wrap=True)
    for plan in plans:
        table.add_column(LABELS[plan], justify="right", no_wrap=True)
    for rows in dict.fromkeys(point.rows for point in points):
        found = {point.plan: point for point in points if point.rows == rows}
        table.add_row(str(rows), *(format(getattr(found[plan], value), style) for plan in plans))
    return table


def write_plots(folder: Path, sweep: Sequence[SweepPoint], load: dict[str, Sequence[LoadPoint]]) -> list[Path]:
    """Draw the threshold sweep, the budget against rows, and throughput and gaps against rows.

    Args:
        folder (`Path`): for the PNG files; made if it is not there.
        sweep (`Sequence[SweepPoint]`): as `threshold_sweep` returns it.
        load (`dict[str, Sequence[LoadPoint]]`): by profile, as `simulate_load` returns it.

    Returns:
        `list[Path]`: the three files.
    """
    from matplotlib.figure import Figure

    folder.mkdir(exist_ok=True)
    figures = {}
    figures["threshold_sweep"] = figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, value, label in zip(
        figure.subplots(1, 2),
        ("draft_acceptance_rate", "pruned"),
        ("accepted of verified drafts", "share of drafts pruned"),
        strict=True,
    ):
        _draw_sweep(axes, sweep, value, label)
    figures["budget"] = figure = Figure(figsize=(5 * len(load), 4), layout="constrained")
    for axes, (name, points) in zip(figure.subplots(1, len(load), squeeze=False)[0], load.items(), strict=True):
        _draw_load(axes, points, DRAFTING, "budget", "tokens a request that are verified")
        axes.set_title(name)
    figures["throughput"] = figure = Figure(figsize=(5 * len(load), 10), layout="constrained")
    for column, (name, points) in zip(figure.subplots(3, len(load), squeeze=False).T, load.items(), strict=True):
        _draw_load(column[0], points, tuple(LABELS), "throughput", "tokens a second over those without drafts")
        _draw_load(column[1], points, SCHEDULED[1:], "gap_to_oracle", "expected: % below the oracle")
        _draw_load(column[2], points, DRAFTING[1:-1], "gap_to_clairvoyant", "realised: % below the clairvoyant")
        column[0].set_title(name)
    paths = [folder / f"{name}.png" for name in figures]
    for path, figure in zip(paths, figures.values(), strict=True):
        figure.savefig(path, dpi=120)
    return paths


def _draw_sweep(axes: Axes, sweep: Sequence[SweepPoint], value: str, label: str) -> None:
    for name in dict.fromkeys(point.set for point in sweep):
        points = [(p.threshold, getattr(p, value)) for p in sweep if p.set == name and getattr(p, value) is not None]
        style = {"color": "black", "linewidth": 2.5} if name is None else {}
        axes.plot(*zip(*points, strict=True), label=name or "all", **style)
    axes.set(xlabel="threshold on the survival", ylabel=label, ylim=(0, 1))
    axes.legend(fontsize="small")


def _draw_load(axes: Axes, points: Sequence[LoadPoint], plans: Sequence[str], value: str, label: str) -> None:
    """One line a plan; throughput, which grows with the rows, is drawn over that of no drafts."""
    units = {p.rows: p.throughput if value == "throughput" else 1.0 for p in points if p.plan == "no_drafts"}
    for plan in plans:
        line = [(p.rows, getattr(p, value) / units[p.rows]) for p in points if p.plan == plan]
        # The clairvoyant and the oracle are no schedules; a plan keeps its colour from panel to panel.
        style = "--" if plan in ("oracle", "clairvoyant") else "-"
        color = f"C{tuple(LABELS).index(plan)}"
        label_of_plan = LABELS[plan].replace("\n", " ")
        axes.plot(*zip(*line, strict=True), style, color=color, marker=".", label=label_of_plan)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(units), [str(rows) for rows in units])
    if value == "gap_to_oracle":  # some are hundreds of times others
        axes.set_yscale("symlog", linthresh=0.1)
    if value != "throughput":
        axes.set_ylim(bottom=0)
    axes.set(xlabel="rows", ylabel=label)
    axes.legend(fontsize="small")
