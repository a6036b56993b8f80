"""What the readers of checkpoint formats share: values picked out of raw JSON, and what they make of them."""

from dataclasses import dataclass, field
from typing import Any


# Fields that every format with a Qwen3 backbone has under our names.
_SHARED = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "hidden_act rms_norm_eps max_position_embeddings initializer_range layer_types sliding_window num_target_layers "
    "num_anchors confidence_temperatures pad_token_id bos_token_id eos_token_id"
).split()


@dataclass(frozen=True)
class Reading:
    """
    What a checkpoint of another format is in the words of ours.

    Attributes:
        fields (`dict`): Keyword arguments of [`DSparkConfig`].
        renamed (`dict[str, str | None]`): Our name of each tensor that is called something else, `None` for one that
            only repeats what others say.
        d2t_offsets (`bool`): Whether `d2t` holds what is to be added to each draft id rather than target ids.
    """

    fields: dict[str, Any]
    renamed: dict[str, str | None] = field(default_factory=dict)
    d2t_offsets: bool = False


def settings(raw: dict[str, Any], name: str) -> dict[str, Any]:
    """An object inside the JSON; empty if it is absent."""
    value = raw.get(name)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"`{name}` in config.json is {value!r}; it must be an object of settings.")
    return value or {}


def texts(raw: dict[str, Any], name: str) -> list[str]:
    """A list of strings inside the JSON; empty if it is absent."""
    value = raw.get(name)
    if value is not None and (not isinstance(value, list) or not all(isinstance(item, str) for item in value)):
        raise ValueError(f"`{name}` in config.json is {value!r}; it must be a list of strings.")
    return value or []


def integer(raw: dict[str, Any], name: str) -> int:
    """A whole number inside the JSON that a reader computes with."""
    value = raw.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"`{name}` in config.json is {value!r}; it must be an integer.")
    return value


def flag(raw: dict[str, Any], name: str, default: bool) -> bool:
    """True or false inside the JSON."""
    value = raw.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"`{name}` in config.json is {value!r}; it must be true or false.")
    return default if value is None else value


def picked(raw: dict[str, Any], *names: str) -> dict[str, Any]:
    """Values that are there and not null, by name."""
    return {name: raw[name] for name in names if raw.get(name) is not None}


def require(raw: dict[str, Any], what: str, *names: str) -> None:
    """Refuse a config that lacks what cannot be guessed."""
    absent = [name for name in names if raw.get(name) is None]
    if absent:
        raise ValueError(f"The config of this {what} lacks {', '.join(absent)}; it cannot be guessed.")


def shared_fields(raw: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """Fields whose names and meanings are ours, the dtype, and what of embedding and head the checkpoint owns."""
    fields = picked(raw, *_SHARED)
    dtype = raw.get("dtype") or raw.get("torch_dtype")
    if dtype is not None:
        fields["dtype"] = dtype
    return fields | {"owns_embedding": "embed_tokens.weight" in names, "owns_lm_head": "lm_head.weight" in names}


def qwen3_fields(raw: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """The backbone of a config that was written by Transformers' `Qwen3Config` or for it."""
    fields = shared_fields(raw, names)
    bias = flag(raw, "attention_bias", default=False)
    fields |= {"attention_bias": bias, "attention_output_bias": bias, "rope_parameters": rope_parameters(raw)}
    # Qwen3's heads are of this size whatever its width, and a list of layer types is what Qwen3Config makes of these.
    fields.setdefault("head_dim", 128)
    if "layer_types" not in fields and flag(raw, "use_sliding_window", default=False) and "sliding_window" in fields:
        full = integer({"max_window_layers": 28} | picked(raw, "max_window_layers"), "max_window_layers")
        kinds = ("full_attention" if layer < full else "sliding_attention" for layer in range(layer_count(raw, names)))
        fields["layer_types"] = list(kinds)
    return fields


def rope_parameters(raw: dict[str, Any]) -> dict[str, Any]:
    """RoPE from its place in Transformers 5, or from where it stood before: the base on top, the variant beside it."""
    if raw.get("rope_parameters"):
        return dict(settings(raw, "rope_parameters"))
    if raw.get("rope_theta") is None:
        raise ValueError("The config has neither `rope_parameters` nor `rope_theta`; the base cannot be guessed.")
    scaling = dict(settings(raw, "rope_scaling"))
    legacy = scaling.pop("type", "default")
    rope_type = scaling.pop("rope_type", legacy)
    return {"rope_type": rope_type, "rope_theta": raw["rope_theta"], **scaling}


def layer_count(raw: dict[str, Any], names: set[str]) -> int:
    """`num_hidden_layers`, compared with the weights before anything of that size is made."""
    count = integer(raw, "num_hidden_layers")
    if names and count > len(names):
        raise ValueError(f"`num_hidden_layers` is {count}, but the weights are only {len(names)} tensors.")
    return count


def draft_vocab_size(raw: dict[str, Any], vocab_size: int, names: set[str]) -> int | None:
    """The size of a reduced vocabulary, `None` for the target's whole."""
    size = raw.get("draft_vocab_size")
    return None if size == vocab_size and "d2t" not in names else size


def without_t2d(names: set[str]) -> dict[str, str | None]:
    """The mask of the target's vocabulary says what `d2t` says: it is compared with it and not kept."""
    return {"t2d": None} if "t2d" in names else {}
