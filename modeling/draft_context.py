"""What a drafter remembers of the rows it drafts for, and where the tokens of a pass go."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import CompileConfig

from .configuration_dspark import DSparkConfig
from .slot_buffer import SlotBuffer


@dataclass
class BackbonePass:
    """
    Where the tokens of one backbone pass go: the new context of all rows, then the blocks of all rows.

    Attributes:
        positions (`torch.LongTensor` of shape `(tokens,)`): Their positions in the text.
        row_index (`torch.LongTensor` of shape `(tokens,)`, *optional*): Their rows; `None` for a single row.
        slots (`torch.LongTensor` of shape `(tokens,)` or `slice`): Their slots in the layers' buffers.
        used (`int`, *optional*): Slots in use afterwards; `None` for whole buffers.
        masks (`dict[str, torch.Tensor | None]`): For each layer type, `(rows, 1, 1 or slots a row, used)`: True where
            a block's slot sees a key.
    """

    positions: torch.Tensor
    row_index: torch.Tensor | None
    slots: torch.Tensor | slice
    used: int | None
    masks: dict[str, torch.Tensor | None]


def visible(
    config: DSparkConfig, layer_type: str, keys: torch.Tensor, queries: torch.Tensor, anchors: torch.Tensor
) -> torch.Tensor:
    """
    Which keys a layer lets the slots of a block see, of the context before the anchor and the block itself.

    Args:
        config ([`DSparkConfig`]): Of the drafter.
        layer_type (`str`): The layer's.
        keys, queries, anchors (`torch.Tensor`, shapes that broadcast): Positions.

    Returns:
        `torch.BoolTensor`: Of the shape they broadcast to.
    """
    mask = keys <= queries if layer_type in config.causal_layer_types else keys < anchors + config.block_slots
    if layer_type == "sliding_attention":
        first = anchors if config.window_from_anchor else queries + 1
        mask = mask & (keys >= first - config.sliding_window)
    return mask


class DraftContext:
    """
    What a drafter remembers of the rows it drafts for: the context's keys and values of each layer, computed once for
    each accepted token.

    Args:
        config ([`DSparkConfig`]): Of the drafter.
        starts (`Sequence[int]`): For each row the position of its first remembered token: 0, or the length of a
            prefix whose hidden states are not known (a cache handed in by the user).
        capacity (`int`): Slots a row to begin with.
        window (`int`, *optional*): A block sees at most so many positions before its anchor, in every layer. What lies
            before them is never projected, or forgotten. By default all that the layers' own windows leave.
        compile_config (`CompileConfig`, *optional*): How passes are compiled; by default they are not.
    """

    def __init__(
        self,
        config: DSparkConfig,
        starts: Sequence[int],
        capacity: int = 128,
        window: int | None = None,
        compile_config: CompileConfig | None = None,
    ):
        self.config, self.compile_config = config, compile_config
        windows = [] if window is None else [window]
        if set(config.layer_types) == {"sliding_attention"}:
            windows.append(config.sliding_window)
        self.window = min(windows, default=None)
        self.starts = list(starts)
        self.lengths = [0] * len(self.starts)
        self.layers = [SlotBuffer(len(self.starts), capacity) for _ in range(config.num_hidden_layers)]

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keep the rows whose indices are given, in that order; see [`SlotBuffer.keep_rows`]."""
        for layer in self.layers:
            layer.keep_rows(rows, max(self.lengths))
        self.starts = [self.starts[row] for row in rows]
        self.lengths = [self.lengths[row] for row in rows]

    def narrow(self, hidden_states: torch.Tensor, context_lengths: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
        """
        Leave out what no block is going to see: of the new positions, and of those held where moving the rest pays.

        Args:
            hidden_states (`torch.Tensor` of shape `(sum(context_lengths), width)`): Of the new positions, row after
                row.
            context_lengths (`Sequence[int]`): How many of them belong to each row.

        Returns:
            Hidden states and lengths of those that are left.
        """
        if self.window is None:
            return hidden_states, list(context_lengths)
        kept = [min(new, self.window) for new in context_lengths]
        for row, new in enumerate(context_lengths):
            held = self.lengths[row]
            stale = min(max(held + new - self.window, 0), held)
            # As much is moved as is kept, at most a window: so much has to have come in between.
            if stale == held or stale >= self.window:
                for layer in self.layers:
                    layer.drop_first(row, stale, held)
                self.lengths[row] = held - stale
                self.starts[row] += stale + new - kept[row]
        if kept != list(context_lengths):
            pieces = hidden_states.split(list(context_lengths))
            tails = [piece[len(piece) - left :] for piece, left in zip(pieces, kept, strict=True)]
            hidden_states = tails[0] if len(tails) == 1 else torch.cat(tails)
        return hidden_states, kept

    def plan(self, context_lengths: Sequence[int], block_slots: int, device: torch.device) -> BackbonePass:
        """Lay out a pass that appends `context_lengths` tokens to the rows and runs a block behind each."""
        held, starts = self.lengths, self.starts
        totals = [before + new for before, new in zip(held, context_lengths, strict=True)]
        used = max(totals) + block_slots
        if len(totals) == 1:
            slots = torch.arange(held[0], used, device=device)
            row_index, positions, written = None, slots + starts[0], slice(held[0], used)
        else:
            token_rows, token_slots = [], []
            for row, (before, total) in enumerate(zip(held, totals, strict=True)):
                token_slots.extend(range(before, total))
                token_rows.extend([row] * (total - before))
            for row, total in enumerate(totals):
                token_slots.extend(range(total, total + block_slots))
                token_rows.extend([row] * block_slots)
            row_index, written, row_starts = (
                torch.tensor(values, device=device) for values in (token_rows, token_slots, starts)
            )
            positions = written + row_starts[row_index]
        masks: dict[str, torch.Tensor | None] = {}
        for layer_type in set(self.config.layer_types):
            masks[layer_type] = self._mask(layer_type, totals, used, block_slots, device)
        return BackbonePass(positions, row_index, written, used, masks)

    def is_steady(self, context_lengths: Sequence[int]) -> bool:
        """Whether a pass has the shapes of most: not the first, with no more new positions than a round accepts."""
        return self.layers[0].keys is not None and max(context_lengths) <= self.config.block_size + 1

    def plan_static(self, context_lengths: Sequence[int], block_slots: int, device: torch.device) -> BackbonePass:
        """
        As [`plan`] for a pass that [`is_steady`], in shapes that depend on the number of rows and the buffers'
        capacity alone: what fills rows up goes into the last slot, which no mask shows.
        """
        most = self.config.block_size + 1
        totals = [before + new for before, new in zip(self.lengths, context_lengths, strict=True)]
        for layer in self.layers:
            layer.reserve(max(totals) + block_slots + 1)
        capacity = self.layers[0].keys.shape[2]
        token_rows, token_slots, positions = [], [], []
        for row, (before, total) in enumerate(zip(self.lengths, totals, strict=True)):
            token_rows += [row] * most
            token_slots += [*range(before, total), *[capacity - 1] * (most + before - total)]
        for row, total in enumerate(totals):
            token_rows += [row] * block_slots
            token_slots += range(total, total + block_slots)
        positions = [slot + self.starts[row] for row, slot in zip(token_rows, token_slots, strict=True)]
        row_index, slots, positions = torch.tensor([token_rows, token_slots, positions], device=device)
        masks = {
            layer_type: self._mask(layer_type, totals, capacity, block_slots, device, always=True)
            for layer_type in set(self.config.layer_types)
        }
        return BackbonePass(positions, row_index, slots, None, masks)

    def fill_up(self, hidden_states: torch.Tensor, context_lengths: Sequence[int]) -> torch.Tensor:
        """Hidden states of new positions with zeros behind each row's, as [`plan_static`] lays them out."""
        most = self.config.block_size + 1
        filled = hidden_states.new_zeros(len(context_lengths) * most, hidden_states.shape[-1])
        for row, piece in enumerate(hidden_states.split(list(context_lengths))):
            filled[row * most : row * most + len(piece)] = piece
        return filled

    def advance(self, context_lengths: Sequence[int]) -> None:
        """Remember the tokens that a pass appended; its blocks are forgotten."""
        self.lengths = [held + new for held, new in zip(self.lengths, context_lengths, strict=True)]

    def drafts(self, block: torch.Tensor) -> torch.Tensor:
        """The slots of each row's block, in the second dimension, that are drafts."""
        return block[:, self.config.block_slots - self.config.block_size :]

    def _mask(
        self,
        layer_type: str,
        totals: Sequence[int],
        used: int,
        block_slots: int,
        device: torch.device,
        always: bool = False,
    ) -> torch.Tensor | None:
        sliding = layer_type == "sliding_attention" and used > self.config.sliding_window
        causal = layer_type in self.config.causal_layer_types
        windowed = self.window is not None and max(totals) > self.window
        if not (sliding or causal or windowed or always) and min(totals) == max(totals):
            return None
        keys = torch.arange(used, device=device)
        anchors = torch.tensor(totals, device=device)[:, None, None, None]
        mask = keys < anchors + block_slots
        if sliding or causal:
            queries = anchors + torch.arange(block_slots, device=device)[:, None]
            mask = visible(self.config, layer_type, keys, queries, anchors)
        return mask & (keys >= anchors - self.window) if windowed else mask
