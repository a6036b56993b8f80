"""What the commands show in a terminal: text whose accepted draft tokens are coloured, and small tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .streaming import DSparkStreamer


if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from transformers import PreTrainedTokenizerBase

DRAFTED_STYLE = "bold green"
TARGET_STYLE = "none"


class ColouredTextStreamer(DSparkStreamer):
    """Print the text as it is generated, accepted draft tokens in another colour than the target's own.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): decodes the tokens; special tokens are left out.
        console (`rich.console.Console`): prints; it decides whether the terminal shows colours.

    A character of several tokens (an emoji in byte tokens, say) is printed when its last token is there, in that
    token's colour.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, console: Console) -> None:
        self.tokenizer = tokenizer
        self.console = console
        self._awaiting_prompt = True
        self._token_ids: list[int] = []
        # Tokens before `_read` are printed; decoding starts at `_context`, so that a token that looks different at
        # the start of a text (a leading space) is decoded after its neighbours.
        self._context = 0
        self._read = 0
        self._style = TARGET_STYLE

    def put(self, value: torch.Tensor, drafted: bool = False) -> None:
        """Take new tokens.

        Args:
            value (`torch.Tensor` of any shape with one sequence): the prompt at the first call, then new tokens.
            drafted (`bool`, *optional*, defaults to `False`): whether the drafter proposed them.

        Raises:
            `ValueError`: several sequences are generated at once.
        """
        if value.ndim > 1 and value.shape[0] > 1:
            raise ValueError(
                f"ColouredTextStreamer prints one sequence, and generate was called with {value.shape[0]}: leave the "
                "streamer out or generate one prompt at a time"
            )
        if self._awaiting_prompt:
            self._awaiting_prompt = False
            return
        self._style = DRAFTED_STYLE if drafted else TARGET_STYLE
        for token_id in value.reshape(-1).tolist():
            self._token_ids.append(token_id)
            self._print_complete_text(final=False)

    def end(self) -> None:
        """Print what was held back, end the line and be ready for another call of `generate`."""
        self._print_complete_text(final=True)
        self.console.print()
        self._awaiting_prompt = True
        self._token_ids, self._context, self._read = [], 0, 0

    def _print_complete_text(self, final: bool) -> None:
        printed = self._decode(self._token_ids[self._context : self._read])
        text = self._decode(self._token_ids[self._context :])
        if text.endswith("\ufffd") and not final:
            return
        if len(text) > len(printed):
            self.console.out(text[len(printed) :], style=self._style, end="", highlight=False)
            self._context = self._read
        self._read = len(self._token_ids)

    def _decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def format_positions(acceptance: Sequence[float | None]) -> str:
    """Acceptance by block position as one line; a dash where nothing was verified.

    Args:
        acceptance (`Sequence[float | None]`): for each position, accepted / verified among the rounds that reached it.
    """
    return "  ".join("–" if value is None else f"{value:.2f}" for value in acceptance)
