"""What is known here of the layers of Transformers' caches: filling them, and taking them apart by rows."""

import copy
from collections.abc import Sequence

import torch
from transformers import Cache
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from .compat import EMPTY_LAYERS


# Layers that hold keys and values of the last positions and nothing else (a subclass may hold more).
PLAIN_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer, *EMPTY_LAYERS)
# The dimensions of rows and of positions in the tensors of layers, where they are not the first and any that differs.
_ROW_DIMENSION = {"indexer_position_ids": 1}
_LENGTH_DIMENSION = {"keys": 2, "values": 2}


def is_filled(cache: Cache) -> bool:
    """Whether any layer of a cache holds keys and values; layers without a length hold states of another kind."""
    return any(hasattr(layer, "get_seq_length") and int(layer.get_seq_length()) > 0 for layer in cache.layers)


def window_of(layer: CacheLayerMixin) -> int | None:
    """How many of the last positions a layer lets the newest token see, itself included; `None` for all."""
    if not getattr(layer, "is_sliding", False):
        return None
    return layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else layer.max_cache_len


def fill_layer(layer: CacheLayerMixin, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Make one of the [`PLAIN_LAYERS`] hold these keys and values, `(rows, key_heads, length, head_dim)`, alone."""
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


def copy_row(cache: Cache, row: int) -> Cache:
    """A cache with one of a cache's rows, sharing no state with it."""
    cache = copy.copy(cache)
    cache.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in cache.layers:
        for name, value in vars(layer).items():
            if isinstance(value, dict):
                setattr(layer, name, dict(value))
            elif isinstance(value, torch.Tensor) and value.ndim == 0:
                setattr(layer, name, value.clone())
    cache.reorder_cache(torch.tensor([row]))
    return cache


def join_rows(cache: Cache, rows: Sequence[Cache]) -> None:
    """Put caches of one row each back into the cache that [`copy_row`] took them from, shorter ones filled up."""
    for index, layer in enumerate(cache.layers):
        parts = [row.layers[index] for row in rows]
        for name, first in vars(parts[0]).items():
            values = [getattr(part, name) for part in parts]
            if isinstance(first, torch.Tensor) and first.ndim > 0:
                dimension = _LENGTH_DIMENSION.get(name, _differing(values))
                if dimension is not None and not isinstance(layer, StaticLayer):
                    values = _align(parts, values, dimension)
                _set(layer, name, torch.cat(values, dim=_ROW_DIMENSION.get(name, 0)))
            elif isinstance(first, torch.Tensor):
                _set(layer, name, torch.stack(values).amax())
            elif isinstance(first, dict):
                joined = {key: [value[key] for value in values] for key in first}
                setattr(layer, name, {key: _join(items) for key, items in joined.items()})
            elif name.startswith("cumulative_length"):
                setattr(layer, name, max(values))


def _differing(values: Sequence[torch.Tensor]) -> int | None:
    """The dimension in which tensors differ, if any."""
    sizes = zip(*(value.shape for value in values), strict=True)
    return next((dimension for dimension, size in enumerate(sizes) if len(set(size)) > 1), None)


def _join(items: list):
    return torch.cat(items) if isinstance(items[0], torch.Tensor) else items[0]


def _align(parts: Sequence[CacheLayerMixin], values: list[torch.Tensor], dimension: int) -> list[torch.Tensor]:
    """Append zeros to the states of shorter rows; a sliding layer keeps what its window lets the next token see."""
    lengths = [part.get_seq_length() for part in parts]
    padded = []
    for value, length in zip(values, lengths, strict=True):
        shape = list(value.shape)
        shape[dimension] = max(lengths) - length
        padded.append(torch.cat([value, value.new_zeros(shape)], dim=dimension))
    kept = min(value.shape[dimension] for value in padded)
    if isinstance(parts[0], DynamicSlidingWindowLayer):
        kept = min(kept, parts[0].sliding_window - 1)
    return [value.narrow(dimension, value.shape[dimension] - kept, kept) for value in padded]


def _set(layer: CacheLayerMixin, name: str, value: torch.Tensor) -> None:
    """Set a tensor of a layer; in place where the layer's memory is not to move."""
    held = getattr(layer, name)
    if isinstance(layer, StaticLayer) and held.shape == value.shape:
        held.copy_(value)
    else:
        setattr(layer, name, value)
