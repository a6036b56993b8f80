"""
Checkpoints of the DFlash family, with settings in `dflash_config`: z-lab's own, and the DSpark drafters that SpecForge
and NVIDIA ModelOpt train on that backbone.
"""

from typing import Any

from .format_fields import (
    Reading,
    draft_vocab_size,
    flag,
    integer,
    layer_count,
    picked,
    qwen3_fields,
    require,
    settings,
    without_t2d,
)


# ModelOpt's flat names of the heads, and ours.
_FLAT_NAMES = {
    "markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_w2.weight": "markov_head.markov_w2.weight",
    "gate_proj.weight": "markov_head.gate_proj.weight",
    "gate_proj.bias": "markov_head.gate_proj.bias",
    "joint_proj.weight": "markov_head.joint_proj.weight",
    "joint_proj.bias": "markov_head.joint_proj.bias",
    "confidence_proj.weight": "confidence_head.proj.weight",
    "confidence_proj.bias": "confidence_head.proj.bias",
}
_NO_HEADS = {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}


def from_dflash(raw: dict[str, Any], names: set[str]) -> Reading:
    """
    A DFlash drafter (`DFlashDraftModel`): no sequential head, embedding and head are the target's, and slot 0 of a
    block is no draft. A setting stands in `dflash_config` or, failing that, at the top level.

    Source: z-lab dflash 0.1.
    """
    nested = settings(raw, "dflash_config")
    both = raw | picked(nested, *nested)
    require(both, "DFlash drafter", "target_layer_ids", "block_size", "mask_token_id")
    fields = qwen3_fields(raw, names) | _backbone(raw, nested, names) | _NO_HEADS
    fields |= {
        "block_size": integer(both, "block_size") - 1,
        "sample_from_anchor": False,
        "embedding_scale": both.get("input_embedding_scale", 1.0),
        "output_multiplier": both.get("output_multiplier", 1.0),
        # As there, 0 is no softcap.
        "final_logit_softcapping": both.get("final_logit_softcapping") or None,
    }
    return Reading(fields)


def from_specforge(raw: dict[str, Any], names: set[str]) -> Reading:
    """
    SpecForge's `DSparkDraftModel`: DeepSpec's slots and names on a DFlash backbone, settings in `dflash_config`, in
    `dspark_config` or at the top level, perhaps a reduced vocabulary.

    Source: SpecForge, `specforge/modeling/draft/dspark.py` and its configs.
    """
    nested = settings(raw, "dflash_config")
    heads = settings(raw, "dspark_config")
    both = raw | picked(heads, *heads) | picked(nested, *nested)
    require(both, "SpecForge drafter", "target_layer_ids", "block_size", "mask_token_id")
    modes = both.get("attention_modes") or [both.get("attention_mode") or "gqa"]
    if not isinstance(modes, list) or any(mode not in ("gqa", "mha") for mode in modes):
        raise ValueError(f"`attention_mode` of this SpecForge drafter is {modes!r}; only gqa and mha can be run.")
    rank = integer({"markov_rank": 0} | picked(both, "markov_rank"), "markov_rank")
    by_loss = bool(both.get("confidence_head_alpha"))
    fields = qwen3_fields(raw, names) | _backbone(raw, nested, names)
    fields |= {
        "block_size": both["block_size"],
        "draft_vocab_size": draft_vocab_size(both, integer(raw, "vocab_size"), names),
        "markov_rank": rank,
        "markov_head_type": both.get("markov_head_type") or "vanilla",
        "enable_confidence_head": flag(both, "enable_confidence_head", default=by_loss),
        "confidence_head_with_markov": flag(both, "confidence_head_with_markov", default=bool(rank)),
    }
    return Reading(fields, without_t2d(names), d2t_offsets=True)


def from_modelopt(raw: dict[str, Any], names: set[str]) -> Reading:
    """
    NVIDIA ModelOpt's DSpark drafter: called `DFlashDraftModel` like a plain one, told apart by its projector, with
    the heads' tensors under flat names. Its confidence head always reads the Markov embedding.

    Source: ModelOpt, `modelopt/torch/export/plugins/hf_spec_export.py` (`DSparkExporter`).
    """
    nested = settings(raw, "dflash_config")
    both = raw | picked(nested, *nested)
    what = "ModelOpt drafter"
    require(both, what, "target_layer_ids", "block_size", "mask_token_id", "markov_rank")
    shifted = flag(both, "shift_label", default=True)
    fields = qwen3_fields(raw, names) | _backbone(raw, nested, names)
    fields |= {
        "block_size": integer(both, "block_size") - (not shifted),
        "sample_from_anchor": shifted,
        "markov_rank": both["markov_rank"],
        "markov_head_type": both.get("markov_head_type") or "vanilla",
        "enable_confidence_head": flag(both, "use_confidence_head", default=False),
        "confidence_head_with_markov": flag(both, "use_confidence_head", default=False),
    }
    return Reading(fields, {name: _FLAT_NAMES[name] for name in names if name in _FLAT_NAMES})


def _backbone(raw: dict[str, Any], nested: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """Taps, mask token, and who sees whom: sliding layers are causal inside a block unless all layers are told."""
    both = raw | picked(nested, *nested)
    if both.get("attention_sink_bias"):
        raise ValueError("`attention_sink_bias` is set: drafters with attention sinks cannot be run.")
    fields = picked(both, "target_layer_ids", "mask_token_id") | {"causal_layer_types": ["sliding_attention"]}
    for place, name in ((nested, "causal"), (raw, "is_causal")):
        if place.get(name) is not None:
            causal = flag(place, name, default=False)
            fields["causal_layer_types"] = ["full_attention", "sliding_attention"] if causal else []
    if flag(nested, "use_swa", default=False):
        fields["layer_types"] = ["sliding_attention"] * layer_count(raw, names)
        fields["sliding_window"] = nested.get("swa_window_size") or raw.get("sliding_window")
    return fields
