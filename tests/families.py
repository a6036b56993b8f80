"""
Tiny random targets of the families of decoders that Transformers has, and how each is verified. `docs/targets.md` is
written from here by `python tests/families.py docs/targets.md`, and `test_targets.py` holds each line to it.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from dspark_hf import DSparkConfig, DSparkDraftModel
from dspark_hf.target_outputs import text_config


VOCAB = 99
IMAGE, IMAGE_START, IMAGE_END = 90, 91, 92
WINDOW = 16  # passed by all prompts together with their text

# Fields of text configs, by all the names they go by; a config takes those it knows.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "n_inner", "d_inner", "ffn_dim", "d_ff", "dim_ff", "dff"), 64),
    **dict.fromkeys(("ffn_hidden_size", "mlp_hidden_size", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("head_dim", "d_head", "global_head_dim", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_head_dim", "index_topk"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_head_dim"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_global_key_value_heads", "num_experts_per_tok", "moe_topk"), 2),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 256),
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "dropout"), 0.0),
    "index_n_heads": 32,  # few would tie at zero, where the choice of keys is arbitrary
    "num_kv_shared_layers": 0,
    "rotary_dim": 4,
    "sliding_window": WINDOW,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
    "is_decoder": True,
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2}
CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * 2}
LATENT = {"num_key_value_heads": 4}  # multi-head latent attention


@dataclass(frozen=True)
class Family:
    """
    Attributes:
        stream (`str`): How it is verified: `"flattened"`, `"row by row"` or `"refused"`; several rows may differ, and
            be `"padded"`.
        fields (`dict`): Of its config, where [`SIZES`] will not do.
        several (`str`, *optional*): How several rows are verified, if not as one row is.
        why (`str`): What is refused, or why a target is not flattened.
        slow (`bool`): Whether it is left to the slow tests.
    """

    stream: str = "flattened"
    fields: dict[str, Any] = field(default_factory=dict)
    several: str | None = None
    why: str = ""
    slow: bool = False


def _flattened(*names: str, slow: bool = True) -> dict[str, Family]:
    return {name: Family(slow=slow) for name in names}


def _rows(why: str, *names: str, slow: bool = True) -> dict[str, Family]:
    return {name: Family("row by row", why=why, slow=slow) for name in names}


def _padded(slow: bool = False, **fields: Any) -> Family:
    return Family("row by row", several="padded", why=NO_INTERFACE, fields=fields, slow=slow)


NO_INTERFACE = "attention not through Transformers' interface"
POSITIONS_COUNTED = "positions counted from the cache's length, which several rows do not share"
MORE_THAN_KEYS = "a cache of more than keys and values"
RECURRENT = "a recurrent state, which cannot forget"
OWN_STATE = "a state of its own in place of a cache"

# By the model type that `AutoModelForCausalLM` knows.
DECODERS: dict[str, Family] = {
    **_flattened("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "gemma", "phi", "phi3", slow=False),
    **_flattened("gpt2", "gpt_neox", "gptj", "codegen", "gpt_bigcode", "opt", "starcoder2", "cohere", slow=False),
    **_flattened("olmo", "olmo2", "granite", "granitemoe", "nemotron", "glm", "glm4", "smollm3", slow=False),
    **_flattened("ernie4_5", "hunyuan_v1_dense", "arcee", "helium", "dots1", "persimmon", "ctrl", slow=False),
    "gemma2": Family(fields=MIXED | {"attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 8}),
    "gemma3_text": Family(fields=MIXED),
    "gemma3n_text": Family(
        fields=MIXED
        | {"num_kv_shared_layers": 2, "laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": None}
    ),
    "gemma4_text": Family(fields=MIXED | {"num_kv_shared_layers": 2}),
    "gpt_oss": Family(fields=MIXED),
    "olmo3": Family(fields=MIXED),
    "exaone4": Family(fields=MIXED),
    "cohere2": Family(fields=MIXED),
    "deepseek_v2": Family(fields=LATENT),
    "deepseek_v3": Family(fields=LATENT),
    "minicpm3": Family(fields=LATENT),
    "llama4_text": Family(
        several="row by row",
        why="queries scaled by the length of the cache, which several rows do not share",
        fields={
            "attention_chunk_size": WINDOW,
            "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
            "no_rope_layers": [1, 1, 1, 0],
            "intermediate_size_mlp": 64,
            "floor_scale": 8,
        },
    ),
    **_flattened("biogpt", "stablelm", slow=False),
    **{name: _padded() for name in ("bloom", "mpt", "xglm")},
    "gpt_neo": _padded(attention_types=[[["global", "local"], 2]], window_size=WINDOW),
    "falcon": _padded(alibi=True),
    "openai-gpt": Family("row by row", why="no cache: each pass reads the whole text, as it does anyway"),
    "doge": Family("row by row", why="masks made from the values; with `is_moe` refused"),
    "deepseek_v32": Family("row by row", why=MORE_THAN_KEYS, fields=LATENT),
    "lfm2": Family("row by row", why=MORE_THAN_KEYS, fields=CONVOLUTIONS),
    # Other decoders that work, and nothing of note
    **_flattened("afmoe", "apertus", "aria_text", "beam", "bert", "bert-generation", "bitnet", "camembert"),
    **_flattened("cohere2_moe", "cwm", "data2vec-text", "diffllama", "ernie", "ernie4_5_moe"),
    **_flattened("exaone_moe", "flex_olmo", "flint", "gemma4_unified_text", "glm4_moe", "granite_swa"),
    **_flattened("granitemoe_swa", "granitemoeshared", "hrm_text", "hunyuan_v1_moe", "hy_v3", "hyperclovax"),
    **_flattened("jais2", "jetmoe", "kolibri1", "laguna", "mellum", "mimo_v2_flash", "minimax_m2"),
    **_flattened("minimax_m3_vl_text", "ministral", "ministral3", "modernbert-decoder", "moshi", "nanochat"),
    **_flattened("olmoe", "phimoe", "qwen2_moe", "roberta", "roberta-prelayernorm", "seed_oss", "solar_open"),
    **_flattened("vaultgemma", "xlm-roberta", "xlm-roberta-xl"),
    **{name: Family(fields=LATENT, slow=True) for name in ("axk1", "glm4_moe_lite", "youtu")},
    **_rows(POSITIONS_COUNTED, "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp"),
    **_rows(POSITIONS_COUNTED, "pegasus", "plbart", "roformer", "trocr", "whisper"),
    **{name: _padded(slow=True) for name in ("big_bird", "gpt_neox_japanese", "megatron-bert")},
    **_rows(MORE_THAN_KEYS, "inkling_text", "lfm3"),
    **{
        name: Family("row by row", why=MORE_THAN_KEYS, fields=LATENT, slow=True)
        for name in ("axk2", "glm_moe_dsa", "hy_v4")
    },
    "lfm2_moe": Family("row by row", why=MORE_THAN_KEYS, fields=CONVOLUTIONS | {"num_dense_layers": 1}, slow=True),
    "electra": Family(fields={"embedding_size": 32}, slow=True),
    "rembert": _padded(slow=True, input_embedding_size=32, output_embedding_size=32),
    # What cannot be a target
    "mamba": Family("refused", why=RECURRENT),
    "mamba2": Family("refused", why=RECURRENT, fields={"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8}),
    "bamba": Family(
        "refused",
        why=RECURRENT,
        fields={"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "attn_layer_indices": [1, 3]},
    ),
    "jamba": Family(
        "refused", why=RECURRENT, fields={"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8}
    ),
    "zamba2": Family(
        "refused", why=RECURRENT, fields={"layer_types": ["mamba", "hybrid"] * 2, "hybrid_layer_ids": [1, 3]}
    ),
    **{
        name: Family("refused", why=RECURRENT)
        for name in ("falcon_h1", "falcon_mamba", "nemotron_h", "olmo_hybrid", "qwen3_next", "qwen3_5_text")
    },
    **{
        name: Family("refused", why=RECURRENT)
        for name in ("deepseek_v4", "lara_mini", "qwen3_5_moe_text", "recurrent_gemma", "rwkv", "zamba")
    },
    "granitemoehybrid": Family(
        "refused",
        why=RECURRENT,
        fields={"mamba_n_heads": 4, "mamba_d_head": 16, "layer_types": ["mamba", "attention"] * 2},
    ),
    "minimax": Family("refused", why=OWN_STATE, fields={"layer_types": ["full_attention", "linear_attention"] * 2}),
    "xlnet": Family("refused", why=OWN_STATE),
    "cpmant": Family("refused", why="tokens of one pass see those after them"),
    "xlm": Family("refused", why="a mask token behind the text in each step"),
    "prophetnet": Family("refused", why="one token at a time"),
    "longcat_flash": Family(
        "refused", why="hidden states of another number than its layers", fields=LATENT | {"num_layers": 2}
    ),
}


# Other configs of the families above: a name, the model type, and the fields that differ.
VARIANTS: dict[str, tuple[str, Family]] = {
    "falcon, rotary": ("falcon", _padded(alibi=False)),
    "falcon, new": ("falcon", _padded(alibi=False, new_decoder_architecture=True)),
    "qwen2, sliding": ("qwen2", Family(fields=MIXED | {"use_sliding_window": True})),
    "mistral, no window": ("mistral", Family(fields={"sliding_window": None})),
    "gpt_neox, serial": ("gpt_neox", Family(fields={"use_parallel_residual": False})),
    "opt, norms after": ("opt", Family(fields={"do_layer_norm_before": False})),
    "llama, tied": ("llama", Family(fields={"tie_word_embeddings": True})),
    "llama, one key head": ("llama", Family(fields={"num_key_value_heads": 1})),
    "llama, yarn": (
        "llama",
        Family(
            fields={
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                }
            }
        ),
    ),
    "smollm3, some layers without rotation": ("smollm3", Family(fields={"no_rope_layers": [1, 0, 1, 0]})),
    "gemma3n_text, nothing shared": ("gemma3n_text", Family(fields={"num_kv_shared_layers": 0})),
    "llama4_text, no scaling": ("llama4_text", Family(fields={"attn_temperature_tuning": False})),
    "doge, mixture of experts": ("doge", Family("refused", fields={"is_moe": True})),
}


def text_fields(model_type: str, **changes: Any) -> dict[str, Any]:
    """The fields of [`SIZES`] that a config has, and changes."""
    config_class = CONFIG_MAPPING[model_type]
    known = set(getattr(config_class, "attribute_map", {}))
    for base in config_class.__mro__:
        known |= set(getattr(base, "__annotations__", {}))
    return {name: value for name, value in SIZES.items() if name in known} | changes


def scramble(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Random weights large enough for text that varies, whatever the family's own initialisation."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    with torch.no_grad():
        for weight in filter(torch.is_floating_point, model.parameters()):
            noise = torch.randn(weight.shape, generator=generator).to(weight)
            if id(weight) in embeddings:
                weight.copy_(noise)
            elif weight.ndim >= 2:
                fan_in = weight.shape[-1] if weight.ndim == 2 else max(weight.shape[-2:])
                weight.copy_(1.3 * noise / fan_in**0.5)
            else:
                weight.add_(0.2 * noise)
    return model.eval()


def decoder(model_type: str, **changes: Any) -> PreTrainedModel:
    """A tiny target of a family or a variant."""
    if model_type in VARIANTS:
        model_type, variant = VARIANTS[model_type]
        changes = variant.fields | changes
    fields = text_fields(model_type, **DECODERS[model_type].fields | changes)
    torch.manual_seed(0)
    return scramble(AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**fields)))


def drafter_for(target: PreTrainedModel, block_size: int = 5, **changes: Any) -> DSparkDraftModel:
    """A random drafter that fits a target and borrows its embedding and head."""
    config = text_config(target)
    layers = config.num_hidden_layers
    fields = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 16,
        "target_layer_ids": sorted({-1, 0, layers - 2}),
        "num_target_layers": layers,
        "block_size": block_size,
        "mask_token_id": 2,
        "markov_rank": 8,
    }
    torch.manual_seed(1)
    return DSparkDraftModel(DSparkConfig(**fields | changes)).eval()


def prompts(lengths: Sequence[int] = (11, 7, 18), images: Sequence[int] = ()) -> dict[str, torch.Tensor]:
    """Random left-padded prompts, each with an image's tokens after its third one."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for length in lengths:
        text = torch.randint(3, 80, (length,), generator=generator)
        rows.append(torch.cat([text[:3], torch.tensor(images, dtype=torch.long), text[3:]]))
    longest = max(map(len, rows))
    pad = torch.nn.functional.pad
    return {
        "input_ids": torch.stack([pad(row, (longest - len(row), 0)) for row in rows]),
        "attention_mask": torch.stack([pad(torch.ones_like(row), (longest - len(row), 0)) for row in rows]),
    }


# Targets that read images: a config and the inputs of so many rows with an image each


def _vision(**changes: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return sizes | {"image_size": 8, "patch_size": 2} | changes


def _pixels(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(4))


def _config(model_type: str, decoder_type: str | None = None, /, text: Any = None, **fields: Any) -> PreTrainedConfig:
    text = text or {}
    if decoder_type is not None:
        text = text_fields(decoder_type, **text) | {"model_type": decoder_type}
    return CONFIG_MAPPING[model_type](text_config=text, tie_word_embeddings=False, **fields)


def _gemma3():
    config = _config(
        "gemma3",
        "gemma3_text",
        text=MIXED,
        vision_config=_vision(model_type="siglip_vision_model"),
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
        boi_token_index=IMAGE_START,
        eoi_token_index=IMAGE_END,
    )
    inputs = prompts(images=[IMAGE_START, *[IMAGE] * 4, IMAGE_END])
    return config, inputs | {
        "pixel_values": _pixels(3, 3, 8, 8),
        "token_type_ids": (inputs["input_ids"] == IMAGE).long(),
    }


def _gemma4():
    config = _config(
        "gemma4",
        "gemma4_text",
        text=MIXED | {"num_kv_shared_layers": 2},
        vision_config=_vision(
            num_key_value_heads=2,
            head_dim=8,
            position_embedding_size=64,
            pooling_kernel_size=2,
            default_output_length=4,
        ),
        audio_config=None,
        image_token_id=IMAGE,
        boi_token_id=IMAGE_START,
        eoi_token_id=IMAGE_END,
        vision_soft_tokens_per_image=4,
    )
    inputs = prompts(images=[IMAGE_START, *[IMAGE] * 4, IMAGE_END])
    places = torch.cartesian_prod(torch.arange(4), torch.arange(4)).flip(-1)
    return config, inputs | {
        "pixel_values": _pixels(3, 16, 12).sigmoid(),
        "image_position_ids": places.expand(3, 16, 2),
        "mm_token_type_ids": (inputs["input_ids"] == IMAGE).long(),
    }


def _qwen_vl(model_type: str, **vision: Any):
    def make():
        tower = {"depth": 1, "num_heads": 2, "patch_size": 2, "temporal_patch_size": 2, "spatial_merge_size": 2}
        text = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
        text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": None}
        text |= {"head_dim": 8} if model_type == "qwen3_vl" else {}
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
        config = _config(
            model_type,
            text=text,
            vision_config=tower | vision,
            image_token_id=IMAGE,
            video_token_id=IMAGE + 3,
            vision_start_token_id=IMAGE_START,
            vision_end_token_id=IMAGE_END,
        )
        inputs = prompts(images=[IMAGE_START, *[IMAGE] * 6, IMAGE_END])
        return config, inputs | {
            "pixel_values": _pixels(3 * 24, 24),
            "image_grid_thw": torch.tensor([[1, 4, 6]] * 3),
            "mm_token_type_ids": (inputs["input_ids"] == IMAGE).long(),
        }

    return make


def _llava():
    config = _config(
        "llava",
        "llama",
        vision_config=_vision(model_type="clip_vision_model", image_size=4, projection_dim=16),
        image_token_index=IMAGE,
        vision_feature_layer=-1,
    )
    return config, prompts(images=[IMAGE] * 4) | {"pixel_values": _pixels(3, 3, 4, 4)}


def _mistral3():
    config = _config(
        "mistral3",
        "mistral",
        vision_config=_vision(model_type="pixtral", head_dim=8),
        image_token_index=IMAGE,
        spatial_merge_size=2,
    )
    inputs = {"pixel_values": _pixels(3, 3, 8, 8), "image_sizes": torch.tensor([[8, 8]] * 3)}
    return config, prompts(images=[IMAGE] * 4) | inputs


def _paligemma(text: str, **changes: Any):
    def make():
        config = _config(
            "paligemma",
            text,
            text=changes,
            vision_config=_vision(model_type="siglip_vision_model", image_size=4, vision_use_head=False),
            image_token_index=IMAGE,
            projection_dim=32,
            hidden_size=32,
        )
        return config, prompts(images=[IMAGE] * 4) | {"pixel_values": _pixels(3, 3, 4, 4)}

    return make


def _idefics3(model_type: str):
    def make():
        config = _config(
            model_type,
            "llama",
            vision_config=_vision(model_type=f"{model_type}_vision"),
            image_token_id=IMAGE,
            scale_factor=2,
            pad_token_id=0,
        )
        return config, prompts(images=[IMAGE] * 4) | {"pixel_values": _pixels(3, 1, 3, 8, 8)}

    return make


def _mllama():
    text = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": None}
    text |= {"cross_attention_layers": [1], "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    tower = {"num_global_layers": 1, "attention_heads": 2, "vision_output_dim": 32, "intermediate_layers_indices": [0]}
    tiles = {"max_num_tiles": 1, "supported_aspect_ratios": [[1, 1]]}
    config = _config("mllama", text=text, vision_config=_vision(**tower, **tiles), image_token_index=IMAGE)
    inputs = prompts(images=[IMAGE])
    return config, inputs | {
        "pixel_values": _pixels(3, 1, 1, 3, 8, 8),
        "aspect_ratio_ids": torch.ones(3, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(3, 1, 1, dtype=torch.long),
        "cross_attention_mask": torch.ones(*inputs["input_ids"].shape, 1, 1, dtype=torch.long),
    }


@dataclass(frozen=True)
class Reader(Family):
    """
    A family that reads images.

    Attributes:
        make (`Callable`): Gives a config and the inputs of three rows.
    """

    make: Callable[[], tuple[PreTrainedConfig, dict[str, torch.Tensor]]] | None = None


OWN_INPUTS = "inputs that change in a way of its own from step to step"
# By the model type that `AutoModelForImageTextToText` knows, and the kind of text decoder where there are several.
IMAGE_READERS: dict[str, Reader] = {
    "gemma3": Reader(make=_gemma3),
    "gemma4": Reader(make=_gemma4),
    "qwen2_vl": Reader(make=_qwen_vl("qwen2_vl", embed_dim=16, hidden_size=32, mlp_ratio=2)),
    "qwen2_5_vl": Reader(
        make=_qwen_vl(
            "qwen2_5_vl",
            hidden_size=16,
            out_hidden_size=32,
            intermediate_size=32,
            window_size=8,
            fullatt_block_indexes=[0],
        )
    ),
    "qwen3_vl": Reader(
        make=_qwen_vl(
            "qwen3_vl",
            hidden_size=16,
            out_hidden_size=32,
            intermediate_size=32,
            num_position_embeddings=16,
            deepstack_visual_indexes=[0],
        )
    ),
    "llava": Reader(make=_llava),
    "mistral3": Reader(make=_mistral3),
    "idefics3": Reader(make=_idefics3("idefics3")),
    "smolvlm": Reader(make=_idefics3("smolvlm")),
    "paligemma": Reader("row by row", why=OWN_INPUTS, make=_paligemma("gemma")),
    "paligemma (Gemma 2)": Reader(
        "row by row", why=OWN_INPUTS, make=_paligemma("gemma2", **MIXED, query_pre_attn_scalar=8)
    ),
    "mllama": Reader("row by row", why=OWN_INPUTS, make=_mllama),
}


def image_reader(name: str) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    """A tiny target that reads images, and the inputs of three rows."""
    config, inputs = IMAGE_READERS[name].make()
    torch.manual_seed(0)
    target = scramble(AutoModelForImageTextToText.from_config(config))
    target.generation_config.eos_token_id = None
    return target, inputs


PAGE = """\
# Targets

How the decoders of Transformers {release} are verified. Written by `python tests/families.py docs/targets.md`; each
line is what `tests/test_targets.py` sees a tiny random model of the family do (greedy text in float32 equal to plain
`generate`, alone and in a left-padded batch of three, past the sliding window where there is one). A family that is
not here has not been tried.

- **flattened**: all rows in one pass, over one cache without padding (`dspark_hf/flattened_stream.py`). It is what a
  target gets whose attention goes through Transformers' attention interface with masks from Transformers' mask
  functions, over a cache of plain keys and values; anything else is noticed in the first pass at the latest.
- **padded**: several rows as one padded batch, over one cache of per-row slots that shows itself to the model as a
  left-padded batch's (`dspark_hf/padded_stream.py`). For families whose attention does not go through the interface
  and that Transformers pads exactly, ALiBi included: a list in that file, held to Transformers by
  `tests/test_padded_stream.py`. Only Transformers' own classes, with `eager` or `sdpa` attention.
- **row by row**: one pass a row over the target's own cache (`dspark_hf/row_stream.py`). Also taken where attention
  weights are wanted and for offloaded caches.
- **refused**: a `ValueError` that names the model and what to do.

## Text

{text}

## Images and text

{images}

## Whatever the family

- Refused: beams, contrastive search, DoLa, constraints, `synced_gpus`; encoder-decoder models; quantised caches;
  static sliding caches past their window where the target goes row by row; virtual tokens of PEFT (prompt, prefix and
  P-tuning; LoRA is fine); rotary embeddings that change with the length of the text (`longrope`, `dynamic`) where the
  call could cross the length at which they do; attention weights and all hidden states of a target without a cache.
- The same text as plain `generate` means: up to ties. In bfloat16 and float16 near ties can fall differently in
  passes of different shapes. Dynamic activation quantisation (`torch.ao.quantization.quantize_dynamic`) scales each
  pass as a whole, so there the text is near plain `generate`'s and no more.
- A target that `accelerate` has offloaded works; an offloaded drafter is refused.
"""


def page(release: str) -> str:
    """The text of `docs/targets.md`."""
    return PAGE.format(release=release, text=_table(DECODERS), images=_table(IMAGE_READERS))


def _table(families: dict[str, Family]) -> str:
    lines = ["| how | model types | why |", "|---|---|---|"]
    kinds = {(family.stream, family.several or "", family.why) for family in families.values()}
    for stream, several, why in sorted(kinds, key=lambda kind: (_ORDER[kind[0]], *kind[1:])):
        names = [
            name
            for name, family in families.items()
            if (family.stream, family.several or "", family.why) == (stream, several, why)
        ]
        how = f"{stream}; several rows {several}" if several else stream
        lines.append(f"| {how} | {', '.join(sorted(names))} | {why} |")
    return "\n".join(lines)


_ORDER = {"flattened": 0, "row by row": 1, "refused": 2}


if __name__ == "__main__":
    import transformers

    with open(sys.argv[1], "w") as file:
        file.write(page(".".join(transformers.__version__.split(".")[:2])))
