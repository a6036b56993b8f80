"""Per-row slots: rows that leave make room in place."""

import pytest
import torch

from dspark_hf.modeling.slot_buffer import SlotBuffer


def filled(rows: int, used: int) -> SlotBuffer:
    """Slot `s` of row `r` holds `100 r + s` as a key, and its negative as a value."""
    buffer = SlotBuffer(rows, capacity=8)
    row_index = torch.arange(rows).repeat_interleave(used)
    slots = torch.arange(used).repeat(rows)
    key = (100 * row_index + slots).float().expand(2, -1)[..., None]
    buffer.write(key, -key, row_index, slots, used)
    return buffer


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [0, 3, 2], [1, 2, 3], [3, 1], [2], []])
def test_rows_move_in_place(rows):
    buffer = filled(4, used=5)
    place = buffer.keys.data_ptr()
    buffer.keep_rows(rows, used=5)
    keys, values = buffer.read(5)
    assert keys.shape == (len(rows), 2, 5, 1) and (not rows or buffer.keys.data_ptr() == place)
    assert keys[:, 1, :, 0].tolist() == [[100.0 * row + slot for slot in range(5)] for row in rows]
    assert torch.equal(values, -keys)


def test_what_is_not_in_use_is_not_copied():
    buffer = filled(2, used=5)
    buffer.keys[:, :, 5:] = torch.tensor([7.0, 8.0])[:, None, None, None]
    buffer.keep_rows([1], used=5)
    assert (buffer.keys[0, :, 5:] == 7.0).all()


def test_rows_that_are_left_grow():
    buffer = filled(3, used=5)
    buffer.keep_rows([2, 1], used=5)
    buffer.reserve(20)
    assert buffer.keys.shape == (2, 2, 32, 1)
    assert buffer.keys[:, 0, :5, 0].tolist() == [
        [200.0 + slot for slot in range(5)],
        [100.0 + slot for slot in range(5)],
    ]


def test_no_row_is_overwritten_before_it_is_copied():
    with pytest.raises(AssertionError):
        filled(3, used=5).keep_rows([1, 0], used=5)
