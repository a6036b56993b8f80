"""Streamers that are told where each token came from."""

import torch
from transformers.generation.streamers import BaseStreamer


class DSparkStreamer(BaseStreamer):
    """
    Base of streamers that tell accepted drafts from the target's own tokens. Any other streamer works as well and
    gets each token without that.
    """

    def put(self, value: torch.Tensor, drafted: bool = False) -> None:
        """
        Take the prompt (the first call) or one token.

        Args:
            value (`torch.LongTensor` of shape `(batch_size, prompt_length)` or `(batch_size,)`): Token ids.
            drafted (`bool`): Whether the token is an accepted draft.
        """
        raise NotImplementedError

    def end(self) -> None:
        """Generation is over."""
        raise NotImplementedError
