"""The rows' tokens in one buffer."""

import torch

from dspark_hf.sequences import Sequences


def three_rows(room: int = 2) -> Sequences:
    return Sequences(torch.tensor([[1, 2], [3, 4], [5, 6]]), room)


def test_tokens_are_written_behind_the_end_and_committed_by_the_length():
    sequences = three_rows(room=4)
    sequences.put([1], torch.tensor([[7, 8]]))
    assert sequences.prefix(1).tolist() == [[3, 4]] and sequences.prefix(1, 2).tolist() == [[3, 4, 7, 8]]
    assert sequences.anchors([0, 1, 2]).tolist() == [2, 4, 6]
    sequences.lengths[1] += 1
    assert sequences.prefix(1).tolist() == [[3, 4, 7]] and sequences.generated(1) == 1
    assert sequences.anchors([1, 2]).tolist() == [7, 6]
    sequences.put([1], torch.tensor([[9]]), at=1)
    assert sequences.prefix(1, 2).tolist() == [[3, 4, 7, 8, 9]]


def test_several_rows_are_written_at_once():
    sequences = three_rows(room=4)
    sequences.lengths[0] -= 1
    sequences.put([2, 0], torch.tensor([[7, 8], [9, 10]]), at=1)
    assert sequences.prefix(0, 3).tolist() == [[1, 2, 9, 10]] and sequences.prefix(2, 3).tolist() == [[5, 6, 0, 7, 8]]
    assert sequences.prefix(1, 3).tolist() == [[3, 4, 0, 0, 0]]


def test_room_grows_with_the_longest_row():
    sequences = three_rows()
    for step in range(20):
        sequences.reserve(3)
        sequences.put([2], torch.tensor([[step, 77, 77]]))
        sequences.lengths[2] += 1
    assert sequences.prefix(2).tolist() == [[5, 6, *range(20)]]
    assert sequences.prefix(0).tolist() == [[1, 2]]


def test_shorter_rows_are_filled_up_with_a_token():
    sequences = three_rows()
    sequences.put([0], torch.tensor([[8, 9]]))
    sequences.lengths[0] += 2
    sequences.put([1], torch.tensor([[7]]))  # a draft that was not committed
    assert sequences.padded(0).tolist() == [[1, 2, 8, 9], [3, 4, 0, 0], [5, 6, 0, 0]]


def test_a_prompt_of_embeddings_has_no_tokens():
    sequences = Sequences(torch.empty(2, 0, dtype=torch.long), room=3)
    sequences.put([0], torch.tensor([[4]]))
    sequences.lengths[0] += 1
    assert sequences.prefix(0).tolist() == [[4]] and sequences.prefix(1).shape == (1, 0)
