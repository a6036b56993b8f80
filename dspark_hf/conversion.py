"""A drafter's checkpoint out of any format that is read, into one of those that are written, weights bit for bit."""

from __future__ import annotations

import copy
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from transformers import PreTrainedModel
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from .card_inputs import TRAINING_NAME
from .files import whole_folder, write_json
from .foreign_formats import EMBEDDING, HEAD, Weights, to_deepspec, to_speculators
from .modeling import DSparkConfig, DSparkDraftModel
from .modeling.borrowing import COMPUTE_DTYPES
from .modeling.checkpoint_formats import find_reader
from .modeling.checkpoint_loading import converted_weights, find_file, read_raw_config, tensor_shapes, weight_files
from .target_outputs import text_config


FORMATS = ("dspark", "deepspec", "speculators")


@dataclass(frozen=True)
class Checkpoint:
    """
    A drafter's checkpoint in our words.

    Attributes:
        config ([`DSparkConfig`]): Of the drafter.
        weights (`dict[str, torch.Tensor]`): Under our names, in the dtypes of the files.
        source (`str`): The folder or Hub id that it came from.
    """

    config: DSparkConfig
    weights: Weights
    source: str


def read_checkpoint(source: str | Path) -> Checkpoint:
    """
    Read a drafter of any format, as strictly as `from_pretrained`.

    Args:
        source (`str` or `Path`): Folder or Hub id.

    Raises:
        `ValueError`, `OSError`: as [`DSparkDraftModel.from_pretrained`].
    """
    config = DSparkDraftModel.from_pretrained(source, dtype="auto").config
    files = weight_files(source, {})
    raw = read_raw_config(source, {})
    reading = find_reader(raw)(raw, set(tensor_shapes(files)))
    return Checkpoint(config, converted_weights(files, reading, config, str(source)), str(source))


def with_target(checkpoint: Checkpoint, target: PreTrainedModel) -> Checkpoint:
    """
    The same drafter with embedding and head of its target, where it has none of its own.

    Args:
        checkpoint ([`Checkpoint`]): Of the drafter.
        target (`PreTrainedModel`): Its target.

    Raises:
        `ValueError`: if the target is of another size, or its weights cannot be copied.
    """
    config, weights = copy.deepcopy(checkpoint.config), dict(checkpoint.weights)
    wanted = text_config(target)
    for name, found, field in (
        ("vocab_size", wanted.vocab_size, "vocab_size"),
        ("hidden_size", wanted.hidden_size, "target_hidden_size"),
        ("num_hidden_layers", wanted.num_hidden_layers, "num_target_layers"),
    ):
        expected = getattr(config, field)
        if expected is not None and expected != found:
            raise ValueError(
                f"The drafter was made for a target with {name} {expected}, and this one has {found}; give its own."
            )
    config.num_target_layers = wanted.num_hidden_layers
    if EMBEDDING not in weights:
        weights[EMBEDDING] = _weight(target.get_input_embeddings(), "embedding", checkpoint)
        config.owns_embedding = True
    if HEAD not in weights:
        weights[HEAD] = _head(target, checkpoint)
        config.owns_lm_head = True
    return replace(checkpoint, config=config, weights=weights)


def _weight(module: torch.nn.Module, what: str, checkpoint: Checkpoint) -> torch.Tensor:
    """A copy of a module's weight, in the drafter's dtype."""
    weight, vocab_size = getattr(module, "weight", None), checkpoint.config.vocab_size
    if weight is None or weight.dtype not in COMPUTE_DTYPES or weight.device.type == "meta":
        raise ValueError(f"The weight of the target's {what} cannot be copied: it is quantised or offloaded.")
    if getattr(module, "bias", None) is not None:
        raise ValueError(f"The target's {what} has a bias, which no checkpoint of a drafter has a place for.")
    if len(weight) < vocab_size:
        raise ValueError(f"The target's {what} has {len(weight)} rows for a vocabulary of {vocab_size}.")
    return weight.detach()[:vocab_size].to("cpu", checkpoint.weights["fc.weight"].dtype, copy=True)


def _head(target: PreTrainedModel, checkpoint: Checkpoint) -> torch.Tensor:
    """The target's head, of a reduced vocabulary its rows."""
    weight = _weight(target.get_output_embeddings(), "head", checkpoint)
    return weight if checkpoint.config.draft_vocab_size is None else weight[checkpoint.weights["d2t"].long()]


def check_borrowed(checkpoint: Checkpoint, target: PreTrainedModel) -> None:
    """
    Refuse a drafter whose embedding or head is not the target's, for a format that takes the target's.

    Raises:
        `ValueError`: naming it.
    """
    theirs = with_target(
        replace(
            checkpoint,
            weights={name: tensor for name, tensor in checkpoint.weights.items() if name not in (EMBEDDING, HEAD)},
        ),
        target,
    ).weights
    for name in (EMBEDDING, HEAD):
        own = checkpoint.weights.get(name)
        reduced = name == HEAD and checkpoint.config.draft_vocab_size is not None  # which is saved
        if own is not None and not reduced and not torch.equal(own, theirs[name].to(own.dtype)):
            raise ValueError(
                f"speculators takes the target's embedding and head, and {name} of this drafter is another than the "
                "target's: it cannot be expressed. Give the target it was trained for, or convert to deepspec."
            )


def convert(
    source: str | Path,
    destination: str | Path,
    to: str,
    target: PreTrainedModel | None = None,
    target_name: str | None = None,
    overwrite: bool = False,
) -> DSparkConfig:
    """
    Write a drafter in another format. What its folder says of training and generation goes along.

    Args:
        source (`str` or `Path`): Folder or Hub id of a drafter in any readable format.
        destination (`str` or `Path`): The new folder: whole or not there.
        to (`str`): One of `FORMATS`.
        target (`PreTrainedModel`, *optional*): Lends what the drafter borrows and the format saves. speculators needs
            it always.
        target_name (`str`, *optional*): Where speculators and vLLM find the target: folder or Hub id.
        overwrite (`bool`, *optional*, defaults to `False`): Whether to replace a checkpoint at `destination`.

    Returns:
        [`DSparkConfig`]: of what was written.

    Raises:
        `ValueError`: if the format cannot express the drafter, naming why; nothing is written then.
        `OSError`: if there is no config or no safetensors file.
    """
    if to not in FORMATS:
        raise ValueError(f"`to` is {to!r}; it must be one of {', '.join(FORMATS)}.")
    checkpoint = read_checkpoint(source)
    if to == "speculators":
        if target is None or target_name is None:
            raise ValueError("speculators names the target in its config and takes its embedding; give the target.")
        check_borrowed(checkpoint, target)
    with whole_folder(destination, overwrite) as folder:
        if to == "dspark":
            config = _write_own(folder, checkpoint, target)
        else:
            if target is not None:
                checkpoint = with_target(checkpoint, target)
            config = checkpoint.config
            if to == "deepspec":
                raw, weights = to_deepspec(config, checkpoint.weights)
            else:
                architectures = target.config.architectures or [type(target).__name__]
                raw, weights = to_speculators(config, checkpoint.weights, target_name, architectures)
            write_json(folder / CONFIG_NAME, raw)
            save_torch_state_dict(weights, folder)
            _copy(source, GENERATION_CONFIG_NAME, folder)
        _copy(source, TRAINING_NAME, folder)
    return config


def _write_own(folder: Path, checkpoint: Checkpoint, target: PreTrainedModel | None) -> DSparkConfig:
    """As `save_pretrained` does, with the tensors as they are in the files."""
    drafter = DSparkDraftModel.from_pretrained(checkpoint.source, dtype="auto")
    if target is not None:
        drafter.config.num_target_layers = with_target(checkpoint, target).config.num_target_layers
    drafter.save_pretrained(folder, state_dict=checkpoint.weights)
    return drafter.config


def _copy(source: str | Path, name: str, folder: Path) -> None:
    """A file of the drafter, if it has it."""
    found = find_file(source, name, {})
    if found is not None:
        shutil.copyfile(found, folder / name)
