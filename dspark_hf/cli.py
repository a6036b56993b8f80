"""The `dspark` command.

Torch and Transformers are imported once the arguments are parsed: help and wrong options do not wait for them (but for
those of `train`, most of which are the Trainer's own).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from . import _set_up, making_commands, measuring_commands
from .command_options import (
    Commands,
    Parser,
    add_pair,
    add_placement,
    add_sampling,
    add_temperature,
    add_threshold,
    calling,
    positive_int,
)
from .loading import CommandError
from .scheduling import SCHEDULES


if TYPE_CHECKING:
    from .timing import Call


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `dspark` command.

    Args:
        argv (`Sequence[str]`, *optional*): the arguments; by default the process's.

    Returns:
        `int`: 0, or 1 if `calibrate --check` advises a refit, `eval` ran into its time limit or `doctor` found a
            problem, or 2 for something given that cannot be used (said in one line on stderr), or 130 after Ctrl-C.
    """
    argv = sys.argv[1:] if argv is None else argv
    # The Trainer's options, some two hundred, are no keyword arguments: `train` has a parser of its own.
    if argv and argv[0] == "train":
        name, command, arguments = "train", _run_train, {"argv": argv[1:]}
    else:
        arguments = vars(build_parser().parse_args(argv))
        command: Callable[..., int] = arguments.pop("run")
        name = arguments.pop("command")
    _set_up()
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
    parser = Parser(prog="dspark", description="DSpark speculative decoding for Hugging Face Transformers.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {importlib.metadata.version('dspark-hf')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    _add_demo(commands)
    _add_generate(commands)
    making_commands.add_prepare_data(commands)
    commands.add_parser("train", help="train a drafter with Transformers' Trainer", add_help=False)
    measuring_commands.add_calibrate(commands)
    measuring_commands.add_eval(commands)
    measuring_commands.add_doctor(commands)
    measuring_commands.add_bench(commands)
    measuring_commands.add_profile(commands)
    measuring_commands.add_simulate(commands)
    measuring_commands.add_ablate(commands)
    making_commands.add_convert(commands)
    making_commands.add_card(commands)
    making_commands.add_push(commands)
    environment = commands.add_parser("env", help="versions and machine, for a bug report")
    environment.set_defaults(run=_run_env)
    return parser


def _add_demo(commands: Commands) -> None:
    demo = commands.add_parser(
        "demo",
        help="a real language model with and without DSpark",
        description="SmolLM2-135M-Instruct with the bundled drafter: streamed text with the accepted draft tokens "
        "coloured, then plain generate against DSpark. The first run fetches the model (93 MB) and converts it.",
    )
    demo.add_argument(
        "--prompt", dest="prompts", action="append", default=[], help="a prompt of your own instead (repeatable)"
    )
    demo.add_argument("--max-new-tokens", type=positive_int, default=96, help="default: %(default)s")
    demo.add_argument("--repetitions", type=positive_int, default=2, help="timed calls each; default: %(default)s")
    demo.add_argument("--prepare", action="store_true", help="only fetch and convert the model")
    add_threshold(demo)
    add_placement(demo, dtype="bfloat16")
    demo.set_defaults(run=calling("demo"))


def _add_generate(commands: Commands) -> None:
    generate = commands.add_parser(
        "generate", help="generate text with any target and drafter", description="Generate text with DSpark."
    )
    add_pair(generate)
    generate.add_argument("--prompt", required=True, help="the text to answer or to continue; - reads stdin")
    generate.add_argument("--chat", action="store_true", help="wrap the prompt in the tokenizer's chat template")
    generate.add_argument("--stream", action="store_true", help="print as it comes, accepted draft tokens coloured")
    generate.add_argument("--compare", action="store_true", help="time plain generate as well, in pairs of calls")
    generate.add_argument("--max-new-tokens", type=positive_int, default=256, help="default: %(default)s")
    add_temperature(generate)
    add_sampling(generate)
    generate.add_argument("--schedule", choices=SCHEDULES, help="default: drafter's, else whole blocks")
    add_threshold(generate)
    add_placement(generate, dtype="auto")
    generate.set_defaults(run=_run_generate)


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
    schedule: str | None,
    threshold: float | None,
    dtype: str,
    device: str,
    threads: int | None,
) -> int:
    """`dspark generate`: the text goes to stdout, everything about it to stderr."""
    from .loading import generation_options, load_pair, reporting

    options = generation_options(max_new_tokens, temperature, top_p, top_k, threshold, schedule)
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        raise CommandError(f"--prompt {prompt!r}: it is empty; give a text")

    from rich.console import Console

    from . import demo
    from .decoding_methods import dspark_method, plain_method
    from .timing import timed_generate, warm_up

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


def _run_train(argv: Sequence[str]) -> int:
    from .train_command import main as train

    return train(argv)
