"""
The target as the decode loop sees it: a prefill by Transformers itself, then streams of tokens of several rows, each
verified in one forward pass and kept or forgotten.
"""

import copy
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedModel
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from .compat import CACHE_NAME, cache_argument, hidden_states_request, is_croppable, tapped_hidden_states
from .slot_cache import SlotCache, StreamPlan, UnsupportedAttention, use_stream


_DYNAMIC_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
_STATIC_LAYERS = (StaticLayer, StaticSlidingWindowLayer)

# One lock a target: while a stream runs, its attention is switched.
_locks: "weakref.WeakKeyDictionary[PreTrainedModel, threading.RLock]" = weakref.WeakKeyDictionary()
_locks_guard = threading.Lock()
# Classes of targets whose attention does not go through the interface, as their first stream showed.
_unstreamable: "weakref.WeakSet[type]" = weakref.WeakSet()


def mark_unstreamable(target: PreTrainedModel) -> None:
    """Remember that this class of targets cannot run flattened streams."""
    _unstreamable.add(type(target))


def _lock_of(target: PreTrainedModel) -> threading.RLock:
    with _locks_guard:
        return _locks.setdefault(target, threading.RLock())


@dataclass
class StreamOutput:
    """
    What the target said of a stream of tokens.

    Attributes:
        logits (`torch.Tensor` of shape `(tokens, vocab_size)`): Raw logits after each token.
        taps (`torch.Tensor` of shape `(tokens, taps * hidden_size)`): Tapped hidden states at each token.
        hidden_states (`tuple[torch.Tensor]`, *optional*): All of them, `(1, tokens, hidden_size)` a layer.
        attentions (`list[tuple[torch.Tensor]]`, *optional*): For each row, `(1, heads, tokens, keys)` a layer.
    """

    logits: torch.Tensor
    taps: torch.Tensor
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: list[tuple[torch.Tensor, ...]] | None = None


@dataclass
class Prefill:
    """
    The prompt as the target saw it.

    Attributes:
        logits (`torch.Tensor` of shape `(rows, vocab_size)`): Raw logits after the prompt.
        taps (`torch.Tensor` of shape `(tokens, taps * hidden_size)`): Tapped hidden states, row after row, padding
            left out.
        tap_counts (`list[int]`): How many of them belong to each row.
        cached (`list[int]`): Positions of each row that came in a cache and have no hidden states here.
        outputs: What the model returned.
        cache (`Cache`): The target's.
        visible (`torch.BoolTensor` of shape `(rows, length)`): False at padding.
        model_kwargs (`dict`): As `generate` prepared them, with the cache.
    """

    logits: torch.Tensor
    taps: torch.Tensor
    tap_counts: list[int]
    cached: list[int]
    outputs: Any
    cache: Cache
    visible: torch.BoolTensor
    model_kwargs: dict[str, Any]


def text_config(target: PreTrainedModel):
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
    """
    if model_kwargs.get(CACHE_NAME) is None:
        model_kwargs |= {CACHE_NAME: DynamicCache(config=text_config(target)), "use_cache": True}
    cache = model_kwargs[CACHE_NAME]
    cached_length = int(cache.get_seq_length())  # a static cache counts in a tensor that the prefill changes
    num_layers = text_config(target).num_hidden_layers
    model_kwargs["output_hidden_states"] = hidden_states_request(taps, bool(generation_config.output_hidden_states))
    chunks, thread = [], threading.get_ident()

    def keep_taps(module, args, outputs):
        # A chunked prefill returns its last chunk only; the hook sees them all, of this thread's call.
        if threading.get_ident() == thread:
            chunks.append(tapped_hidden_states(outputs.hidden_states, taps, num_layers))

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
    new = visible[:, -new_length:]
    return Prefill(
        logits=outputs.logits[:, -1].clone(),
        taps=tapped[new],
        tap_counts=new.sum(dim=1).tolist(),
        cached=visible[:, :-new_length].sum(dim=1).tolist(),
        outputs=outputs,
        cache=cache,
        visible=visible,
        model_kwargs=model_kwargs,
    )


def open_stream(target: PreTrainedModel, prompt: Prefill, generation_config: GenerationConfig, taps: Sequence[int]):
    """
    The stream that fits a target: flattened over slots where its attention goes through Transformers' attention
    interface, and row by row over its own cache otherwise.

    Raises:
        `ValueError`: if the target's cache cannot forget rejected tokens.
    """
    keep_hidden = bool(generation_config.output_hidden_states)
    keep_attentions = bool(generation_config.output_attentions)
    if not keep_attentions and _can_flatten(target, prompt):
        return FlattenedStream(target, prompt, taps, keep_hidden)
    return RowStream(target, prompt, taps, keep_hidden, keep_attentions)


def _can_flatten(target: PreTrainedModel, prompt: Prefill) -> bool:
    layers = [layer for layer in prompt.cache.layers if getattr(layer, "is_initialized", True)]
    left_padded = bool((prompt.visible.long().diff(dim=1) >= 0).all())
    return (
        getattr(target, "_supports_attention_backend", False)
        and type(target) not in _unstreamable
        and prompt.model_kwargs.get("position_ids") is not None
        and not prompt.cache.offloading
        and all(type(layer) in _DYNAMIC_LAYERS + _STATIC_LAYERS for layer in layers)
        # A hole in the middle of a row would count towards its sliding windows.
        and (left_padded or not any(getattr(layer, "is_sliding", False) for layer in layers))
        and getattr(text_config(target), "attention_chunk_size", None) is None
    )


class FlattenedStream:
    """
    The rows' tokens as one stream of a batch of one, over a cache of per-row slots without padding.

    Args:
        target (`PreTrainedModel`): The verifying model.
        prompt ([`Prefill`]): Its keys and values are copied into slots.
        taps (`Sequence[int]`): The drafter's `target_layer_ids`.
        keep_hidden (`bool`): Whether all hidden states are wanted.
    """

    def __init__(self, target: PreTrainedModel, prompt: Prefill, taps: Sequence[int], keep_hidden: bool):
        self.target, self.prompt, self.taps, self.keep_hidden = target, prompt, list(taps), keep_hidden
        self.config = text_config(target)
        self.request = hidden_states_request(taps, keep_hidden)
        self.prompt_lengths = prompt.visible.sum(dim=1).tolist()
        # The last position of each row: one number, or one a dimension for multimodal rotary embeddings.
        positions = prompt.model_kwargs["position_ids"]
        self.last_positions = positions[..., -1].expand(*positions.shape[:-2], len(self.prompt_lengths)).tolist()
        self.rows = list(range(len(self.prompt_lengths)))
        self.finished: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self.final_lengths: dict[int, int] = {}
        self.keep_finished = False
        self.cache = self._import(prompt.cache)
        self.cache_name = cache_argument(target)
        self.extra = {
            name: prompt.model_kwargs[name][:1, -1:] if name == "token_type_ids" else None
            for name in ("token_type_ids", "mm_token_type_ids")
            if prompt.model_kwargs.get(name) is not None
        }

    def _import(self, source: Cache) -> SlotCache:
        visible = self.prompt.visible
        total = visible.shape[1]
        layers = source.layers
        windows = [_window(layer) for layer in layers]
        cache = SlotCache(len(self.rows), windows, capacity=max(64, total + 64))
        cache.lengths = list(self.prompt_lengths)
        for layer, buffer in zip(layers, cache.buffers, strict=True):
            if not getattr(layer, "is_initialized", True) or layer.keys is None:
                continue
            keys, values = layer.keys, layer.values
            held = min(keys.shape[2], total)
            if isinstance(layer, StaticLayer):
                keys, values = keys[:, :, :held], values[:, :, :held]
            # A sliding layer holds the last positions only.
            kept = visible[:, total - held :].to(keys.device)
            slots = visible.long().cumsum(dim=1)[:, total - held :].to(keys.device) - 1
            row_index = torch.arange(len(self.rows), device=keys.device)[:, None].expand_as(kept)[kept]
            buffer.write(
                keys.transpose(1, 2)[kept].transpose(0, 1),
                values.transpose(1, 2)[kept].transpose(0, 1),
                row_index,
                slots[kept],
                used=max(self.prompt_lengths),
            )
        return cache

    def verify(self, tokens: torch.LongTensor, counts: Sequence[int]) -> StreamOutput:
        """
        Run a stream of tokens, row after row.

        Args:
            tokens (`torch.LongTensor` of shape `(sum(counts),)`): Each row's anchor and the drafts sent.
            counts (`Sequence[int]`): Tokens of each row, at least 1.
        """
        device = tokens.device
        plan = self.cache.plan = StreamPlan(self.cache.lengths, counts, device)
        inputs = {
            "input_ids": tokens[None],
            "position_ids": self._positions(counts, device),
            # A mask of four dimensions is passed through as it is, so none is built; the stream has its own.
            "attention_mask": torch.zeros(1, 1, 1, 1, device=device),
            self.cache_name: self.cache,
            "use_cache": True,
            "output_hidden_states": self.request,
            "return_dict": True,
        }
        for name, value in self.extra.items():
            inputs[name] = torch.zeros_like(tokens)[None] if value is None else value.expand(1, len(tokens))
        with use_stream(self.config, _lock_of(self.target), self.cache):
            outputs = self.target(**inputs)
        if plan.calls < max(plan.updates, 1):
            raise UnsupportedAttention("a way around the attention interface")
        taps = tapped_hidden_states(outputs.hidden_states, self.taps, self.config.num_hidden_layers)
        hidden = outputs.hidden_states if self.keep_hidden else None
        return StreamOutput(outputs.logits[0], taps[0], hidden_states=hidden)

    def _positions(self, counts: Sequence[int], device: torch.device) -> torch.LongTensor:
        def of_dimension(last):
            values = []
            for row, count, length in zip(self.rows, counts, self.cache.lengths, strict=True):
                first = last[row] + 1 + length - self.prompt_lengths[row]
                values.extend(range(first, first + count))
            return values

        if isinstance(self.last_positions[0], list):
            return torch.tensor([of_dimension(last) for last in self.last_positions], device=device)[:, None]
        return torch.tensor(of_dimension(self.last_positions), device=device)[None]

    def advance(self, kept: Sequence[int]) -> None:
        """Keep the first `kept` tokens of each row of the last stream, forget the others."""
        self.cache.lengths = [length + count for length, count in zip(self.cache.lengths, kept, strict=True)]

    def keep_rows(self, keep: Sequence[int]) -> None:
        """Drop all rows but those whose indices, among the current ones, are given."""
        for index in sorted(set(range(len(self.rows))) - set(keep)):
            self._set_aside(index)
        self.rows = [self.rows[index] for index in keep]
        if keep:
            self.cache.keep_rows(keep)

    def _set_aside(self, index: int) -> None:
        row, length = self.rows[index], self.cache.lengths[index]
        self.final_lengths[row] = length
        if self.keep_finished:
            self.finished[row] = [
                (None, None)
                if buffer.keys is None
                else (buffer.keys[index, :, :length].clone(), buffer.values[index, :, :length].clone())
                for buffer in self.cache.buffers
            ]

    def close(self) -> None:
        """Write what was kept back into the cache that `generate` prepared or was given."""
        visible = self.prompt.visible
        total = max(visible.shape[1] + self.final_lengths[row] - held for row, held in enumerate(self.prompt_lengths))
        for layer_index, layer in enumerate(self.prompt.cache.layers):
            if self.finished[0][layer_index][0] is None:
                continue
            states = []
            for which in (0, 1):
                first = self.finished[0][layer_index][which]
                whole = first.new_zeros(len(self.prompt_lengths), first.shape[0], total, first.shape[2])
                for row, held in enumerate(self.prompt_lengths):
                    kept = self.finished[row][layer_index][which]
                    prompt_places = visible[row].nonzero().squeeze(1).to(kept.device)
                    whole[row, :, prompt_places] = kept[:, :held]
                    whole[row, :, visible.shape[1] : visible.shape[1] + kept.shape[1] - held] = kept[:, held:]
                states.append(whole)
            _fill_layer(layer, *states)


def _window(layer) -> int | None:
    if not getattr(layer, "is_sliding", False):
        return None
    return layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else layer.max_cache_len


def _fill_layer(layer, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Make a cache layer of Transformers hold these keys and values and nothing else."""
    length = keys.shape[2]
    if isinstance(layer, StaticLayer):
        kept = min(length, layer.max_cache_len)
        layer.keys[:, :, :kept] = keys[:, :, length - kept :]
        layer.values[:, :, :kept] = values[:, :, length - kept :]
        layer.cumulative_length.fill_(length)
        if hasattr(layer, "cumulative_length_int"):
            layer.cumulative_length_int = length
        return
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = length
        keys, values = keys[:, :, -layer.sliding_window + 1 :], values[:, :, -layer.sliding_window + 1 :]
    layer.keys, layer.values = keys.contiguous(), values.contiguous()


class RowStream:
    """
    Each row on its own over the target's own cache, as Transformers' assisted generation runs a single row: for
    targets whose attention does not go through the interface, and where attention weights are wanted.

    Args:
        target, prompt, taps, keep_hidden: As for [`FlattenedStream`].
        keep_attentions (`bool`): Whether attention weights are wanted.

    Raises:
        `ValueError`: if the cache cannot forget rejected tokens.
    """

    def __init__(
        self, target: PreTrainedModel, prompt: Prefill, taps: Sequence[int], keep_hidden: bool, keep_attentions: bool
    ):
        if not is_croppable(prompt.cache):
            kinds = sorted({type(layer).__name__ for layer in prompt.cache.layers if not _croppable(layer)})
            raise ValueError(
                f"{type(target).__name__} keeps {', '.join(kinds)} in its cache, which cannot forget rejected drafts. "
                "Call `generate` without `assistant_model`, or with another `cache_implementation`."
            )
        self.target, self.prompt, self.taps, self.keep_hidden = target, prompt, list(taps), keep_hidden
        self.keep_attentions = keep_attentions
        self.num_layers = text_config(target).num_hidden_layers
        self.request = hidden_states_request(taps, keep_hidden)
        batch = len(prompt.visible)
        self.rows = [self._row(row, batch) for row in range(batch)]
        for cache, _ in self.rows:
            cache.activate_past_recording()
        self.ids = [torch.empty(1, 0, dtype=torch.long, device=prompt.logits.device)] * batch
        self.keep_finished = False

    def _row(self, row: int, batch: int) -> tuple[Cache, dict[str, Any]]:
        kwargs = dict(self.prompt.model_kwargs)
        kwargs.pop(CACHE_NAME)
        kwargs["output_hidden_states"] = self.request
        if batch == 1:
            return self.prompt.cache, kwargs
        cache = copy.deepcopy(self.prompt.cache)
        cache.batch_select_indices(torch.tensor([row]))
        for name, value in kwargs.items():
            if isinstance(value, torch.Tensor):
                dimension = 1 if name == "position_ids" and value.ndim == 3 else 0
                if value.ndim > dimension and value.shape[dimension] == batch:
                    kwargs[name] = value.narrow(dimension, row, 1)
        return cache, kwargs

    def verify(self, tokens: torch.LongTensor, counts: Sequence[int]) -> StreamOutput:
        """As [`FlattenedStream.verify`], one forward pass a row."""
        logits, taps, hidden, attentions = [], [], [], []
        for index, piece in enumerate(tokens.split(list(counts))):
            cache, kwargs = self.rows[index]
            longer = self.target._update_model_kwargs_for_generation({}, dict(kwargs), num_new_tokens=len(piece))
            inputs = self.target.prepare_inputs_for_generation(
                piece[None], next_sequence_length=len(piece), is_first_iteration=False, **longer, **{CACHE_NAME: cache}
            )
            if "logits_to_keep" in inputs:
                inputs["logits_to_keep"] = len(piece)
            outputs = self.target(**inputs, return_dict=True)
            logits.append(outputs.logits[0, -len(piece) :])
            taps.append(tapped_hidden_states(outputs.hidden_states, self.taps, self.num_layers)[0])
            if self.keep_hidden:
                hidden.append(outputs.hidden_states)
            if self.keep_attentions:
                attentions.append(outputs.attentions)
        self.counts = list(counts)
        return StreamOutput(
            torch.cat(logits),
            torch.cat(taps),
            tuple(torch.cat(layer, dim=1) for layer in zip(*hidden, strict=True)) if self.keep_hidden else None,
            attentions if self.keep_attentions else None,
        )

    def advance(self, kept: Sequence[int]) -> None:
        """As [`FlattenedStream.advance`]."""
        for index, (count, keep) in enumerate(zip(self.counts, kept, strict=True)):
            cache, kwargs = self.rows[index]
            cache.crop(keep - count)
            kwargs = (
                self.target._update_model_kwargs_for_generation({}, kwargs, num_new_tokens=keep) if keep else kwargs
            )
            self.rows[index] = (cache, kwargs)

    def keep_rows(self, keep: Sequence[int]) -> None:
        """As [`FlattenedStream.keep_rows`]."""
        self.rows = [self.rows[index] for index in keep]

    def close(self) -> None:
        """The rows' caches are the target's own; of a single row it is the very one that `generate` prepared."""
        for layer in self.prompt.cache.layers:
            if hasattr(layer, "record_past"):
                layer.record_past = False


def _croppable(layer) -> bool:
    return bool(getattr(layer, "is_croppable", False))
