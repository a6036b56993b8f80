"""A repository's `custom_generate/`: decoding where dspark_hf is not installed, from copies of the one source."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import FIXTURES, load_drafter
from hub_standin import hub_standin
from tiny import encode
from transformers.dynamic_module_utils import get_relative_import_files

from dspark_hf.hub import stage_drafter
from dspark_hf.hub_only import FOLDER, flat_modules


ROOT = Path(__file__).parents[1]
PROMPTS = ["12 - 7 = ", "Tom has 5 apples and buys 3 more. How many"]

ELSEWHERE = """
from __future__ import annotations

import json
import sys
from pathlib import Path


class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "dspark_hf":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, NotInstalled())
import torch
from transformers import AutoModelForCausalLM, GenerationMixin
from transformers.generation.streamers import BaseStreamer

source, where, results, prompts = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[4]), json.loads(sys.argv[5])
target = AutoModelForCausalLM.from_pretrained(sys.argv[3]).eval()
inputs = {name: torch.tensor(value) for name, value in prompts.items()}
options = inputs | {"max_new_tokens": 32, "do_sample": False, "pad_token_id": 0}
before = GenerationMixin._assisted_decoding


class Kept(BaseStreamer):
    def __init__(self):
        self.tokens = []

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.tokens.append("end")


report = {}
try:
    target.generate(**options, custom_generate=source, **where, trust_remote_code=False)
except ValueError as error:
    report["refusal"] = str(error)
report["plain"] = target.generate(**options).tolist()
out = target.generate(**options, custom_generate=source, **where, trust_remote_code=True, return_dict_in_generate=True)
report["text"], report["stats"] = out.sequences.tolist(), out.speculative_stats.to_dict()
if "revision" in where:  # of a repository, which needs no such thing
    text = target.generate(**options, custom_generate=source, trust_remote_code=True)
    assert text.tolist() == report["plain"]
streamer = Kept()
one = {name: value[:1] for name, value in inputs.items()}
text = target.generate(
    **options | one, custom_generate=source, **where, trust_remote_code=True, streamer=streamer,
    num_assistant_tokens_schedule="confidence", assistant_confidence_threshold=0.4,
)
report["streamed"] = streamer.tokens[:-1] == text[0].tolist() and streamer.tokens[-1] == "end"
torch.manual_seed(0)
sampled = target.generate(**options | {"do_sample": True}, custom_generate=source, **where, trust_remote_code=True)
report["sampled"] = list(sampled.shape)
report["untouched"] = GenerationMixin._assisted_decoding is before
report["imported"] = "dspark_hf" in sys.modules
report["modules"] = sorted(name for name in sys.modules if ".custom_generate." in name)
(results / "report.json").write_text(json.dumps(report))
"""


@pytest.fixture(scope="module")
def staged(tmp_path_factory) -> Path:
    """What `dspark push` would send."""
    root = tmp_path_factory.mktemp("staged")
    load_drafter("deepspec-rnn").save_pretrained(root / "drafter")
    stage_drafter(root / "drafter", root / "repository", "ann/drafter")
    return root / "repository"


def run_elsewhere(source: str, results: Path, environment: dict[str, str], **where: str) -> dict:
    """What a fresh interpreter without dspark_hf makes of a repository."""
    prompts = {name: value.tolist() for name, value in encode(*PROMPTS).items()}
    arguments = [source, json.dumps(where), str(FIXTURES / "tiny-target"), str(results), json.dumps(prompts)]
    result = subprocess.run(
        [sys.executable, "-I", "-c", ELSEWHERE, *arguments],
        env=os.environ | {"HF_MODULES_CACHE": str(results / "modules")} | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return json.loads((results / "report.json").read_text())


def check(report: dict, tiny_target) -> None:
    """The text of plain generate, with the rounds that the library itself makes of it."""
    assert "trust_remote_code=True" in report["refusal"]
    assert report["text"] == report["plain"]
    assert report["streamed"] and report["sampled"][0] == 2 and report["untouched"] and not report["imported"]
    assert any(name.endswith(".custom_generate.decoding") for name in report["modules"])
    assert any(name.endswith(".custom_generate.modeling_dspark") for name in report["modules"])
    out = tiny_target.generate(
        **encode(*PROMPTS), assistant_model=load_drafter("deepspec-rnn"), max_new_tokens=32, do_sample=False,
        pad_token_id=0, return_dict_in_generate=True,
    )  # fmt: skip
    ours = out.speculative_stats.to_dict()
    assert report["stats"]["accepted"] == ours["accepted"] > 5 and report["stats"]["rounds"] == ours["rounds"]


@torch.no_grad()
def test_a_local_folder(staged, tmp_path, tiny_target):
    report = run_elsewhere(str(staged), tmp_path, {"HF_HUB_OFFLINE": "1"}, assistant_model=str(staged))
    check(report, tiny_target)


@torch.no_grad()
def test_a_repository_on_the_hub(staged, tmp_path, tiny_target):
    """Its own drafter, without being told; and nothing of an earlier push stays."""
    with hub_standin() as hub:
        hub.create("ann/drafter", files={f"{FOLDER}/gone.py": "stale"})
        environment = hub.environment(str(tmp_path / "home"))
        code = "import sys; from dspark_hf.hub import push_drafter; push_drafter(sys.argv[1], 'ann/drafter')"
        result = subprocess.run(
            [sys.executable, "-c", code, str(staged)],
            env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert result.returncode == 0, result.stderr
        files = {name for name in hub.files("ann/drafter") if name.startswith(f"{FOLDER}/")}
        assert files == {f"{FOLDER}/{path.name}" for path in (staged / FOLDER).iterdir()}
        pinned = hub.repositories["ann/drafter"].branches["main"][-1].oid
        check(run_elsewhere("ann/drafter", tmp_path, environment, revision=pinned), tiny_target)


def test_the_host_finds_every_module(staged):
    """It follows `from .x import y` and nothing else."""
    folder = staged / FOLDER
    found = {Path(path).name for path in get_relative_import_files(folder / "generate.py")} | {"generate.py"}
    assert found == {path.name for path in folder.glob("*.py")}
    assert (folder / "requirements.txt").read_text() == "transformers>=5.18.0\n"


def test_there_is_one_source(staged):
    """But for where modules lie and which repository it is, files are those of the package."""
    sources = {file.name: file for part in ("dspark_hf", "modeling") for file in (ROOT / part).glob("*.py")}
    for path in (staged / FOLDER).glob("*.py"):
        source = sources["hub_generate.py" if path.name == "generate.py" else path.name].read_text()
        own = path.read_text().replace('DRAFTER = "ann/drafter"', 'DRAFTER = ""')
        lines = zip(own.splitlines(), source.splitlines(), strict=True)
        assert all(one == other or one == other.replace("from .modeling.", "from .") for one, other in lines)


def test_it_needs_nothing_but_what_transformers_brings():
    allowed = set(sys.stdlib_module_names) | {"numpy", "packaging", "safetensors", "torch", "transformers"}
    allowed |= {"huggingface_hub"}
    for name, text in flat_modules().items():
        for node in ast.walk(ast.parse(text)):
            named = [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            named += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert {module.split(".")[0] for module in named} <= allowed, name


def test_commands_do_not_travel():
    assert not {"cli", "loading", "bench", "trainer", "hub"} & flat_modules().keys()


@torch.no_grad()
def test_in_the_library_itself(tiny_target):
    """The same function, as it stands in the package; without a repository a drafter must be named."""
    from dspark_hf.hub_generate import generate

    inputs = encode(PROMPTS[0])
    plain = tiny_target.generate(**inputs, max_new_tokens=24, do_sample=False)
    for drafter in (load_drafter("deepspec-rnn"), FIXTURES / "deepspec-rnn" / "drafter"):
        assert torch.equal(generate(tiny_target, drafter, **inputs, max_new_tokens=24, do_sample=False), plain)
    with pytest.raises(ValueError, match="`assistant_model` is not given"):
        generate(tiny_target, **inputs)
