"""Pushing a drafter: the real command and client against a stand-in for the Hub, and what loads from there again."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from card_files import batch_benchmark, benchmark, evaluation, fit, training, write
from conftest import FIXTURES, load_drafter
from hub_standin import HubStandIn, hub_standin
from huggingface_hub import ModelCard, constants
from safetensors.torch import load, load_file, save_file

from dspark_hf import DSparkDraftModel, cli
from dspark_hf.card import CardSources, is_unedited
from dspark_hf.hub import load_strictly, push_drafter
from dspark_hf.hub_only import flat_modules


ROOT = Path(__file__).parents[1]
CODE = {path.name for path in (ROOT / "modeling").glob("*.py")} - {"__init__.py"}
DECODING = {f"custom_generate/{name}.py" for name in flat_modules() if name != "hub_generate"}
DECODING |= {"custom_generate/generate.py", "custom_generate/requirements.txt"}
WRITTEN = (
    {"config.json", "generation_config.json", "model.safetensors", "training.json", "README.md"} | CODE | DECODING
)
REPO = "ann/drafter"
# A PNG file by its first bytes; nobody draws it.
PNG = b"\x89PNG\r\n\x1a\n"


def make_folder(path: Path) -> Path:
    """A drafter as training and calibration leave it, with the state of the run beside it."""
    drafter = load_drafter("deepspec-vanilla")
    drafter.config.confidence_temperatures = [fit(0.0), fit(1.0)]
    drafter.generation_config.assistant_confidence_threshold = 0.25
    drafter.save_pretrained(path)
    write(path / "training.json", training())
    (path / "calibration.png").write_bytes(PNG)
    (path / "training_args.bin").write_bytes(b"a pickle")
    (path / "checkpoint-100").mkdir()
    (path / "checkpoint-100" / "optimizer.pt").write_bytes(b"a pickle")
    return path


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


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


# From a process of its own, as a user has it: pushed, and loaded with and without dspark_hf.

WITH_LIBRARY = """
import sys
from pathlib import Path

from safetensors.torch import save_file

from dspark_hf import DSparkDraftModel

results = Path(sys.argv[1])
drafter = DSparkDraftModel.from_pretrained("ann/drafter")
save_file(drafter.state_dict(), results / "with.safetensors")
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
def pushed(hub, folder, tmp_path_factory) -> subprocess.CompletedProcess[str]:
    """`dspark push` with figures."""
    files = tmp_path_factory.mktemp("figures")
    figures = [write(files / "eval.json", evaluation())]
    benches = [write(files / "bench.json", benchmark()), write(files / "batches.json", batch_benchmark())]
    result = run(
        *["-m", "dspark_hf", "push", str(folder), REPO, "--licence", "mit", "--message", "First"],
        *["--eval", *figures, "--bench", *benches],
        environment=hub.environment(str(files / "home")),
    )
    assert result.returncode == 0, result.stderr
    return result


def test_the_command_says_where_it_is_and_how_to_use_it(hub, pushed):
    oid = hub.repositories[REPO].branches["main"][-1].oid
    assert f"Pushed: {hub.endpoint}/{REPO} ({hub.endpoint}/{REPO}/commit/{oid})" in pushed.stdout
    assert f"Use it: dspark generate --target org/tiny-target --drafter {REPO} --chat --prompt" in pushed.stdout


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
    assert f'DSparkDraftModel.from_pretrained("{REPO}", dtype=torch.bfloat16' in text
    assert f'custom_generate="{REPO}", trust_remote_code=True' in text
    for linked in ("figures/eval.json", "figures/bench.json", "figures/batches.json", "training.json"):
        assert f"]({linked})" in text and linked in hub.files(REPO)
    assert "](calibration.png)" in text


def test_it_loads_from_there_with_and_without_the_library(hub, pushed, folder, tmp_path):
    environment = hub.environment(str(tmp_path / "home"))
    result = run("-c", WITH_LIBRARY, str(tmp_path), environment=environment)
    assert result.returncode == 0, result.stderr
    result = run("-I", "-c", WITHOUT_LIBRARY, str(tmp_path), environment=environment)
    assert result.returncode == 0, result.stderr
    weights = load_file(folder / "model.safetensors")
    for name in ("with", "drafter", "plain"):
        loaded = load_file(tmp_path / f"{name}.safetensors")
        assert loaded.keys() == weights.keys()
        assert all(torch.equal(loaded[key], weights[key]) for key in weights), name
    plain = hub.files("ann/plain")
    assert plain.keys() >= CODE | {"config.json", "model.safetensors", "generation_config.json"}
    tags = ModelCard(plain["README.md"].decode()).data.tags
    assert {"speculative-decoding", "draft-model", "dspark", "more"} <= set(tags)


# In this process, with the client turned to a stand-in.


@pytest.fixture
def here(monkeypatch, tmp_path) -> Iterator[HubStandIn]:
    """A stand-in of the test's own, which the client of this process takes for the Hub."""
    with hub_standin() as server:
        turn_to(server.endpoint, monkeypatch)
        for name, value in server.environment(str(tmp_path / "home")).items():
            monkeypatch.setenv(name, value)
        yield server


def turn_to(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The client reads these when it is imported, and looks them up in this module when it is used.
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + template)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # conftest.py keeps all other tests off the network


@pytest.fixture
def own_folder(tmp_path) -> Path:
    return make_folder(tmp_path / "drafter")


@pytest.fixture
def push(capfd, own_folder) -> Callable[..., tuple[int, str, str]]:
    """`dspark push` of a folder: exit code, what it prints, what it complains of. The folder stays as it is."""

    def command(*argv: str, repo_id: str = REPO) -> tuple[int, str, str]:
        before = snapshot(own_folder)
        capfd.readouterr()
        code = cli.main(["push", str(own_folder), repo_id, *argv])
        assert snapshot(own_folder) == before
        return code, *capfd.readouterr()

    return command


FAILURES = [
    ({"create": (500, "Internal error")}, ["the Hub failed", "500", "Internal error", "run this again"]),
    ({"create": (429, "Slow down")}, ["the Hub failed", "429", "Slow down"]),
    ({"create": (403, "No rights")}, ["does not allow it", "403", "No rights", "token that may write to 'ann'"]),
    ({"preupload": (403, "Read-only token")}, ["does not allow it", "Read-only token"]),
    ({"store": (403, "Store closed")}, ["does not allow it", "Store closed"]),
    ({"commit": (500, "Internal error")}, ["the Hub failed", "500", "nothing here has changed"]),
    ({"commit": (400, "Bad file")}, ["the Hub refused", "400", "Bad file"]),
]


@pytest.mark.parametrize(("failures", "parts"), FAILURES, ids=lambda value: " ".join(value))
def test_a_failed_upload_is_one_line(here, push, failures, parts):
    here.failures = failures
    code, _, message = push()
    assert code == 2 and message.count("\n") == 1, message
    assert message.startswith(f"dspark push: error: REPO_ID '{REPO}': ")
    for part in parts:
        assert part in message
    repository = here.repositories.get(REPO)
    assert repository is None or [commit.message for commit in repository.branches["main"]] == ["initial commit"]
    here.failures = {}
    assert push()[0] == 0
    assert here.files(REPO).keys() >= WRITTEN


def test_without_a_valid_token(here, push, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
    code, _, message = push()
    assert code == 2 and message.count("\n") == 1 and "hf auth login" in message
    assert not here.repositories


def test_in_somebody_elses_namespace(here, push):
    code, _, message = push(repo_id="bob/drafter")
    assert (
        code == 2 and message.count("\n") == 1 and "write to 'bob'" in message and "don't have the rights" in message
    )


def test_with_nobody_there(here, push, monkeypatch):
    turn_to("http://127.0.0.1:9", monkeypatch)
    code, _, message = push()
    assert code == 2 and message.count("\n") == 1 and "could not be reached" in message


def test_a_card_edited_by_hand_stays(here, push, own_folder, caplog):
    assert push()[0] == 0
    assert push("--licence", "mit")[0] == 0 and not caplog.records
    card = here.files(REPO)["README.md"]
    assert ModelCard(card.decode()).data.license == "mit"

    edited = card + b"\nTrained on a rainy day.\n"
    repository = here.repositories[REPO]
    here.commit(repository, "main", "by hand", repository.branches["main"][-1].files | {"README.md": edited})
    (own_folder / "training.json").unlink()
    assert push("--licence", "apache-2.0", "--message", "Again")[0] == 0
    (told,) = caplog.messages
    assert told.startswith(f"README.md of {REPO} was not written by dspark, or edited since") and "--overwrite" in told
    assert here.files(REPO)["README.md"] == edited and "training.json" not in here.files(REPO)
    assert push("--licence", "apache-2.0", "--overwrite-card")[0] == 0 and len(caplog.messages) == 1
    assert ModelCard(here.files(REPO)["README.md"].decode()).data.license == "apache-2.0"


def test_what_belonged_to_other_weights_goes(here, push, own_folder, tmp_path):
    assert push("--eval", write(tmp_path / "eval.json", evaluation()))[0] == 0
    repository = here.repositories[REPO]
    old = {"model-00001-of-00002.safetensors": b"", "model.safetensors.index.json": b"{}", "notes.txt": b"mine"}
    here.commit(repository, "main", "by hand", repository.branches["main"][-1].files | old)
    for name in ("calibration.png", "training.json"):
        (own_folder / name).unlink()
    assert push()[0] == 0
    assert here.files(REPO).keys() == WRITTEN - {"training.json"} | {".gitattributes", "notes.txt"}


def test_a_branch(here, push):
    code, printed, _ = push("--revision", "trial")
    assert code == 0 and f"DSparkDraftModel.from_pretrained('{REPO}', revision='trial')" in printed
    assert here.files(REPO, "trial").keys() >= WRITTEN
    assert here.files(REPO).keys() == {".gitattributes"}
    assert push("--revision", "trial", "--licence", "mit")[0] == 0
    assert len(here.repositories[REPO].branches["trial"]) == 3


def test_private_or_not_at_all(here, push):
    assert push("--private")[0] == 0
    assert here.repositories[REPO].private
    here.create("ann/public")
    code, _, message = push("--private", repo_id="ann/public")
    assert code == 2 and message.count("\n") == 1 and "is public" in message
    assert here.files("ann/public").keys() == {".gitattributes"}


def test_another_model_is_not_replaced(here, push):
    here.create("ann/target", files={"config.json": json.dumps({"model_type": "qwen3", "architectures": ["Qwen3"]})})
    code, _, message = push(repo_id="ann/target")
    assert code == 2 and message.count("\n") == 1 and "holds another model (model_type 'qwen3')" in message
    assert here.files("ann/target").keys() == {".gitattributes", "config.json"}
    deepspec = {"model_type": "qwen3", "architectures": ["Qwen3DSparkModel"]}
    here.create(REPO, files={"config.json": json.dumps(deepspec)})
    assert push()[0] == 0


def test_a_dry_run_sends_nothing(here, push):
    code, printed, message = push("--dry-run")
    assert code == 0 and not message and not here.requests
    first, *lines = printed.splitlines()
    assert first.startswith(f"Nothing was sent. {REPO} would get what lies in ")
    staged = Path(first.removesuffix(":").rpartition(" ")[2])
    try:
        assert {line.split()[0] for line in lines} == set(snapshot(staged)) == WRITTEN | {"calibration.png"}
        assert DSparkDraftModel.from_pretrained(staged).generation_config.assistant_confidence_threshold == 0.25
    finally:
        shutil.rmtree(staged)


def test_a_drafter_of_deepspec_becomes_one_that_carries_its_code(here, push, own_folder):
    shutil.rmtree(own_folder)
    shutil.copytree(FIXTURES / "deepspec-vanilla" / "drafter", own_folder)
    assert push("--target", "org/tiny-target")[0] == 0
    assert here.files(REPO).keys() == WRITTEN - {"training.json"} | {".gitattributes"}
    assert json.loads(here.files(REPO)["config.json"])["model_type"] == "dspark"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_is_pushed_in_its_dtype(here, dtype):
    drafter = load_drafter("deepspec-vanilla").to(dtype)
    commit = push_drafter(drafter, REPO, CardSources(licence="mit"), commit_message="From a trainer")
    assert commit.oid == here.repositories[REPO].branches["main"][-1].oid
    assert commit.repo_url == f"{here.endpoint}/{REPO}" and commit.commit_message == "From a trainer"
    sent = load(here.files(REPO)["model.safetensors"])
    assert {value.dtype for value in sent.values()} == {dtype}
    assert all(torch.equal(sent[name], value) for name, value in drafter.state_dict().items())


# What is refused before anything is sent.


def test_what_is_not_a_drafter_is_no_model(here):
    with pytest.raises(ValueError, match="`drafter` is a Linear"):
        push_drafter(torch.nn.Linear(1, 1), REPO)
    assert not here.requests


def with_a_pickle(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")


def with_a_target(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"target.lm_head.weight": torch.zeros(2, 2)}, folder / "model.safetensors")


def with_a_tensor_missing(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["fc.weight"]
    save_file(weights, folder / "model.safetensors")


def without_a_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def with_wrong_provenance(folder: Path) -> None:
    write(folder / "training.json", {"steps": "many"})


BAD_FOLDERS = [
    (with_a_pickle, "pytorch_model.bin, pickles"),
    (with_a_target, "holds the target as well (1 tensors, target.lm_head.weight the first)"),
    (with_a_tensor_missing, "missing fc.weight"),
    (without_a_config, "has no config.json"),
    (with_wrong_provenance, "`steps` is 'many'"),
]


@pytest.mark.parametrize(("spoil", "complaint"), BAD_FOLDERS, ids=lambda value: getattr(value, "__name__", ""))
def test_folders_that_are_not_published(here, push, own_folder, spoil, complaint):
    spoil(own_folder)
    code, _, message = push()
    assert code == 2 and message.count("\n") == 1 and complaint in message, message
    assert str(own_folder) in message
    assert not here.requests


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--plot", "/no/plot.png"], ["/no/plot.png", "no PNG file"]),
        (["--plot", str(ROOT / "README.md")], ["README.md", "no PNG file"]),
        (["--eval", "/no/eval.json"], ["--eval", "/no/eval.json"]),
        (["--bench", "/no/bench.json"], ["--bench", "/no/bench.json"]),
        (["--target", "target"], ["'target'", "NAMESPACE/NAME"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_bad_input_is_one_line(here, push, argv, parts):
    code, _, message = push(*argv)
    assert code == 2 and message.count("\n") == 1, message
    for part in parts:
        assert part in message
    assert not here.requests


@pytest.mark.parametrize("repo_id", ["drafter", "a/b/c", "ann/dra fter", "./drafter"])
def test_ids_that_are_none(here, push, repo_id):
    code, _, message = push(repo_id=repo_id)
    assert code == 2 and message.count("\n") == 1 and "REPO_ID" in message and repr(repo_id) in message
    assert not here.requests


def test_two_figures_of_one_name(here, push, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    files = [write(tmp_path / name / "eval.json", evaluation()) for name in ("a", "b")]
    code, _, message = push("--eval", *files)
    assert code == 2 and "Two of the files with figures are named eval.json" in message


def test_the_dtype_is_the_files(own_folder):
    assert load_strictly(own_folder).dtype == torch.float32
