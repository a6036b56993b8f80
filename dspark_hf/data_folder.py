"""A data set's folder, and the one beside it with what is unfinished."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .data import column_kinds, import_datasets
from .files import write_json, write_text
from .loading import CommandError, told


# Records that are made a table of at a time.
_CHUNK = 5000


@dataclass(frozen=True)
class DataFolder:
    """
    Where a data set comes to lie. The folder itself is only ever a whole data set; while it is not complete, the
    folder `work` beside it, of the same name with `.work` behind, has what is needed to go on.

    Attributes:
        path (`Path`): The folder.
        settings (`dict`): By argument, what another run must have too in order to go on with it.
    """

    path: Path
    settings: dict[str, Any]

    @property
    def work(self) -> Path:
        """The folder of what is unfinished."""
        return self.path.with_name(self.path.name + ".work")

    def is_complete(self) -> bool:
        """
        Whether the data set is there and complete.

        Raises:
            `CommandError`: if it was made, or begun, with other settings, or is there in part and cannot be gone on
                with.
        """
        made, begun = _read_json(self.path / "provenance.json"), _read_json(self.work / "settings.json")
        for settings in (made and made["settings"], begun):
            if settings is not None:
                self._check_same(settings)
        if made is not None and not made["complete"] and begun is None:
            raise CommandError(
                f"--output {str(self.path)!r}: it is not complete, and {self.work}, needed to go on, is gone; remove "
                "it to start anew, or give another folder"
            )
        return made is not None and made["complete"]

    def _check_same(self, found: dict[str, Any]) -> None:
        for name in dict.fromkeys([*self.settings, *found]):
            old, new = found.get(name), self.settings.get(name)
            if old != new:
                # What is not an argument is a hash.
                new, old = ("left out" if value is None else told(value) for value in (new, old))
                change = f"{new} and was {old}" if name.startswith("--") else "not what it was"
                raise CommandError(
                    f"--output {str(self.path)!r}: {name} is {change} when it was begun; give what was given then, or "
                    "another --output"
                )

    @contextmanager
    def working(self) -> Iterator[Path]:
        """
        Context in which nobody else writes to the work folder, which is made if it is not there.

        Raises:
            `CommandError`: if somebody else does.
        """
        from filelock import FileLock, Timeout

        self.work.mkdir(exist_ok=True)
        lock = FileLock(self.work / "lock", timeout=0)
        try:
            lock.acquire()
        except Timeout as error:
            raise CommandError(
                f"--output {str(self.path)!r}: another process is writing to {self.work}; wait for it, or give "
                "another folder"
            ) from error
        try:
            write_json(self.work / "settings.json", self.settings)
            yield self.work
        finally:
            lock.release()

    def write(
        self,
        records: Iterable[dict[str, Any]],
        provenance: dict[str, Any],
        complete: bool,
        files: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """
        Make the folder a data set of these records, in place of an older one.

        Args:
            records (`Iterable[dict]`): As [`dspark_hf.data`] describes them, at least one.
            provenance (`dict`): How they were made.
            complete (`bool`): Whether these are all.
            files (`Mapping[str, str]`, *optional*): Texts of files to put beside it, by name.
        """
        datasets = import_datasets()
        features = datasets.Features(column_kinds())
        waiting, parts = iter(records), []
        while chunk := list(islice(waiting, _CHUNK)):
            columns = {name: [record[name] for record in chunk] for name in features}
            parts.append(datasets.Dataset.from_dict(columns, features=features))
        data = datasets.concatenate_datasets(parts)
        scratch = Path(tempfile.mkdtemp(dir=self.path.parent, prefix=f".{self.path.name}-"))
        try:
            with _quiet(datasets):
                data.save_to_disk(str(scratch / "new"))
            write_json(
                scratch / "new" / "provenance.json", {"complete": complete, "settings": self.settings} | provenance
            )
            for name, text in files.items():
                write_text(scratch / "new" / name, text)
            if self.path.exists():
                os.replace(self.path, scratch / "old")
            os.replace(scratch / "new", self.path)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def remove_work(self) -> None:
        """Remove what is of no more use once the data set is complete."""
        shutil.rmtree(self.work, ignore_errors=True)


@contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """Context without progress bars of `datasets`."""
    shown = datasets.are_progress_bars_disabled() is False
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
