"""DeepSpec's fixtures as other packages would have written them: the same drafter in another wrapping."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from conftest import FIXTURES
from safetensors.torch import load_file, save_file
from torch import nn

from dspark_hf import DSparkDraftModel
from dspark_hf.modeling.draft_context import DraftContext


Config = dict[str, Any]
Weights = dict[str, torch.Tensor]

# DeepSpec's own fields, and what it owns of the target.
OWN = (
    "block_size target_layer_ids mask_token_id markov_rank markov_head_type enable_confidence_head "
    "confidence_head_with_markov num_anchors"
).split()
BORROWED = ("embed_tokens.weight", "lm_head.weight")
FLAT = {"markov_head.": "", "confidence_head.proj.": "confidence_proj."}


def write(folder: Path, config: Any, weights: Weights) -> Path:
    """A checkpoint folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: value.contiguous().clone() for name, value in weights.items()}, folder / "model.safetensors")
    return folder


def read(name: str) -> tuple[Config, Weights]:
    """Config and weights of a fixture."""
    folder = FIXTURES / name / "drafter"
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def as_specforge(config: Config, weights: Weights, nested: Sequence[str] = tuple(OWN)) -> tuple[Config, Weights]:
    """SpecForge: DeepSpec's settings in `dflash_config`, YaRN (of factor 1, which changes nothing), no embedding."""
    nested = [name for name in nested if name not in ("block_size", "num_anchors")]
    flat = {name: value for name, value in config.items() if name not in nested and name != "rope_parameters"}
    settings = {name: config[name] for name in nested if name in config}
    return flat | {
        "architectures": ["DSparkDraftModel"],
        "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "yarn", "factor": 1.0, "original_max_position_embeddings": 512},
        "dflash_config": settings
        | {"projector_type": "dspark", "attention_mode": "gqa", "confidence_head_alpha": 1.0},
    }, {name: value for name, value in weights.items() if name not in BORROWED}


def as_modelopt(config: Config, weights: Weights) -> tuple[Config, Weights]:
    """NVIDIA ModelOpt: called a DFlash drafter, flat names."""
    flat = {name: value for name, value in config.items() if name not in OWN or name in ("block_size", "num_anchors")}
    settings = {
        name: config[name] for name in ("mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type")
    }
    renamed = {}
    for name, value in weights.items():
        for ours, theirs in FLAT.items():
            name = theirs + name.removeprefix(ours) if name.startswith(ours) else name
        renamed[name] = value
    return flat | {
        "architectures": ["DFlashDraftModel"],
        "torch_dtype": flat.pop("dtype"),
        "rope_scaling": None,
        "rope_theta": flat.pop("rope_parameters")["rope_theta"],
        "dflash_config": settings
        | {"projector_type": "dspark", "shift_label": True, "use_confidence_head": True, "causal": False},
    }, {name: value for name, value in renamed.items() if name not in BORROWED}


def as_nemo(config: Config, weights: Weights) -> tuple[Config, Weights]:
    """NeMo AutoModel: DeepSpec's fields and names."""
    return config | {"architectures": ["Qwen3DSparkModel"]}, weights


def as_old_speculators(config: Config, weights: Weights, tokens: int | None = None) -> tuple[Config, Weights]:
    """
    speculators before 0.9: embedding and head saved, no `sample_from_anchor`, and of the layers' config only what
    differs from Transformers' defaults.

    Args:
        tokens: Drafts of a block; by default one a slot, so that slot 0 is one.
    """
    usual = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False, "use_cache": True}
    layers = {name: value for name, value in config.items() if name not in OWN and usual.get(name, not value) != value}
    layers.pop("architectures"), layers.pop("num_target_layers"), layers.pop("rope_parameters")
    heads = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
    tokens = tokens or config["block_size"]
    return {name: config[name] for name in heads} | {
        "architectures": ["DSparkDraftModel"],
        "auto_map": {"": "config.DSparkSpeculatorConfig"},
        "speculators_model_type": "dspark",
        "speculators_version": "0.7.0",
        "speculators_config": {
            "algorithm": "dspark",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
            "verifier": {"name_or_path": "tiny-target", "architectures": ["Qwen3ForCausalLM"]},
        },
        "transformer_layer_config": layers,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config["target_layer_ids"]],
        "block_size": config["block_size"],
        "draft_vocab_size": config["vocab_size"],
        "mask_token_id": config["mask_token_id"],
        "dtype": "float32",
    }, weights


Packaging = Callable[[Config, Weights], tuple[Config, Weights]]
PACKAGINGS: dict[str, Packaging] = {
    "SpecForge": as_specforge,
    "ModelOpt": as_modelopt,
    "NeMo": as_nemo,
    "speculators, old": as_old_speculators,
}


@torch.no_grad()
def drafts_of(
    drafter: DSparkDraftModel, embedding: nn.Module | None = None, head: nn.Module | None = None
) -> dict[str, torch.Tensor]:
    """Hidden states, logits, tokens and confidences of two rounds of two rows over random contexts."""
    generator = torch.Generator().manual_seed(3)
    context, found = DraftContext(drafter.config, [0, 4]), {}
    for turn, new in enumerate([[21, 14], [2, 5]]):
        anchors = torch.tensor([40 + turn, 50 - turn])
        taps = torch.randn(sum(new), drafter.fc.in_features, generator=generator).to(drafter.dtype)
        hidden = drafter(drafter.embed(drafter.block_tokens(anchors), embedding), taps, new, context)
        draft = drafter.draft(hidden, anchors, head)
        found |= {f"hidden {turn}": hidden, f"tokens {turn}": draft.tokens}
        found[f"logits {turn}"] = drafter.base_logits(hidden, head)
        if draft.confidence_logits is not None:
            found[f"confidence {turn}"] = draft.confidence_logits
    return found


def assert_same_drafts(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """To the last bit."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
