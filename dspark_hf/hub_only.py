"""
The folder `custom_generate/` of a repository, with which `generate` decodes where dspark_hf is not installed.

Transformers fetches `custom_generate/generate.py` and whatever it imports by `from .x import y`, all from that one
folder. So the modules that decoding needs are copied into it flat, those of `modeling/` among them; nothing else in
them changes.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

from .compat import FLOOR


FOLDER = "custom_generate"
_ENTRY = "hub_generate"
_PACKAGE = Path(__file__).parent


def write_custom_generate(repository: Path, repo_id: str) -> None:
    """
    Write `custom_generate/` into a staged repository.

    Args:
        repository (`Path`): The folder.
        repo_id (`str`): From where `generate` loads the drafter unless a call names another.
    """
    folder = repository / FOLDER
    folder.mkdir()
    for name, text in flat_modules().items():
        if name == _ENTRY:
            name, text = "generate", text.replace('DRAFTER = ""', f"DRAFTER = {json.dumps(repo_id)}")
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    (folder / "requirements.txt").write_text(f"transformers>={FLOOR}\n", encoding="utf-8")


def flat_modules() -> dict[str, str]:
    """The modules that decoding needs, by name, as if `modeling` and this package were one folder."""
    from . import modeling

    package, models = _sources(_PACKAGE), _sources(Path(modeling.__file__).parent)
    assert not package.keys() & models.keys(), "the folders share a name"
    sources, found, waiting = package | models, {}, [_ENTRY]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = _flattened(sources[name])
            waiting += _imported(found[name])
    return found


def _sources(folder: Path) -> dict[str, str]:
    return {file.stem: file.read_text(encoding="utf-8") for file in folder.glob("*.py") if file.stem[:2] != "__"}


def _flattened(text: str) -> str:
    return re.sub(r"^(\s*from )\.modeling\.", r"\1.", text, flags=re.MULTILINE)


def _imported(text: str) -> set[str]:
    """Modules beside it that a module imports, at its top or inside a function."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level:
            found |= {node.module} if node.module else {alias.name for alias in node.names}
    return found
