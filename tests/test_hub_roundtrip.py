"""A drafter pushed by the command, and loaded from there with dspark_hf and, in a process of its own, without."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from card_files import CODE, PNG, WRITTEN, batch_benchmark, benchmark, evaluation, make_folder, training, write
from hub_standin import HubStandIn, hub_standin
from huggingface_hub import ModelCard
from safetensors.torch import load, load_file

from dspark_hf.card import is_unedited


ROOT = Path(__file__).parents[1]
REPO = "ann/drafter"


def run(*argv: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, *argv],
        env=os.environ | {"PYTHONPATH": paths} | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )


WITH_LIBRARY = """
import sys
from pathlib import Path

from safetensors.torch import save_file

from dspark_hf import DSparkDraftModel
from dspark_hf.cli import main

results, *argv = sys.argv[1:]
assert main(argv) == 0
drafter = DSparkDraftModel.from_pretrained("ann/drafter")
save_file(drafter.state_dict(), Path(results) / "with.safetensors")
assert drafter.config.confidence_temperatures[0]["sampling_temperature"] == 0
assert drafter.generation_config.assistant_confidence_threshold == 0.25
# The way that every model of Transformers has.
drafter.push_to_hub("ann/plain")
drafter.push_to_hub("ann/plain", tags=["more"])
assert "more" not in DSparkDraftModel(drafter.config).model_tags
"""

WITHOUT_LIBRARY = """
import sys
from pathlib import Path


class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "dspark_hf":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, NotInstalled())
from safetensors.torch import save_file
from transformers import AutoModel

for name in ("drafter", "plain"):
    drafter = AutoModel.from_pretrained(f"ann/{name}", trust_remote_code=True)
    assert type(drafter).__module__.startswith("transformers_modules."), type(drafter)
    save_file(drafter.state_dict(), Path(sys.argv[1]) / f"{name}.safetensors")
assert "dspark_hf" not in sys.modules
"""


@pytest.fixture(scope="module")
def hub() -> Iterator[HubStandIn]:
    with hub_standin() as server:
        yield server


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("trained") / "drafter")


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """Where the processes put the weights they have loaded."""
    return tmp_path_factory.mktemp("results")


@pytest.fixture(scope="module")
def pushed(hub, folder, results) -> str:
    """What `dspark push` with figures says; the process loads the drafter from there, then pushes it plainly."""
    figures = [write(results / "eval.json", evaluation())]
    benches = [write(results / "bench.json", benchmark()), write(results / "batches.json", batch_benchmark())]
    argv = ["push", str(folder), REPO, "--licence", "mit", "--message", "First", "--eval", *figures]
    environment = hub.environment(str(results / "home"))
    result = run("-c", WITH_LIBRARY, str(results), *argv, "--bench", *benches, environment=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_command_says_where_it_is_and_how_to_use_it(hub, pushed):
    oid = hub.repositories[REPO].branches["main"][-1].oid
    assert f"Pushed: {hub.endpoint}/{REPO} ({hub.endpoint}/{REPO}/commit/{oid})" in pushed
    assert f"Use it: dspark generate --target org/tiny-target --drafter {REPO} --chat --prompt" in pushed


def test_it_is_one_commit_of_all_that_belongs_to_it(hub, pushed, folder):
    history = hub.repositories[REPO].branches["main"]
    assert [commit.message for commit in history] == ["initial commit", "First"]
    figures = {f"figures/{name}.json" for name in ("eval", "bench", "batches")}
    files = hub.files(REPO)
    assert files.keys() == WRITTEN | figures | {"calibration.png", ".gitattributes"}
    assert not hub.repositories[REPO].private
    assert files["calibration.png"] == PNG
    assert json.loads(files["training.json"]) == training()
    assert json.loads(files["figures/eval.json"]) == evaluation()
    auto_map = json.loads(files["config.json"])["auto_map"]
    assert auto_map == {
        "AutoConfig": "configuration_dspark.DSparkConfig",
        "AutoModel": "modeling_dspark.DSparkDraftModel",
    }
    for name in CODE:
        assert files[name] == (ROOT / "modeling" / name).read_bytes()
    weights = load_file(folder / "model.safetensors")
    sent = load(files["model.safetensors"])
    assert sent.keys() == weights.keys() and all(torch.equal(sent[name], weights[name]) for name in weights)


def test_its_card_is_whole(hub, pushed):
    text = hub.files(REPO)["README.md"].decode()
    data = ModelCard(text).data
    assert data.base_model == "org/tiny-target" and data.license == "mit" and is_unedited(text)
    assert f'target_id, drafter_id = "org/tiny-target", "{REPO}"' in text
    assert f'custom_generate="{REPO}", trust_remote_code=True' in text
    for linked in ("figures/eval.json", "figures/bench.json", "figures/batches.json", "training.json"):
        assert f"]({linked})" in text and linked in hub.files(REPO)
    assert "](calibration.png)" in text


def test_it_loads_from_there_with_and_without_the_library(hub, pushed, folder, results):
    environment = hub.environment(str(results / "home"))
    result = run("-I", "-c", WITHOUT_LIBRARY, str(results), environment=environment)
    assert result.returncode == 0, result.stderr
    weights = load_file(folder / "model.safetensors")
    for name in ("with", "drafter", "plain"):
        loaded = load_file(results / f"{name}.safetensors")
        assert loaded.keys() == weights.keys()
        assert all(torch.equal(loaded[key], weights[key]) for key in weights), name
    plain = hub.files("ann/plain")
    assert plain.keys() >= CODE | {"config.json", "model.safetensors", "generation_config.json"}
    tags = ModelCard(plain["README.md"].decode()).data.tags
    assert {"speculative-decoding", "draft-model", "dspark", "more"} <= set(tags)
