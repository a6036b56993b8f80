"""The subcommands that measure: their options."""

from __future__ import annotations

import argparse

from .command_options import (
    Commands,
    Parser,
    add_batch_size,
    add_costs,
    add_pair,
    add_placement,
    add_prompts,
    add_results,
    add_rows,
    add_sampling,
    add_simulation,
    add_target,
    add_tasks,
    add_temperature,
    add_temperatures,
    add_threshold,
    auc_value,
    calling,
    non_negative_int,
    positive_int,
    positive_minutes_value,
    probability_value,
    seconds_value,
    share_value,
    threshold_value,
)
from .loading import CommandError, told
from .scheduling import SCHEDULES


def add_bench(commands: Commands) -> None:
    """`dspark bench`."""
    bench = commands.add_parser(
        "bench",
        help="plain generate, prompt lookup and DSpark in turn",
        description="Measure plain generate, prompt lookup and DSpark in turn, prompt by prompt, and set a round's "
        "cost beside Equation 1's bound tau * T(1) / (T_draft + T_verify). With --batch-sizes, measure plain generate "
        "and the schedules on batches instead.",
    )
    add_pair(bench)
    add_prompts(bench)
    add_temperature(bench)
    add_sampling(bench, top_p="1, no truncation", top_k="0, no truncation")
    bench.add_argument(
        "--repetitions",
        type=positive_int,
        default=3,
        help="calls of each kind, of small batches more; default: %(default)s",
    )
    bench.add_argument(
        "--prompt-lookup-tokens",
        type=positive_int,
        default=argparse.SUPPRESS,
        help="prompt_lookup_num_tokens; default: 10; not with --batch-sizes",
    )
    bench.add_argument(
        "--methods",
        choices=("static", "compiled", "prompt-lookup", "dflash", "compiled-drafter", *SCHEDULES),
        nargs="+",
        default=argparse.SUPPRESS,
        help="beside plain generate: a static cache, torch.compile, prompt lookup, Transformers' own DFlash path (for "
        "DFlash drafters with full attention), the drafter compiled, or by schedules; default: prompt lookup and the "
        "drafter; not with --batch-sizes",
    )
    bench.add_argument(
        "--contexts",
        metavar="N",
        type=positive_int,
        nargs="+",
        default=argparse.SUPPRESS,
        help="prompts of N tokens each, other prompts before them; not with --batch-sizes",
    )
    bench.add_argument(
        "--draft-context-windows",
        metavar="N",
        type=positive_int,
        nargs="+",
        default=argparse.SUPPRESS,
        help="beside these: the drafter with draft_context_window N, seeing the last N positions; not with "
        "--batch-sizes",
    )
    bench.add_argument(
        "--draft-top-k",
        metavar="K",
        type=positive_int,
        nargs="+",
        default=argparse.SUPPRESS,
        help="beside these: the drafter with draft_top_k K, drafting among K tokens a slot; not with --batch-sizes",
    )
    bench.add_argument(
        "--synthetic-acceptance",
        dest="synthetic",
        metavar="P",
        type=probability_value,
        nargs="+",
        default=[],
        help="measure the engine instead: drafts are forced to be right with probability P; the text is not meant",
    )
    bench.add_argument("--output", help="write all calls and the summary to this JSON file")
    add_threshold(bench)
    add_placement(bench, dtype="auto")
    _add_batches(bench)
    bench.set_defaults(run=_run_bench)


def _add_batches(bench: argparse.ArgumentParser) -> None:
    batches = bench.add_argument_group("batches", argument_default=argparse.SUPPRESS)
    batches.add_argument(
        "--batch-sizes",
        metavar="N",
        type=positive_int,
        nargs="+",
        help="rows of a batch; all rows run to full length",
    )
    batches.add_argument(
        "--schedules",
        choices=SCHEDULES,
        nargs="+",
        help="default: all; confidence takes the best of a few thresholds, found in a warm-up, or --threshold",
    )
    batches.add_argument(
        "--synthetic-auc",
        metavar="AUC",
        type=auc_value,
        help="ROC-AUC of confidences that go with --synthetic-acceptance; default: the same for every draft",
    )
    batches.add_argument("--markdown", help="write a table to this Markdown file")
    batches.add_argument(
        "--plot", metavar="FILE", help="draw decoding speed over plain generate by batch size, as PNG"
    )


def add_profile(commands: Commands) -> None:
    """`dspark profile`."""
    profile = commands.add_parser(
        "profile",
        help="what steps and drafts cost on this machine, for the hardware-aware schedules",
        description="Measure steps of the target by their tokens and rows, and drafts by their rows, and store that "
        "where generate finds it. It holds for this machine, dtype, number of threads and these versions; what was "
        "stored is shown again. Let nothing else run meanwhile.",
    )
    add_target(profile)
    profile.add_argument(
        "--drafter", help="folder or Hub id of a drafter for this target, or none; default: the demo's"
    )
    profile.add_argument(
        "--contexts", metavar="C", type=positive_int, nargs="+", help="tokens that rows hold; default: 128 512 2048"
    )
    profile.add_argument("--most-tokens", type=positive_int, help="of a step; default: 256")
    profile.add_argument(
        "--budget",
        metavar="SECONDS",
        type=seconds_value,
        help="for all but loading the models; a target too slow for three sweeps takes longer; default: 120",
    )
    profile.add_argument("--force", action="store_true", help="measure although there is a stored profile")
    profile.add_argument("--plot", metavar="FILE", help="draw SPS(B), tokens a second and drafts, as PNG")
    profile.add_argument("--output", metavar="FILE", help="write a copy to this JSON file")
    add_placement(profile, dtype="auto")
    profile.set_defaults(run=calling("profile_command"))


def add_calibrate(commands: Commands) -> None:
    """`dspark calibrate`."""
    calibrate = commands.add_parser(
        "calibrate",
        help="fit a drafter's confidence to what the target accepts, or check whether it still fits",
        description="Sequential Temperature Scaling: decode prompts, fit one temperature a block position so that the "
        "predicted survival is how often a prefix survives, and write them into the drafter's config.json. Each "
        "sampling temperature is a fit of its own, greedy decoding too.",
    )
    add_pair(calibrate)
    add_prompts(calibrate)
    add_batch_size(calibrate)
    add_temperatures(calibrate, "fit", "0 1, with --check all that were fitted")
    add_sampling(calibrate)
    calibrate.add_argument(
        "--holdout",
        type=share_value,
        default=0.3,
        metavar="SHARE",
        help="of the prompts, kept out of the fit to judge it by; default: %(default)s",
    )
    calibrate.add_argument(
        "--check",
        action="store_true",
        help="write nothing: measure the stored fits on (new) prompts; exit code 1 if a refit is advised",
    )
    calibrate.add_argument(
        "--output", metavar="FOLDER", help="copy the drafter here with its temperatures; default: its own folder"
    )
    calibrate.add_argument("--plot", metavar="FILE", help="draw reliability diagrams, before and after, as PNG")
    calibrate.add_argument(
        "--blocks", metavar="FILE", help="save the recorded blocks as JSON (of several temperatures FILE-t0, FILE-t1)"
    )
    add_placement(calibrate, dtype="auto")
    calibrate.set_defaults(run=calling("calibrate"))


def add_eval(commands: Commands) -> None:
    """`dspark eval`."""
    evaluate = commands.add_parser(
        "eval",
        help="acceptance by task and position with intervals, and calibration, for any drafter",
        description="Decode prompts task by task and report tokens a round, accepted drafts, acceptance by position "
        "and calibration, with intervals over prompts. With --output a run that was broken off is taken up by the "
        "same command.",
    )
    add_pair(evaluate)
    add_tasks(evaluate)
    add_temperatures(evaluate, "measure", "0 1")
    add_sampling(evaluate)
    evaluate.add_argument(
        "--thinking",
        choices=("on", "off"),
        nargs="+",
        help="for chat templates with enable_thinking: measure each; default: the template's own choice",
    )
    evaluate.add_argument(
        "--schedule", choices=SCHEDULES, default="constant", help="default: %(default)s, all drafts verified"
    )
    evaluate.add_argument("--threshold", type=threshold_value, help="of --schedule confidence; default: drafter's")
    evaluate.add_argument(
        "--time-limit", metavar="MINUTES", type=positive_minutes_value, help="stop then; run again to go on"
    )
    add_results(evaluate, "the tables of a model card", "acceptance, reliability and the temperature sweep")
    add_placement(evaluate, dtype="auto")
    evaluate.set_defaults(run=calling("eval_command"))


def add_simulate(commands: Commands) -> None:
    """`dspark simulate`."""
    simulate = commands.add_parser(
        "simulate",
        help="schedules and thresholds over recorded blocks and a profile, up to hundreds of rows",
        description="What each threshold keeps and prunes, and what each schedule would make of 1 to 512 concurrent "
        "rows, by recorded blocks and a profile's costs. Confidences are calibrated by the temperatures of the "
        "drafter that drafted the blocks; with --blocks, of the one that --drafter names, else not at all.",
    )
    add_pair(simulate)
    add_prompts(simulate)
    add_temperature(simulate)
    add_simulation(simulate, [2**power for power in range(10)], "1 2 4 ... 512")
    simulate.add_argument("--seed", type=non_negative_int, default=0, help="default: %(default)s")
    simulate.add_argument("--output", help="write all numbers to this JSON file")
    simulate.add_argument("--plot", metavar="FOLDER", help="draw threshold_sweep.png, budget.png and throughput.png")
    add_placement(simulate, dtype="auto")
    simulate.set_defaults(run=calling("simulate"))


def add_doctor(commands: Commands) -> None:
    """`dspark doctor`."""
    doctor = commands.add_parser(
        "doctor",
        help="whether a target and a drafter go together, are read as they were trained, and pay here",
        description="Compare sizes, tokenizer and template, draft blocks in the target's own greedy texts with the "
        "taps and slots that the config declares and with their neighbours (a wrong reading raises no error), and "
        "measure whether drafting pays on this machine. Exit code 1 if there is a problem.",
    )
    add_pair(doctor)
    add_prompts(doctor, max_new_tokens=64)
    doctor.add_argument(
        "--budget",
        metavar="SECONDS",
        type=seconds_value,
        default=30.0,
        help="for measuring costs where there is no profile, as for dspark profile; default: %(default)s",
    )
    add_placement(doctor, dtype="auto")
    doctor.set_defaults(run=calling("doctor"))


def _run_bench(**arguments: object) -> int:
    """`dspark bench`: row by row, or on batches."""
    batched = "batch_sizes" in arguments
    for name in (
        ("prompt_lookup_tokens", "methods", "contexts", "draft_context_windows", "draft_top_k")
        if batched
        else ("schedules", "synthetic_auc", "markdown", "plot")
    ):
        if name in arguments:
            fix = "leave one of them out" if batched else "give that as well"
            raise CommandError(
                f"--{name.replace('_', '-')} {told(arguments[name])}: not {'with' if batched else 'without'} "
                f"--batch-sizes; {fix}"
            )
    if batched:
        from .batch_bench import run
    else:
        from .bench import run
    return run(**arguments)


def add_ablate(commands: Commands) -> None:
    """`dspark ablate`."""
    ablate = commands.add_parser(
        "ablate",
        help="one thing swapped, all else held fixed: schedules, calibration, drafters, what a drafter costs",
        description="Swap one thing and hold all else fixed, with intervals over prompts.",
    )
    parts = ablate.add_subparsers(dest="part", required=True, metavar="PART", parser_class=Parser)
    schedule = parts.add_parser(
        "schedule",
        help="what the schedules are worth with one drafter, down from an oracle",
        description="Whole blocks, the best threshold, the hardware-aware schedules, an oracle and a clairvoyant over "
        "the same recorded blocks of one drafter and a profile's costs: what drafts are worth, what a schedule adds "
        "to them, and what it misses of the best.",
    )
    calibration = parts.add_parser(
        "calibration",
        help="temperatures fitted on one set of prompts, used on another",
        description="Fit the confidence temperatures on each set of prompts and use them on each: calibration error, "
        "and tokens a second of Algorithm 1 that are lost by a profile's costs.",
    )
    for part in (schedule, calibration):
        add_pair(part)
        _add_evaluated(part)
        add_simulation(part, [1, 4, 16, 64])
        part.add_argument("--save-blocks", metavar="FILE", help="keep what is recorded, for --blocks")
        _add_tables(part)
        part.set_defaults(run=_run_ablate)
    drafters = parts.add_parser(
        "drafters",
        help="several drafters of one target: training data, block sizes, heads",
        description="Decode the same prompts with several drafters of one target, say what they differ in and what "
        "that is worth, prompt by prompt against the first.",
    )
    add_target(drafters)
    drafters.add_argument(
        "--drafters", metavar="DRAFTER", nargs="+", required=True, help="folders or Hub ids; the first is the baseline"
    )
    _add_evaluated(drafters)
    _add_tables(drafters)
    drafters.set_defaults(run=_run_ablate)
    cost = parts.add_parser(
        "cost",
        help="what a drafter adds in parameters, memory and time",
        description="Parameters, weights, peak memory and time of a drafter as shares of the target's; times by this "
        "machine's profile of the pair, or measured for one row if there is none.",
    )
    add_pair(cost)
    add_costs(cost)
    add_rows(cost, [1, 8])
    cost.add_argument(
        "--max-new-tokens", type=positive_int, default=64, help="of the calls whose memory counts; default: 64"
    )
    _add_tables(cost)
    cost.set_defaults(run=_run_ablate)


def _add_evaluated(part: argparse.ArgumentParser) -> None:
    """Prompts by set, decoded at one temperature."""
    add_tasks(part)
    add_temperature(part)
    add_sampling(part)


def _add_tables(part: argparse.ArgumentParser) -> None:
    add_results(part, "the tables", "them")
    add_placement(part, dtype="auto")


def _run_ablate(*, part: str, **arguments: object) -> int:
    """`dspark ablate`: one of its parts."""
    if part == "drafters":
        from .ablate_drafters import run
    elif part == "cost":
        from .ablate_cost import run
    else:
        from .ablate import run

        arguments["part"] = part
    return run(**arguments)
