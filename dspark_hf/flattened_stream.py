"""The rows' tokens as one stream of a batch of one, over a cache of per-row slots without padding."""

from collections.abc import Sequence

import torch

from .locks import lock_of
from .slot_cache import StreamPlan, UnsupportedAttention, use_stream
from .slot_stream import SlotStream, is_host_class
from .target_outputs import StreamOutput, read_taps


# Their attention goes through the interface, though their classes do not say so.
_INTERFACE_UNSAID = ("biogpt", "stablelm")


class FlattenedStream(SlotStream):
    """As [`SlotStream`], for targets whose attention goes through Transformers' attention interface."""

    def _check(self) -> None:
        said = getattr(self.target, "_supports_attention_backend", False)
        if not said and not is_host_class(self.target, _INTERFACE_UNSAID):
            raise UnsupportedAttention("no attention interface")
        super()._check()

    def verify(self, tokens: torch.LongTensor, counts: Sequence[int]) -> StreamOutput:
        """As [`SlotStream.verify`]."""
        device, counts = tokens.device, self._of_all(counts)
        plan = self.cache.plan = StreamPlan(self.cache.lengths, counts)
        inputs = {
            **self.inputs,
            **{name: torch.full_like(tokens, kind)[None] for name, kind in self.token_types.items()},
            "input_ids": tokens[None],
            "position_ids": self._positions(counts, device),
            self.cache_name: self.cache,
        }
        try:
            with use_stream(self.config, lock_of(self.config), self.cache):
                outputs = self.target(**inputs)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or not plan.unattended:
                raise
            # Keys of all rows went to an attention that knows of one row.
            raise UnsupportedAttention("a way around the attention interface") from error
        if plan.unattended or not plan.masks:
            raise UnsupportedAttention("a way around Transformers' masks or attention interface")
        hidden = outputs.hidden_states if self.keep_hidden else None
        return StreamOutput(outputs.logits[0], read_taps(self.target, outputs, self.taps)[0], hidden_states=hidden)

    def _positions(self, counts: Sequence[int], device: torch.device) -> torch.LongTensor:
        def of_dimension(next_positions):
            values = []
            for row, count, length in zip(self.rows, counts, self.cache.lengths, strict=True):
                first = next_positions[row] + length - self.prompt_lengths[row]
                values.extend(range(first, first + count))
            return values

        if isinstance(self.next_positions[0], list):
            return torch.tensor([of_dimension(dimension) for dimension in self.next_positions], device=device)[:, None]
        return torch.tensor(of_dimension(self.next_positions), device=device)[None]
