"""
Whether a drafter is read the way it was trained: its taps and its slots, measured against the neighbouring readings.

A wrong reading raises no error, it only drafts badly. So the target writes some greedy texts, and from many places in
each the drafter drafts blocks under every reading; what agrees with the text is what greedy decoding would accept. All
readings draft from the same places, so their differences are paired.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from .compat import hidden_states_request
from .intervals import Interval, ratio_interval
from .modeling import DSparkConfig, DSparkDraftModel
from .target_outputs import read_taps, text_config
from .training_blocks import PackedContext, cut_blocks, draw_anchors


SHIFTS = (-1, 0, 1)
MOST_ANCHORS = 48
# A reading is clearly better if at least so many more drafts of a block are accepted on average, and the whole 95%
# bootstrap interval of the paired difference, texts being drawn, lies above 0.
MARGIN = 0.1


@dataclass(frozen=True)
class Reading:
    """
    One way to read a drafter.

    Attributes:
        tap_shift (`int`): Added to each of the config's `target_layer_ids`.
        sample_from_anchor (`bool`): Whether slot 0 is a draft.
        target_layer_ids (`list[int]`): The taps that come of the shift.
        block_size (`int`): Drafts of a block with as many slots as the config's.
        declared (`bool`): Whether this is what the config says.
    """

    tap_shift: int
    sample_from_anchor: bool
    target_layer_ids: list[int]
    block_size: int
    declared: bool


@dataclass(frozen=True)
class Probe:
    """
    What was accepted under one reading.

    Attributes:
        reading ([`Reading`]): Which.
        accepted (`list[list[int]]`): For each text the accepted drafts of each block.
        common (`int`): The most drafts that every reading has; comparisons count no more.
    """

    reading: Reading
    accepted: list[list[int]]
    common: int

    @property
    def blocks(self) -> int:
        """How many blocks were drafted."""
        return sum(map(len, self.accepted))

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a round, the target's own included, of rounds that begin anywhere in the texts."""
        return 1 + sum(map(sum, self.accepted)) / self.blocks

    @property
    def interval(self) -> Interval | None:
        """Of the mean acceptance length, over texts."""
        found = ratio_interval([sum(text) for text in self.accepted], [len(text) for text in self.accepted])
        return None if found is None else (1 + found[0], 1 + found[1])

    @property
    def survivals(self) -> list[float]:
        """Share of blocks of which the first 1, 2, ... drafts were all accepted."""
        counts = [count for text in self.accepted for count in text]
        return [
            sum(count >= place for count in counts) / len(counts) for place in range(1, self.reading.block_size + 1)
        ]

    def gain_over(self, other: Probe) -> tuple[float, Interval | None]:
        """Accepted drafts a block beyond another reading's, of the same blocks, and its interval over texts."""
        texts = [
            sum(min(own, self.common) - min(its, self.common) for own, its in zip(*pair, strict=True))
            for pair in zip(self.accepted, other.accepted, strict=True)
        ]
        blocks = [len(text) for text in self.accepted]
        return sum(texts) / sum(blocks), ratio_interval(texts, blocks)

    def clearly_beats(self, other: Probe) -> bool:
        """Whether this reading is clearly better than another, by `MARGIN` and the interval."""
        gain, interval = self.gain_over(other)
        return gain >= MARGIN and interval is not None and interval[0] > 0


def readings_of(config: DSparkConfig, num_layers: int) -> list[Reading]:
    """
    The declared reading, first, and its neighbours: taps one layer off, the other slot convention, and both.

    Args:
        config ([`DSparkConfig`]): Of the drafter.
        num_layers (`int`): Of the target; taps beyond it make no reading.
    """
    found = []
    for from_anchor in (config.sample_from_anchor, not config.sample_from_anchor):
        for shift in sorted(SHIFTS, key=abs):
            taps = [tap + shift for tap in config.target_layer_ids]
            drafts = config.block_slots - (not from_anchor)
            if taps[0] >= -1 and taps[-1] <= num_layers - 2 and drafts > 0:
                declared = shift == 0 and from_anchor == config.sample_from_anchor
                found.append(Reading(shift, from_anchor, taps, drafts, declared))
    return found


@torch.no_grad()
def probe(
    target: PreTrainedModel, drafter: DSparkDraftModel, texts: Sequence[tuple[torch.LongTensor, int]], seed: int = 0
) -> list[Probe]:
    """
    Draft blocks in texts under every reading.

    Args:
        target (`PreTrainedModel`): The verifying model.
        drafter (`DSparkDraftModel`): The draft model, which fits the target.
        texts (`Sequence[tuple]`): Each a greedy text of the target's, `torch.LongTensor` of shape `(1, length)`, and
            the length of its prompt.
        seed (`int`): Draws the places.

    Returns:
        `list[Probe]`: The declared reading first; none if no text has room for a whole block.
    """
    config = drafter.config
    readings = readings_of(config, text_config(target).num_hidden_layers)
    longest = max(reading.block_size for reading in readings)
    layers = sorted({tap for reading in readings for tap in reading.target_layer_ids})
    accepted: list[list[list[int]]] = [[] for _ in readings]
    for ids, prompt_length in texts:
        written = torch.zeros_like(ids)
        # A block must be over before the text is.
        written[:, prompt_length : max(ids.shape[1] - longest + 1, 0)] = 1
        anchors, kept = draw_anchors(ids, written, MOST_ANCHORS, seed)
        if not kept.all():
            continue
        outputs = target(
            input_ids=ids, use_cache=False, output_hidden_states=hidden_states_request(layers, False), logits_to_keep=1
        )
        states = read_taps(target, outputs, layers)[0]
        by_layer = dict(zip(layers, states.split(states.shape[1] // len(layers), dim=1), strict=True))
        blocks = cut_blocks(ids, torch.ones_like(ids), anchors, kept, longest)
        for reading, found in zip(readings, accepted, strict=True):
            taps = torch.cat([by_layer[tap] for tap in reading.target_layer_ids], dim=1)
            drafts = _drafts(drafter, target, reading, taps, blocks.anchors, blocks.tokens[0, :, 0])
            right = drafts.to(ids.device) == blocks.labels[0, :, : reading.block_size]
            found.append(right.long().cumprod(dim=1).sum(dim=1).tolist())
    if not accepted[0]:
        return []
    common = min(reading.block_size for reading in readings)
    return [Probe(reading, found, common) for reading, found in zip(readings, accepted, strict=True)]


def _drafts(
    drafter: DSparkDraftModel,
    target: PreTrainedModel,
    reading: Reading,
    taps: torch.Tensor,
    anchors: torch.LongTensor,
    tokens: torch.LongTensor,
) -> torch.LongTensor:
    """Greedy drafts, `(blocks, block_size)`, of blocks at `anchors`, `(1, blocks)`, that hold `tokens`."""
    config = copy.deepcopy(drafter.config)
    config.sample_from_anchor, config.block_size = reading.sample_from_anchor, reading.block_size
    tokens = tokens.to(drafter.device)
    slots = tokens.new_full((len(tokens), config.block_slots), config.mask_token_id)
    slots[:, 0] = tokens
    embedding = None if config.owns_embedding else target.get_input_embeddings()
    hidden = drafter(
        drafter.embed(slots.view(1, -1), embedding),
        context_hidden_states=taps.to(drafter.device),
        context_lengths=[len(taps)],
        context=PackedContext(config, anchors, len(taps)),
    )
    head = None if config.owns_lm_head else target.get_output_embeddings()
    return drafter.draft(hidden.view(len(tokens), config.block_size, -1), tokens, head).tokens


@torch.no_grad()
def greedy_texts(
    target: PreTrainedModel, prompts: Sequence[dict[str, torch.Tensor]], max_new_tokens: int
) -> list[tuple[torch.LongTensor, int]]:
    """
    What plain `generate` writes, greedily.

    Args:
        target (`PreTrainedModel`): The verifying model.
        prompts (`Sequence[dict]`): Each with `input_ids` and `attention_mask` of shape `(1, prompt_length)`.
        max_new_tokens (`int`): Of each.

    Returns:
        `list[tuple]`: As [`probe`] takes them.
    """
    options = {"max_new_tokens": max_new_tokens, "do_sample": False, "num_beams": 1}
    return [(target.generate(**prompt, **options), prompt["input_ids"].shape[1]) for prompt in prompts]
