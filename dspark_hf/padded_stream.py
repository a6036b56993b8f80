"""
The rows' tokens as a padded batch, for families whose attention does not go through Transformers' attention interface.

Tokens and keys are laid out as in a left-padded batch of plain `generate`: each row's tokens end in the last column,
its keys with the last place. So the model makes its own 4-D mask of a 2-D one, and distances between places are
distances in the text, which ALiBi and windows count. Fillers write no keys, and what becomes of them is not read.
"""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from .cache_layers import window_of
from .slot_cache import SlotCache, UnsupportedAttention
from .slot_stream import SlotStream, is_host_class
from .target_outputs import Prefill, StreamOutput, read_taps, text_config


# Read with Transformers 5.24, and held to it by `tests/test_padded_stream.py`: nothing in these models depends on a
# key's place but through the mask, the positions and the distance to the query. They get positions,
_BY_POSITION = ("big_bird", "falcon", "gpt_neo", "gpt_neox_japanese", "megatron-bert", "rembert", "xglm")
# or have none but distances.
_BY_DISTANCE = ("bloom", "mpt")
_ATTENTIONS = ("eager", "sdpa")


class PaddedPlan:
    """
    Where the tokens of one padded forward pass belong.

    Args:
        held (`Sequence[int]`): Slots of each row that are filled.
        counts (`Sequence[int]`): New tokens of each row.
    """

    def __init__(self, held: Sequence[int], counts: Sequence[int]):
        self.held, self.counts = list(held), list(counts)
        self.totals = [slots + count for slots, count in zip(held, counts, strict=True)]
        self.width, self.used = max(counts), max(self.totals)
        self._tokens: dict[torch.device, tuple[torch.Tensor, ...]] = {}
        self._order: dict[torch.device, torch.Tensor] = {}

    def tokens(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Row, column and slot of each token, on a layer's device."""
        if device not in self._tokens:
            places = [
                (row, self.width - count + step, slots + step)
                for row, (slots, count) in enumerate(zip(self.held, self.counts, strict=True))
                for step in range(count)
            ]
            self._tokens[device] = torch.tensor(places, device=device).unbind(dim=1)
        return self._tokens[device]

    def first_places(self, device: torch.device) -> torch.Tensor:
        """How many of the places are left of each row's first slot, `(rows, 1)`."""
        return self.used - torch.tensor(self.totals, device=device)[:, None]

    def order(self, device: torch.device) -> torch.Tensor | None:
        """The slot at each place of each row, `(rows, used)`, any slot left of the first; `None` if all end alike."""
        if min(self.totals) == self.used:
            return None
        if device not in self._order:
            places = torch.arange(self.used, device=device)
            self._order[device] = (places - self.first_places(device)).clamp(min=0)
        return self._order[device]


class PaddedCache(SlotCache):
    """A cache of per-row slots that shows them as a left-padded batch's. Its `plan` is a [`PaddedPlan`]."""

    plan: PaddedPlan

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the tokens of keys and values of shape `(rows, key_heads, width, head_dim)`; return all places."""
        row_index, columns, slots = self.plan.tokens(key_states.device)
        buffer = self.buffers[layer_idx]
        key, value = (states[row_index, :, columns].transpose(0, 1) for states in (key_states, value_states))
        buffer.write(key, value, row_index, slots, self.plan.used)
        order = self.plan.order(key_states.device)
        if order is None:
            return buffer.read(self.plan.used)
        return tuple(
            states.gather(2, order[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3]))
            for states in buffer.read(self.plan.used)
        )

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        """Places before the columns of this pass."""
        return self.plan.used - self.plan.width

    def get_query_offset(self, layer_idx: int | None = None) -> int:
        """As [`PaddedCache.get_seq_length`]."""
        return self.get_seq_length()


class PaddedStream(SlotStream):
    """As [`SlotStream`], for the families listed here."""

    cache_class = PaddedCache

    def __init__(self, target: PreTrainedModel, prompt: Prefill, taps: Sequence[int], keep_hidden: bool):
        self.needs_positions = text_config(target).model_type not in _BY_DISTANCE
        super().__init__(target, prompt, taps, keep_hidden)

    def _check(self) -> None:
        if not is_host_class(self.target, _BY_POSITION + _BY_DISTANCE):
            raise UnsupportedAttention("a family that is not known to run as a padded batch")
        if self.config._attn_implementation not in _ATTENTIONS:
            raise UnsupportedAttention(f"{self.config._attn_implementation} attention")
        super()._check()
        if any(window_of(layer) is not None for layer in self.prompt.cache.layers):
            raise UnsupportedAttention("a cache with a window that its masks do not know of")

    def verify(self, tokens: torch.LongTensor, counts: Sequence[int]) -> StreamOutput:
        """As [`SlotStream.verify`]."""
        device = tokens.device
        plan = self.cache.plan = PaddedPlan(self.cache.lengths, self._of_all(counts))
        row_index, columns, _ = plan.tokens(device)
        ids = tokens.new_zeros(len(self.rows), plan.width)
        ids[row_index, columns] = tokens
        inputs = {
            **self.inputs,
            **{name: torch.full_like(ids, kind) for name, kind in self.token_types.items()},
            "input_ids": ids,
            "attention_mask": (torch.arange(plan.used, device=device) >= plan.first_places(device)).long(),
            self.cache_name: self.cache,
        }
        if self.needs_positions:
            inputs["position_ids"] = self._positions(plan, device)
        outputs = self.target(**inputs)

        def of_tokens(states: torch.Tensor) -> torch.Tensor:
            row_index, columns, _ = plan.tokens(states.device)
            return states[row_index, columns]

        taps = of_tokens(read_taps(self.target, outputs, self.taps))
        hidden = tuple(of_tokens(states)[None] for states in outputs.hidden_states) if self.keep_hidden else None
        return StreamOutput(of_tokens(outputs.logits), taps, hidden_states=hidden)

    def _positions(self, plan: PaddedPlan, device: torch.device) -> torch.LongTensor:
        """Positions of shape `(rows, width)`; those of fillers exist, and no more."""
        ends = [
            self.next_positions[row] + total - self.prompt_lengths[row]
            for row, total in zip(self.rows, plan.totals, strict=True)
        ]
        columns = torch.arange(plan.width, device=device) - plan.width
        return (torch.tensor(ends, device=device)[:, None] + columns).clamp(min=0)
