"""Acceptance and calibration as `evaluate` modules, of use with any drafter: rounds in, numbers out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from evaluate import EvaluationModule

NAMES = ("acceptance_length", "acceptance_by_position", "calibration_error")


def load(name: str) -> EvaluationModule:
    """
    Load one of the metrics from the installed package, as `evaluate.load` with its folder does; nothing is fetched.

    Args:
        name (`str`): One of `NAMES`.

    Raises:
        `ValueError`: there is no such metric.
        `ImportError`: the package `evaluate` is not installed.
    """
    if name not in NAMES:
        raise ValueError(f"`name` is {name!r}; it must be one of {', '.join(NAMES)}.")
    try:
        import evaluate
    except ImportError as error:
        raise ImportError(
            "The metrics are modules of the package 'evaluate', which is not here; pip install 'dspark-hf[train]' "
            "(in a checkout '.[train]')."
        ) from error
    return evaluate.load(str(Path(__file__).parent / name))
