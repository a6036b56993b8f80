"""
The target's keys and values in per-row slots, and attention over them for a flattened stream: the tokens of all rows
stand one after the other in a batch of one, each seeing its own row's slots as far as its layer's mask lets it.

The masks are the target's own: Transformers asks the mask function registered here for each mask that the model wants
(causal, sliding, chunked), and what a layer hands to its attention must be one of those. A model that does anything
else with its attention is found out in its first stream, by [`UnsupportedAttention`].
"""

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    causal_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .modeling.attention import grouped_attention
from .modeling.slot_buffer import SlotBuffer


ATTENTION_NAME = "dspark_stream"
# Tensors that models hand through to their attention function and that have no say in it once there is a mask.
_IDLE_TENSORS = ("position_ids", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")

_active = threading.local()
# What attention a config had before it was switched, by the config's id.
_switched: dict[int, str] = {}


class UnsupportedAttention(Exception):
    """The target's attention asks for something that the stream does not do."""


@dataclass
class StreamPlan:
    """
    Where the tokens of one forward pass belong.

    Attributes:
        held (`Sequence[int]`): Slots of each row that are filled.
        counts (`Sequence[int]`): New tokens of each row.
    """

    held: Sequence[int]
    counts: Sequence[int]
    unattended: bool = False  # a layer's keys were written, and its attention has not come here yet
    window: int | None = None  # of that layer's cache
    masks: list[tuple[torch.Tensor, bool]] = field(default_factory=list)  # and whether they are plainly causal
    windowed: dict[tuple[int, torch.device], torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.used = max(map(sum, zip(self.held, self.counts, strict=True)))
        self.longest = max(self.counts)
        self._places: dict[torch.device, tuple[torch.Tensor, ...]] = {}

    def places(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Row, offset in the row's tokens and slot of each token, on a layer's device; `None` for a single row."""
        if len(self.counts) == 1:
            return None
        if device not in self._places:
            rows = [row for row, count in enumerate(self.counts) for _ in range(count)]
            offsets = [offset for count in self.counts for offset in range(count)]
            slots = [self.held[row] + offset for row, offset in zip(rows, offsets, strict=True)]
            self._places[device] = tuple(torch.tensor(values, device=device) for values in (rows, offsets, slots))
        return self._places[device]

    def make_mask(self, mask_function: Callable, device: torch.device) -> torch.Tensor:
        """
        The mask of one kind of layers, `(rows, 1, longest, used)`: true where a query sees a slot.

        Args:
            mask_function (`Callable`): As in `transformers.masking_utils`, of batch, head, query and key indices.
            device (`torch.device`): Where it is wanted.
        """
        slots = torch.arange(self.used, device=device)
        queries = torch.tensor(self.held, device=device)[:, None] + torch.arange(self.longest, device=device)
        # Rows have no padding here, so the function's batch index makes no difference.
        mask = mask_function(0, 0, queries[:, None, :, None], slots)
        if mask.shape != (len(self.counts), 1, self.longest, self.used):
            raise UnsupportedAttention("a mask that is not causal")
        self.masks.append((mask, mask_function is causal_mask_function))
        return mask

    def find_mask(self, given: torch.Tensor | None) -> torch.Tensor | None:
        """What a layer's queries may see, from the mask it hands to its attention; `None` for all slots."""
        for mask, causal in self.masks:
            if given is not mask and (given is None or given.shape != mask.shape or not _same_or_moved(given, mask)):
                continue
            if not causal:
                return given
            if self.window is not None and self.used > self.window:
                return self._windowed(given)
            # One token of one row sees all that the row has.
            return None if len(self.counts) == 1 and self.longest == 1 else given
        raise UnsupportedAttention("a mask of the model's own")

    def _windowed(self, causal: torch.Tensor) -> torch.Tensor:
        """A causal mask with a window: some models leave it to the cache to forget what is too old."""
        key = (self.window, causal.device)
        if key not in self.windowed:
            window = sliding_window_causal_mask_function(self.window)
            self.windowed[key] = causal & StreamPlan(self.held, self.counts).make_mask(window, causal.device)
        return self.windowed[key]

    def by_row(self, states: torch.Tensor) -> torch.Tensor:
        """`(1, heads, tokens, head_dim)` of the stream as `(rows, heads, longest, head_dim)`."""
        if self.longest == min(self.counts):  # a view will do
            return states[0].unflatten(1, (len(self.counts), self.longest)).transpose(0, 1)
        row_index, offsets, _ = self.places(states.device)
        rows = states.new_zeros(len(self.counts), states.shape[1], self.longest, states.shape[-1])
        rows[row_index, :, offsets] = states[0].transpose(0, 1)
        return rows

    def flatten(self, states: torch.Tensor) -> torch.Tensor:
        """`(rows, heads, longest, head_dim)` as `(1, tokens, heads, head_dim)`."""
        if self.longest == min(self.counts):
            return states.transpose(1, 2).flatten(0, 1)[None]
        row_index, offsets, _ = self.places(states.device)
        return states[row_index, :, offsets][None]


def _same_or_moved(given: torch.Tensor, mask: torch.Tensor) -> bool:
    """Whether a mask is another view of the same memory, or a copy that was moved to its layer's device."""
    if given.device != mask.device:
        return given.dtype == torch.bool
    return given.dtype == torch.bool and given.data_ptr() == mask.data_ptr()


class _NoLayers(list):
    """Stands for the layers of a cache: a model that looks for one needs more than `update` gives."""

    def __getitem__(self, index):
        raise UnsupportedAttention("a use of the cache's layers")


class SlotCache(Cache):
    """
    A cache of per-row slots for flattened streams. Rejecting tokens is not advancing `lengths`.

    Args:
        num_rows (`int`): Number of rows.
        windows (`Sequence[int | None]`): For each cache layer the last positions that it keeps, `None` for all.
        capacity (`int`): Slots a row to begin with.
    """

    is_compileable = False

    def __init__(self, num_rows: int, windows: Sequence[int | None], capacity: int):
        super().__init__(layers=[])
        self.layers = _NoLayers()
        self.buffers = [SlotBuffer(num_rows, capacity) for _ in windows]
        self.windows = list(windows)
        self.lengths = [0] * num_rows
        self.plan: StreamPlan | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scatter a stream's keys and values of shape `(1, key_heads, tokens, head_dim)`; return all used slots."""
        plan = self.plan
        if not plan.masks or plan.unattended:
            raise UnsupportedAttention("a way around Transformers' masks or attention interface")
        if layer_idx >= len(self.buffers):
            raise UnsupportedAttention("more cache layers than the prompt filled")
        buffer = self.buffers[layer_idx]
        row_index, _, slots = plan.places(key_states.device) or (None, None, slice(plan.held[0], plan.used))
        buffer.write(key_states[0], value_states[0], row_index, slots, plan.used)
        plan.unattended, plan.window = True, self.windows[layer_idx]
        return buffer.read(plan.used)

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        """Slots filled in the longest row; of several rows no layer can take its queries' positions from it."""
        if layer_idx is not None and len(self.lengths) > 1:
            raise UnsupportedAttention("positions taken from the cache's length")
        return max(self.lengths)

    def get_query_offset(self, layer_idx: int | None = None) -> int:
        """What Transformers computes a mask's arguments from; the mask itself is made from the plan."""
        return max(self.lengths)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """As [`SlotCache.get_query_offset`]."""
        return self.plan.used, 0

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keep the rows whose indices are given, in that order; see [`SlotBuffer.keep_rows`]."""
        for buffer in self.buffers:
            buffer.keep_rows(rows, max(self.lengths))
        self.lengths = [self.lengths[row] for row in rows]


class use_stream:
    """
    Context in which the target's attention runs over a cache's slots, in this thread.

    Other threads that use the same target meanwhile meet the stream's functions, which hand on to the target's own.

    Args:
        config (`PreTrainedConfig`): The text config whose attention is switched.
        lock (`threading.RLock`): Held while it is.
        cache ([`SlotCache`]): With its plan set.
    """

    def __init__(self, config, lock: threading.RLock, cache: SlotCache):
        self.config, self.lock, self.cache = config, lock, cache

    def __enter__(self) -> None:
        self.lock.acquire()
        self.before = _switched[id(self.config)] = self.config._attn_implementation
        self.config._attn_implementation = ATTENTION_NAME
        _active.cache = self.cache

    def __exit__(self, *error) -> None:
        try:
            _active.cache = None
            self.config._attn_implementation = self.before
            _switched.pop(id(self.config), None)
        finally:
            self.lock.release()


def _own_attention(config) -> str:
    """The attention that a config is set to, apart from any stream."""
    name = config._attn_implementation
    return _switched.get(id(config), "sdpa") if name == ATTENTION_NAME else name


def stream_mask(
    *, mask_function: Callable, device: torch.device, config, allow_is_causal_skip: bool = True, **kwargs
) -> torch.Tensor | None:
    """A mask of a flattened stream, as the mask functions of Transformers ask for it."""
    cache: SlotCache | None = getattr(_active, "cache", None)
    if cache is None:
        make_mask = ALL_MASK_ATTENTION_FUNCTIONS.get(_own_attention(config))
        kwargs |= {"device": device, "config": config, "allow_is_causal_skip": allow_is_causal_skip}
        return None if make_mask is None else make_mask(mask_function=mask_function, **kwargs)
    if not allow_is_causal_skip:
        # Something else is laid over the mask, such as an image's tokens seeing each other.
        raise UnsupportedAttention("a mask that is more than causal")
    return cache.plan.make_mask(mask_function, device)


def stream_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Attention of a flattened stream, as the public attention interface of Transformers calls it."""
    cache: SlotCache | None = getattr(_active, "cache", None)
    if cache is None:
        kwargs |= {name: value for name, value in (("softcap", softcap), ("s_aux", s_aux)) if value is not None}
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(_own_attention(module.config), eager)
        return attention(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    for name, argument in kwargs.items():
        if isinstance(argument, torch.Tensor) and name not in _IDLE_TENSORS:
            raise UnsupportedAttention(f"the argument `{name}`")
    if _own_attention(module.config) == "sdpa":
        softcap = s_aux = None  # older releases leave these out there, newer ones do not come here with them
    plan = cache.plan
    mask = plan.find_mask(attention_mask)
    plan.unattended, plan.window = False, None
    output = grouped_attention(
        plan.by_row(query),
        key,
        value,
        mask,
        scaling if scaling is not None else query.shape[-1] ** -0.5,
        softcap=softcap,
        sinks=s_aux,
    )
    return plan.flatten(output).contiguous(), None


AttentionInterface.register(ATTENTION_NAME, stream_attention)
AttentionMaskInterface.register(ATTENTION_NAME, stream_mask)
