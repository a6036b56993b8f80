"""What the target says: of the prompt, run as Transformers runs it, and of a stream of tokens after it."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from .cache_layers import is_filled
from .compat import CACHE_NAME, hidden_states_request, tapped_hidden_states
from .target_limits import check_prompts


# Fields of a model's output that are large and that no later step of `generate` reads.
_LARGE_FIELDS = ("logits", "hidden_states", "attentions", CACHE_NAME)


@dataclass
class StreamOutput:
    """
    What the target said of a stream of tokens.

    Attributes:
        logits (`torch.Tensor` of shape `(tokens, vocab_size)`): Raw logits after each token.
        taps (`torch.Tensor` of shape `(tokens, taps * hidden_size)`): Tapped hidden states at each token.
        hidden_states (`tuple[torch.Tensor]`, *optional*): All of them, `(1, tokens, hidden_size)` a layer.
        attentions (`list[list[tuple[torch.Tensor]]]`, *optional*): For each row and token, `(1, heads, 1, keys)` a
            layer.
    """

    logits: torch.Tensor
    taps: torch.Tensor
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: list[list[tuple[torch.Tensor, ...]]] | None = None


@dataclass
class Prefill:
    """
    The prompt as the target saw it.

    Attributes:
        input_ids (`torch.LongTensor` of shape `(rows, prompt_length)`): Left-padded prompts; empty with embeddings.
        logits (`torch.Tensor` of shape `(rows, vocab_size)`): Raw logits after the prompt.
        taps (`torch.Tensor` of shape `(tokens, taps * hidden_size)`): Tapped hidden states, row after row, padding
            left out.
        tap_counts (`list[int]`): How many of them belong to each row.
        cached (`list[int]`): Positions of each row that came in a cache and have no hidden states here.
        outputs: What the model returned.
        cache (`Cache`): The target's; never filled by models that have none.
        visible (`torch.BoolTensor` of shape `(rows, length)`): False at padding.
        model_kwargs (`dict`): As `generate` would hand them to the step after the prompt, without the cache.
        last_outputs (`ModelOutput`): `outputs` without what is large.
        device (`torch.device`): Where the target takes its inputs.
    """

    input_ids: torch.LongTensor
    logits: torch.Tensor
    taps: torch.Tensor
    tap_counts: list[int]
    cached: list[int]
    outputs: Any
    cache: Cache
    visible: torch.BoolTensor
    model_kwargs: dict[str, Any]
    last_outputs: ModelOutput
    device: torch.device


def text_config(target: PreTrainedModel) -> PreTrainedConfig:
    """The config of the target's text decoder."""
    return target.config.get_text_config(decoder=True)


def prefill(
    target: PreTrainedModel,
    input_ids: torch.LongTensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    taps: Sequence[int],
) -> Prefill:
    """
    Run the prompt as plain `generate` does, chunked if it says so, and keep the tapped hidden states.

    Args:
        target (`PreTrainedModel`): The verifying model.
        input_ids (`torch.LongTensor` of shape `(rows, prompt_length)`): Left-padded prompts; empty with embeddings.
        generation_config (`GenerationConfig`): Of the call.
        model_kwargs (`dict`): As `generate` prepared them; used up.
        taps (`Sequence[int]`): The drafter's `target_layer_ids`.

    Raises:
        `ValueError`: if the target cannot be one, saying why.
    """
    if model_kwargs.get(CACHE_NAME) is None:
        if not target._supports_default_dynamic_cache():
            raise ValueError(
                f"{type(target).__name__} keeps a state of its own instead of a cache of Transformers, and cannot "
                "forget rejected drafts. Call `generate` without `assistant_model`."
            )
        model_kwargs |= {CACHE_NAME: DynamicCache(config=text_config(target)), "use_cache": True}
    cache = model_kwargs[CACHE_NAME]
    cached_length = int(cache.get_seq_length())  # a static cache counts in a tensor that the prefill changes
    model_kwargs["output_hidden_states"] = hidden_states_request(taps, bool(generation_config.output_hidden_states))
    chunks, thread = [], threading.get_ident()

    def keep_taps(module, args, outputs):
        # A chunked prefill returns its last chunk only; the hook sees them all, of this thread's call.
        if threading.get_ident() == thread:
            chunks.append(read_taps(target, outputs, taps))

    hook = target.register_forward_hook(keep_taps)
    try:
        outputs = target._prefill(input_ids, generation_config, model_kwargs)
    finally:
        hook.remove()
    tapped = torch.cat(chunks, dim=1)  # (rows, new_length, taps * hidden_size)
    rows, new_length = tapped.shape[:2]
    mask = model_kwargs.get("attention_mask")
    if mask is None:
        visible = torch.ones(rows, cached_length + new_length, dtype=torch.bool, device=tapped.device)
    else:
        visible = mask.to(tapped.device).bool()
    if visible.shape != (rows, cached_length + new_length):
        raise ValueError(
            f"{type(target).__name__} read {new_length} positions after {cached_length} cached ones where the "
            f"attention mask has {visible.shape[1]}: something adds positions to the prompt. Call `generate` without "
            "`assistant_model`."
        )
    new_tokens = generation_config.max_length - input_ids.shape[1]
    check_prompts(target, visible.sum(dim=1).tolist(), not visible.all(), new_tokens)
    returned = outputs.get(CACHE_NAME)
    if isinstance(returned, Cache) and not is_filled(cache):
        cache = returned  # Phi-3 drops the one it was given in front of a long prompt
    new = visible[:, cached_length:]
    last_outputs = type(outputs)(**{name: value for name, value in outputs.items() if name not in _LARGE_FIELDS})
    model_kwargs = target._update_model_kwargs_for_generation(last_outputs, model_kwargs, is_encoder_decoder=False)
    model_kwargs.pop(CACHE_NAME, None)
    return Prefill(
        input_ids=input_ids,
        logits=outputs.logits[:, -1].clone(),
        taps=tapped[new],
        tap_counts=new.sum(dim=1).tolist(),
        cached=visible[:, :cached_length].sum(dim=1).tolist(),
        outputs=outputs,
        cache=cache,
        visible=visible,
        model_kwargs=model_kwargs,
        last_outputs=last_outputs,
        # Weights that accelerate has offloaded are on `meta` between passes.
        device=outputs.logits.device if target.device.type == "meta" else target.device,
    )


def read_taps(target: PreTrainedModel, outputs: Any, taps: Sequence[int]) -> torch.Tensor:
    """
    The tapped layers' outputs, `(rows, length, taps * hidden_size)`, of a forward pass that was asked for them.

    Raises:
        `ValueError`: if the target does not return them.
    """
    config, name = text_config(target), type(target).__name__
    states = getattr(outputs, "hidden_states", None)
    if not states:
        raise ValueError(
            f"{name} returns no hidden states, which a DSpark drafter reads. Call `generate` without "
            "`assistant_model`."
        )
    if len(states) - config.num_hidden_layers not in (0, 1):
        raise ValueError(
            f"{name} returns {len(states)} hidden states for {config.num_hidden_layers} layers, so it is not known "
            "which the drafter should read. Call `generate` without `assistant_model`."
        )
    tapped = tapped_hidden_states(states, taps, config.num_hidden_layers)
    if any(state is None for state in tapped):
        raise ValueError(
            f"{name} does not return the hidden states of the layers {list(taps)} that the drafter reads. Call "
            "`generate` without `assistant_model`."
        )
    tapped = [_one_stream(state, config) for state in tapped]
    if any(state.ndim != 3 or state.shape[-1] != config.hidden_size for state in tapped):
        shapes = sorted({tuple(state.shape) for state in tapped})
        raise ValueError(
            f"{name} returns hidden states of shape {shapes} where (rows, length, {config.hidden_size}) was expected. "
            "Call `generate` without `assistant_model`."
        )
    return torch.cat([state.to(tapped[0].device) for state in tapped], dim=-1)


def _one_stream(states: torch.Tensor, config: PreTrainedConfig) -> torch.Tensor:
    """
    Hidden states of models with several residual streams, as one: Gemma 3n's active one, which stand in the first
    dimension; the mean of hyper-connections, which stand before the last.
    """
    if states.ndim != 4:
        return states
    active = getattr(config, "altup_active_idx", None)
    return states.mean(dim=-2) if active is None else states[active]
