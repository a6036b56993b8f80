"""
A backbone pass in shapes that stay the same from round to round, so that it can be compiled: each row brings as many
new positions as a round can accept, filled up where it accepted fewer, and buffers are read whole under a mask.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import CompileConfig

from .draft_context import BackbonePass, DraftContext


class _ReadBuffer:
    """Keys and values of one layer, in the place of a `SlotBuffer`: what is written goes into a copy."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor):
        self.keys, self.values = keys, values

    def write(
        self, key: torch.Tensor, value: torch.Tensor, row_index: torch.Tensor, slots: torch.Tensor, used: int | None
    ) -> None:
        """Take the tokens of a pass, each of shape `(key_heads, tokens, head_dim)`."""
        self.new = key, value
        self.keys, self.values = self.keys.clone(), self.values.clone()
        self.keys[row_index, :, slots] = key.transpose(0, 1)
        self.values[row_index, :, slots] = value.transpose(0, 1)

    def read(self, used: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """All slots."""
        return self.keys, self.values


def _functional_pass(
    drafter: Any,
    noise_embeds: torch.Tensor,
    context_hidden_states: torch.Tensor,
    step: BackbonePass,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """The pass without side effects, which CUDA graphs could not replay: the block, and each layer's new tokens."""
    buffers = [_ReadBuffer(*pair) for pair in zip(keys, values, strict=True)]
    block = drafter.backbone(noise_embeds, context_hidden_states, step, buffers)
    return block, [buffer.new for buffer in buffers]


class StaticPass:
    """
    Runs the passes of one drafter compiled. It stands outside of the drafter's module tree: copies start without.
    """

    def __init__(self) -> None:
        self._config: CompileConfig | None = None

    def __deepcopy__(self, memo: dict) -> "StaticPass":
        return StaticPass()

    def __reduce__(self) -> tuple:
        return StaticPass, ()

    def __call__(
        self,
        drafter: Any,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        context_lengths: Sequence[int],
        context: DraftContext,
    ) -> torch.Tensor:
        """
        Args:
            drafter (`DSparkDraftModel`): The drafter.
            noise_embeds, context_hidden_states, context_lengths, context: As for its `forward`; the context
                [`DraftContext.is_steady`].

        Returns:
            `torch.Tensor` of shape `(rows, block_slots, hidden_size)`: the block behind the last layer.
        """
        if context.compile_config != self._config:
            self._config = context.compile_config
            self._compiled = torch.compile(_functional_pass, **self._config.to_dict())
        step = context.plan_static(context_lengths, noise_embeds.shape[1], noise_embeds.device)
        filled = context.fill_up(context_hidden_states, context_lengths)
        if noise_embeds.device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        keys, values = ([getattr(layer, name) for layer in context.layers] for name in ("keys", "values"))
        block, new = self._compiled(drafter, noise_embeds, filled, step, keys, values)
        tokens = len(filled)  # those of the blocks, behind these, are forgotten
        for layer, (key, value) in zip(context.layers, new, strict=True):
            layer.write(key[:, :tokens], value[:, :tokens], step.row_index[:tokens], step.slots[:tokens], 0)
        return block
