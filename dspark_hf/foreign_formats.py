"""
Drafters as others write them: the inverse of the readers in `modeling/`.

What a format cannot say is found by reading back what was written: any setting that comes out different is refused by
its name, so nothing is lost in silence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .modeling import DSparkConfig
from .modeling.checkpoint_formats import find_reader


Raw = dict[str, Any]
Weights = dict[str, torch.Tensor]

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
# Settings that the tensors tell, or that no format needs.
_NOT_COMPARED = ("owns_embedding", "owns_lm_head", "tie_word_embeddings")
_SPECULATORS_VERSION = "0.9.0"


def to_deepspec(config: DSparkConfig, weights: Weights) -> tuple[Raw, Weights]:
    """
    A drafter as DeepSpec saves it: `Qwen3DSparkModel`, or `Gemma4DSparkModel` for one with Gemma 4's layers.

    Args:
        config ([`DSparkConfig`]): Of the drafter.
        weights (`dict[str, torch.Tensor]`): Under our names, embedding and head included.

    Returns:
        The `config.json`, and the tensors (which DeepSpec calls as we do).

    Raises:
        `ValueError`: naming what DeepSpec cannot express, or what is missing.

    Source: DeepSpec's released `deepseek-ai/dspark_*_block7` checkpoints.
    """
    if config.num_target_layers is None:
        raise ValueError("`num_target_layers` of this drafter is not known, and DeepSpec needs it; give the target.")
    gemma4 = config.sandwich_norms or config.value_norm or config.layer_scalar
    raw = _shared(config) | (_gemma4(config) if gemma4 else _qwen3(config))
    raw |= {
        "architectures": ["Gemma4DSparkModel" if gemma4 else "Qwen3DSparkModel"],
        "block_size": config.block_size,
        "enable_confidence_head": config.enable_confidence_head,
        "markov_rank": config.markov_rank,
        "mask_token_id": config.mask_token_id,
        "num_target_layers": config.num_target_layers,
        "target_layer_ids": list(config.target_layer_ids),
        **_own_extras(config),
    }
    # As there, written only where they apply.
    if config.enable_confidence_head:
        raw["confidence_head_with_markov"] = config.confidence_head_with_markov
    if config.markov_rank:
        raw["markov_head_type"] = config.markov_head_type
    _check_expressed("DeepSpec", config, raw, weights)
    absent = [name for name in (EMBEDDING, HEAD) if name not in weights]
    if absent:
        raise ValueError(
            f"DeepSpec's checkpoints hold {' and '.join(absent)}, which this drafter borrows from its target; give "
            "the target as well."
        )
    return dict(sorted(raw.items())), dict(weights)


def to_speculators(
    config: DSparkConfig, weights: Weights, target: str, architectures: Sequence[str]
) -> tuple[Raw, Weights]:
    """
    A drafter as speculators saves it: `dspark`, or `dflash` for one without heads whose slot 0 is no draft.

    Args:
        config ([`DSparkConfig`]): Of the drafter.
        weights (`dict[str, torch.Tensor]`): Under our names. Embedding and head must be the target's own: they are
            left out, as speculators does, but for the head of a reduced vocabulary, which must be there.
        target (`str`): Hub id or folder of the target, from where speculators and vLLM load it.
        architectures (`Sequence[str]`): Of the target, as in its `config.json`.

    Returns:
        The `config.json`, and the tensors.

    Raises:
        `ValueError`: naming what speculators cannot express, or what is missing.

    Source: speculators 0.9, `speculators/models/dspark`.
    """
    dflash = not (config.sample_from_anchor or config.markov_rank or config.enable_confidence_head)
    reduced = config.draft_vocab_size is not None
    left_out = {EMBEDDING} if reduced else {EMBEDDING, HEAD}
    tensors = {name: tensor for name, tensor in weights.items() if name not in left_out}
    if reduced:
        if HEAD not in tensors:
            raise ValueError(
                "speculators' checkpoints with a reduced vocabulary hold its head, which this drafter borrows from "
                "its target; give the target as well."
            )
        ids = weights["d2t"].long()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    kind = "dflash" if dflash else "dspark"
    raw = {
        "architectures": ["DFlashDraftModel" if dflash else "DSparkDraftModel"],
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.target_layer_ids],
        "block_size": config.block_slots,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "dtype": _dtype(config),
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        "sliding_window_non_causal": "sliding_attention" not in config.causal_layer_types and _slides(config),
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "accept_tolerance": 0.0,
                    "proposal_type": "greedy",
                    "speculative_tokens": config.block_size,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"architectures": list(architectures), "name_or_path": target},
        },
        "speculators_model_type": kind,
        "speculators_version": _SPECULATORS_VERSION,
        "target_hidden_size": None if config.target_hidden_size == config.hidden_size else config.target_hidden_size,
        "tie_word_embeddings": False,
        "transformer_layer_config": dict(sorted((_shared(config) | _qwen3(config)).items())),
        **_own_extras(config),
    }
    if config.num_target_layers is not None:
        raw["num_target_layers"] = config.num_target_layers
    if not dflash:
        raw |= {
            "confidence_head_with_markov": config.enable_confidence_head and config.confidence_head_with_markov,
            "enable_confidence_head": config.enable_confidence_head,
            "markov_head_type": config.markov_head_type if config.markov_rank else "vanilla",
            "markov_rank": config.markov_rank,
        }
    _check_expressed("speculators", config, raw, tensors)
    return dict(sorted(raw.items())), tensors


def _shared(config: DSparkConfig) -> Raw:
    """Fields of Transformers' text configs that both families have under one name."""
    same = (
        "attention_bias bos_token_id eos_token_id hidden_size initializer_range intermediate_size layer_types "
        "max_position_embeddings num_attention_heads num_hidden_layers num_key_value_heads pad_token_id rms_norm_eps "
        "vocab_size"
    ).split()
    return {name: getattr(config, name) for name in same} | {
        "attention_dropout": 0.0,
        "dtype": _dtype(config),
        "tie_word_embeddings": False,
        "use_cache": True,
    }


def _qwen3(config: DSparkConfig) -> Raw:
    return {
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "max_window_layers": 0 if _slides(config) else config.num_hidden_layers,
        "model_type": "qwen3",
        "rope_parameters": dict(config.rope_parameters),
        "sliding_window": config.sliding_window if _slides(config) else None,
        "use_sliding_window": _slides(config),
    }


def _gemma4(config: DSparkConfig) -> Raw:
    """Gemma 4's layers of the full-attention kind, and none of what else Transformers' config of it turns on."""
    return {
        "attention_k_eq_v": config.attention_k_eq_v,
        "enable_moe_block": False,
        "final_logit_softcapping": config.final_logit_softcapping,
        "global_head_dim": config.head_dim,
        "head_dim": config.head_dim,
        "hidden_activation": config.hidden_act,
        "hidden_size_per_layer_input": 0,
        "model_type": "gemma4_text",
        "num_global_key_value_heads": config.num_key_value_heads,
        "num_kv_shared_layers": 0,
        "rope_parameters": {"full_attention": dict(config.rope_parameters)},
        "sliding_window": config.sliding_window,
        "target_model_type": "gemma4_text",
        "target_text_model_type": "gemma4_text",
        "use_double_wide_mlp": False,
        "vocab_size_per_layer_input": config.vocab_size,
    }


def _own_extras(config: DSparkConfig) -> Raw:
    """Settings that others do not read and we do when the checkpoint comes back."""
    extras = {name: getattr(config, name) for name in ("num_anchors", "confidence_temperatures")}
    return {name: value for name, value in extras.items() if value is not None}


def _slides(config: DSparkConfig) -> bool:
    return "sliding_attention" in config.layer_types


def _dtype(config: DSparkConfig) -> str:
    return str(config.dtype or "float32").removeprefix("torch.")


def _check_expressed(what: str, config: DSparkConfig, raw: Raw, weights: Weights) -> None:
    """Read back what was written and refuse what has become something else."""
    wanted = _meaning(config)
    found = _meaning(DSparkConfig(**find_reader(raw)(raw, set(weights)).fields))
    lost = [f"`{name}` {value!r}" for name, value in wanted.items() if found[name] != value]
    if lost:
        hint = ""
        if what == "DeepSpec" and config.draft_vocab_size is not None and _fits_speculators(config, weights):
            hint = " A reduced vocabulary goes into speculators' format."
        raise ValueError(f"{what} cannot express what this drafter is: {', '.join(lost)}.{hint}")


def _fits_speculators(config: DSparkConfig, weights: Weights) -> bool:
    """Whether speculators' format expresses a drafter with a reduced vocabulary, its head lent or its own."""
    try:
        to_speculators(config, {HEAD: weights["d2t"]} | weights, "target", ())  # of a head only the name is read
    except ValueError:
        return False
    return True


def _meaning(config: DSparkConfig) -> Raw:
    """Settings by name, those without effect made equal."""
    values = {name: getattr(config, name) for name in DSparkConfig.__annotations__ if name not in _NOT_COMPARED}
    slides = _slides(config)
    values |= {
        "attention_scaling": config.attention_scaling or 1 / math.sqrt(config.head_dim),
        "causal_layer_types": sorted(set(config.causal_layer_types) & set(config.layer_types)),
        "sliding_window": config.sliding_window if slides else None,
        "window_from_anchor": config.window_from_anchor if slides else None,
        "markov_head_type": config.markov_head_type if config.markov_rank else None,
        "confidence_head_with_markov": config.enable_confidence_head and config.confidence_head_with_markov,
        "rope_parameters": {name: value for name, value in config.rope_parameters.items() if value is not None},
        "target_layer_ids": list(config.target_layer_ids),
    }
    return values
