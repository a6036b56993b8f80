"""What a result or a bug report has to say about where it came from: machine and versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Sequence
from pathlib import Path


PACKAGES = (
    "dspark-hf",
    "torch",
    "transformers",
    "tokenizers",
    "accelerate",
    "huggingface-hub",
    "safetensors",
    "numpy",
    "gguf",
    "peft",
    "datasets",
)
# Those that texts, and how fast they come, depend on.
ENGINE = PACKAGES[:3]


def cache_folder() -> Path:
    """Where what was fetched, converted or measured is kept.

    Returns:
        `Path`: `$DSPARK_CACHE` if set, otherwise `dspark_hf` in `$XDG_CACHE_HOME`, otherwise `~/.cache/dspark_hf`.

    Raises:
        `ValueError`: if it is in the home of a user that does not exist.
    """
    explicit = os.environ.get("DSPARK_CACHE")
    folder = Path(explicit or os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    try:
        folder = folder.expanduser().absolute()
    except RuntimeError as error:
        raise ValueError(
            f"The cache folder {str(folder)!r} is in the home of a user that does not exist; set DSPARK_CACHE to a "
            "folder of yours."
        ) from error
    return folder if explicit else folder / "dspark_hf"


def package_versions(names: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Versions of dspark_hf and of the packages it works with; "not installed" for those that are absent."""
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def machine() -> dict[str, str | int]:
    """The machine: operating system, Python, processor, cores, torch's threads and the CUDA devices it sees."""
    import torch

    cuda = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "processor": processor_name(),
        "cores": os.cpu_count() or 0,
        "torch_threads": torch.get_num_threads(),
        "cuda": f"{torch.version.cuda} ({', '.join(cuda)})" if cuda else "no device",
    }


def processor_name() -> str:
    """The processor's name; Linux gives it in /proc/cpuinfo, elsewhere the platform module knows it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
