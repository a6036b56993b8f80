"""Files that are whole or not there."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_json(path: str | Path, value: Any) -> None:
    """
    Write a JSON file in one step, as [`write_text`] does.

    Args:
        path (`str` or `Path`): The file; its folder must exist.
        value (`Any`): What `json` can write.
    """
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path: str | Path, text: str) -> None:
    """
    Write a text file in one step: an old one keeps its permissions, and stays as it is if anything fails.

    Args:
        path (`str` or `Path`): The file; its folder must exist.
        text (`str`): Written as UTF-8.
    """
    path = Path(path)
    file = tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8")
    try:
        with file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # before the name changes hands, or a crash could leave an empty file
        if path.exists():
            shutil.copymode(path, file.name)
        else:
            os.chmod(file.name, 0o644)  # a temporary file is for its owner's eyes
        os.replace(file.name, path)
    except BaseException:
        Path(file.name).unlink(missing_ok=True)
        raise


def image_format(path: Path) -> str:
    """The format of a plot, by the ending of its name; PNG without one."""
    return path.suffix[1:] or "png"


@contextmanager
def whole_folder(path: str | Path, overwrite: bool = False) -> Iterator[Path]:
    """
    A folder that is there when all is in it: what is filled in the meantime lies beside it, and is removed if anything
    fails.

    Args:
        path (`str` or `Path`): The folder; the one it lies in is made if need be.
        overwrite (`bool`, *optional*, defaults to `False`): Whether to replace a checkpoint that is there.

    Raises:
        `ValueError`: there is something already that is not to be replaced.
    """
    path = Path(path).expanduser().absolute()
    check_replaceable(path, overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as scratch:
        new, old = Path(scratch) / "new", Path(scratch) / "old"
        new.mkdir()  # unlike the temporary folder, for everybody's eyes
        yield new
        if path.exists():
            path.rename(old)
        new.rename(path)


def check_replaceable(path: Path, overwrite: bool) -> None:
    """
    Refuse a folder that [`whole_folder`] would not write.

    Raises:
        `ValueError`: saying why.
    """
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not overwrite:
        raise ValueError(f"{path} exists already; give another folder, or --overwrite (`overwrite=True`)")
    if not (path / "config.json").is_file():
        raise ValueError(f"{path} is no checkpoint folder (it has no config.json), and is not overwritten")
