"""What commands read and write: prompts, plots, results."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .environment import machine, package_versions
from .files import write_json
from .loading import CommandError, reporting


# Endings of plots; without one they are PNG.
IMAGES = ("", ".png", ".pdf", ".svg", ".jpg")


def read_prompts(source: str | None, limit: int | None = None) -> dict[str, list[str]]:
    """Prompt sets by name.

    Args:
        source (`str`, *optional*): a `.jsonl` file, or a folder of them, with the field `prompt` on every line. By
            default the school-maths prompts that come with the package.
        limit (`int`, *optional*): how many prompts of each file; by default all.

    Returns:
        `dict[str, list[str]]`: the prompts of each file under its name without `.jsonl`.

    Raises:
        `CommandError`: there is no such file, or a line is not a JSON object with a non-empty `prompt`.
    """
    path = Path(source).expanduser() if source else Path(__file__).parent / "assets" / "prompts"
    if not path.exists():
        raise CommandError(f"--prompts {source!r}: there is no such file or folder; give a .jsonl file or a folder")
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise CommandError(f"--prompts {source!r}: the folder holds no .jsonl file")
    return {file.stem: read_prompt_file(file, limit) for file in files}


def read_prompt_file(file: Path, limit: int | None = None, argument: str = "--prompts") -> list[str]:
    """The field `prompt` of each line of a `.jsonl` file.

    Args:
        file (`Path`): is there.
        limit (`int`, *optional*): how many lines; by default all.
        argument (`str`, *optional*, defaults to `"--prompts"`): what an error names.

    Raises:
        `CommandError`: a line is not a JSON object with a non-empty `prompt`, or there is none.
    """
    prompts = []
    for number, record in json_lines(argument, file, limit):
        prompt = record.get("prompt") if isinstance(record, dict) else None
        if not isinstance(prompt, str) or not prompt:
            raise CommandError(f"{argument}: {file}:{number} has no text in the field 'prompt'; add it")
        prompts.append(prompt)
    if not prompts:
        raise CommandError(f"{argument}: {file} has no prompts; give at least one line")
    return prompts


def json_lines(argument: str, file: Path, limit: int | None = None) -> Iterator[tuple[int, Any]]:
    """
    The values of a `.jsonl` file, line by line; empty lines are passed over.

    Args:
        argument (`str`): what an error names.
        file (`Path`): in UTF-8.
        limit (`int`, *optional*): how many; by default all.

    Returns:
        Pairs of a line's number, from 1, and its value.

    Raises:
        `CommandError`: the file cannot be read, or a line is not JSON, or holds half a character.
    """
    count = 0
    with reporting(f"{argument}: {file}"), open(file, encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if count == limit:
                return
            if not line.strip():
                continue
            try:
                value = json.loads(line)
                json.dumps(value, ensure_ascii=False).encode("utf-8")
            except UnicodeEncodeError as error:
                raise CommandError(
                    f"{argument}: {file}:{number} holds half of a surrogate pair, which is no character; take it out"
                ) from error
            except (json.JSONDecodeError, RecursionError) as error:
                raise CommandError(
                    f"{argument}: {file}:{number} is not JSON ({error}); give one object a line"
                ) from error
            count += 1
            yield number, value


def check_parent(argument: str, path: str | None) -> None:
    """Refuse a file or folder whose own folder is not there, before anything is measured."""
    if path is not None and not Path(path).expanduser().absolute().parent.is_dir():
        raise CommandError(f"{argument} {path!r}: its folder does not exist; create it first")


def check_writable(argument: str, path: str | None) -> None:
    """The same of a file, which is written beside its place and then put there: no folder, and no device."""
    check_parent(argument, path)
    if path is None:
        return
    file = Path(path).expanduser().absolute()
    if file.exists() and not file.is_file():
        raise CommandError(f"{argument} {path!r}: it is {'a folder' if file.is_dir() else 'a device'}; give a file")
    _check_access(argument, path, file.parent)


def _check_access(argument: str, path: str, folder: Path) -> None:
    if not os.access(folder, os.W_OK):
        raise CommandError(f"{argument} {path!r}: {folder} cannot be written; give another folder")


def check_plot(plot: str | None) -> None:
    """Refuse a plot that could not be drawn or written, before anything is measured."""
    check_writable("--plot", plot)
    if plot is not None and Path(plot).suffix not in IMAGES:
        raise CommandError(f"--plot {plot!r}: give a name that ends in {', '.join(IMAGES[1:])}")
    _check_matplotlib(plot)


def _check_matplotlib(plot: str | None) -> None:
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise CommandError(
            f"--plot {plot!r}: it needs matplotlib, which is not here; pip install 'dspark-hf[plots]' (in a checkout "
            "'.[plots]'), or leave --plot out"
        )


def check_plot_folder(plot: str | None) -> None:
    """The same for plots that go to a folder."""
    if plot is not None and Path(plot).expanduser().is_file():
        raise CommandError(f"--plot {plot!r}: it is a file; give a folder for the plots")
    check_parent("--plot", plot)
    if plot is not None:
        folder = Path(plot).expanduser().absolute()
        _check_access("--plot", plot, folder if folder.is_dir() else folder.parent)
    _check_matplotlib(plot)


def check_outputs(output: str | None, markdown: str | None, plot: str | None) -> None:
    """Refuse, before anything long is begun, files that could not be written."""
    check_writable("--output", output)
    check_writable("--markdown", markdown)
    check_plot_folder(plot)


def write_results(output: str, results: dict[str, Any]) -> None:
    """Write plain values to a JSON file, behind the command, the machine and the versions they come from."""
    origin = {"command": ["dspark", *sys.argv[1:]], "machine": machine(), "versions": package_versions()}
    write_json(Path(output).expanduser(), origin | results)
