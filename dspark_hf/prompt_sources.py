"""Prompts and conversations from files and data sets, for training data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .command_files import json_lines
from .data import import_datasets
from .loading import CommandError, reporting


FIELDS = ("messages", "prompt", "conversations")
# What data sets call those who speak.
_ROLES = {"human": "user", "gpt": "assistant"} | {role: role for role in ("system", "user", "assistant")}


@dataclass(frozen=True)
class Prompt:
    """
    A prompt of one or several turns.

    Attributes:
        source (`str`): The file or data set that it comes from.
        messages (`tuple[dict, ...]`): With `role` and `content`. What is to be answered has no assistant's turns and
            ends with a user's; what is to be used as it is ends with an assistant's.
    """

    source: str
    messages: tuple[dict[str, str], ...]

    @property
    def key(self) -> str:
        """A hash of what is asked: the messages of all but the assistant."""
        asked = [[message["role"], message["content"]] for message in self.messages if message["role"] != "assistant"]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]

    @property
    def user_texts(self) -> list[str]:
        """What the user says, turn by turn."""
        return [message["content"] for message in self.messages if message["role"] == "user"]

    @classmethod
    def of_text(cls, source: str, text: str) -> Prompt:
        """A user's only turn."""
        return cls(source, ({"role": "user", "content": text},))


def read_files(argument: str, paths: Sequence[str], limit: int | None, keep_responses: bool = False) -> list[Prompt]:
    """
    Prompts of `.jsonl` files, or folders of them: a text in the field `prompt`, or turns in `messages`.

    Args:
        argument (`str`): Whose value the paths are, for messages.
        paths (`Sequence[str]`): Files and folders.
        limit (`int`, *optional*): Prompts of each file; by default all.
        keep_responses (`bool`, *optional*, defaults to `False`): As for [`conversation`].

    Raises:
        `CommandError`: naming file and line.
    """
    prompts = []
    for given in paths:
        path = Path(given).expanduser()
        if not path.exists():
            raise CommandError(
                f"{argument} {given!r}: there is no such file or folder; give a .jsonl file or a folder"
            )
        files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not files:
            raise CommandError(f"{argument} {given!r}: the folder holds no .jsonl file")
        for file in files:
            found = [
                conversation(record, file.stem, f"{argument}: {file}:{number}", None, keep_responses)
                for number, record in json_lines(argument, file, limit)
            ]
            if not found:
                raise CommandError(f"{argument}: {file} has no prompts; give at least one line")
            prompts += found
    return prompts


def read_dataset(
    name: str,
    subset: str | None,
    split: str,
    column: str | None,
    limit: int | None,
    keep_responses: bool = False,
) -> list[Prompt]:
    """
    Prompts of a data set on the Hub or in a folder.

    Args:
        name (`str`): As `datasets.load_dataset` takes it, or a folder that `save_to_disk` wrote.
        subset (`str`, *optional*): Of a data set that has several.
        split (`str`): For example `"train"` or `"train[:1000]"`.
        column (`str`, *optional*): Holds a text, or turns; by default the first of [`FIELDS`] that is there.
        limit (`int`, *optional*): Prompts; by default all.
        keep_responses (`bool`, *optional*, defaults to `False`): As for [`conversation`].

    Raises:
        `CommandError`: if it cannot be read, or has no such column or rows.
    """
    argument = f"--dataset {name!r}"
    with reporting(argument):
        datasets = import_datasets()
        path = Path(name).expanduser()
        if (path / "state.json").is_file():
            data = datasets.load_from_disk(str(path))
        else:
            data = datasets.load_dataset(str(path) if path.exists() else name, subset, split=split)
    if isinstance(data, datasets.DatasetDict):
        if split not in data:
            raise CommandError(f"{argument}: it has the splits {', '.join(data)}, not --split {split!r}")
        data = data[split]
    columns = [field for field in ([column] if column else FIELDS) if field in data.column_names]
    if not columns:
        wanted = f"--column {column!r}" if column else f"a column {' or '.join(FIELDS)}"
        raise CommandError(f"{argument}: it has the columns {', '.join(data.column_names)}, not {wanted}")
    rows = data.select_columns(columns[:1])
    rows = rows if limit is None else rows.select(range(min(limit, len(rows))))
    prompts = [
        conversation(row, name, f"{argument}: row {number}", columns[0], keep_responses)
        for number, row in enumerate(rows)
    ]
    if not prompts:
        raise CommandError(f"{argument}: --split {split!r} is empty; give another")
    return prompts


def conversation(record: Any, source: str, place: str, column: str | None, keep_responses: bool) -> Prompt:
    """
    What a line or row asks.

    Args:
        record (`Any`): Should be a `dict`.
        source, place (`str`): Where it is from, in short, and for messages.
        column (`str`, *optional*): Holds a text or turns; by default the first of [`FIELDS`] that is there.
        keep_responses (`bool`): Whether the assistant's turns are to be used, rather than left out.

    Raises:
        `CommandError`: if it asks nothing, or has no response that could be kept.
    """
    fields = [column] if column else FIELDS
    value = next((record[field] for field in fields if field in record), None) if isinstance(record, dict) else None
    if isinstance(value, str) and value and not keep_responses:
        return Prompt.of_text(source, value)
    messages = list(map(_message, value)) if isinstance(value, list) else [None]
    if None in messages:
        known = " or ".join(repr(field) for field in fields)
        wanted = "turns" if keep_responses else "text or turns"
        raise CommandError(
            f"{place} has no {wanted} in the field {known}; turns are objects with 'role' (system, user, assistant) "
            "and 'content'"
        )
    if not keep_responses:
        messages = [message for message in messages if message["role"] != "assistant"]
    last = "assistant" if keep_responses else "user"
    while messages and messages[-1]["role"] != last:
        messages.pop()
    if not messages or not any(message["role"] == "user" for message in messages):
        what = (
            "user's turn followed by an assistant's, which --keep-responses needs" if keep_responses else "user's turn"
        )
        raise CommandError(f"{place} has no {what}; remove it")
    return Prompt(source, tuple(messages))


def _message(value: Any) -> dict[str, str] | None:
    """A turn as chat templates take it, from either of the two usual forms; `None` if it is neither."""
    if not isinstance(value, dict):
        return None
    role = _ROLES.get(str(value.get("role", value.get("from"))))
    content = value.get("content", value.get("value"))
    return {"role": role, "content": content} if role and isinstance(content, str) and content else None
