"""Pushing a drafter by the real client to a stand-in for the Hub: what goes wrong is one line, nothing is lost."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from card_files import WRITTEN, evaluation, make_folder, write
from conftest import FIXTURES, load_drafter
from hub_standin import HubStandIn, hub_standin
from huggingface_hub import ModelCard, constants
from safetensors.torch import load, load_file, save_file

from dspark_hf import DSparkDraftModel, cli
from dspark_hf.card import CardSources
from dspark_hf.hub import load_strictly, push_drafter


ROOT = Path(__file__).parents[1]
REPO = "ann/drafter"


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


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
    def told() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "dspark_hf.hub"]

    assert push()[0] == 0
    assert push("--licence", "mit")[0] == 0 and not told()
    card = here.files(REPO)["README.md"]
    assert ModelCard(card.decode()).data.license == "mit"

    edited = card + b"\nTrained on a rainy day.\n"
    repository = here.repositories[REPO]
    here.commit(repository, "main", "by hand", repository.branches["main"][-1].files | {"README.md": edited})
    (own_folder / "training.json").unlink()
    assert push("--licence", "apache-2.0", "--message", "Again")[0] == 0
    (message,) = told()
    assert message.startswith(f"README.md of {REPO} was not written by dspark, or edited since")
    assert "--overwrite" in message
    assert here.files(REPO)["README.md"] == edited and "training.json" not in here.files(REPO)
    assert push("--licence", "apache-2.0", "--overwrite-card")[0] == 0 and len(told()) == 1
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
