"""Checkpoints of speculators: the backbone's config inside another one, taps counted from the embedding."""

from typing import Any

from .format_fields import (
    Reading,
    draft_vocab_size,
    flag,
    integer,
    picked,
    qwen3_fields,
    require,
    settings,
    without_t2d,
)


# What Transformers' Qwen3Config makes of names that are absent: speculators may write only what differs from it.
_QWEN3_DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "rope_theta": 10000.0,
}


def from_speculators(raw: dict[str, Any], names: set[str]) -> Reading:
    """
    A DSpark or DFlash drafter of speculators. Its tap `i` is the target's `hidden_states[i]`, our `i - 1`; the
    window of its sliding layers is counted from the anchor. Of the target's number of layers, anchors and calibration
    it says nothing unless we wrote it.

    Source: speculators 0.9, `speculators/models/dspark` and `speculators/models/dflash`.
    """
    layers = _QWEN3_DEFAULTS | settings(raw, "transformer_layer_config")
    if layers.get("model_type", "qwen3") != "qwen3":
        raise ValueError(
            f"`transformer_layer_config` is of model_type {layers['model_type']!r}; of speculators' drafters those "
            "with Qwen3 layers can be run."
        )
    require(raw, "speculators drafter", "aux_hidden_state_layer_ids", "block_size", "mask_token_id")
    from_anchor = _samples_from_anchor(raw)
    fields = qwen3_fields(layers, names) | picked(raw, "mask_token_id", "target_hidden_size", "dtype")
    fields |= picked(raw, "confidence_temperatures", "num_anchors", "num_target_layers") | _heads(raw, names)
    fields |= {
        "target_layer_ids": _taps(raw["aux_hidden_state_layer_ids"]),
        "block_size": integer(raw, "block_size") - (not from_anchor),
        "sample_from_anchor": from_anchor,
        "draft_vocab_size": draft_vocab_size(raw, integer(layers, "vocab_size"), names),
        "window_from_anchor": True,
        "causal_layer_types": [] if flag(raw, "sliding_window_non_causal", default=False) else ["sliding_attention"],
    }
    return Reading(fields, without_t2d(names), d2t_offsets=True)


def _taps(ids: Any) -> list[int]:
    if not isinstance(ids, list) or any(not isinstance(tap, int) or isinstance(tap, bool) for tap in ids):
        raise ValueError(f"`aux_hidden_state_layer_ids` is {ids!r}; it must be a list of integers.")
    return [tap - 1 for tap in ids]


def _heads(raw: dict[str, Any], names: set[str]) -> dict[str, Any]:
    if (raw.get("speculators_model_type") or settings(raw, "speculators_config").get("algorithm")) == "dflash":
        return {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}
    rank = integer({"markov_rank": 0} | picked(raw, "markov_rank"), "markov_rank")
    confident = flag(raw, "enable_confidence_head", default="confidence_head.proj.weight" in names)
    return {
        "markov_rank": rank,
        "markov_head_type": raw.get("markov_head_type") or "vanilla",
        "enable_confidence_head": confident,
        "confidence_head_with_markov": confident and flag(raw, "confidence_head_with_markov", default=rank > 0),
    }


def _samples_from_anchor(raw: dict[str, Any]) -> bool:
    """Whether slot 0 is a draft; older checkpoints only tell by how many tokens a block is meant to give."""
    if raw.get("sample_from_anchor") is not None:
        return flag(raw, "sample_from_anchor", default=True)
    block_size, methods = integer(raw, "block_size"), settings(raw, "speculators_config").get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else None
    tokens = first.get("speculative_tokens") if isinstance(first, dict) else None
    if tokens not in (block_size, block_size - 1):
        raise ValueError(
            f"The config has no `sample_from_anchor`, and its `speculative_tokens` is {tokens!r} for `block_size` "
            f"{block_size}: whether slot 0 is a draft cannot be told. Add `sample_from_anchor` to config.json."
        )
    return tokens == block_size
