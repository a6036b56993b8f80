"""What a long measurement has done so far, line by line, so that the same command can take it up."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from .files import write_text
from .loading import CommandError


class WorkFile:
    """
    A JSON-lines file: what was asked for, then one record after the other. A record is written in one piece and
    flushed to the disk; one that a crash cut short does not count and is written again.

    Args:
        path (`Path`): The file; its folder exists.
        asked (`dict[str, Any]`): What the records depend on, as plain values.

    Attributes:
        records (`list`): Those of an earlier run that asked for the same.

    Raises:
        `CommandError`: the file is of a run that asked for something else.
    """

    def __init__(self, path: Path, asked: dict[str, Any]):
        self.path = path
        self.records: list[Any] = []
        asked = json.loads(json.dumps(asked))
        lines = _whole_lines(path)
        if lines:
            self._check(lines[0], asked)
            self.records = lines[1:]
        # Anew, so that nothing that was cut short stays before what is appended.
        write_text(path, "".join(map(_line, [asked, *self.records])))

    def append(self, record: Any) -> None:
        """Keep a record."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line(record))
            file.flush()
            os.fsync(file.fileno())

    def remove(self) -> None:
        """Everything is done."""
        self.path.unlink()

    def _check(self, before: Any, asked: dict[str, Any]) -> None:
        if before == asked:
            return
        known = before if isinstance(before, dict) else {}
        changed = [name for name in asked | known if asked.get(name) != known.get(name)]
        raise CommandError(
            f"{self.path} holds an unfinished run with other {', '.join(changed)}; run it with the same arguments to "
            "go on, or remove the file to begin anew"
        )


def _line(value: Any) -> str:
    return json.dumps(value, separators=(",", ":")) + "\n"


def _whole_lines(path: Path) -> list[Any]:
    """The values of all lines up to the first that is none."""
    values: list[Any] = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                values.append(json.loads(line))
            except json.JSONDecodeError:
                break
    return values
