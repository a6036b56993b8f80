"""Imports point one way only, and what travels to the Hub needs nothing of what stays."""

import ast
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]
PACKAGE = {path.stem: path for path in (ROOT / "dspark_hf").glob("*.py")}
MODELING = {path.stem: path for path in (ROOT / "modeling").glob("*.py")}
# The ground floor: these import nothing of the package.
BOTTOM = (
    "sampling",
    "scheduling",
    "statistics",
    "sequences",
    "snapshot",
    "streaming",
    "compat",
    "locks",
    "calibration",
    "intervals",
    "files",
    "data",
    "chat_format",
    "near_duplicates",
    "progress",
)
# Modules that only the command line and the package's face may know.
TOP = (
    "cli",
    "__main__",
    "demo",
    "bench",
    "bench_report",
    "host_dflash",
    "timing",
    "decoding_methods",
    "batch_bench",
    "batch_report",
    "loading",
    "simulate",
    "simulation",
    "blocks",
    "calibrate",
    "evaluation",
    "eval_command",
    "eval_report",
    "tasks",
    "work_file",
    "profile_command",
    "command_files",
    "command_options",
    "measuring_commands",
    "making_commands",
    "train_command",
    "training_callbacks",
    "hub_commands",
    "prepare_data",
    "data_folder",
    "prompt_sources",
    "answering",
    "convert_command",
    "synthesis",
    "data_making",
    "doctor",
    "ablation",
    "ablate",
    "ablate_drafters",
    "ablate_cost",
    "ablate_report",
)


def imports_of(path: Path, modules: dict[str, Path]) -> set[str]:
    """The modules of a package that a file imports, at its top or inside a function; `__init__` for its face."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert node.level == 1, f"{path.name} reaches above its package"
            if node.module is None:
                found |= {alias.name if alias.name in modules else "__init__" for alias in node.names}
            else:
                found.add(node.module.split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] != "dspark_hf", f"{path.name} imports its own package by name"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                assert alias.name.split(".")[0] != "dspark_hf", f"{path.name} imports its own package by name"
    return found


GRAPH = {name: imports_of(path, PACKAGE) for name, path in PACKAGE.items()}


def test_every_import_is_of_something_that_is_there():
    assert set().union(*GRAPH.values()) <= PACKAGE.keys() | {"modeling"}


def test_imports_form_no_circle():
    placed: set[str] = {"modeling"}
    waiting = dict(GRAPH)
    while waiting:
        ready = [name for name, needs in waiting.items() if needs <= placed]
        assert ready, f"these import each other in a circle: {sorted(waiting)}"
        for name in ready:
            placed.add(name)
            del waiting[name]


@pytest.mark.parametrize("name", BOTTOM)
def test_the_ground_floor_stands_on_nothing(name):
    assert GRAPH[name] == set()


@pytest.mark.parametrize("name", sorted(PACKAGE.keys() - set(TOP)))
def test_the_engine_does_not_know_its_commands(name):
    assert not GRAPH[name] & set(TOP)


def test_importing_the_package_loads_no_command():
    reached, waiting = set(), ["__init__"]
    while waiting:
        name = waiting.pop()
        if name not in reached and name in GRAPH:
            reached.add(name)
            waiting += GRAPH[name]
    assert not reached & set(TOP)


@pytest.mark.parametrize("name", sorted(MODELING))
def test_modeling_is_flat_and_alone(name):
    """Transformers copies files that are reached by `from .x import y`, and no others."""
    for node in ast.walk(ast.parse(MODELING[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            assert not any(alias.name.split(".")[0] in ("dspark_hf", "modeling") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in ("dspark_hf", "modeling") or node.level
            if node.level:
                assert node.level == 1 and node.module in MODELING
                assert [alias.name for alias in node.names] != ["*"]


def test_modeling_has_no_circle():
    graph = {name: imports_of(path, MODELING) for name, path in MODELING.items() if name != "__init__"}
    placed: set[str] = set()
    while len(placed) < len(graph):
        ready = {name for name, needs in graph.items() if name not in placed and needs <= placed}
        assert ready
        placed |= ready


@pytest.mark.parametrize("path", sorted((ROOT / "dspark_hf" / "metrics").rglob("*.py")), ids=lambda path: path.stem)
def test_metrics_stand_on_the_ground_floor(path):
    """`evaluate.load` runs a metric outside the package, so what it takes from there has an absolute name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "dspark_hf":
            assert node.module.removeprefix("dspark_hf.") in BOTTOM
        if isinstance(node, ast.ImportFrom) and node.level:
            assert path.name == "__init__.py" and node.module == path.parent.name
