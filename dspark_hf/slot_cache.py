"""
The target's keys and values in per-row slots, and attention over them for a flattened stream: the tokens of all rows
stand one after the other in a batch of one, each seeing its own row's slots up to its own.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .modeling.attention import grouped_attention
from .modeling.slot_buffer import SlotBuffer


ATTENTION_NAME = "dspark_stream"

_active = threading.local()


class UnsupportedAttention(Exception):
    """The target's attention asks for something that the stream does not do."""


@dataclass
class StreamPlan:
    """
    Where the tokens of one forward pass belong.

    Attributes:
        held (`Sequence[int]`): Slots of each row that are filled.
        counts (`Sequence[int]`): New tokens of each row.
        device (`torch.device`): Of the target's inputs.
    """

    held: Sequence[int]
    counts: Sequence[int]
    device: torch.device
    updates: int = 0
    calls: int = 0
    _masks: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.used = max(map(sum, zip(self.held, self.counts, strict=True)))
        self.longest = max(self.counts)
        self.row_index = self.offsets = None
        if len(self.counts) == 1:
            self.slots = slice(self.held[0], self.used)
        else:
            rows = [row for row, count in enumerate(self.counts) for _ in range(count)]
            offsets = [offset for count in self.counts for offset in range(count)]
            slots = [self.held[row] + offset for row, offset in zip(rows, offsets, strict=True)]
            self.row_index, self.offsets, self.slots = (
                torch.tensor(values, device=self.device) for values in (rows, offsets, slots)
            )

    def mask(self, window: int | None, device: torch.device) -> torch.Tensor | None:
        """
        Which slots each query sees: `(rows, 1, longest, used)`, true for its own slot and those before, inside the
        window; `None` if every query sees all slots.
        """
        sliding = window is not None and self.used > window
        if len(self.counts) == 1 and self.longest == 1 and not sliding:
            return None
        key = (window if sliding else None, device)
        if key not in self._masks:
            slots = torch.arange(self.used, device=device)
            queries = torch.tensor(self.held, device=device)[:, None] + torch.arange(self.longest, device=device)
            queries = queries[:, None, :, None]
            mask = slots <= queries
            if sliding:
                mask &= slots > queries - window
            self._masks[key] = mask
        return self._masks[key]

    def by_row(self, states: torch.Tensor) -> torch.Tensor:
        """`(1, heads, tokens, head_dim)` of the stream as `(rows, heads, longest, head_dim)`."""
        if self.row_index is None:
            return states
        rows = states.new_zeros(len(self.counts), states.shape[1], self.longest, states.shape[-1])
        rows[self.row_index, :, self.offsets] = states[0].transpose(0, 1)
        return rows

    def flatten(self, states: torch.Tensor) -> torch.Tensor:
        """`(rows, heads, longest, head_dim)` as `(1, tokens, heads, head_dim)`."""
        if self.row_index is None:
            return states.transpose(1, 2)
        return states[self.row_index, :, self.offsets][None]


class SlotCache(Cache):
    """
    A cache of per-row slots for flattened streams. Rejecting tokens is not advancing `lengths`.

    Args:
        num_rows (`int`): Number of rows.
        num_layers (`int`): Number of cache layers.
        windows (`Sequence[int | None]`): For each layer its sliding window, `None` where it sees everything.
        capacity (`int`): Slots a row to begin with.
    """

    def __init__(self, num_rows: int, windows: Sequence[int | None], capacity: int):
        super().__init__(layers=[])
        self.buffers = [SlotBuffer(num_rows, capacity) for _ in windows]
        self.windows = list(windows)
        self.lengths = [0] * num_rows
        self.plan: StreamPlan | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scatter a stream's keys and values of shape `(1, key_heads, tokens, head_dim)`; return all used slots."""
        plan, buffer = self.plan, self.buffers[layer_idx]
        plan.updates += 1
        buffer.write(key_states[0], value_states[0], plan.row_index, plan.slots, plan.used)
        return buffer.read(plan.used)

    def window(self, layer_idx: int | None) -> int | None:
        """The sliding window of a layer; layers that share another's keys have none of their own here."""
        return self.windows[layer_idx] if layer_idx is not None and layer_idx < len(self.windows) else None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Slots filled in the longest row."""
        return max(self.lengths)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keep the rows whose indices are given, in that order."""
        self.lengths = [self.lengths[row] for row in rows]
        for buffer in self.buffers:
            device = None if buffer.keys is None else buffer.keys.device
            buffer.keep_rows(torch.tensor(rows, device=device))


class use_stream:
    """
    Context in which the target's attention runs over a cache's slots, in this thread.

    Other threads that use the same target meanwhile meet the stream's attention too; it does plain attention there.

    Args:
        config (`PreTrainedConfig`): The text config whose attention is switched.
        lock (`threading.RLock`): Held while it is.
        cache ([`SlotCache`]): With its plan set.
    """

    def __init__(self, config, lock: threading.RLock, cache: SlotCache):
        self.config, self.lock, self.cache = config, lock, cache

    def __enter__(self) -> None:
        self.lock.acquire()
        self.before = self.config._attn_implementation
        self.config._attn_implementation = ATTENTION_NAME
        _active.cache = self.cache

    def __exit__(self, *error) -> None:
        _active.cache = None
        self.config._attn_implementation = self.before
        self.lock.release()


def stream_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Attention of a flattened stream, as the public attention interface of Transformers calls it."""
    cache: SlotCache | None = getattr(_active, "cache", None)
    if cache is None:
        if softcap is not None:
            kwargs["softcap"] = softcap
        if s_aux is not None:
            kwargs["s_aux"] = s_aux
        return ALL_ATTENTION_FUNCTIONS["sdpa"](
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    if kwargs.get("position_bias") is not None:
        raise UnsupportedAttention("a position bias")
    plan = cache.plan
    plan.calls += 1
    window = sliding_window if sliding_window is not None else cache.window(getattr(module, "layer_idx", None))
    output = grouped_attention(
        plan.by_row(query),
        key,
        value,
        plan.mask(window, query.device),
        scaling if scaling is not None else query.shape[-1] ** -0.5,
        softcap=softcap,
        sinks=s_aux,
    )
    return plan.flatten(output).contiguous(), None


AttentionInterface.register(ATTENTION_NAME, stream_attention)
AttentionMaskInterface.register(ATTENTION_NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
