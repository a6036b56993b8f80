"""A drafter's files: found, compared with what the model expects before anything is allocated, and converted."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from .configuration_dspark import DSparkConfig
from .format_fields import Reading


# Arguments of `from_pretrained` that say where the files are.
HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def find_file(path: str | Path, name: str, where: dict[str, Any]) -> str | None:
    """A file of a folder or Hub repository on this machine, downloaded if need be; `None` if there is none."""
    return cached_file(path, name, _raise_exceptions_for_missing_entries=False, **where)


def read_raw_config(path: str | Path, where: dict[str, Any]) -> Any:
    """The `config.json` of a folder or Hub repository, as it stands."""
    try:
        file = cached_file(path, CONFIG_NAME, **where)
        raw = None if file is None else json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        kind = "a folder" if Path(path).is_dir() else "no folder on this machine, so taken for a Hub id"
        raise OSError(f"The config.json of the drafter {str(path)!r} ({kind}) could not be read: {error}") from error
    if file is None:
        raise OSError(f"{str(path)!r} has no config.json; give the folder or Hub id of a drafter.")
    return raw


def make_config(config_class: type[DSparkConfig], fields: dict[str, Any]) -> DSparkConfig:
    """
    The configuration that fields of a file make.

    Raises:
        `ValueError`: if a field is of a kind that it cannot be.
    """
    try:
        return config_class(**fields)
    except (StrictDataclassError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"config.json cannot be made into a DSparkConfig: {error}") from error


def weight_files(path: str | Path, where: dict[str, Any], variant: str | None = None) -> list[str]:
    """A checkpoint's safetensors files on this machine, downloaded if need be."""
    name, index_name = SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME
    if variant is not None:
        name = name.removesuffix("safetensors") + f"{variant}.safetensors"
        index_name = index_name.removesuffix("json") + f"{variant}.json"
    # As in transformers, a single file comes before an index.
    if (single := find_file(path, name, where)) is not None:
        return [single]
    if (index := find_file(path, index_name, where)) is None:
        raise OSError(f"{path} has neither {name} nor {index_name} (other weight formats are not read).")
    parts = _parts(index)
    strange = [part for part in parts if Path(part).name != part or not part.endswith(".safetensors")]
    if strange or not parts:
        raise ValueError(f"{index_name} of {path} names {strange}; only safetensors files beside it are read.")
    return [cached_file(path, part, **where) for part in parts]


def _parts(index: str) -> list[str]:
    try:
        content = json.loads(Path(index).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{index} is not JSON: {error}.") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(part, str) for part in weight_map.values()):
        raise ValueError(f"{index} has no `weight_map` from tensors to files.")
    return sorted(set(weight_map.values()))


def tensor_shapes(files: Iterable[str]) -> dict[str, list[int]]:
    """Shapes of all tensors in a checkpoint, by name, from the headers of its files."""
    shapes: dict[str, list[int]] = {}
    for file in files:
        with _opened(file) as tensors:
            shapes |= {name: list(tensors.get_slice(name).get_shape()) for name in tensors.keys()}
    return shapes


def _opened(file: str) -> Any:
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{file} is not a whole safetensors file ({error}); download it again.") from error


def check_tensors(
    model_class: type[nn.Module], config: DSparkConfig, reading: Reading, shapes: dict[str, list[int]], path: str
) -> None:
    """
    Compare a checkpoint with the model its config describes, before anything is allocated.

    Raises:
        `ValueError`: naming the tensors, as the checkpoint calls them, that are missing, left over or of another
            shape.
    """
    with torch.device("meta"):
        expected = {name: list(value.shape) for name, value in model_class(config).state_dict().items()}
    calls = {name: reading.renamed.get(name, name) for name in shapes}
    by_our_name: dict[str, str] = {}
    problems = []
    for name, ours in calls.items():
        if ours is not None and ours in by_our_name:
            problems.append(f"{by_our_name[ours]} and {name} both stand for {ours}")
        elif ours is not None:
            by_our_name[ours] = name
    problems += [f"missing {name}" for name in sorted(expected.keys() - by_our_name.keys())]
    problems += [f"left over {by_our_name[ours]}" for ours in sorted(by_our_name.keys() - expected.keys())]
    for ours in sorted(expected.keys() & by_our_name.keys()):
        name = by_our_name[ours]
        if expected[ours] != shapes[name]:
            problems.append(f"{name} is {shapes[name]}, the config says {expected[ours]}")
    if "t2d" in shapes and "t2d" in reading.renamed and shapes["t2d"] != [config.vocab_size]:
        problems.append(f"t2d is {shapes['t2d']}, the config says {[config.vocab_size]}")
    if problems:
        raise ValueError(f"The weights of {path} do not fit its config: {'; '.join(problems)}.")


def converted_weights(
    files: Iterable[str], reading: Reading, config: DSparkConfig, path: str
) -> dict[str, torch.Tensor]:
    """
    All tensors of a checkpoint under our names, `d2t` as target ids.

    Raises:
        `ValueError`: if `d2t` or `t2d` cannot be right.
    """
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        with _opened(file) as tensors:
            weights |= {name: tensors.get_tensor(name) for name in tensors.keys()}
    if "d2t" in weights:
        ids = weights["d2t"]
        if reading.d2t_offsets and not ids.is_floating_point():
            ids = ids.long() + torch.arange(len(ids))
        weights["d2t"] = check_draft_ids(ids, config.vocab_size, f"`d2t` of {path}")
        t2d = weights.get("t2d")
        if t2d is not None and not torch.equal(t2d.nonzero().flatten(), weights["d2t"]):
            raise ValueError(f"`t2d` of {path} marks other tokens than `d2t` names; one of them is wrong.")
    ours = {reading.renamed.get(name, name): tensor for name, tensor in weights.items()}
    ours.pop(None, None)
    return ours


def check_draft_ids(ids: torch.Tensor, vocab_size: int, what: str) -> torch.LongTensor:
    """
    The tokens of a reduced vocabulary.

    Args:
        ids (`torch.Tensor` of shape `(draft_vocab_size,)`): Target ids, of an integer dtype.
        vocab_size (`int`): Of the target.
        what (`str`): How messages call them.

    Raises:
        `ValueError`: if they are not increasing ids of the vocabulary.
    """
    if ids.dim() != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool or not len(ids):
        raise ValueError(f"{what} is {ids.dtype} of shape {list(ids.shape)}; it must be integers, one a draft token.")
    ids = ids.long()
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        raise ValueError(f"{what} names token {int(outside[0])}; the target's are 0 to {vocab_size - 1}.")
    wrong = (ids[1:] <= ids[:-1]).nonzero().flatten()
    if len(wrong):
        place = int(wrong[0])
        raise ValueError(
            f"{what} names token {int(ids[place + 1])} after {int(ids[place])}; the ids must be increasing, each once."
        )
    return ids


def check_loaded(model: nn.Module, info: dict[str, Any], path: str) -> None:
    """Nothing may have been left out on the way into the model, and a broken download must not draft."""
    problems = [f"{kind}: {sorted(map(str, found))}" for kind, found in info.items() if found]
    if problems:
        raise ValueError(f"{path} was not loaded completely: {'; '.join(problems)}.")
    broken = [name for name, value in model.state_dict().items() if not torch.isfinite(value).all()]
    if broken:
        raise ValueError(f"{path} holds values that are not finite in {', '.join(broken)}.")
