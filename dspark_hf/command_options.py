"""What the subcommands' options have in common: the parser, numbers with bounds, groups of options."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Sequence
from typing import NoReturn

from .loading import DEMO, DTYPES


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see `{self.prog} --help`)\n")


Commands = argparse._SubParsersAction  # of `Parser`


def calling(module: str, function: str = "run") -> Callable[..., int]:
    """A command's function, imported when it is called: most import torch.

    Args:
        module (`str`): of this package.
        function (`str`, *optional*, defaults to `"run"`): its name there.
    """

    def call(**arguments: object) -> int:
        return getattr(importlib.import_module(f".{module}", __package__), function)(**arguments)

    return call


def add_target(parser: argparse.ArgumentParser) -> None:
    """The option that names a target."""
    parser.add_argument("--target", default=DEMO, help="folder or Hub id; default: the demo's target")


def add_pair(parser: argparse.ArgumentParser) -> None:
    """Options that name a target and a drafter."""
    add_target(parser)
    parser.add_argument("--drafter", help="folder or Hub id of a drafter for this target; default: the demo's")


def add_prompts(parser: argparse.ArgumentParser, max_new_tokens: int = 128) -> None:
    """Options that name prompts and say how far they are decoded."""
    parser.add_argument(
        "--prompts", help=".jsonl file, or folder of them, with the field 'prompt'; default: bundled school maths"
    )
    parser.add_argument("--limit", type=positive_int, help="prompts of each file; default: all")
    _add_length(parser, max_new_tokens)


def add_tasks(parser: argparse.ArgumentParser) -> None:
    """Options that name prompts by set and say how they are decoded."""
    parser.add_argument(
        "--tasks",
        help="separated by commas: names of sets, .jsonl files with the field 'prompt', or datasets as "
        "NAME:SPLIT:COLUMN; default: all sets",
    )
    parser.add_argument("--prompts", metavar="FOLDER", help="sets, as .jsonl files; default: the bundled ones")
    parser.add_argument("--limit", type=positive_int, help="prompts of each set; default: all")
    _add_length(parser, 128)
    add_batch_size(parser)


def _add_length(parser: argparse.ArgumentParser, max_new_tokens: int) -> None:
    parser.add_argument(
        "--max-new-tokens", type=positive_int, default=max_new_tokens, help="of each text; default: %(default)s"
    )


def add_batch_size(parser: argparse.ArgumentParser) -> None:
    """The option of how many prompts are decoded at a time."""
    parser.add_argument("--batch-size", type=positive_int, default=8, help="prompts at a time; default: %(default)s")


def add_temperature(parser: argparse.ArgumentParser) -> None:
    """The option of one sampling temperature."""
    parser.add_argument("--temperature", type=temperature_value, default=0.0, help="0 is greedy; default: %(default)s")


def add_temperatures(parser: argparse._ActionsContainer, what: str, default: str) -> None:
    """The option of several sampling temperatures, with what is done at each; the default is told as `default`."""
    parser.add_argument(
        "--temperature",
        dest="temperatures",
        metavar="T",
        type=temperature_value,
        nargs="+",
        action="extend",
        help=f"{what} at each of these, 0 is greedy; default: {default}",
    )


def add_sampling(
    parser: argparse._ActionsContainer, top_p: str = "the target's own", top_k: str | None = None
) -> None:
    """Options of sampling; the defaults are told as `top_p` and `top_k`."""
    parser.add_argument("--top-p", type=top_p_value, help=f"with a temperature; default: {top_p}")
    parser.add_argument("--top-k", type=non_negative_int, help=f"with a temperature; default: {top_k or top_p}")
    parser.add_argument("--seed", type=non_negative_int, default=0, help="default: %(default)s")


def add_threshold(parser: argparse.ArgumentParser) -> None:
    """The option of the schedule `confidence`."""
    parser.add_argument(
        "--threshold",
        type=threshold_value,
        help="assistant_confidence_threshold, 0 sends whole blocks; default: drafter's",
    )


def add_costs(parser: argparse.ArgumentParser) -> None:
    """The option that says what rounds cost."""
    parser.add_argument("--profile", metavar="FILE", help="costs (dspark profile); default: this machine's own")


def add_rows(parser: argparse.ArgumentParser, rows: Sequence[int], told: str | None = None) -> None:
    """Options of how many rows there are at once, by default `rows`, and what each holds."""
    parser.add_argument(
        "--context", type=positive_int, default=256, help="tokens that each row holds; default: %(default)s"
    )
    parser.add_argument(
        "--rows",
        metavar="R",
        type=positive_int,
        nargs="+",
        default=list(rows),
        help=f"numbers of concurrent rows; default: {told or ' '.join(map(str, rows))}",
    )


def add_simulation(parser: argparse.ArgumentParser, rows: Sequence[int], told: str | None = None) -> None:
    """Options of schedules over recorded blocks."""
    parser.add_argument(
        "--blocks", metavar="FILE", help="recorded blocks (dspark calibrate); default: records some first"
    )
    add_costs(parser)
    parser.add_argument(
        "--gpu-like", action="store_true", help="made-up, jagged costs in the manner of a GPU: alone or with --profile"
    )
    add_rows(parser, rows, told)
    parser.add_argument(
        "--rounds", type=positive_int, default=200, help="for each number of rows; default: %(default)s"
    )


def add_results(parser: argparse.ArgumentParser, markdown: str, plots: str) -> None:
    """Options of the files that figures go to, and what is in them."""
    parser.add_argument("--output", metavar="FILE", help="write all numbers to this JSON file")
    parser.add_argument("--markdown", metavar="FILE", help=f"write {markdown} to this Markdown file")
    parser.add_argument("--plot", metavar="FOLDER", help=f"draw {plots}, as PNG files")


def add_placement(parser: argparse.ArgumentParser, dtype: str) -> None:
    """Options of dtype, device and threads."""
    parser.add_argument("--dtype", choices=DTYPES, default=dtype, help="default: %(default)s")
    parser.add_argument("--device", default="auto", help="torch device; default: cuda if there is one, else cpu")
    parser.add_argument("--threads", type=positive_int, help="torch's CPU threads; default: torch's own choice")


def positive_int(text: str) -> int:
    """A type of option: a number with bounds, or an error that says which."""
    return int(within(text, int, "a whole number of at least 1", lambda value: value >= 1))


def non_negative_int(text: str) -> int:
    """A type of option: a number with bounds, or an error that says which."""
    return int(within(text, int, "a whole number of at least 0", lambda value: value >= 0))


def temperature_value(text: str) -> float:
    """A type of option: a number with bounds, or an error that says which."""
    return within(text, float, "a number of at least 0 (0 is greedy)", lambda value: 0 <= value < float("inf"))


def top_p_value(text: str) -> float:
    """A type of option: a number with bounds, or an error that says which."""
    return within(text, float, "a number above 0 and at most 1", lambda value: 0 < value <= 1)


def threshold_value(text: str) -> float:
    """A type of option: a number with bounds, or an error that says which."""
    return within(text, float, "a number from 0 to below 1 (0 sends whole blocks)", lambda value: 0 <= value < 1)


def share_value(text: str) -> float:
    """A type of option: a number with bounds, or an error that says which."""
    return within(text, float, "a number from 0 to below 1", lambda value: 0 <= value < 1)


def probability_value(text: str) -> float:
    """A type of option: a number with bounds, or an error that says which."""
    return within(text, float, "a number from 0 to 1", lambda value: 0 <= value <= 1)


def seconds_value(text: str) -> float:
    """A type of option: a number with bounds, or an error that says which."""
    return within(text, float, "a number of seconds above 0", lambda value: 0 < value < float("inf"))


def positive_minutes_value(text: str) -> float:
    """A type of option: a number with bounds, or an error that says which."""
    return within(text, float, "a number of minutes above 0", lambda value: 0 < value < float("inf"))


def minutes_value(text: str) -> float:
    """A type of option: a number with bounds, or an error that says which."""
    return within(text, float, "a number of minutes of at least 0", lambda value: 0 <= value < float("inf"))


def auc_value(text: str) -> float:
    """A type of option: a number with bounds, or an error that says which."""
    return within(text, float, "a number between 0.5 and 1", lambda value: 0.5 < value < 1)


def within(text: str, convert: type[int] | type[float], allowed: str, accepts: Callable[[float], bool]) -> float:
    """Parse a number and check its range, saying what is allowed otherwise."""
    try:
        value = convert(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; give {allowed}") from None
    if not accepts(value):
        raise argparse.ArgumentTypeError(f"{text} is not allowed; give {allowed}")
    return value
