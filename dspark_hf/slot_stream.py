"""What streams over per-row slots have in common: the prompt's keys and values in slots, and back in its cache."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import StaticLayer
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL

from .cache_layers import PLAIN_LAYERS, fill_layer, window_of
from .compat import CACHE_NAME, cache_argument, hidden_states_request
from .slot_cache import SlotCache, UnsupportedAttention
from .target_outputs import Prefill, StreamOutput, text_config


# What the stream provides itself, and what is for the prompt only.
_OWN_INPUTS = (
    "input_ids",
    "attention_mask",
    "position_ids",
    "inputs_embeds",
    "output_hidden_states",
    "logits_to_keep",
    CACHE_NAME,
)
_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


class SlotStream:
    """
    Args:
        target (`PreTrainedModel`): The verifying model.
        prompt ([`Prefill`]): Its keys and values are copied into slots.
        taps (`Sequence[int]`): The drafter's `target_layer_ids`.
        keep_hidden (`bool`): Whether all hidden states are wanted.

    Raises:
        [`UnsupportedAttention`]: if the target or the prompt does not allow it.
    """

    cache_class: type[SlotCache] = SlotCache
    needs_positions = True

    def __init__(self, target: PreTrainedModel, prompt: Prefill, taps: Sequence[int], keep_hidden: bool):
        self.target, self.prompt, self.taps, self.keep_hidden = target, prompt, list(taps), keep_hidden
        self.config = text_config(target)
        self._check()
        self.inputs, self.token_types, positions = self._step_inputs()
        # The position of each row's next token: one number, or one a dimension for multimodal rotary embeddings.
        self.next_positions = None if positions is None else positions[..., -1].tolist()
        self.prompt_lengths = prompt.visible.sum(dim=1).tolist()
        self.rows = list(range(len(self.prompt_lengths)))
        self.waiting: list[int] = []  # finished rows that are kept in the cache; their tokens do not run
        self.keep_finished = False
        self.cache = self._import(prompt.cache)
        self.cache_name = cache_argument(target)

    def _check(self) -> None:
        """What can be known of a target before its first stream."""
        update = getattr(type(self.target), "_update_model_kwargs_for_generation", None)
        if update is not GenerationMixin._update_model_kwargs_for_generation:
            raise UnsupportedAttention("inputs of its own that change from step to step")
        cache, visible = self.prompt.cache, self.prompt.visible
        if cache.offloading or any(type(layer) not in PLAIN_LAYERS for layer in cache.layers):
            raise UnsupportedAttention("a cache that is not plain keys and values")
        if not bool((visible.long().diff(dim=1) >= 0).all()):
            raise UnsupportedAttention("a prompt with holes, which count towards sliding windows")

    def _step_inputs(self) -> tuple[dict[str, Any], dict[str, int], torch.LongTensor | None]:
        """What the target's own preparation gives to the step after the prompt, as far as it holds for all steps."""
        prompt, batch = self.prompt, len(self.prompt.visible)
        ids = prompt.input_ids.to(prompt.device)
        ids = torch.cat([ids, ids.new_zeros(batch, 1)], dim=1)
        step = self.target.prepare_inputs_for_generation(
            ids, next_sequence_length=1, is_first_iteration=False, **prompt.model_kwargs, **{CACHE_NAME: prompt.cache}
        )
        positions = step.get("position_ids")
        if (positions is None and self.needs_positions) or step.get("inputs_embeds") is not None:
            raise UnsupportedAttention("inputs without positions")
        if positions is not None:
            positions = positions.expand(*positions.shape[:-2], batch, 1)
        inputs, token_types = {}, {}
        for name, value in step.items():
            if name in _OWN_INPUTS or value is None:
                continue
            if name in _TOKEN_TYPES:
                kinds = set(value[:, -1].tolist())
                if len(kinds) > 1:
                    raise UnsupportedAttention(f"`{name}` that differ between rows")
                token_types[name] = kinds.pop()
            elif isinstance(value, (bool, int, float, str)):
                inputs[name] = value
            elif name not in MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL:
                raise UnsupportedAttention(f"the input `{name}`")
        inputs |= {
            "use_cache": True,
            "output_hidden_states": hidden_states_request(self.taps, self.keep_hidden),
            "return_dict": True,
        }
        return inputs, token_types, positions

    def _import(self, source: Cache) -> SlotCache:
        visible = self.prompt.visible
        total = visible.shape[1]
        cache = self.cache_class(len(self.rows), list(map(window_of, source.layers)), capacity=max(64, total + 64))
        cache.lengths = list(self.prompt_lengths)
        for layer, buffer in zip(source.layers, cache.buffers, strict=True):
            if not layer.is_initialized or layer.keys is None:
                continue
            keys, values = layer.keys, layer.values
            held = min(keys.shape[2], total)
            if isinstance(layer, StaticLayer):
                keys, values = keys[:, :, :held], values[:, :, :held]
            # A sliding layer holds the last positions only.
            kept = visible[:, total - held :].to(keys.device)
            slots = visible.long().cumsum(dim=1)[:, total - held :].to(keys.device) - 1
            row_index = torch.arange(len(self.rows), device=keys.device)[:, None].expand_as(kept)[kept]
            buffer.write(
                keys.transpose(1, 2)[kept].transpose(0, 1),
                values.transpose(1, 2)[kept].transpose(0, 1),
                row_index,
                slots[kept],
                used=max(self.prompt_lengths),
            )
        return cache

    def verify(self, tokens: torch.LongTensor, counts: Sequence[int]) -> StreamOutput:
        """
        Run a stream of tokens, row after row.

        Args:
            tokens (`torch.LongTensor` of shape `(sum(counts),)`): Each row's anchor and the drafts sent.
            counts (`Sequence[int]`): Tokens of each row, at least 1.

        Raises:
            [`UnsupportedAttention`]: in the first stream, if the target's attention does not do as the stream wants.
        """
        raise NotImplementedError

    def advance(self, kept: Sequence[int]) -> None:
        """Keep the first `kept` tokens of each row of the last stream, forget the others."""
        kept = self._of_all(kept)
        self.cache.lengths = [length + count for length, count in zip(self.cache.lengths, kept, strict=True)]

    def _of_all(self, counts: Sequence[int]) -> list[int]:
        """Counts of the rows whose tokens run as counts of all rows of the cache."""
        running = iter(counts)
        return [0 if row in self.waiting else next(running) for row in self.rows] if self.waiting else list(counts)

    def keep_rows(self, keep: Sequence[int]) -> None:
        """Drop all rows but those whose indices, among the current ones, are given; with `keep_finished` they wait."""
        if self.keep_finished:
            running = [row for row in self.rows if row not in self.waiting]
            self.waiting += [row for index, row in enumerate(running) if index not in keep]
            return
        self.rows = [self.rows[index] for index in keep]
        if keep:
            self.cache.keep_rows(keep)

    def catch_up(self, missing: Sequence[torch.LongTensor]) -> None:
        """Run what is missing of each row of the batch, after the last round and with `keep_finished`."""
        self.waiting, counts = [], list(map(len, missing))
        if any(counts):
            self.verify(torch.cat(list(missing)).to(self.prompt.device), counts)
            self.advance(counts)

    def close(self) -> None:
        """Write what was kept back into the cache that `generate` prepared or was given."""
        visible, lengths = self.prompt.visible, self.cache.lengths
        total = visible.shape[1] + max(map(int.__sub__, lengths, self.prompt_lengths))
        for layer, buffer in zip(self.prompt.cache.layers, self.cache.buffers, strict=True):
            if buffer.keys is None:
                continue
            states = []
            for slots in (buffer.keys, buffer.values):
                whole = slots.new_zeros(len(lengths), slots.shape[1], total, slots.shape[3])
                for row, (length, held) in enumerate(zip(lengths, self.prompt_lengths, strict=True)):
                    prompt_places = visible[row].nonzero().squeeze(1).to(slots.device)
                    whole[row, :, prompt_places] = slots[row, :, :held]
                    whole[row, :, visible.shape[1] : visible.shape[1] + length - held] = slots[row, :, held:length]
                states.append(whole)
            fill_layer(layer, *states)


def is_host_class(target: PreTrainedModel, model_types: Sequence[str]) -> bool:
    """Whether a target is Transformers' own class of one of these model types, and not one derived from it."""
    return text_config(target).model_type in model_types and type(target).__module__.startswith("transformers.models.")
