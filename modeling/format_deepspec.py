"""Checkpoints of DeepSpec, and of NeMo AutoModel, which writes the same fields and names."""

import math
from typing import Any

from .format_fields import (
    Reading,
    flag,
    integer,
    picked,
    qwen3_fields,
    require,
    settings,
    shared_fields,
    texts,
)


_REQUIRED = ("target_layer_ids", "num_target_layers", "block_size", "mask_token_id", "vocab_size", "markov_rank")
# Transformers 5.11 and later drop the last two when they write such a config again.
_REQUIRED_OF_GEMMA4 = ("hidden_activation", "rope_parameters", "global_head_dim", "num_global_key_value_heads")


def from_deepspec(raw: dict[str, Any], names: set[str]) -> Reading:
    """
    A DeepSpec checkpoint (`Qwen3DSparkModel`, `Gemma4DSparkModel`): the target's text config with the drafter's own
    fields beside it.

    Source: DeepSpec's released `deepseek-ai/dspark_*_block7` checkpoints; NeMo AutoModel's `*DSparkModel`.
    """
    architecture = next(name for name in texts(raw, "architectures") if name.endswith("DSparkModel"))
    gemma4 = architecture.startswith("Gemma4")
    if not gemma4 and architecture != "Qwen3DSparkModel":
        raise ValueError(
            f"`architectures` is {architecture!r}, a DeepSpec drafter of a family that cannot be run; readable are "
            "Qwen3DSparkModel and Gemma4DSparkModel."
        )
    require(raw, architecture, *_REQUIRED, *(_REQUIRED_OF_GEMMA4 if gemma4 else ("hidden_act",)))
    fields = _gemma4_fields(raw, names) if gemma4 else qwen3_fields(raw, names)
    fields |= picked(raw, "target_layer_ids", "block_size", "mask_token_id", "markov_rank", "markov_head_type")
    # These two are only written where they apply.
    for name in ("enable_confidence_head", "confidence_head_with_markov"):
        fields[name] = flag(raw, name, default=False)
    return Reading(fields)


def _gemma4_fields(raw: dict[str, Any], names: set[str]) -> dict[str, Any]:
    # A drafter's layers are all of the full-attention kind, whose head sizes Gemma 4 keeps in fields of their own.
    keys_are_values = flag(raw, "attention_k_eq_v", default=False)
    key_value_heads = raw["num_global_key_value_heads"] if keys_are_values else raw["num_key_value_heads"]
    bias = flag(raw, "attention_bias", default=False)
    return shared_fields(raw, names) | {
        "hidden_act": raw["hidden_activation"],
        "head_dim": raw["global_head_dim"],
        "num_key_value_heads": key_value_heads,
        "attention_k_eq_v": keys_are_values,
        "attention_bias": bias,
        "attention_output_bias": bias,
        "attention_scaling": 1.0,
        "value_norm": True,
        "sandwich_norms": True,
        "layer_scalar": True,
        "embedding_scale": math.sqrt(abs(integer(raw, "hidden_size"))),
        "final_logit_softcapping": raw.get("final_logit_softcapping"),
        "rope_parameters": dict(settings(settings(raw, "rope_parameters"), "full_attention")),
    }
