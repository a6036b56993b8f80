"""What the subcommands' options have in common: the parser, numbers with bounds, groups of options."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
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


def add_pair(parser: argparse.ArgumentParser) -> None:
    """Options that name a target and a drafter."""
    parser.add_argument("--target", default=DEMO, help="folder or Hub id; default: the demo's target")
    parser.add_argument("--drafter", help="folder or Hub id of a drafter for this target; default: the demo's")


def add_prompts(parser: argparse.ArgumentParser) -> None:
    """Options that name prompts and say how far they are decoded."""
    parser.add_argument(
        "--prompts", help=".jsonl file, or folder of them, with the field 'prompt'; default: bundled school maths"
    )
    parser.add_argument("--limit", type=positive_int, help="prompts of each file; default: all")
    parser.add_argument("--max-new-tokens", type=positive_int, default=128, help="default: %(default)s")


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
