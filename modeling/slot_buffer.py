"""Preallocated keys and values in per-row slots: a rejected token leaves the length where it was; growth doubles."""

from collections.abc import Sequence

import torch


class SlotBuffer:
    """
    Keys and values of one layer. Slot `s` of a row holds the row's `s`-th position; what lies past a row's length is
    stale until overwritten, and masked by whoever reads it.

    Args:
        rows (`int`): Number of rows.
        capacity (`int`): Slots a row to begin with.
    """

    def __init__(self, rows: int, capacity: int):
        self.rows = rows
        self.capacity = capacity
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        row_index: torch.Tensor | None,
        slots: torch.Tensor | slice,
        used: int,
    ) -> None:
        """
        Put tokens into their slots.

        Args:
            key, value (`torch.Tensor` of shape `(key_heads, tokens, head_dim)`): The tokens' keys and values.
            row_index (`torch.Tensor` of shape `(tokens,)`, *optional*): Row of each token; `None` for row 0.
            slots (`torch.Tensor` of shape `(tokens,)` or `slice`): Slot of each token, a slice with `row_index=None`.
            used (`int`): Slots that must exist after the write.
        """
        self.keys = self._room(self.keys, key, used)
        self.values = self._room(self.values, value, used)
        if row_index is None:
            self.keys[0, :, slots] = key
            self.values[0, :, slots] = value
        else:
            self.keys[row_index, :, slots] = key.transpose(0, 1)
            self.values[row_index, :, slots] = value.transpose(0, 1)

    def read(self, used: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first `used` slots of every row: two views of shape `(rows, key_heads, used, head_dim)`."""
        return self.keys[:, :, :used], self.values[:, :, :used]

    def reserve(self, slots: int) -> None:
        """Make room for so many slots a row, once something has been written."""
        self.keys = self._room(self.keys, self.keys[0, :, :0], slots)
        self.values = self._room(self.values, self.values[0, :, :0], slots)

    def drop_first(self, row: int, count: int, length: int) -> None:
        """Forget the first `count` of the `length` positions a row holds; the others move to the front."""
        if count and count < length:
            for buffer in (self.keys, self.values):
                buffer[row, :, : length - count] = buffer[row, :, count:length].clone()

    def keep_rows(self, rows: Sequence[int], used: int) -> None:
        """
        Keep some rows, in place: only those that get another number are copied.

        Args:
            rows (`Sequence[int]`): For each new row the old one, at least as high, so that none is overwritten before
                it is copied.
            used (`int`): Slots of them that are in use.
        """
        assert all(old >= new for new, old in enumerate(rows))
        self.rows = len(rows)
        if self.keys is not None:
            for new, old in enumerate(rows):
                if new != old:
                    self.keys[new, :, :used] = self.keys[old, :, :used]
                    self.values[new, :, :used] = self.values[old, :, :used]
            self.keys, self.values = self.keys[: self.rows], self.values[: self.rows]

    def _room(self, buffer: torch.Tensor | None, like: torch.Tensor, used: int) -> torch.Tensor:
        if buffer is not None and buffer.shape[2] >= used:
            return buffer
        while self.capacity < used:
            self.capacity *= 2
        # Zeros rather than empty memory: a stale NaN would survive the mask as 0 * NaN.
        grown = like.new_zeros(self.rows, like.shape[0], self.capacity, like.shape[-1])
        if buffer is not None:
            grown[:, :, : buffer.shape[2]] = buffer
        return grown
