"""The `dspark` command and its subcommands.

Torch and Transformers are imported by the commands that need them, after the arguments have been checked.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from .loading import DEMO, DTYPES, CommandError
from .scheduling import SCHEDULES


if TYPE_CHECKING:
    from .bench import Call


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see `{self.prog} --help`)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `dspark` command.

    Args:
        argv (`Sequence[str]`, *optional*): the arguments; by default the process's.

    Returns:
        `int`: 0, or 1 if `calibrate --check` advises a refit or `eval` ran into its time limit, or 2 for something
            given that cannot be used (said in one line on stderr), or 130 after Ctrl-C.
    """
    argv = sys.argv[1:] if argv is None else argv
    # The Trainer's options, some two hundred, are no keyword arguments: `train` has a parser of its own.
    if argv and argv[0] == "train":
        name, command, arguments = "train", _run_train, {"argv": argv[1:]}
    else:
        arguments = vars(build_parser().parse_args(argv))
        command: Callable[..., int] = arguments.pop("run")
        name = arguments.pop("command")
    try:
        return command(**arguments)
    except CommandError as error:
        print(f"dspark {name}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\ndspark {name}: interrupted", file=sys.stderr)
        return 130


def build_parser() -> argparse.ArgumentParser:
    """The command line: each subcommand's options are the keyword arguments of the function in its `run`."""
    parser = _Parser(prog="dspark", description="DSpark speculative decoding for Hugging Face Transformers.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {importlib.metadata.version('dspark-hf')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    _add_demo(commands)
    _add_generate(commands)
    _add_bench(commands)
    _add_profile(commands)
    _add_calibrate(commands)
    _add_eval(commands)
    _add_simulate(commands)
    _add_ablate(commands)
    commands.add_parser("train", help="train a drafter with the Trainer", add_help=False)
    _add_card(commands)
    _add_push(commands)
    _add_prepare_data(commands)
    _add_convert(commands)
    environment = commands.add_parser("env", help="versions and machine, for a bug report")
    environment.set_defaults(run=_run_env)
    return parser


def _add_demo(commands: argparse._SubParsersAction[_Parser]) -> None:
    demo = commands.add_parser(
        "demo",
        help="a real language model with and without DSpark",
        description="SmolLM2-135M-Instruct with the bundled drafter: streamed text with the accepted draft tokens "
        "coloured, then plain generate against DSpark. The first run fetches the model (93 MB) and converts it.",
    )
    demo.add_argument(
        "--prompt", dest="prompts", action="append", default=[], help="a prompt of your own instead (repeatable)"
    )
    demo.add_argument("--max-new-tokens", type=_positive_int, default=96, help="default: %(default)s")
    demo.add_argument("--repetitions", type=_positive_int, default=2, help="timed calls each; default: %(default)s")
    demo.add_argument("--prepare", action="store_true", help="only fetch and convert the model")
    _add_threshold(demo)
    _add_placement(demo, dtype="bfloat16")
    demo.set_defaults(run=_run_demo)


def _add_generate(commands: argparse._SubParsersAction[_Parser]) -> None:
    generate = commands.add_parser(
        "generate", help="generate text with any target and drafter", description="Generate text with DSpark."
    )
    _add_pair(generate)
    generate.add_argument("--prompt", required=True, help="the text to answer or to continue; - reads stdin")
    generate.add_argument("--chat", action="store_true", help="wrap the prompt in the tokenizer's chat template")
    generate.add_argument("--stream", action="store_true", help="print as it comes, accepted draft tokens coloured")
    generate.add_argument("--compare", action="store_true", help="time plain generate as well and compare")
    generate.add_argument("--max-new-tokens", type=_positive_int, default=256, help="default: %(default)s")
    generate.add_argument("--temperature", type=_temperature, default=0.0, help="0 is greedy; default: %(default)s")
    _add_sampling(generate)
    _add_threshold(generate)
    _add_placement(generate, dtype="auto")
    generate.set_defaults(run=_run_generate)


def _add_bench(commands: argparse._SubParsersAction[_Parser]) -> None:
    bench = commands.add_parser(
        "bench",
        help="plain generate, prompt lookup and DSpark in turn",
        description="Measure plain generate, prompt lookup and DSpark in turn, prompt by prompt, and set a round's "
        "cost beside Equation 1's bound tau * T(1) / (T_draft + T_verify). With --batch-sizes, measure plain generate "
        "and the schedules on batches instead.",
    )
    _add_pair(bench)
    _add_prompts(bench)
    bench.add_argument("--temperature", type=_temperature, default=0.0, help="0 is greedy; default: %(default)s")
    _add_sampling(bench, top_p="1, no truncation", top_k="0, no truncation")
    bench.add_argument("--repetitions", type=_positive_int, default=3, help="default: %(default)s")
    bench.add_argument(
        "--prompt-lookup-tokens",
        type=_positive_int,
        default=argparse.SUPPRESS,
        help="prompt_lookup_num_tokens; default: 10; not with --batch-sizes",
    )
    bench.add_argument(
        "--synthetic-acceptance",
        dest="synthetic",
        metavar="P",
        type=_probability,
        nargs="+",
        default=[],
        help="measure the engine instead: drafts are forced to be right with probability P; the text is not meant",
    )
    bench.add_argument("--output", help="write all calls and the summary to this JSON file")
    _add_threshold(bench)
    _add_placement(bench, dtype="auto")
    _add_batches(bench)
    bench.set_defaults(run=_run_bench)


def _add_batches(bench: argparse.ArgumentParser) -> None:
    batches = bench.add_argument_group("batches", argument_default=argparse.SUPPRESS)
    batches.add_argument(
        "--batch-sizes",
        metavar="N",
        type=_positive_int,
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
        type=_auc,
        help="ROC-AUC of confidences that go with --synthetic-acceptance; default: the same for every draft",
    )
    batches.add_argument("--markdown", help="write a table to this Markdown file")


def _add_profile(commands: argparse._SubParsersAction[_Parser]) -> None:
    profile = commands.add_parser(
        "profile",
        help="what steps and drafts cost on this machine, for the hardware-aware schedules",
        description="Measure steps of the target by their tokens and rows, and drafts by their rows, and store that "
        "where generate finds it. It holds for this machine, dtype, number of threads and these versions; what was "
        "stored is shown again. Let nothing else run meanwhile.",
    )
    profile.add_argument("--target", default=DEMO, help="folder or Hub id; default: the demo's target")
    profile.add_argument(
        "--drafter", help="folder or Hub id of a drafter for this target, or none; default: the demo's"
    )
    profile.add_argument(
        "--contexts", metavar="C", type=_positive_int, nargs="+", help="tokens that rows hold; default: 128 512 2048"
    )
    profile.add_argument("--most-tokens", type=_positive_int, help="of a step; default: 256")
    profile.add_argument("--budget", metavar="SECONDS", type=_seconds, help="for measuring; default: 120")
    profile.add_argument("--force", action="store_true", help="measure although there is a stored profile")
    profile.add_argument("--plot", metavar="FILE", help="draw SPS(B), tokens a second and drafts, as PNG")
    profile.add_argument("--output", metavar="FILE", help="write a copy to this JSON file")
    _add_placement(profile, dtype="auto")
    profile.set_defaults(run=_run_profile)


def _add_calibrate(commands: argparse._SubParsersAction[_Parser]) -> None:
    calibrate = commands.add_parser(
        "calibrate",
        help="fit a drafter's confidence to what the target accepts, or check whether it still fits",
        description="Sequential Temperature Scaling: decode prompts, fit one temperature a block position so that the "
        "predicted survival is how often a prefix survives, and write them into the drafter's config.json. Each "
        "sampling temperature is a fit of its own, greedy decoding too.",
    )
    _add_pair(calibrate)
    _add_prompts(calibrate)
    calibrate.add_argument("--batch-size", type=_positive_int, default=8, help="default: %(default)s")
    calibrate.add_argument(
        "--temperature",
        dest="temperatures",
        metavar="T",
        type=_temperature,
        nargs="+",
        action="extend",
        help="fit at each of these, 0 is greedy; default: 0 1, with --check all that were fitted",
    )
    _add_sampling(calibrate)
    calibrate.add_argument(
        "--holdout",
        type=_share,
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
    _add_placement(calibrate, dtype="auto")
    calibrate.set_defaults(run=_run_calibrate)


def _add_eval(commands: argparse._SubParsersAction[_Parser]) -> None:
    evaluate = commands.add_parser(
        "eval",
        help="acceptance by task and position with intervals, and calibration, for any drafter",
        description="Decode prompts task by task and report tokens a round, accepted drafts, acceptance by position "
        "and calibration, with intervals over prompts. With --output a run that was broken off is taken up by the "
        "same command.",
    )
    _add_pair(evaluate)
    evaluate.add_argument(
        "--tasks",
        help="separated by commas: names of sets, .jsonl files with the field 'prompt', or datasets as "
        "NAME:SPLIT:COLUMN; default: all sets",
    )
    evaluate.add_argument("--prompts", metavar="FOLDER", help="sets, as .jsonl files; default: the bundled ones")
    evaluate.add_argument("--limit", type=_positive_int, help="prompts of each task; default: all")
    evaluate.add_argument("--max-new-tokens", type=_positive_int, default=128, help="default: %(default)s")
    evaluate.add_argument("--batch-size", type=_positive_int, default=8, help="default: %(default)s")
    evaluate.add_argument(
        "--temperature",
        dest="temperatures",
        metavar="T",
        type=_temperature,
        nargs="+",
        action="extend",
        help="measure at each of these, 0 is greedy; default: 0 1",
    )
    _add_sampling(evaluate)
    evaluate.add_argument(
        "--thinking",
        choices=("on", "off"),
        nargs="+",
        help="for chat templates with enable_thinking: measure each; default: the template's own choice",
    )
    evaluate.add_argument(
        "--schedule", choices=SCHEDULES, default="constant", help="default: %(default)s, all drafts verified"
    )
    evaluate.add_argument("--threshold", type=_threshold, help="of --schedule confidence; default: drafter's")
    evaluate.add_argument("--time-limit", metavar="MINUTES", type=_minutes, help="stop then; run again to go on")
    evaluate.add_argument("--output", metavar="FILE", help="write all numbers to this JSON file")
    evaluate.add_argument("--markdown", metavar="FILE", help="write the tables of a model card")
    evaluate.add_argument("--plot", metavar="FOLDER", help="draw acceptance, reliability and the temperature sweep")
    _add_placement(evaluate, dtype="auto")
    evaluate.set_defaults(run=_run_eval)


def _add_simulate(commands: argparse._SubParsersAction[_Parser]) -> None:
    simulate = commands.add_parser(
        "simulate",
        help="schedules and thresholds over recorded blocks and a profile, up to hundreds of rows",
        description="What each threshold keeps and prunes, and what each schedule would make of 1 to 512 concurrent "
        "rows, by recorded blocks and a profile's costs. Confidences are calibrated by the temperatures of the "
        "drafter that drafted the blocks; with --blocks, of the one that --drafter names, else not at all.",
    )
    _add_pair(simulate)
    simulate.add_argument("--blocks", help="file of recorded blocks (dspark calibrate); default: records some first")
    _add_prompts(simulate)
    simulate.add_argument("--temperature", type=_temperature, default=0.0, help="0 is greedy; default: %(default)s")
    simulate.add_argument("--profile", metavar="FILE", help="costs (dspark profile); default: this machine's own")
    simulate.add_argument(
        "--gpu-like", action="store_true", help="made-up, jagged costs in the manner of a GPU: alone or with --profile"
    )
    simulate.add_argument(
        "--context", type=_positive_int, default=256, help="tokens that each row holds; default: %(default)s"
    )
    simulate.add_argument(
        "--rows",
        metavar="R",
        type=_positive_int,
        nargs="+",
        default=[2**power for power in range(10)],
        help="numbers of concurrent rows; default: 1 2 4 ... 512",
    )
    simulate.add_argument("--rounds", type=_positive_int, default=200, help="of each; default: %(default)s")
    simulate.add_argument("--seed", type=_non_negative_int, default=0, help="default: %(default)s")
    simulate.add_argument("--output", help="write all numbers to this JSON file")
    simulate.add_argument("--plot", metavar="FOLDER", help="draw threshold_sweep.png, budget.png and throughput.png")
    _add_placement(simulate, dtype="auto")
    simulate.set_defaults(run=_run_simulate)


def _add_ablate(commands: argparse._SubParsersAction[_Parser]) -> None:
    ablate = commands.add_parser(
        "ablate",
        help="one thing swapped, all else held fixed: schedules, calibration, drafters, what a drafter costs",
        description="Swap one thing and hold all else fixed, with intervals over prompts.",
    )
    parts = ablate.add_subparsers(dest="part", required=True, metavar="PART", parser_class=_Parser)
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
        _add_pair(part)
        part.add_argument("--blocks", metavar="FILE", help="recorded blocks; default: records some first")
        _add_evaluated(part)
        part.add_argument("--profile", metavar="FILE", help="costs (dspark profile); default: this machine's own")
        part.add_argument(
            "--gpu-like", action="store_true", help="made-up, jagged costs in the manner of a GPU: alone or as well"
        )
        _add_rows(part, [1, 4, 16, 64])
        part.add_argument(
            "--rounds", type=_positive_int, default=200, help="that follow each other; default: %(default)s"
        )
        part.add_argument("--save-blocks", metavar="FILE", help="keep what is recorded, for --blocks")
        _add_results(part)
        part.set_defaults(run=_run_ablate)
    drafters = parts.add_parser(
        "drafters",
        help="several drafters of one target: training data, block sizes, heads",
        description="Decode the same prompts with several drafters of one target, say what they differ in and what "
        "that is worth, prompt by prompt against the first.",
    )
    drafters.add_argument("--target", default=DEMO, help="folder or Hub id; default: the demo's target")
    drafters.add_argument(
        "--drafters", metavar="DRAFTER", nargs="+", required=True, help="folders or Hub ids; the first is the baseline"
    )
    _add_evaluated(drafters)
    _add_results(drafters)
    drafters.set_defaults(run=_run_ablate)
    cost = parts.add_parser(
        "cost",
        help="what a drafter adds in parameters, memory and time",
        description="Parameters, weights, peak memory and time of a drafter as shares of the target's; times by this "
        "machine's profile of the pair, or measured for one row if there is none.",
    )
    _add_pair(cost)
    cost.add_argument("--profile", metavar="FILE", help="costs (dspark profile); default: this machine's own")
    _add_rows(cost, [1, 8])
    cost.add_argument(
        "--max-new-tokens", type=_positive_int, default=64, help="of the calls whose memory counts; default: 64"
    )
    _add_results(cost)
    cost.set_defaults(run=_run_ablate)


def _add_evaluated(part: argparse.ArgumentParser) -> None:
    """Prompts by set, and how they are decoded."""
    part.add_argument(
        "--tasks",
        help="separated by commas: names of sets, .jsonl files with the field 'prompt', or datasets as "
        "NAME:SPLIT:COLUMN; default: all sets",
    )
    part.add_argument("--prompts", metavar="FOLDER", help="sets, as .jsonl files; default: the bundled ones")
    part.add_argument("--limit", type=_positive_int, help="prompts of each set; default: all")
    part.add_argument("--max-new-tokens", type=_positive_int, default=128, help="default: %(default)s")
    part.add_argument("--batch-size", type=_positive_int, default=8, help="default: %(default)s")
    part.add_argument("--temperature", type=_temperature, default=0.0, help="0 is greedy; default: %(default)s")
    _add_sampling(part)


def _add_rows(part: argparse.ArgumentParser, rows: list[int]) -> None:
    part.add_argument(
        "--context", type=_positive_int, default=256, help="tokens that each row holds; default: %(default)s"
    )
    part.add_argument(
        "--rows",
        metavar="R",
        type=_positive_int,
        nargs="+",
        default=rows,
        help=f"numbers of concurrent rows; default: {' '.join(map(str, rows))}",
    )


def _add_results(part: argparse.ArgumentParser) -> None:
    part.add_argument("--output", metavar="FILE", help="write all numbers to this JSON file")
    part.add_argument("--markdown", metavar="FILE", help="write the tables to this Markdown file")
    part.add_argument("--plot", metavar="FOLDER", help="draw PNG files")
    _add_placement(part, dtype="auto")


def _add_card(commands: argparse._SubParsersAction[_Parser]) -> None:
    card = commands.add_parser(
        "card",
        help="the model card of a drafter, as dspark push writes it",
        description="Render a drafter's model card from its config, its training.json and measured figures. What is "
        "not known, it says.",
    )
    _add_card_sources(card)
    card.add_argument("--repo-id", metavar="REPO_ID", help="what its code loads; default: the folder by its name")
    card.add_argument("--output", metavar="FILE", help="write it to this file; default: print it")
    card.set_defaults(run=_run_card)


def _add_push(commands: argparse._SubParsersAction[_Parser]) -> None:
    push = commands.add_parser(
        "push",
        help="a drafter with its code, provenance, figures and card to the Hub",
        description="Check a drafter, stage it as a repository that loads with and without dspark_hf, and upload it "
        "in one commit. The token is that of `hf auth login` or HF_TOKEN. A card that was edited on the Hub stays.",
    )
    _add_card_sources(push)
    push.add_argument("repo_id", metavar="REPO_ID", help="NAMESPACE/NAME, created if it is not there")
    push.add_argument("--plot", metavar="FILE", help="calibration plot, PNG; default: the folder's calibration.png")
    push.add_argument("--private", action="store_true", help="a new repository is private; an old one must be")
    push.add_argument("--revision", metavar="BRANCH", help="created if it is not there; default: the main branch")
    push.add_argument("--message", help="of the commit; default: Upload DSpark drafter")
    push.add_argument("--overwrite-card", action="store_true", help="replace a card that was edited by hand as well")
    push.add_argument("--dry-run", action="store_true", help="send nothing: leave the staged repository in a folder")
    push.set_defaults(run=_run_push)


def _add_card_sources(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="of the drafter, with its training.json if there is one")
    for option, name, command in (("--eval", "evaluations", "eval"), ("--bench", "benchmarks", "bench")):
        parser.add_argument(
            option,
            dest=name,
            metavar="FILE",
            nargs="+",
            action="extend",
            default=[],
            help=f"figures of `dspark {command} --output`",
        )
    parser.add_argument("--target", metavar="REPO_ID", help="Hub id of the target; default: what training.json says")
    parser.add_argument("--licence", metavar="ID", help="of the weights, as the Hub names it, for example apache-2.0")
    parser.add_argument(
        "--dataset",
        dest="datasets",
        metavar="REPO_ID",
        action="append",
        default=[],
        help="Hub id of a data set it was trained on, besides those that training.json names (repeatable)",
    )


def _add_prepare_data(commands: argparse._SubParsersAction[_Parser]) -> None:
    prepare = commands.add_parser(
        "prepare-data",
        help="training data: prompts answered by the target itself",
        description="Let the target answer prompts and write a data set of whole conversations, with a mask of the "
        "tokens that the target wrote. It can be stopped at any moment; the same command goes on.",
    )
    prepare.add_argument("--target", default=DEMO, help="folder or Hub id; default: the demo's target")
    prepare.add_argument("--output", required=True, metavar="FOLDER", help="for the data set")
    given = prepare.add_argument_group("prompts")
    given.add_argument(
        "--prompts",
        nargs="+",
        action="extend",
        metavar="PATH",
        help=".jsonl files, or folders of them, with the field 'prompt' (text) or 'messages' (turns; the target "
        "answers each of the user's)",
    )
    given.add_argument("--dataset", metavar="NAME", help="a data set on the Hub or in a folder")
    given.add_argument("--subset", metavar="NAME", help="of the data set, if it has several")
    given.add_argument("--split", default="train", help="of the data set; default: %(default)s")
    given.add_argument("--column", help="of the data set; default: messages, prompt or conversations")
    given.add_argument("--limit", type=_positive_int, help="prompts of each file and data set; default: all")
    given.add_argument(
        "--exclude",
        nargs="+",
        action="extend",
        metavar="PATH",
        help="drop prompts that are, hold or nearly repeat one of these files' or folders', as those kept for "
        "evaluation",
    )
    given.add_argument(
        "--keep-responses",
        action="store_true",
        help="decode nothing: take conversations with the assistant's turns that they have",
    )
    decoding = prepare.add_argument_group("decoding")
    decoding.add_argument(
        "--temperature",
        dest="temperatures",
        metavar="T",
        type=_temperature,
        nargs="+",
        action="extend",
        help="answer at each of these, 0 is greedy; default: 1",
    )
    decoding.add_argument(
        "--samples-per-prompt",
        type=_positive_int,
        help="answers to a prompt, the temperatures taken in turn; default: one at each temperature",
    )
    decoding.add_argument("--max-new-tokens", type=_positive_int, default=512, help="default: %(default)s")
    _add_sampling(decoding)
    decoding.add_argument(
        "--thinking",
        choices=("default", "on", "off"),
        default="default",
        help="enable_thinking, for chat templates that know of it; default: the template's own",
    )
    decoding.add_argument("--batch-size", type=_positive_int, default=32, help="default: %(default)s")
    decoding.add_argument(
        "--time-limit",
        metavar="MINUTES",
        type=_minutes,
        help="stop then, with the data set as far as it is; 0 only gathers what there is; default: none",
    )
    _add_placement(prepare, dtype="auto")
    prepare.set_defaults(run=_run_prepare_data)


def _add_convert(commands: argparse._SubParsersAction[_Parser]) -> None:
    convert = commands.add_parser(
        "convert",
        help="a drafter into the format of DeepSpec or speculators, for vLLM and SGLang, or into ours",
        description="Write a drafter of any readable format in another one, weights bit for bit, and say how vLLM and "
        "SGLang are started with it. What the format cannot express is refused by name.",
    )
    convert.add_argument("source", metavar="SRC", help="folder or Hub id of the drafter")
    convert.add_argument("destination", metavar="DST", help="the new folder")
    convert.add_argument("--to", choices=("dspark", "deepspec", "speculators"), required=True)
    convert.add_argument(
        "--target",
        help="folder or Hub id: lends embedding and head where the drafter borrows them and the format saves them; "
        "speculators' config names it",
    )
    convert.add_argument("--overwrite", action="store_true", help="replace a checkpoint at DST")
    convert.set_defaults(run=_run_convert)


def _add_pair(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", default=DEMO, help="folder or Hub id; default: the demo's target")
    parser.add_argument("--drafter", help="folder or Hub id of a drafter for this target; default: the demo's")


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompts", help=".jsonl file, or folder of them, with the field 'prompt'; default: bundled school maths"
    )
    parser.add_argument("--limit", type=_positive_int, help="prompts of each file; default: all")
    parser.add_argument("--max-new-tokens", type=_positive_int, default=128, help="default: %(default)s")


def _add_sampling(
    parser: argparse._ActionsContainer, top_p: str = "the target's own", top_k: str | None = None
) -> None:
    parser.add_argument("--top-p", type=_top_p, help=f"with a temperature; default: {top_p}")
    parser.add_argument("--top-k", type=_non_negative_int, help=f"with a temperature; default: {top_k or top_p}")
    parser.add_argument("--seed", type=_non_negative_int, default=0, help="default: %(default)s")


def _add_threshold(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--threshold", type=_threshold, help="assistant_confidence_threshold, 0 sends whole blocks; default: drafter's"
    )


def _add_placement(parser: argparse.ArgumentParser, dtype: str) -> None:
    parser.add_argument("--dtype", choices=DTYPES, default=dtype, help="default: %(default)s")
    parser.add_argument("--device", default="auto", help="torch device; default: cuda if there is one, else cpu")
    parser.add_argument("--threads", type=_positive_int, help="torch's CPU threads; default: torch's own choice")


def _run_demo(**arguments: object) -> int:
    from .demo import run

    return run(**arguments)


def _run_bench(**arguments: object) -> int:
    """`dspark bench`: row by row, or on batches."""
    batched = "batch_sizes" in arguments
    for name in ("prompt_lookup_tokens",) if batched else ("schedules", "synthetic_auc", "markdown"):
        if name in arguments:
            value = arguments[name]
            told = " ".join(value) if isinstance(value, list) else value
            fix = "leave one of them out" if batched else "give that as well"
            raise CommandError(
                f"--{name.replace('_', '-')} {told}: not {'with' if batched else 'without'} --batch-sizes; {fix}"
            )
    if batched:
        from .batch_bench import run
    else:
        from .bench import run
    return run(**arguments)


def _run_profile(**arguments: object) -> int:
    from .profile_command import run

    return run(**arguments)


def _run_calibrate(**arguments: object) -> int:
    from .calibrate import run

    return run(**arguments)


def _run_eval(**arguments: object) -> int:
    from .eval_command import run

    return run(**arguments)


def _run_simulate(**arguments: object) -> int:
    from .simulate import run

    return run(**arguments)


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


def _run_card(**arguments: object) -> int:
    from .hub_commands import card

    return card(**arguments)


def _run_push(**arguments: object) -> int:
    from .hub_commands import push

    return push(**arguments)


def _run_prepare_data(**arguments: object) -> int:
    from .prepare_data import run

    return run(**arguments)


def _run_convert(**arguments: object) -> int:
    from .convert_command import run

    return run(**arguments)


def _run_generate(
    *,
    target: str,
    drafter: str | None,
    prompt: str,
    chat: bool,
    stream: bool,
    compare: bool,
    max_new_tokens: int,
    temperature: float,
    top_p: float | None,
    top_k: int | None,
    seed: int,
    threshold: float | None,
    dtype: str,
    device: str,
    threads: int | None,
) -> int:
    """`dspark generate`: the text goes to stdout, everything about it to stderr."""
    from .loading import generation_options, load_pair, reporting

    options = generation_options(max_new_tokens, temperature, top_p, top_k, threshold)
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        raise CommandError(f"--prompt {prompt!r}: it is empty; give a text")

    from rich.console import Console

    from . import demo
    from .bench import dspark_method, plain_method, timed_generate, warm_up

    pair = load_pair(target, drafter, dtype, device, threads)
    inputs = pair.encode(text, chat)
    console = Console(stderr=True)
    console.print(pair.description, highlight=False)
    if compare:
        warm_up(pair, inputs, [plain_method(), dspark_method(pair)], options)
    with reporting(f"--target {target!r} with --drafter {pair.names[1]!r}"):
        if stream:
            demo.print_legend(console)
            call = demo.stream(pair, inputs, options, Console(), seed)
        else:
            call = timed_generate(pair, inputs, dspark_method(pair), options, seed)
            print(pair.tokenizer.decode(call.new_token_ids, skip_special_tokens=True))
    console.print(_summary(call), highlight=False)
    if len(call.new_token_ids) <= 1 and not chat and pair.tokenizer.chat_template is not None:
        console.print("The target ended at once: --chat wraps the prompt as its chat template has it.")
    if compare:
        comparison = demo.compare(pair, inputs, options, repetitions=3, seed=seed)
        demo.print_comparison([comparison], pair, console, greedy=temperature == 0)
    return 0


def _summary(call: Call) -> str:
    parts = [f"{len(call.new_token_ids)} tokens in {call.seconds:.1f} s ({call.tokens_per_second:.1f} tok/s)"]
    if call.stats is not None and call.stats.mean_acceptance_length is not None:
        parts.append(f"mean_acceptance_length {call.stats.mean_acceptance_length:.2f}")
    if call.stats is not None and call.stats.draft_acceptance_rate is not None:
        parts.append(f"draft_acceptance_rate {call.stats.draft_acceptance_rate:.2f}")
    return ", ".join(parts)


def _run_env() -> int:
    """`dspark env`."""
    from .environment import machine, package_versions

    for name, value in (package_versions() | machine()).items():
        print(f"{name}: {value}")
    return 0


def _positive_int(text: str) -> int:
    return int(_within(text, int, "a whole number of at least 1", lambda value: value >= 1))


def _non_negative_int(text: str) -> int:
    return int(_within(text, int, "a whole number of at least 0", lambda value: value >= 0))


def _temperature(text: str) -> float:
    return _within(text, float, "a number of at least 0 (0 is greedy)", lambda value: 0 <= value < float("inf"))


def _top_p(text: str) -> float:
    return _within(text, float, "a number above 0 and at most 1", lambda value: 0 < value <= 1)


def _threshold(text: str) -> float:
    return _within(text, float, "a number from 0 to below 1 (0 sends whole blocks)", lambda value: 0 <= value < 1)


def _share(text: str) -> float:
    return _within(text, float, "a number from 0 to below 1", lambda value: 0 <= value < 1)


def _probability(text: str) -> float:
    return _within(text, float, "a number from 0 to 1", lambda value: 0 <= value <= 1)


def _seconds(text: str) -> float:
    return _within(text, float, "a number of seconds above 0", lambda value: 0 < value < float("inf"))


def _minutes(text: str) -> float:
    return _within(text, float, "a number of minutes of at least 0", lambda value: 0 <= value < float("inf"))


def _auc(text: str) -> float:
    return _within(text, float, "a number between 0.5 and 1", lambda value: 0.5 < value < 1)


def _within(text: str, convert: type[int] | type[float], allowed: str, accepts: Callable[[float], bool]) -> float:
    """Parse a number and check its range, saying what is allowed otherwise."""
    try:
        value = convert(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; give {allowed}") from None
    if not accepts(value):
        raise argparse.ArgumentTypeError(f"{text} is not allowed; give {allowed}")
    return value


def _run_train(argv: Sequence[str]) -> int:
    from .train_command import main as train

    return train(argv)
