"""Work that may be killed at any moment: numbered files, each whole or not there, that say how far it has come."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .files import write_text


class Shards:
    """
    Files of one batch each, in order. The first line of a file is the state after that batch, the others are what the
    batch brought, so that both are there or neither is.

    Args:
        folder (`Path`): Made if it is not there. What a killed run left half-written in it is removed.

    Raises:
        `ValueError`: if files are missing or no such files.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for unfinished in folder.glob("*.tmp"):
            unfinished.unlink()
        names = sorted(path.name for path in folder.glob("*.jsonl"))
        if names != [self._path(number).name for number in range(len(names))]:
            raise ValueError(f"{folder} lacks some of its files; remove the folder to start anew.")
        self.count = len(names)

    def __len__(self) -> int:
        return self.count

    def append(self, state: dict[str, Any], records: Sequence[dict[str, Any]]) -> None:
        """Add a batch's records, and the state after it, in one step."""
        lines = [json.dumps(value, separators=(",", ":")) for value in (state, *records)]
        write_text(self._path(self.count), "\n".join(lines) + "\n")
        self.count += 1

    def last_state(self) -> dict[str, Any] | None:
        """The state after the last batch; `None` if there is none."""
        if not self.count:
            return None
        with open(self._path(self.count - 1), encoding="utf-8") as file:
            return json.loads(file.readline())

    def states(self) -> Iterator[dict[str, Any]]:
        """The states in order."""
        for number in range(self.count):
            with open(self._path(number), encoding="utf-8") as file:
                yield json.loads(file.readline())

    def records(self) -> Iterator[dict[str, Any]]:
        """All records in order."""
        for number in range(self.count):
            with open(self._path(number), encoding="utf-8") as file:
                file.readline()
                yield from map(json.loads, file)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06d}.jsonl"
