"""Each row on its own over the target's own cache, as Transformers' assisted generation runs a single row."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from .cache_layers import copy_row, is_filled, join_rows, window_of
from .compat import CACHE_NAME, crop, hidden_states_request, is_croppable
from .target_outputs import Prefill, StreamOutput, read_taps, text_config


class RowStream:
    """
    For targets that no other stream serves, for caches that hold more than keys and values, and where attention
    weights are wanted. Targets without a cache run their whole text in each pass, as they do anyway.

    Args:
        target, prompt, taps, keep_hidden: As for [`SlotStream`].
        keep_attentions (`bool`): Whether attention weights are wanted.

    Raises:
        `ValueError`: if the cache cannot forget rejected tokens, or what is wanted cannot be had.
    """

    def __init__(
        self, target: PreTrainedModel, prompt: Prefill, taps: Sequence[int], keep_hidden: bool, keep_attentions: bool
    ):
        self.has_cache = is_filled(prompt.cache)
        if not self.has_cache and (keep_hidden or keep_attentions):
            raise ValueError(
                f"{type(target).__name__} has no cache and returns the states of the whole text in each step, which a "
                "drafter does not. Leave `output_hidden_states` and `output_attentions` out."
            )
        stuck = sorted({type(layer).__name__ for layer in prompt.cache.layers if not is_croppable(layer)})
        if self.has_cache and stuck:
            raise ValueError(
                f"{type(target).__name__} keeps {', '.join(stuck)} in its cache, which cannot forget rejected drafts. "
                "Call `generate` without `assistant_model`, or with another `cache_implementation`."
            )
        self.target, self.prompt, self.taps = target, prompt, list(taps)
        self.keep_hidden, self.keep_attentions = keep_hidden, keep_attentions
        self.request = hidden_states_request(taps, keep_hidden)
        self.all_rows = [_Row(target, prompt, row, self.request, self.has_cache) for row in range(len(prompt.visible))]
        self.rows = self.all_rows
        self.keep_finished = False

    def verify(self, tokens: torch.LongTensor, counts: Sequence[int]) -> StreamOutput:
        """As [`SlotStream.verify`], one forward pass a row."""
        logits, taps, hidden, attentions = [], [], [], []
        self.pieces = tokens.split(list(counts))
        for row, piece in zip(self.rows, self.pieces, strict=True):
            outputs = self.target(**row.inputs(piece), return_dict=True)
            count = len(piece)
            logits.append(outputs.logits[0, -count:])
            taps.append(read_taps(self.target, outputs, self.taps)[0, -count:])
            if self.keep_hidden:
                hidden.append([states[:, -count:] for states in outputs.hidden_states])
            if self.keep_attentions:
                attentions.append(row.weights(outputs.attentions, count))
        return StreamOutput(
            torch.cat(logits),
            torch.cat(taps),
            tuple(torch.cat(layer, dim=1) for layer in zip(*hidden, strict=True)) if self.keep_hidden else None,
            attentions if self.keep_attentions else None,
        )

    def advance(self, kept: Sequence[int]) -> None:
        """As [`SlotStream.advance`]."""
        for row, piece, keep in zip(self.rows, self.pieces, kept, strict=True):
            row.commit(piece, keep)

    def keep_rows(self, keep: Sequence[int]) -> None:
        """As [`SlotStream.keep_rows`]."""
        self.rows = [self.rows[index] for index in keep]

    def catch_up(self, missing: Sequence[torch.LongTensor]) -> None:
        """As [`SlotStream.catch_up`]."""
        for row, piece in zip(self.all_rows, missing, strict=True):
            if self.has_cache and len(piece):
                self.target(**row.inputs(piece.to(self.prompt.device)), return_dict=True)
                row.commit(piece.to(self.prompt.device), len(piece))

    def close(self) -> None:
        """Several rows go back into the cache that `generate` prepared or was given; a single one never left it."""
        cache = self.prompt.cache
        if self.has_cache and len(self.all_rows) > 1:
            join_rows(cache, [row.cache for row in self.all_rows])
        for layer in cache.layers:
            if hasattr(layer, "record_past"):
                layer.record_past = False


class _Row:
    """A row's tokens, cache and model arguments, as `generate` would have them before its next step."""

    def __init__(self, target: PreTrainedModel, prompt: Prefill, row: int, request: bool | list[int], has_cache: bool):
        self.target, self.last_outputs = target, prompt.last_outputs
        batch = len(prompt.visible)
        self.kwargs = _of_row(prompt.model_kwargs, row, batch) | {"output_hidden_states": request}
        self.ids = prompt.input_ids[row : row + 1].to(prompt.device)
        # Layers that attend to images hold the images' keys, as many as there are.
        self.constant_layers = getattr(text_config(target), "cross_attention_layers", None) or ()
        self.ids_before = prompt.visible.shape[1] - self.ids.shape[1]  # positions of embeddings, which have no ids
        self.cache: Cache | None = None
        if not has_cache:
            self.kwargs["use_cache"] = False
            return
        self.cache = prompt.cache if batch == 1 else copy_row(prompt.cache, row)
        self.cache.activate_past_recording()

    def inputs(self, piece: torch.LongTensor) -> dict[str, Any]:
        """Arguments of the target's forward pass over the row's next tokens."""
        count = len(piece)
        inputs = self.target.prepare_inputs_for_generation(
            torch.cat([self.ids, piece[None]], dim=1),
            next_sequence_length=None if self.cache is None else count,
            is_first_iteration=False,
            **self._after(count - 1),
            **({} if self.cache is None else {CACHE_NAME: self.cache}),
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = count
        return inputs

    def weights(self, layers: Sequence[torch.Tensor], count: int) -> list[tuple[torch.Tensor, ...]]:
        """Attention weights of a piece's tokens, each as the step of plain `generate` that runs it alone returns."""
        if self.cache.is_compileable:  # a static cache shows all it has
            return [tuple(layer[:, :, step : step + 1] for layer in layers) for step in range(count)]
        windows = _windows(self.target, self.cache, len(layers))
        seen = self.ids_before + self.ids.shape[1]
        steps = []
        for step in range(count):
            shown = []
            for index, (layer, window) in enumerate(zip(layers, windows, strict=True)):
                constant = index in self.constant_layers
                end = layer.shape[-1] - (0 if constant else count - 1 - step)
                keep = end if constant or window is None else min(seen + step + 1, window)
                shown.append(layer[:, :, step : step + 1, end - keep : end])
            steps.append(tuple(shown))
        return steps

    def commit(self, piece: torch.LongTensor, keep: int) -> None:
        """Keep the first `keep` tokens of a piece that was run, forget the others."""
        if self.cache is not None:
            for index, layer in enumerate(self.cache.layers):
                if index not in self.constant_layers:
                    crop(layer, len(piece) - keep)
        self.ids = torch.cat([self.ids, piece[None, :keep]], dim=1)
        self.kwargs = self._after(keep)

    def _after(self, steps: int) -> dict[str, Any]:
        """The model arguments so many steps of `generate` later."""
        kwargs = dict(self.kwargs)
        for _ in range(steps):  # one by one: not every model's own update knows of several
            kwargs = self.target._update_model_kwargs_for_generation(
                self.last_outputs, kwargs, is_encoder_decoder=False
            )
        kwargs.pop(CACHE_NAME, None)
        return kwargs


def _windows(target: PreTrainedModel, cache: Cache, count: int) -> list[int | None]:
    """The windows of so many attention layers, some of which may keep no keys of their own."""
    windows = [window_of(layer) for layer in cache.layers]
    types = [kind for kind in getattr(text_config(target), "layer_types", None) or () if kind.endswith("attention")]
    if len(types) == count:
        window = next((window for window in windows if window is not None), None)
        return [None if kind == "full_attention" else window for kind in types]
    return windows if len(windows) == count else [None] * count


def _of_row(kwargs: dict[str, Any], row: int, batch: int) -> dict[str, Any]:
    kwargs = dict(kwargs)
    if batch == 1:
        return kwargs
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor):
            dimension = 1 if name == "position_ids" and value.ndim == 3 else 0
            if value.ndim > dimension and value.shape[dimension] == batch:
                kwargs[name] = value.narrow(dimension, row, 1)
    return kwargs
