"""What the tests share: the reference fixtures, and models loaded from them."""

import os


# Before anything reads it: no test may wait for a network. Subprocesses inherit it.
os.environ["HF_HUB_OFFLINE"] = "1"

# ruff: noqa: E402
import json
import uuid
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from dspark_hf import DSparkDraftModel
from dspark_hf.environment import cache_folder


FIXTURES = Path(__file__).parent / "fixtures"
# The folders with a drafter that DeepSpec wrote and the outputs it computed.
DEEPSPEC = tuple(sorted(folder.name for folder in FIXTURES.glob("deepspec-*")))
# The same of z-lab's DFlash, and of speculators.
DFLASH = ("dflash-nested-sliding", "dflash-top-level")
SPECULATORS = tuple(sorted(folder.name for folder in FIXTURES.glob("speculators-*")))

logging.disable_progress_bar()


def load_drafter(name: str, **kwargs: Any) -> DSparkDraftModel:
    """A fresh drafter of a fixture folder; `kwargs` as for `from_pretrained`."""
    return DSparkDraftModel.from_pretrained(FIXTURES / name / "drafter", **kwargs)


@cache
def load_golden(name: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The reference outputs of a fixture folder: `golden.json` and `golden.safetensors`."""
    folder = FIXTURES / name
    return json.loads((folder / "golden.json").read_text()), load_file(folder / "golden.safetensors")


@pytest.fixture(scope="session", name="load_drafter")
def load_drafter_fixture() -> Callable[..., DSparkDraftModel]:
    """[`load_drafter`], for tests that ask for it by argument."""
    return load_drafter


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A cache of each test's own, with what the user's holds (the demo target) but for profiles of the machine."""
    folder = tmp_path_factory.getbasetemp() / f"cache-{uuid.uuid4().hex}"
    folder.mkdir()
    for path in cache_folder().glob("*"):
        if path.name != "profiles":
            (folder / path.name).symlink_to(path)
    monkeypatch.setenv("DSPARK_CACHE", str(folder))


@pytest.fixture
def no_grad():
    """For files of tests that only decode, which name it in `pytestmark`."""
    with torch.no_grad():
        yield


@pytest.fixture(scope="session")
def tiny_target() -> PreTrainedModel:
    """The six-layer character model that the drafters of most folders were made for, in float32."""
    return AutoModelForCausalLM.from_pretrained(FIXTURES / "tiny-target").eval()
