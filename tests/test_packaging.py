"""What is installed: both packages, the bundled drafter, the type marker; and versions stated alike everywhere."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from dspark_hf import metrics


ROOT = Path(__file__).parents[1]
tomllib = pytest.importorskip("tomllib", reason="tomllib comes with Python 3.11")


@pytest.fixture(scope="module")
def pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory) -> list[str]:
    """File names of the built wheel."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    # Built from a copy, since setuptools writes beside what it builds.
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("dspark_hf", "modeling", "hub_cards"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    subprocess.run([*command, str(folder), str(source)], check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_every_package_is_listed(pyproject):
    """A folder of modules that pyproject does not list would be missing from an installation."""
    listed = set(pyproject["tool"]["setuptools"]["packages"])
    found = {"dspark_hf.modeling", "dspark_hf.hub_cards"}
    for init in (ROOT / "dspark_hf").rglob("__init__.py"):
        found.add(".".join(init.parent.relative_to(ROOT).parts))
    assert listed == found
    assert not list((ROOT / "modeling").glob("*/__init__.py")), "modeling/ is flat: Transformers copies flat files"


@pytest.mark.slow
def test_the_wheel_holds_code_and_data(wheel_names):
    expected = {
        "dspark_hf/__init__.py",
        "dspark_hf/py.typed",
        "dspark_hf/cli.py",
        "dspark_hf/modeling/__init__.py",
        "dspark_hf/assets/prompts/school-maths.jsonl",
        "dspark_hf/assets/eval-prompts/README.md",
        "dspark_hf/assets/eval-prompts/gsm8k.jsonl",
        "dspark_hf/hub_cards/template.md",
    }
    expected |= {f"dspark_hf/metrics/{name}/{name}.py" for name in metrics.NAMES}
    folder = "dspark_hf/assets/smollm2-135m-instruct-drafter"
    expected |= {f"{folder}/{name}" for name in ("config.json", "model.safetensors", "README.md")}
    expected |= {f"dspark_hf/modeling/{file.name}" for file in (ROOT / "modeling").glob("*.py")}
    assert expected <= set(wheel_names)
    assert any(name.endswith("licenses/LICENSE") for name in wheel_names)
    assert not any(name.startswith(("modeling/", "hub_cards/", "tests/")) for name in wheel_names)
    assert [name for name in wheel_names if "hub_cards" in name] == ["dspark_hf/hub_cards/template.md"]


def test_installed_modeling_is_the_one_copy():
    import dspark_hf.modeling

    assert Path(dspark_hf.modeling.__file__).parent.name == "modeling"


def test_the_floor_is_stated_alike(pyproject):
    (requirement,) = [item for item in pyproject["project"]["dependencies"] if item.startswith("transformers")]
    floor = re.search(r">=(\d+\.\d+)", requirement).group(1)
    from dspark_hf import compat

    assert f"{compat.FLOOR.major}.{compat.FLOOR.minor}" == floor
    assert re.search(rf"transformers==({re.escape(floor)}\.\d+)", (ROOT / "Makefile").read_text())
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    stated = re.findall(r"[Tt]ransformers\W{0,4}(?:≥|>=|from|newer than)?\W{0,2}(5\.\d+)", readme)
    assert floor in stated, f"README.md does not state the floor, Transformers {floor}"


def test_the_oldest_python_is_stated_alike(pyproject):
    oldest = pyproject["project"]["requires-python"].removeprefix(">=")
    assert pyproject["tool"]["ruff"]["target-version"] == f"py{oldest.replace('.', '')}"
    major, minor = oldest.split(".")
    assert f"({major}, {minor})" in (ROOT / "Makefile").read_text()
    assert oldest in (ROOT / "README.md").read_text(encoding="utf-8")


def test_readme_commands_are_targets():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    mentioned = set(re.findall(r"\bmake ([a-z][a-z-]+)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert {"demo", "test"} <= mentioned <= targets


def test_continuous_integration_runs_the_readme_command():
    script = (ROOT / ".ci" / "run").read_text()
    assert "make test" in script and "make lint" in script
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100
