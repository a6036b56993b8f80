"""Where an evaluation's prompts come from: bundled sets, JSON-lines files, columns of `datasets`."""

from __future__ import annotations

from pathlib import Path

from .command_files import read_prompt_file
from .data import import_datasets
from .loading import CommandError, reporting


BUNDLED = Path(__file__).parent / "assets" / "eval-prompts"


def read_tasks(tasks: str | None, folder: str | None, limit: int | None) -> dict[str, list[str]]:
    """
    Prompts by task.

    Args:
        tasks (`str`, *optional*): Separated by commas, each the name of a `.jsonl` file in `folder` without its
            ending, or the path of one, or a dataset as `NAME:SPLIT:COLUMN` or `NAME:CONFIG:SPLIT:COLUMN`; by default
            all files in `folder`.
        folder (`str`, *optional*): Holds `.jsonl` files with the field `prompt` on every line; by default the sets
            that come with the package.
        limit (`int`, *optional*): Prompts of each task; by default all.

    Raises:
        `CommandError`: something given is not there or has no prompts.
    """
    path = BUNDLED if folder is None else Path(folder).expanduser()
    if not path.is_dir():
        raise CommandError(f"--prompts {folder!r}: there is no such folder; give a folder of .jsonl files")
    files = {file.stem: file for file in sorted(path.glob("*.jsonl"))}
    if tasks is None:
        if not files:
            raise CommandError(f"--prompts {folder!r}: the folder holds no .jsonl file")
        return {name: read_prompt_file(file, limit) for name, file in files.items()}
    prompts: dict[str, list[str]] = {}
    for task in tasks.split(","):
        name, found = _read_task(task.strip(), files, limit)
        if name in prompts:
            raise CommandError(f"--tasks {tasks!r}: two of them are called {name!r}; leave one out")
        prompts[name] = found
    return prompts


def _read_task(task: str, files: dict[str, Path], limit: int | None) -> tuple[str, list[str]]:
    """A task's name and its prompts."""
    if task in files:
        return task, read_prompt_file(files[task], limit)
    if task.endswith(".jsonl"):
        path = Path(task).expanduser()
        if not path.is_file():
            raise CommandError(f"--tasks {task!r}: there is no such file")
        return path.stem, read_prompt_file(path, limit, "--tasks")
    if ":" in task:
        return _read_dataset(task, limit)
    raise CommandError(
        f"--tasks {task!r}: there is no such set; give one of {', '.join(files) or 'none'}, a .jsonl file, or a "
        "dataset as NAME:SPLIT:COLUMN"
    )


def _read_dataset(task: str, limit: int | None) -> tuple[str, list[str]]:
    """The prompts of a dataset's column, under the last part of its name."""
    name, *config, split, column = task.split(":") if task.count(":") in (2, 3) else ("", "", "")
    if not (name and split and column):
        raise CommandError(f"--tasks {task!r}: a dataset is given as NAME:SPLIT:COLUMN or NAME:CONFIG:SPLIT:COLUMN")
    with reporting(f"--tasks {task!r}"):
        datasets = import_datasets()
        from datasets.exceptions import DatasetsError

        try:
            rows = datasets.load_dataset(name, *config, split=split)
        except DatasetsError as error:
            raise ValueError(error) from error
    if column not in rows.column_names:
        raise CommandError(f"--tasks {task!r}: it has no column {column!r} but {', '.join(rows.column_names)}")
    prompts = rows[column][: len(rows) if limit is None else limit]
    if not prompts:
        raise CommandError(f"--tasks {task!r}: it has no rows")
    for number, prompt in enumerate(prompts):
        if not isinstance(prompt, str) or not prompt:
            raise CommandError(f"--tasks {task!r}: row {number} has no text in {column!r}; give a column of prompts")
    return Path(name).name, list(prompts)
