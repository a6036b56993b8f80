"""The rows' tokens in one buffer: prompt, committed tokens, and behind a row's end the drafts under discussion."""

from collections.abc import Sequence

import torch


class Sequences:
    """
    Args:
        input_ids (`torch.LongTensor` of shape `(rows, prompt_length)`): Left-padded prompts.
        room (`int`): Tokens a row that fit before the buffer grows.
    """

    def __init__(self, input_ids: torch.LongTensor, room: int):
        rows, self.prompt_length = input_ids.shape
        self.tokens = torch.cat([input_ids.long(), input_ids.new_zeros(rows, room, dtype=torch.long)], dim=1)
        self.lengths = [self.prompt_length] * rows

    def reserve(self, more: int) -> None:
        """Make room for `more` tokens behind each row's end."""
        missing = max(self.lengths) + more - self.tokens.shape[1]
        if missing > 0:
            room = self.tokens.new_zeros(len(self.tokens), max(missing, self.tokens.shape[1]))
            self.tokens = torch.cat([self.tokens, room], dim=1)

    def prefix(self, row: int, more: int = 0) -> torch.LongTensor:
        """A view of a row's tokens and `more` behind its end, of shape `(1, length + more)`."""
        return self.tokens[row : row + 1, : self.lengths[row] + more]

    def anchors(self, rows: Sequence[int]) -> torch.LongTensor:
        """The last token of each row, of shape `(rows,)`."""
        if len(rows) == 1:
            return self.tokens[rows[0], self.lengths[rows[0]] - 1 : self.lengths[rows[0]]]
        return self.tokens[self._index(rows), self._index([self.lengths[row] - 1 for row in rows])]

    def put(self, rows: Sequence[int], tokens: torch.LongTensor, at: int = 0) -> None:
        """Write `(rows, count)` tokens behind the rows' ends, `at` places further, without committing them."""
        starts, count = [self.lengths[row] + at for row in rows], tokens.shape[1]
        if len(rows) == 1:
            self.tokens[rows[0], starts[0] : starts[0] + count] = tokens[0]
        else:
            places = self._index(starts)[:, None] + torch.arange(count, device=self.tokens.device)
            self.tokens[self._index(rows)[:, None], places] = tokens

    def _index(self, values: Sequence[int]) -> torch.LongTensor:
        return torch.tensor(values, device=self.tokens.device)

    def generated(self, row: int) -> int:
        """Tokens committed to a row since the prompt."""
        return self.lengths[row] - self.prompt_length

    def padded(self, pad_token_id: int) -> torch.LongTensor:
        """All rows, `(rows, longest)`, shorter ones filled up with a token."""
        longest = max(self.lengths)
        tokens = self.tokens[:, :longest].clone()
        for row, length in enumerate(self.lengths):
            tokens[row, length:] = pad_token_id
        return tokens
