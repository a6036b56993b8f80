"""The `dspark` command: demo, generate, bench, env.

Torch and Transformers are imported by the commands that need them, after the arguments have been checked.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from .loading import DEMO, DTYPES, CommandError


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
        `int`: 0, or 2 for something given that cannot be used (said in one line on stderr), or 130 after Ctrl-C.
    """
    args = build_parser().parse_args(argv)
    arguments = vars(args)
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
    generate.add_argument("--top-p", type=_top_p, help="with a temperature; default: the target's own")
    generate.add_argument("--top-k", type=_non_negative_int, help="with a temperature; default: the target's own")
    generate.add_argument("--seed", type=_non_negative_int, default=0, help="default: %(default)s")
    _add_threshold(generate)
    _add_placement(generate, dtype="auto")
    generate.set_defaults(run=_run_generate)


def _add_bench(commands: argparse._SubParsersAction[_Parser]) -> None:
    bench = commands.add_parser(
        "bench",
        help="plain generate, prompt lookup and DSpark in turn",
        description="Measure plain generate, prompt lookup and DSpark in turn, prompt by prompt, and set a round's "
        "cost beside Equation 1's bound tau * T(1) / (T_draft + T_verify).",
    )
    _add_pair(bench)
    bench.add_argument(
        "--prompts", help=".jsonl file, or folder of them, with the field 'prompt'; default: bundled school maths"
    )
    bench.add_argument("--limit", type=_positive_int, help="prompts of each file; default: all")
    bench.add_argument("--max-new-tokens", type=_positive_int, default=128, help="default: %(default)s")
    bench.add_argument("--temperature", type=_temperature, default=0.0, help="0 is greedy; default: %(default)s")
    bench.add_argument("--repetitions", type=_positive_int, default=3, help="default: %(default)s")
    bench.add_argument("--seed", type=_non_negative_int, default=0, help="default: %(default)s")
    bench.add_argument(
        "--prompt-lookup-tokens", type=_positive_int, default=10, help="prompt_lookup_num_tokens; default: %(default)s"
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
    bench.set_defaults(run=_run_bench)


def _add_pair(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", default=DEMO, help="folder or Hub id; default: the demo's target")
    parser.add_argument("--drafter", help="folder or Hub id of a drafter for this target; default: the demo's")


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
    from .bench import run

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

    import torch
    from rich.console import Console

    from . import demo
    from .bench import dspark_method, plain_method, timed_generate, warm_up

    if threads is not None:
        torch.set_num_threads(threads)
    pair = load_pair(target, drafter, dtype, device)
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


def _probability(text: str) -> float:
    return _within(text, float, "a number from 0 to 1", lambda value: 0 <= value <= 1)


def _within(text: str, convert: type[int] | type[float], allowed: str, accepts: Callable[[float], bool]) -> float:
    """Parse a number and check its range, saying what is allowed otherwise."""
    try:
        value = convert(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; give {allowed}") from None
    if not accepts(value):
        raise argparse.ArgumentTypeError(f"{text} is not allowed; give {allowed}")
    return value
