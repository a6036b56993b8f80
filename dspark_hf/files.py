"""Files that are whole or not there."""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any


def write_json(path: str | Path, value: Any) -> None:
    """
    Write a JSON file in one step: an old one keeps its permissions, and stays as it is if anything fails.

    Args:
        path (`str` or `Path`): The file; its folder must exist.
        value (`Any`): What `json` can write.
    """
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path: str | Path, text: str) -> None:
    """As [`write_json`], with any text."""
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
