"""A training that pushes what it made, to the stand-in for the Hub, and what lies there afterwards."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hub_standin import hub_standin

import dspark_hf


RUN = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import torch
from test_trainer import Samples, arguments, new_drafter
from tiny import random_target
from dspark_hf import DSparkDraftModel
from dspark_hf.trainer import DSparkTrainer

target = random_target(vocab_size=13, dtype=torch.float32)
given = arguments(Path({folder!r}), push_to_hub=True, hub_model_id="drafter", save_strategy="steps", save_steps=3)
provenance = {{"target": {{"id": "org/tiny", "revision": None, "dtype": "float32"}}, "data": {{"samples": 12}}}}
run = DSparkTrainer(new_drafter(), given, target, Samples(target), provenance=provenance)
run.train()
print(run.push_to_hub(licence="mit").repo_url)
drafter = DSparkDraftModel.from_pretrained("ann/drafter")
assert torch.equal(drafter.fc.weight, run.drafter.fc.weight)
"""


@pytest.mark.slow
def test_the_trainer_pushes_model_code_provenance_and_card(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(RUN.format(tests=str(Path(__file__).parent), folder=str(tmp_path / "run")))
    with hub_standin() as hub:
        environment = os.environ | {"PYTHONPATH": str(Path(dspark_hf.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
        environment |= hub.environment(str(tmp_path / "home"))
        done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        assert f"{hub.endpoint}/ann/drafter" in done.stdout
        files = hub.files("ann/drafter")
    assert {"model.safetensors", "config.json", "training.json", "README.md", "modeling_dspark.py"} <= files.keys()
    assert not any("optimizer" in name or name.endswith((".bin", ".pt")) for name in files)
    assert json.loads(files["training.json"])["steps"] == 6
    card = files["README.md"].decode()
    assert "base_model: org/tiny" in card and "license: mit" in card
