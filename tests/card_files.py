"""Files that a drafter's card is made from, as training, `dspark eval` and `dspark calibrate` write them; and the
folder of a drafter with all that belongs to it."""

import json
from pathlib import Path
from typing import Any

from conftest import load_drafter

from dspark_hf.hub_only import flat_modules


MACHINE = {"platform": "Linux", "processor": "Some CPU", "cores": 8, "torch_threads": 4, "cuda": "no device"}
GPU = MACHINE | {"cuda": "12.8 (NVIDIA H200)"}
VERSIONS = {"dspark-hf": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0"}
TARGET = "org/tiny-target"
# The files that travel with a drafter as its code, and those that every push writes.
CODE = {path.name for path in (Path(__file__).parents[1] / "modeling").glob("*.py")} - {"__init__.py"}
DECODING = {f"custom_generate/{name}.py" for name in flat_modules() if name != "hub_generate"}
DECODING |= {"custom_generate/generate.py", "custom_generate/requirements.txt"}
WRITTEN = (
    {"config.json", "generation_config.json", "model.safetensors", "training.json", "README.md"} | CODE | DECODING
)
# A PNG file by its first bytes; nobody draws it.
PNG = b"\x89PNG\r\n\x1a\n"


def training() -> dict[str, Any]:
    """A complete training.json."""
    return {
        "command": ["dspark", "train", "--target", TARGET, "--data", "my data"],
        "versions": VERSIONS,
        "machine": GPU,
        "target": {"id": TARGET, "revision": "0123abc", "dtype": "bfloat16"},
        "data": {
            "prompts": [{"source": "openai/gsm8k", "count": 7473}, {"source": "prompts/seeds.jsonl", "count": 175}],
            "temperatures": [0.7, 1.0],
            "thinking": "off",
            "samples": 7648,
            "tokens": 2_000_000,
            "supervised_tokens": 1_500_000,
        },
        "arguments": {"max_length": 2048, "learning_rate": 1e-3},
        "steps": 1200,
        "blocks": 4_000_000,
        "supervised_tokens": 28_000_000,
        "seconds": 5400.0,
        "started_from": None,
        "log": [],
        "evaluations": [
            {"step": 600, "blocks": 1, "tokens": 1, "mean_acceptance_length": {"greedy": 1.5, "temperature 1": 1.25}},
            {"step": 1200, "blocks": 2, "tokens": 2, "mean_acceptance_length": {"greedy": 2.5, "temperature 1": 1.75}},
        ],
    }


def evaluation() -> dict[str, Any]:
    """A file of `dspark eval`: three sets of prompts, greedy and at temperature 1."""

    def tasks(*lengths: float) -> dict[str, Any]:
        return {
            name: {
                "prompts": 20,
                "rounds": 100,
                "tokens": 250,
                "mean_acceptance_length": length,
                "mean_acceptance_length_interval": [length - 0.25, length + 0.25],
                "acceptance_by_position": [0.8, 0.5, None],
            }
            for name, length in zip(("gsm8k", "mt-bench", "math500"), lengths, strict=True)
        }

    def setting(temperature: float, macro: float, *lengths: float) -> dict[str, Any]:
        return {
            "temperature": temperature,
            "top_p": None,
            "top_k": None,
            "thinking": None,
            "max_new_tokens": 256,
            "tasks": tasks(*lengths),
            "macro": {"mean_acceptance_length": macro, "acceptance_by_position": [0.75, 0.5, None]},
        }

    return {
        "command": ["dspark", "eval"],
        "machine": GPU,
        "versions": VERSIONS,
        "target": {"id": TARGET, "dtype": "bfloat16"},
        "drafter": {"id": "drafter"},
        "settings": [setting(0.0, 2.0, 3.0, 1.5, 2.0), setting(1.0, 1.75, 2.5, 1.25, 1.5)],
    }


def benchmark() -> dict[str, Any]:
    """A file of `dspark bench`: one set of prompts."""
    return {
        "command": ["dspark", "bench"],
        "machine": MACHINE,
        "versions": VERSIONS,
        "settings": {"target": TARGET, "device": "cpu", "dtype": "float32", "temperature": 0.0, "max_new_tokens": 64},
        "summary": {
            name: {
                "plain generate": {"tokens_per_second": 40.0, "ratio": 1.0},
                "DSpark": {"tokens_per_second": 60.0, "ratio": 1.5, "mean_acceptance_length": 2.25},
            }
            for name in ("gsm8k", "macro")
        },
        "calls": [],
    }


def batch_benchmark() -> dict[str, Any]:
    """A file of `dspark bench --batch-sizes`."""

    def cell(size: int, method: str, speed: float, ratio: float, length: float | None) -> dict[str, Any]:
        found = {"batch_size": size, "accept_prob": None, "method": method, "tokens_per_second": speed}
        return found | {"ratio": ratio, "mean_acceptance_length": length}

    sizes = ((1, 40.0, 1.5), (16, 400.0, 1.125))
    settings = {"device": "cuda:0", "dtype": "bfloat16", "do_sample": False, "max_new_tokens": 64, "synthetic": []}
    return {
        "machine": GPU,
        "versions": VERSIONS,
        "settings": settings,
        "summary": [
            one
            for size, speed, ratio in sizes
            for one in (
                cell(size, "plain generate", speed, 1.0, None),
                cell(size, "hardware_aware", ratio * speed, ratio, 2.5),
            )
        ],
        "calls": [],
    }


def fit(sampling_temperature: float, block_size: int = 7) -> dict[str, Any]:
    """An entry of the config's `confidence_temperatures`."""
    errors = {"before": [0.2] * block_size, "after": [0.025] * block_size}
    made_with = {"ece": {"fit": errors, "held_out": errors}, "top_p": None, "top_k": None}
    return {
        "sampling_temperature": sampling_temperature,
        "temperatures": [1.25] * block_size,
        "made_with": made_with,
    }


def write(path: Path, record: Any) -> str:
    """Write a record as JSON and return the path as a command takes it."""
    path.write_text(json.dumps(record), encoding="utf-8")
    return str(path)


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
