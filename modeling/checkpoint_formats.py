"""Drafter checkpoints as others write them, told apart by raw JSON and tensor names: one pure function a format."""

import math
from collections.abc import Callable


# Formats that exist but are not DSpark drafters of a kind this model runs, by what gives them away.
_KNOWN_ARCHITECTURES = {
    "DFlash2DraftModel": "z-lab DFlash2",
    "DFlashDraftModel": "z-lab DFlash or NVIDIA ModelOpt",
    "DSparkDraftModel": "speculators or SpecForge",
}


Reader = Callable[[dict, set[str]], dict]


def find_reader(raw: dict) -> Reader:
    """
    Find out what wrote a drafter's `config.json`, before its weights are touched.

    Args:
        raw (`dict`): The JSON as it stands in the folder.

    Returns:
        `Callable`: Takes the JSON and the names of all tensors, returns keyword arguments of [`DSparkConfig`].

    Raises:
        `ValueError`: if the format is not one that can be read, saying what was found.
    """
    if raw.get("model_type") == "dspark":
        return from_own
    architectures = raw.get("architectures") or []
    if any(name.endswith("DSparkModel") for name in architectures):
        return from_deepspec
    found = ", ".join(f"{name} ({_KNOWN_ARCHITECTURES.get(name, 'not known')})" for name in architectures)
    raise ValueError(
        f"This is not a drafter that can be read: its config has model_type {raw.get('model_type')!r}, architectures: "
        f"{found or 'none'}. Readable are checkpoints saved by dspark_hf (model_type 'dspark') and by DeepSpec "
        "(architectures '...DSparkModel')."
    )


def from_own(raw: dict, tensor_names: set[str]) -> dict:
    """Fields of a checkpoint that `save_pretrained` wrote."""
    return dict(raw)


def from_deepspec(raw: dict, tensor_names: set[str]) -> dict:
    """
    Fields of a DeepSpec checkpoint (`Qwen3DSparkModel`, `Gemma4DSparkModel`): the target's text config with the
    drafter's own fields beside it.

    Source: DeepSpec's released `deepseek-ai/dspark_*_block7` checkpoints.
    """
    architecture = raw["architectures"][0]
    required = ("target_layer_ids", "num_target_layers", "block_size", "mask_token_id", "vocab_size", "markov_rank")
    if architecture.startswith("Gemma4"):
        # Transformers 5.11 and later drop the last two when they write such a config again.
        required += ("hidden_activation", "rope_parameters", "global_head_dim", "num_global_key_value_heads")
    absent = [name for name in required if name not in raw]
    if absent:
        raise ValueError(f"The config of this {architecture} lacks {', '.join(absent)}; it cannot be guessed.")
    shared = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
        "rms_norm_eps max_position_embeddings initializer_range layer_types sliding_window target_layer_ids "
        "num_target_layers block_size mask_token_id markov_rank markov_head_type enable_confidence_head "
        "confidence_head_with_markov num_anchors confidence_temperatures pad_token_id bos_token_id eos_token_id dtype"
    ).split()
    fields = {name: raw[name] for name in shared if raw.get(name) is not None}
    # DeepSpec writes these two only where they apply.
    fields.setdefault("enable_confidence_head", False)
    fields.setdefault("confidence_head_with_markov", False)
    fields["owns_embedding"] = "embed_tokens.weight" in tensor_names
    fields["owns_lm_head"] = "lm_head.weight" in tensor_names
    if architecture.startswith("Gemma4"):
        fields |= _gemma4_family(raw)
    elif architecture.startswith("Qwen3"):
        bias = raw.get("attention_bias", False)
        fields |= {
            "hidden_act": raw["hidden_act"],
            "attention_bias": bias,
            "attention_output_bias": bias,
            "rope_parameters": _rope_parameters(raw),
        }
    else:
        raise ValueError(
            f"`architectures` is {architecture!r}, a DeepSpec drafter of a family that cannot be run; readable are "
            "Qwen3DSparkModel and Gemma4DSparkModel."
        )
    return fields


def _gemma4_family(raw: dict) -> dict:
    # A drafter's layers are all of the full-attention kind, whose head sizes Gemma 4 keeps in fields of their own.
    keys_are_values = raw.get("attention_k_eq_v", False)
    key_value_heads = raw["num_global_key_value_heads"] if keys_are_values else raw["num_key_value_heads"]
    return {
        "hidden_act": raw["hidden_activation"],
        "head_dim": raw["global_head_dim"],
        "num_key_value_heads": key_value_heads,
        "attention_k_eq_v": keys_are_values,
        "attention_bias": raw.get("attention_bias", False),
        "attention_output_bias": raw.get("attention_bias", False),
        "attention_scaling": 1.0,
        "value_norm": True,
        "sandwich_norms": True,
        "layer_scalar": True,
        "embedding_scale": math.sqrt(raw["hidden_size"]),
        "final_logit_softcapping": raw.get("final_logit_softcapping"),
        "rope_parameters": dict(raw["rope_parameters"]["full_attention"]),
    }


def _rope_parameters(raw: dict) -> dict:
    if raw.get("rope_parameters"):
        return dict(raw["rope_parameters"])
    # Before transformers 5 the base stood at the top level and the variant beside it.
    if "rope_theta" not in raw:
        raise ValueError("The config has neither `rope_parameters` nor `rope_theta`; the base cannot be guessed.")
    scaling = dict(raw.get("rope_scaling") or {})
    rope_type = scaling.pop("rope_type", scaling.pop("type", "default"))
    return {"rope_type": rope_type, "rope_theta": raw["rope_theta"], **scaling}
