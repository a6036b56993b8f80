"""A new drafter for a target: its shape, the token that fills its blocks, and weights to start from."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .modeling import DSparkConfig, DSparkDraftModel
from .target_outputs import text_config


# What a drafter's layer has in common with a target's, by their names in both.
_LAYER_PARTS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "self_attn.q_norm",
    "self_attn.k_norm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "input_layernorm",
    "post_attention_layernorm",
)


# What families call the width of their MLP.
_MLP_SIZES = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")


def spread_taps(num_target_layers: int, taps: int) -> list[int]:
    """
    Layers to tap, evenly from the second to the third from the end.

    Args:
        num_target_layers (`int`): At least 2.
        taps (`int`): How many; fewer are returned where the target has too few layers.

    Source: DeepSpec's released drafters: 36 layers `[1, 9, 17, 25, 33]`, 40 layers `[1, 10, 19, 28, 37]`.
    """
    first, last = min(1, num_target_layers - 2), max(num_target_layers - 3, 0)
    places = torch.linspace(first, max(first, last), taps).round().long().tolist()
    return sorted(set(places))


def choose_mask_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """
    A token to fill the blocks with, that no text holds: the mask token, else a special token that ends, begins or
    fills nothing and that the chat template does not write.

    Raises:
        `ValueError`: if the tokenizer has none.
    """
    if tokenizer.mask_token_id is not None:
        return tokenizer.mask_token_id
    template = tokenizer.chat_template or ""
    taken = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    special = [token for token, added in sorted(tokenizer.added_tokens_decoder.items()) if added.special]
    for token in special:
        if token not in taken and tokenizer.added_tokens_decoder[token].content not in template:
            return token
    raise ValueError(
        "The tokenizer has no special token that is free to fill the drafter's blocks; give `mask_token_id`, a token "
        "that no text holds."
    )


def drafter_config(
    target: PreTrainedModel,
    mask_token_id: int,
    num_hidden_layers: int = 5,
    block_size: int = 7,
    target_layer_ids: list[int] | None = None,
    markov_rank: int = 256,
    markov_head_type: str = "vanilla",
    enable_confidence_head: bool = True,
    draft_vocab_size: int | None = None,
) -> DSparkConfig:
    """
    The config of a new drafter, of the target's width and attention; it borrows the target's embedding and head.

    Args:
        target (`PreTrainedModel`): The model to draft for.
        mask_token_id (`int`): Fills the blocks; see [`choose_mask_token`].
        num_hidden_layers (`int`, *optional*, defaults to 5): As the released drafters.
        block_size (`int`, *optional*, defaults to 7): As the released drafters.
        target_layer_ids (`list[int]`, *optional*): Taps. Defaults to [`spread_taps`], as many as layers.
        markov_rank (`int`, *optional*, defaults to 256): 0 for no sequential head.
        markov_head_type (`str`, *optional*, defaults to `"vanilla"`): Or `"gated"`, `"rnn"`.
        enable_confidence_head (`bool`, *optional*, defaults to `True`): Whether there is one.
        draft_vocab_size (`int`, *optional*): Tokens that can be drafted; by default all.

    Raises:
        `ValueError`: if the target lacks a size that is needed, or what is given does not fit it.
    """
    config = text_config(target)
    heads = config.num_attention_heads
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if "rope_theta" not in rope:  # per layer type, as Gemma's
        rope = dict(rope.get("full_attention", {}))
    eps = getattr(config, "rms_norm_eps", 1e-6)
    made = DSparkConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=next(
            (size for name in _MLP_SIZES if (size := getattr(config, name, None))), 4 * config.hidden_size
        ),
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        rms_norm_eps=eps,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)},
        target_layer_ids=target_layer_ids or spread_taps(config.num_hidden_layers, num_hidden_layers),
        num_target_layers=config.num_hidden_layers,
        block_size=block_size,
        mask_token_id=mask_token_id,
        markov_rank=markov_rank,
        markov_head_type=markov_head_type,
        enable_confidence_head=enable_confidence_head,
        confidence_head_with_markov=enable_confidence_head and markov_rank > 0,
        draft_vocab_size=draft_vocab_size,
        query_key_norm=_has_query_key_norm(target),
        final_logit_softcapping=getattr(config, "final_logit_softcapping", None),
        embedding_scale=float(getattr(target.get_input_embeddings(), "scalar_embed_scale", 1.0)),
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
    made.validate_drafter()
    return made


def frequent_tokens(
    texts: Iterable[tuple[list[int], list[int]]], size: int, vocab_size: int, always: Iterable[int] = ()
) -> torch.LongTensor:
    """
    The tokens that a target writes most often, to draft no others.

    Args:
        texts (`Iterable`): Pairs of token ids and a mask of those that the target wrote.
        size (`int`): How many.
        vocab_size (`int`): Of the target; at least `size`.
        always (`Iterable[int]`, *optional*): Tokens that are among them in any case, those that end a text.

    Returns:
        `torch.LongTensor` of shape `(size,)`: Increasing.

    Raises:
        `ValueError`: if `size` is not between 1 and `vocab_size`.
    """
    if not 1 <= size <= vocab_size:
        raise ValueError(f"`draft_vocab_size` is {size}; it must be from 1 to the target's {vocab_size}.")
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for token_ids, mask in texts:
        counts += torch.bincount(torch.tensor(token_ids)[torch.tensor(mask, dtype=torch.bool)], minlength=vocab_size)
    counts[list(always)] = torch.iinfo(torch.long).max
    # Stable: where counts are equal, the lower ids, which tokenizers give to the more frequent tokens.
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def change_vocabulary(drafter: DSparkDraftModel, token_ids: torch.LongTensor) -> DSparkDraftModel:
    """
    The same drafter, of the same weights, that drafts some of the tokens only.

    Args:
        drafter ([`DSparkDraftModel`]): Left as it is. Tokens that it could not draft have no correction by its
            sequential head at first.
        token_ids (`torch.LongTensor` of shape `(draft_vocab_size,)`): Target ids, increasing.

    Raises:
        `ValueError`: if the ids are not increasing ids of the target, or the drafter's own head has no rows for some.
    """
    config = copy.deepcopy(drafter.config)
    config.draft_vocab_size = len(token_ids)
    changed = DSparkDraftModel(config).to(drafter.device, drafter.dtype)
    changed.set_draft_vocabulary(token_ids)
    token_ids = token_ids.to(drafter.device)
    rows = torch.full((config.vocab_size,), -1, device=drafter.device)
    known = torch.arange(config.vocab_size, device=drafter.device) if drafter.d2t is None else drafter.d2t
    rows[known] = torch.arange(len(known), device=drafter.device)
    rows = rows[token_ids]
    unknown = (rows < 0).nonzero().squeeze(1)
    state = dict(drafter.state_dict())
    if "lm_head.weight" in state and len(unknown):
        raise ValueError(
            f"The drafter's own head has no rows for {len(unknown)} of the {len(token_ids)} tokens; leave "
            "`draft_vocab_size` out to go on with those it has."
        )
    for name in ("markov_head.markov_w2.weight", "lm_head.weight"):
        if name in state:
            state[name] = state[name][rows.clamp(min=0)]
            state[name][unknown] = 0
    changed.load_state_dict(state | {"d2t": changed.d2t})
    return changed


def target_layers(target: PreTrainedModel) -> nn.ModuleList:
    """
    The target's decoder layers.

    Raises:
        `ValueError`: if they are not to be found.
    """
    count = text_config(target).num_hidden_layers
    found = [
        module
        for name, module in target.named_modules()
        if name.split(".")[-1] == "layers" and isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if len(found) != 1:
        raise ValueError(f"{type(target).__name__} has {len(found)} lists of {count} layers; one was expected.")
    return found[0]


def start_from_target(drafter: DSparkDraftModel, target: PreTrainedModel) -> list[str]:
    """
    Copy the last layers of the target into a drafter, and let it read the last tap alone at first: it begins as the
    end of the target does. What the two do not have in common stays as it is.

    Args:
        drafter ([`DSparkDraftModel`]): Changed in place.
        target (`PreTrainedModel`): Its weights must be there as they are, not quantised.

    Returns:
        `list[str]`: The drafter's parameters that were set.

    Raises:
        `ValueError`: if the target has too few layers, or none of its weights fits.
    """
    layers = target_layers(target)
    if len(layers) < len(drafter.layers):
        raise ValueError(
            f"The drafter has {len(drafter.layers)} layers and {type(target).__name__} {len(layers)}; a drafter that "
            "starts from its target has no more than it."
        )
    done = []
    with torch.no_grad():
        for index, (own, other) in enumerate(zip(drafter.layers, layers[-len(drafter.layers) :], strict=True)):
            have, lend = dict(own.named_parameters()), dict(other.named_parameters())
            for part in _LAYER_PARTS:
                if part.endswith("norm") and not _is_plain_norm(other, part):
                    continue
                for name in (f"{part}.weight", f"{part}.bias"):
                    if name in have and name in lend and have[name].shape == lend[name].shape:
                        have[name].copy_(lend[name])
                        done.append(f"layers.{index}.{name}")
        if not done:
            raise ValueError(f"None of the weights of {type(target).__name__}'s layers fits the drafter's layers.")
        width = drafter.config.target_hidden_size
        if width == drafter.config.hidden_size:
            drafter.fc.weight.zero_()
            drafter.fc.weight[:, -width:].copy_(torch.eye(width))
            done.append("fc.weight")
        norm = getattr(target.get_decoder(), "norm", None)
        if norm is not None and _is_plain_norm(target.get_decoder(), "norm"):
            drafter.norm.weight.copy_(norm.weight)
            done.append("norm.weight")
    return done


def _is_plain_norm(module: nn.Module, name: str) -> bool:
    """Whether a norm is there and multiplies by its weight; some families multiply by 1 more than it."""
    norm = dict(module.named_modules()).get(name)
    weight = getattr(norm, "weight", None)
    if weight is None:
        return False
    probe = torch.linspace(-1, 1, len(weight), dtype=weight.dtype, device=weight.device)[None]
    plain = nn.functional.rms_norm(probe, weight.shape, weight, 1e-6)
    return torch.allclose(norm(probe).float(), plain.float(), rtol=2e-2, atol=1e-3)


def _has_query_key_norm(target: PreTrainedModel) -> bool:
    return any(name.endswith("self_attn.q_norm") for name, _ in target.named_modules())
