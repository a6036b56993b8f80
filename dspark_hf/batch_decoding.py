"""
Many texts of a target alone, batch by batch, as fast as plain `generate` allows.

Three things keep a batch from waiting for its longest row: keys and values have room to grow, so that a step does not
copy them; rows that are done leave the batch when half of it is; and the last few are handed back unfinished, for a
later batch. None of them changes what a row's tokens are drawn from.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from transformers import (
    Cache,
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.cache_utils import DynamicLayer

from .cache_layers import PLAIN_LAYERS
from .compat import CACHE_NAME, cache_argument
from .nucleus import filter_nucleus
from .sampling import draw_tokens, most_likely, probabilities


# Slots that a layer gets at once, at least.
_ROOM = 64
# Of a generation config: what it may ask of sampling that is not done here, and the value that asks for nothing.
_NOT_DONE = {"typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "top_h": None}


@dataclass(frozen=True)
class Sampling:
    """
    What is cut from a distribution before a token is drawn.

    Attributes:
        top_p (`float`): Nucleus in (0, 1].
        top_k (`int`): Most likely tokens; 0 for all.
        min_p (`float`): Least share of the most likely token's probability; 0 for all.
    """

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    def processors(self) -> list[LogitsProcessor]:
        """In the order of `generate`."""
        chain: list[LogitsProcessor] = []
        if self.top_k:
            chain.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            chain.append(TopPLogitsWarper(self.top_p))
        if self.min_p:
            chain.append(MinPLogitsWarper(self.min_p))
        return chain


def check_sampling(target: PreTrainedModel) -> None:
    """
    Check that a target samples in a way that is done here.

    Raises:
        `ValueError`: naming what its generation config asks for.
    """
    for name, nothing in _NOT_DONE.items():
        value = getattr(target.generation_config, name, None)
        if value is not None and value != nothing:
            raise ValueError(
                f"the target's generation config sets {name} to {value}, which is not sampled with here; set it to "
                f"{nothing} in generation_config.json, or decode at temperature 0"
            )


def decode_rows(
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    rooms: Sequence[int],
    temperatures: Sequence[float],
    sampling: Sampling,
    end_tokens: Collection[int],
    pad_token_id: int,
    leave: int = 0,
    deadline: float | None = None,
    on_step: Callable[[int], None] | None = None,
) -> list[list[int]]:
    """
    Continue prompts, each until it ends or has no room.

    Args:
        target (`PreTrainedModel`): Decodes; its generation config's own logits processors apply.
        prompts (`Sequence[Sequence[int]]`): Tokens, at least one each.
        rooms (`Sequence[int]`): Tokens that each may get, at least 1.
        temperatures (`Sequence[float]`): Of each; 0 is greedy.
        sampling ([`Sampling`]): Where the temperature is not 0.
        end_tokens (`Collection[int]`): Tokens that end a text.
        pad_token_id (`int`): Put where nothing is attended to.
        leave (`int`, *optional*, defaults to 0): Rows that may be left unfinished.
        deadline (`float`, *optional*): `time.monotonic()` at which all rows are left.
        on_step (`Callable`, *optional*): Called after each step with the number of tokens it gave.

    Returns:
        `list[list[int]]`: the new tokens of each prompt. One that neither ends with an end token nor fills its room
        was left unfinished.
    """
    texts: list[list[int]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))
    ids, mask = _left_padded(prompts, pad_token_id, target.device)
    cache = growing_cache(target)
    while True:
        left = [rooms[row] - len(texts[row]) for row in rows]
        fewest = leave if cache is None else max(leave, len(rows) // 2)
        stop = _Stop(left, end_tokens, fewest, deadline, on_step, target.device)
        draw = _Draw([temperatures[row] for row in rows], sampling, target.device)
        output = target.generate(
            input_ids=ids,
            attention_mask=mask,
            **({} if cache is None else {CACHE_NAME: cache}),
            logits_processor=LogitsProcessorList([draw]),
            stopping_criteria=StoppingCriteriaList([stop]),
            max_new_tokens=max(left),
            eos_token_id=sorted(end_tokens) or None,
            pad_token_id=pad_token_id,
            # Drawing is the last processor's, which leaves one token.
            do_sample=False,
            temperature=1.0,
            top_p=1.0,
            top_k=50,
            num_beams=1,
            return_dict_in_generate=False,
        )
        under_way = []
        for index, row in enumerate(rows):
            new = _until_end(output[index, ids.shape[1] :].tolist()[: left[index]], end_tokens)
            texts[row] += new
            if new[-1] not in end_tokens and len(texts[row]) < rooms[row]:
                under_way.append(index)
        if len(under_way) <= leave or stop.out_of_time:
            return texts
        rows = [rows[index] for index in under_way]
        keep = torch.tensor(under_way, device=ids.device)
        mask = torch.cat([mask, mask.new_ones(len(mask), output.shape[1] - ids.shape[1])], dim=1)[keep]
        ids = output[keep]
        cache.batch_select_indices(keep)
        ids, mask = _without_padding(ids, mask, cache)


class _Draw(LogitsProcessor):
    """
    Draws each row's token at the row's own temperature and leaves no other: `generate` samples at one temperature, and
    on a CPU mostly sorts the vocabulary and draws a random number for each of its tokens.
    """

    def __init__(self, temperatures: Sequence[float], sampling: Sampling, device: torch.device):
        self.temperatures = torch.tensor(temperatures, device=device)
        self.sampled = self.temperatures.nonzero().squeeze(1)
        self.sampling, self.processors = sampling, sampling.processors()

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        if len(self.sampled) == len(scores):
            tokens = self._draw(scores, self.temperatures)
        else:
            tokens = most_likely(scores)
            if len(self.sampled):
                tokens[self.sampled] = self._draw(scores[self.sampled], self.temperatures[self.sampled])
        return torch.full_like(scores, float("-inf")).scatter_(1, tokens[:, None], 0.0)

    def _draw(self, scores: torch.Tensor, temperatures: torch.Tensor) -> torch.LongTensor:
        """Tokens of shape `(rows,)`."""
        places = None
        if 0 < self.sampling.top_k < scores.shape[-1] // 4:
            # Enough to see that no more tokens are as likely as the last of the top k.
            highest = scores.topk(2 * self.sampling.top_k, dim=-1)
            if (highest.values[:, -1] < highest.values[:, self.sampling.top_k - 1]).all():
                scores, places = highest
        scores = scores / temperatures[:, None]
        for processor in self.processors:
            nucleus = isinstance(processor, TopPLogitsWarper) and places is None and scores.device.type == "cpu"
            scores = filter_nucleus(processor, scores) if nucleus else processor(None, scores)
        tokens = draw_tokens(probabilities(scores))
        return tokens if places is None else places.gather(1, tokens[:, None]).squeeze(1)


class _Stop(StoppingCriteria):
    """Stops rows that end or are full, and all of them once few are left, or at the deadline."""

    def __init__(
        self,
        left: Sequence[int],
        end_tokens: Collection[int],
        fewest: int,
        deadline: float | None,
        on_step: Callable[[int], None] | None,
        device: torch.device,
    ):
        self.left = torch.tensor(left, device=device)
        self.ends = torch.tensor(sorted(end_tokens), dtype=torch.long, device=device)
        self.done = torch.zeros(len(left), dtype=torch.bool, device=device)
        self.fewest, self.deadline, self.on_step = fewest, deadline, on_step
        self.active, self.steps = len(left), 0
        self.out_of_time = False

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor, **kwargs) -> torch.BoolTensor:
        if self.on_step is not None:
            self.on_step(self.active)
        self.steps += 1
        self.done |= torch.isin(input_ids[:, -1], self.ends) | (self.left <= self.steps)
        self.active = len(self.done) - int(self.done.sum())
        self.out_of_time = self.deadline is not None and time.monotonic() >= self.deadline
        if self.active <= self.fewest or self.out_of_time:
            return torch.ones_like(self.done)
        return self.done.clone()


class GrowingLayer(DynamicLayer):
    """A cache layer with room behind its keys and values, so that a step writes its token and copies nothing."""

    _layer_type = None  # stands for no type of layer: only [`growing_cache`] makes these

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """As its parent does."""
        super().lazy_initialization(key_states, value_states)
        self.spacious: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add keys and values of shape `(rows, key_heads, tokens, head_dim)` and return all."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        held = self.get_seq_length()
        total = held + key_states.shape[-2]
        # What took rows or positions away has left other tensors here.
        moved = self.spacious is None or self.keys.data_ptr() != self.spacious[0].data_ptr()
        if moved or self.spacious[0].shape[-2] < total:
            self.spacious = tuple(
                new.new_empty(*new.shape[:-2], total + max(_ROOM, total // 4), new.shape[-1])
                for new in (key_states, value_states)
            )
            if held:
                for whole, old in zip(self.spacious, (self.keys, self.values), strict=True):
                    whole[..., :held, :] = old
        for whole, new in zip(self.spacious, (key_states, value_states), strict=True):
            whole[..., held:total, :] = new
        self.keys, self.values = (whole[..., :total, :] for whole in self.spacious)
        return self.keys, self.values


def growing_cache(target: PreTrainedModel) -> Cache | None:
    """
    An empty cache of [`GrowingLayer`]s where `generate` would make one of plain layers, which rows can be taken out
    of; `None` where it would make another.
    """
    takes_one = cache_argument(target) in inspect.signature(target.forward).parameters
    makes_plain = target._supports_default_dynamic_cache() and target.generation_config.cache_implementation is None
    if not takes_one or not makes_plain:
        return None
    cache = DynamicCache(config=target.config.get_text_config(decoder=True))
    if not cache.layers or any(type(layer) not in PLAIN_LAYERS for layer in cache.layers):
        return None
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def _without_padding(
    ids: torch.LongTensor, mask: torch.LongTensor, cache: Cache
) -> tuple[torch.LongTensor, torch.LongTensor]:
    """A batch without the columns in which no row has a token; a layer with a window would not know of it."""
    first = int(mask.any(dim=0).long().argmax())
    if first == 0 or any(type(layer) is not GrowingLayer for layer in cache.layers):
        return ids, mask
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, first:], layer.values[:, :, first:]
    return ids[:, first:], mask[:, first:]


def _left_padded(
    prompts: Sequence[Sequence[int]], pad_token_id: int, device: torch.device
) -> tuple[torch.LongTensor, torch.LongTensor]:
    longest = max(map(len, prompts))
    ids = [[pad_token_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def _until_end(tokens: list[int], end_tokens: Collection[int]) -> list[int]:
    """Tokens through the first that ends a text."""
    return next((tokens[: place + 1] for place, token in enumerate(tokens) if token in end_tokens), tokens)
