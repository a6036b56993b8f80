"""Drafter checkpoints as others write them, told apart by their raw JSON."""

from collections.abc import Callable
from typing import Any

from .format_deepspec import from_deepspec
from .format_dflash import from_dflash, from_modelopt, from_specforge
from .format_fields import Reading, settings, texts
from .format_speculators import from_speculators


READABLE = (
    "checkpoints saved by dspark_hf (model_type 'dspark'), by DeepSpec and NeMo AutoModel (architectures "
    "'...DSparkModel'), by z-lab DFlash 0.1 ('DFlashDraftModel'), and the DSpark drafters of speculators, SpecForge "
    "and NVIDIA ModelOpt"
)
# Drafters of kinds that this model does not run, by what their names contain (in lower case).
_OTHER_KINDS = {
    "dflash2": "DFlash2",
    "domino": "Domino",
    "lilicorr": "LiLiCorr",
    "dflare": "DFlare",
    "eagle": "EAGLE",
    "medusa": "Medusa",
    "hydra": "Hydra",
    "mtp": "an MTP head",
    "nextn": "an MTP head",
}


Reader = Callable[[dict[str, Any], set[str]], Reading]


def find_reader(raw: Any) -> Reader:
    """
    Find out what wrote a drafter's `config.json`, before its weights are touched.

    Args:
        raw (`dict`): The JSON as it stands in the folder.

    Returns:
        `Callable`: Takes the JSON and the names of all tensors, returns a [`Reading`].

    Raises:
        `ValueError`: if the format is not one that can be read, saying what was found.
    """
    if not isinstance(raw, dict):
        raise ValueError(f"config.json holds {_shown(raw)} where an object of settings belongs.")
    architectures = texts(raw, "architectures")
    nested = settings(raw, "dflash_config")
    if raw.get("quantization_config"):
        raise ValueError("config.json has a `quantization_config`; drafters with quantised weights cannot be read.")
    of_speculators = settings(raw, "speculators_config")
    kind = raw.get("speculators_model_type") or of_speculators.get("algorithm")
    told = [kind, raw.get("model_type"), nested.get("projector_type") or raw.get("projector_type"), *architectures]
    told += ["medusa"] if "medusa_num_heads" in raw else ["dflash2"] if "selector_rank" in nested else []
    for part, other in _OTHER_KINDS.items():
        if any(part in str(word).lower() for word in told):
            raise ValueError(f"This is a drafter of another kind, {other}, which cannot be run. {_found(raw)}")
    if kind is not None:
        if kind in ("dspark", "dflash"):
            return from_speculators
    elif raw.get("model_type") == "dspark" and "dflash_config" not in raw:
        return from_own
    elif "DSparkDraftModel" in architectures and "dflash_config" in raw:
        return from_specforge
    elif "DFlashDraftModel" in architectures and nested.get("projector_type") == "dspark":
        # SpecForge once used that name too, and never these two settings.
        return from_modelopt if {"shift_label", "use_confidence_head"} & nested.keys() else from_specforge
    elif "DFlashDraftModel" in architectures and nested.get("projector_type") in (None, "dflash"):
        return from_dflash
    elif any(name.endswith("DSparkModel") for name in architectures):
        return from_deepspec
    raise ValueError(f"This is not a drafter that can be read. {_found(raw)}")


def from_own(raw: dict[str, Any], names: set[str]) -> Reading:
    """A checkpoint that `save_pretrained` wrote."""
    return Reading(dict(raw))


def _found(raw: dict[str, Any]) -> str:
    words = [f"model_type {_shown(raw.get('model_type'))}", f"architectures: {_shown(raw.get('architectures'))}"]
    words += [
        f"{name} {_shown(place.get(name))}"
        for place in (raw, settings(raw, "dflash_config"))
        for name in ("speculators_model_type", "projector_type")
        if name in place
    ]
    return f"Its config has {', '.join(words)}. Readable are {READABLE}."


def _shown(value: Any) -> str:
    """What was found, at a length that a message can bear."""
    shown = ", ".join(map(str, value)) if isinstance(value, list) else repr(value)
    return (shown[:100] + "..." if len(shown) > 100 else shown) or "none"
