"""A saved folder drafts where dspark_hf is not installed, with the code it carries, if that code is trusted."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import load_drafter
from safetensors.torch import load_file

from dspark_hf import DSparkDraftModel
from dspark_hf.modeling.draft_context import DraftContext


def drafts(drafter: DSparkDraftModel, context_class: type[DraftContext]) -> dict[str, torch.Tensor]:
    """Two rounds of drafting; runs in both processes."""
    config = drafter.config
    context, outputs = context_class(config, [0]), {}
    generator = torch.Generator().manual_seed(5)
    for new in (6, 3):
        slots = torch.full((1, config.block_size), config.mask_token_id)
        slots[0, 0] = 30 + new
        taps = torch.randn(new, drafter.fc.in_features, generator=generator)
        with torch.no_grad():
            hidden = drafter(drafter.embed(slots), taps, [new], context)
            draft = drafter.draft(hidden, slots[:, 0])
        outputs |= {f"hidden{new}": hidden, f"tokens{new}": draft.tokens, f"confidence{new}": draft.confidence_logits}
    return outputs


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
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel

DRAFTS

folder, results = Path(sys.argv[1]), Path(sys.argv[2])
report = {"refusals": []}
for trust in ({}, {"trust_remote_code": False}):
    for auto in (AutoConfig, AutoModel):
        try:
            auto.from_pretrained(folder, **trust)
        except ValueError as error:
            report["refusals"].append(str(error))
report["ran_untrusted"] = (folder / "canary").exists()
drafter = AutoModel.from_pretrained(folder, trust_remote_code=True)
report["ran_trusted"] = (folder / "canary").exists()
report["module"] = type(drafter).__module__
report["threshold"] = drafter.generation_config.assistant_confidence_threshold
save_file(drafts(drafter, sys.modules[type(drafter).__module__].DraftContext), results / "drafts.safetensors")
drafter.save_pretrained(results / "again")
again = AutoModel.from_pretrained(results / "again", trust_remote_code=True)
report["same_weights"] = all(torch.equal(v, again.state_dict()[k]) for k, v in drafter.state_dict().items())
report["same_config"] = again.config.to_diff_dict() == drafter.config.to_diff_dict()
report["imported"] = "dspark_hf" in sys.modules
(results / "report.json").write_text(json.dumps(report))
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A drafter's folder, whose code leaves a file behind when it runs."""
    folder = tmp_path_factory.mktemp("hub") / "drafter"
    drafter = load_drafter("deepspec-rnn")
    drafter.generation_config.assistant_confidence_threshold = 0.25
    drafter.save_pretrained(folder)
    for file in folder.glob("*.py"):
        file.write_text(file.read_text() + f"\nopen({str(folder / 'canary')!r}, 'w').close()\n")
    return folder


@pytest.fixture(scope="module")
def results(saved, tmp_path_factory) -> Path:
    """What a fresh interpreter without dspark_hf made of the folder, with nobody to answer a question about trust."""
    results = tmp_path_factory.mktemp("results")
    environment = os.environ | {"HF_MODULES_CACHE": str(results / "modules")}
    code = ELSEWHERE.replace("DRAFTS", inspect.getsource(drafts))
    result = subprocess.run(
        [sys.executable, "-I", "-c", code, str(saved), str(results)],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return results


@pytest.fixture(scope="module")
def report(results) -> dict[str, Any]:
    return json.loads((results / "report.json").read_text())


def test_the_saved_code_drafts_the_same_tokens(results):
    theirs, ours = load_file(results / "drafts.safetensors"), drafts(load_drafter("deepspec-rnn"), DraftContext)
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], value) for name, value in ours.items())


def test_it_ran_without_this_library(report):
    assert report["module"].startswith("transformers_modules.")
    assert not report["imported"]


def test_code_that_is_not_trusted_does_not_run(report):
    assert len(report["refusals"]) == 4
    assert all("trust_remote_code=True" in refusal for refusal in report["refusals"]), report["refusals"]
    assert not report["ran_untrusted"]
    assert report["ran_trusted"]


def test_what_it_saves_is_whole(results, report):
    assert report["same_weights"] and report["same_config"]
    assert report["threshold"] == 0.25
    again = DSparkDraftModel.from_pretrained(results / "again")
    assert again.generation_config.assistant_confidence_threshold == 0.25
    assert all(
        torch.equal(*pair) for pair in zip(again.parameters(), load_drafter("deepspec-rnn").parameters(), strict=True)
    )


def test_the_modeling_files_import_only_each_other(saved):
    # transformers copies what is imported as `from .x import y`, and nothing else.
    names = {file.stem for file in saved.glob("*.py")}
    for file in saved.glob("*.py"):
        for line in file.read_text().splitlines():
            words = line.split()
            if words[:1] == ["from"] and words[1].startswith("."):
                assert words[1].removeprefix(".") in names, line
            assert words[:2] not in (["import", "dspark_hf"], ["from", "dspark_hf"]), line
