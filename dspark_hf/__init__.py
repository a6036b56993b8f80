"""DSpark speculative decoding for Hugging Face Transformers: `target.generate(**inputs, assistant_model=drafter)`."""

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .public import *  # noqa: F403


def _is_command() -> bool:
    """Whether this process is the `dspark` command, by its script or as `python -m dspark_hf`."""
    program = sys.argv[0] if sys.argv else ""
    return Path(program).name in ("dspark", "dspark.exe") or (program == "-m" and __name__ in sys.orig_argv)


def _set_up() -> None:
    """Take in the public names; with them come Transformers' auto classes and the hook in `generate`."""
    public = importlib.import_module(f"{__name__}.public")
    globals().update({name: getattr(public, name) for name in ("__all__", *public.__all__)})


def __getattr__(name: str) -> Any:
    """A public name that is asked for before the command has set the package up, by a script called `dspark`, say."""
    is_module = name.startswith("_") or importlib.util.find_spec(f"{__name__}.{name}") is not None
    if is_module or "install" in globals():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _set_up()
    return getattr(sys.modules[__name__], name)


# Importing the package is all the setup there is. Only the command puts it off until its arguments are read: torch
# and Transformers take seconds, which its help can do without.
if not _is_command():
    _set_up()
