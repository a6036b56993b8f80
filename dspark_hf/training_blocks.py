"""Blocks to train on: anchors drawn from texts, and all blocks of a text through the drafter in one pass.

Blocks are independent of each other (anchor-bounded packing): each sees the context strictly before its anchor and
itself, as it will in decoding.

Source: DSpark (arXiv 2607.05147), training objective.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .modeling import DSparkConfig
from .modeling.draft_context import BackbonePass, visible


@dataclass(frozen=True)
class TrainingBlocks:
    """
    The blocks of a batch of texts; rows with fewer than others are filled up with blocks that do not count.

    Attributes:
        anchors (`torch.LongTensor` of shape `(rows, blocks)`): Position of each block's anchor in its text.
        tokens (`torch.LongTensor` of shape `(rows, blocks, block_size + 1)`): The anchor, then the tokens that the
            slots are to predict.
        supervised (`torch.BoolTensor` of shape `(rows, blocks, block_size)`): Slots that count: the contiguous
            prefix of a block whose tokens the target wrote.
    """

    anchors: torch.LongTensor
    tokens: torch.LongTensor
    supervised: torch.BoolTensor

    @property
    def labels(self) -> torch.LongTensor:
        """The token each slot is to predict, `(rows, blocks, block_size)`."""
        return self.tokens[..., 1:]

    @property
    def previous(self) -> torch.LongTensor:
        """The token before each slot's, `(rows, blocks, block_size)`: the anchor, then the labels but the last."""
        return self.tokens[..., :-1]


def draw_anchors(
    input_ids: torch.LongTensor, loss_mask: torch.Tensor, num_anchors: int, seed: int
) -> tuple[torch.LongTensor, torch.BoolTensor]:
    """
    Draw each text's anchors without replacement from the tokens that the target wrote and that another one follows.

    What is drawn depends on the seed and the text alone, not on the batch, the process or the step that it falls to,
    so a resumed or distributed run draws the same.

    Args:
        input_ids (`torch.LongTensor` of shape `(rows, length)`): Texts, filled up on the right.
        loss_mask (`torch.Tensor` of shape `(rows, length)`): Nonzero at tokens that the target wrote.
        num_anchors (`int`): The most anchors of a text.
        seed (`int`): Another one draws others.

    Returns:
        Anchors, `torch.LongTensor` of shape `(rows, blocks)`, increasing, and `torch.BoolTensor` of the same shape:
        false where a text had fewer. `blocks` is at least 1.
    """
    written = loss_mask.bool()
    possible = written[:, :-1] & written[:, 1:]
    drawn = []
    for row, places in enumerate(possible.cpu()):
        found = places.nonzero()[:, 0]
        if len(found) > num_anchors:
            text = input_ids[row, : found[-1] + 2].cpu().numpy().tobytes()  # without what fills up
            generator = torch.Generator().manual_seed(zlib.crc32(text, seed & 0xFFFFFFFF))
            found = found[torch.randperm(len(found), generator=generator)[:num_anchors].sort().values]
        drawn.append(found)
    blocks = max(1, *map(len, drawn))
    anchors = torch.zeros(len(drawn), blocks, dtype=torch.long)
    kept = torch.zeros(len(drawn), blocks, dtype=torch.bool)
    for row, found in enumerate(drawn):
        anchors[row, : len(found)], kept[row, : len(found)] = found, True
    return anchors.to(input_ids.device), kept.to(input_ids.device)


def cut_blocks(
    input_ids: torch.LongTensor,
    loss_mask: torch.Tensor,
    anchors: torch.LongTensor,
    kept: torch.BoolTensor,
    block_size: int,
) -> TrainingBlocks:
    """
    Cut the blocks behind anchors out of their texts.

    Args:
        input_ids (`torch.LongTensor` of shape `(rows, length)`): Texts, filled up on the right.
        loss_mask (`torch.Tensor` of shape `(rows, length)`): Nonzero at tokens that the target wrote.
        anchors (`torch.LongTensor` of shape `(rows, blocks)`): Positions of the anchors.
        kept (`torch.BoolTensor` of shape `(rows, blocks)`): Which blocks count.
        block_size (`int`): Draft tokens a block.
    """
    length = input_ids.shape[1]
    places = anchors[..., None] + torch.arange(block_size + 1, device=anchors.device)
    inside = places < length
    places = places.clamp(max=length - 1)
    rows = torch.arange(len(input_ids), device=anchors.device)[:, None, None]
    written = loss_mask.bool()[rows, places] & inside & kept[..., None]
    supervised = written[..., 1:].long().cumprod(dim=-1).bool()
    return TrainingBlocks(anchors, input_ids[rows, places], supervised)


class _PackedKeys:
    """Keys and values of one layer: each row's context, then its blocks; in the place of a `SlotBuffer`."""

    def __init__(self, rows: int, length: int):
        self.rows, self.length = rows, length
        self.keys = self.values = None

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        row_index: torch.Tensor | None,
        slots: torch.Tensor | slice,
        used: int,
    ) -> None:
        """Take the tokens of a pass, each of shape `(key_heads, tokens, head_dim)`."""
        self.keys, self.values = self._by_row(key), self._by_row(value)

    def read(self, used: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Two tensors of shape `(rows, key_heads, used, head_dim)`."""
        return self.keys, self.values

    def _by_row(self, states: torch.Tensor) -> torch.Tensor:
        heads, _, head_dim = states.shape
        context, blocks = states.tensor_split([self.rows * self.length], dim=1)
        parts = [part.reshape(heads, self.rows, -1, head_dim) for part in (context, blocks)]
        return torch.cat(parts, dim=2).transpose(0, 1)


class PackedContext:
    """
    The context of a training pass, in the place of a `DraftContext`: whole texts, and many blocks a row. It has shapes
    of its own, so it is never compiled as drafting is.

    Args:
        config ([`DSparkConfig`]): Of the drafter.
        anchors (`torch.LongTensor` of shape `(rows, blocks)`): Positions of the anchors.
        length (`int`): Tokens of the longest text. What fills up the others lies behind all their anchors.
    """

    compile_config = None

    def __init__(self, config: DSparkConfig, anchors: torch.LongTensor, length: int):
        self.config, self.anchors, self.length = config, anchors, length
        self.layers = [_PackedKeys(len(anchors), length) for _ in range(config.num_hidden_layers)]

    def narrow(
        self, hidden_states: torch.Tensor, context_lengths: Sequence[int]
    ) -> tuple[torch.Tensor, Sequence[int]]:
        """Nothing is left out: each text's early blocks see its beginning."""
        return hidden_states, context_lengths

    def plan(self, context_lengths: Sequence[int], block_slots: int, device: torch.device) -> BackbonePass:
        """Lay out the pass; `block_slots` is the number of slots of all blocks of a row."""
        rows, blocks = self.anchors.shape
        anchors = self.anchors.to(device)
        context = torch.arange(self.length, device=device).expand(rows, -1)
        slots = anchors[..., None] + torch.arange(self.config.block_slots, device=device)
        queries = slots.flatten(1)[..., None]  # (rows, blocks * slots, 1)
        anchors = anchors.repeat_interleave(self.config.block_slots, dim=1)[..., None]
        block = torch.arange(blocks, device=device).repeat_interleave(self.config.block_slots)
        own = (block[:, None] == block).expand(rows, -1, -1)
        allowed = torch.cat([context[:, None, :] < anchors, own], dim=-1)
        keys = torch.cat([context, slots.flatten(1)], dim=1)[:, None, :]
        masks = {
            layer_type: (allowed & visible(self.config, layer_type, keys, queries, anchors))[:, None]
            for layer_type in set(self.config.layer_types)
        }
        positions = torch.cat([context.flatten(), slots.flatten()])
        return BackbonePass(positions, None, slice(0, 0), self.length + block_slots, masks)

    def drafts(self, block: torch.Tensor) -> torch.Tensor:
        """The slots of each row's blocks, in the second dimension, that are drafts."""
        by_block = block.unflatten(1, (-1, self.config.block_slots))
        return by_block[:, :, self.config.block_slots - self.config.block_size :].flatten(1, 2)

    def advance(self, context_lengths: Sequence[int]) -> None:
        """Nothing is remembered: every pass has a context of its own."""
