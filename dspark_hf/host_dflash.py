"""A DFlash drafter as Transformers' own DFlash assistant, to set the two decoding loops beside each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .modeling.borrowing import embedding_scale


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .modeling import DSparkDraftModel

# What Transformers' one DFlash assistant is, in the words of a drafter's config.
_RUNS = {
    "markov_rank": 0,
    "sample_from_anchor": False,
    "owns_embedding": False,
    "owns_lm_head": False,
    "draft_vocab_size": None,
    "query_key_norm": True,
    "value_norm": False,
    "attention_k_eq_v": False,
    "attention_bias": False,
    "attention_output_bias": False,
    "mlp_bias": False,
    "sandwich_norms": False,
    "layer_scalar": False,
    "hidden_act": "silu",
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
}
# Config fields that both have under one name.
_SHARED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_parameters",
    "max_position_embeddings",
    "layer_types",
    "mask_token_id",
    "target_layer_ids",
)
_RENAMED = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}


def check_host_dflash(drafter: DSparkDraftModel, target: PreTrainedModel) -> None:
    """
    Whether Transformers' DFlash path can draft with a drafter as it was trained.

    Raises:
        `ValueError`: naming the first thing that it does otherwise.
    """
    config = drafter.config
    heads = config.head_dim**-0.5
    scale = float(embedding_scale(target.get_input_embeddings()))
    # A block there sees itself both ways, and windows count from each slot to either side.
    full = ["full_attention"] * config.num_hidden_layers
    causal = [kind for kind in config.causal_layer_types if kind in config.layer_types]
    comparisons = [(name, getattr(config, name), runs) for name, runs in _RUNS.items()]
    comparisons += [
        ("layer_types", config.layer_types, full),
        ("causal_layer_types", causal, []),
        ("attention_scaling", heads if config.attention_scaling is None else config.attention_scaling, heads),
        ("embedding_scale", config.embedding_scale, scale),
    ]
    for name, found, runs in comparisons:
        if found != runs:
            raise ValueError(f"the drafter's `{name}` is {found!r}; Transformers' DFlash runs {runs!r} only")
    if -1 in config.target_layer_ids:
        raise ValueError("the drafter taps the embedding (-1 in `target_layer_ids`); Transformers' DFlash taps layers")


def host_dflash(drafter: DSparkDraftModel, target: PreTrainedModel) -> PreTrainedModel:
    """
    Transformers' DFlash assistant with the weights of a drafter, not copied: `generate` drafts with it if its
    `speculation_type` is `"dflash"`.

    Args:
        drafter (`DSparkDraftModel`): Of z-lab's DFlash format, or another of that kind: no sequential head, full
            attention, embedding and head borrowed. A confidence head is left out.
        target (`PreTrainedModel`): Its target.

    Raises:
        `ValueError`: if it is not of that kind, saying why.

    Source: `DFlashTokenCandidateGenerator` and `MuseGlimmerAssistantModel` of Transformers.
    """
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    check_host_dflash(drafter, target)
    fields = {name: getattr(drafter.config, name) for name in _SHARED}
    config = MuseGlimmerAssistantConfig(**fields, block_size=drafter.config.block_slots)
    with torch.device(drafter.device):
        assistant = MuseGlimmerAssistantModel(config)
    weights = {
        _RENAMED.get(name, name): weight
        for name, weight in drafter.state_dict().items()
        if not name.startswith("confidence_head.")
    }
    assistant.load_state_dict(weights, assign=True)
    return assistant.eval()
