"""Timing calls of `generate`, and bare forwards of target and drafter outside the loop."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .decoding_methods import Method
from .loading import Pair, reporting


if TYPE_CHECKING:
    import torch

    from .statistics import SpeculativeStats

BARE_STEPS = 12
WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class BareForwards:
    """Seconds of forwards outside the loop: a one-token step of the target T(1), a block's draft, a verification."""

    step: float
    draft: float
    verify: float


@dataclass(frozen=True)
class Call:
    """One timed call of `generate`."""

    new_token_ids: list[int]
    seconds: float
    stats: SpeculativeStats | None

    @property
    def tokens_per_second(self) -> float:
        """New tokens a second of the whole call, prefill included."""
        return len(self.new_token_ids) / self.seconds


def timed_generate(
    pair: Pair, inputs: dict[str, torch.Tensor], method: Method, options: dict[str, Any], seed: int | None = None
) -> Call:
    """Generate once and time it.

    Args:
        pair (`Pair`): target and drafter.
        inputs (`dict`): `input_ids` and `attention_mask` of shape `(1, prompt_length)`.
        method (`Method`): the way of decoding.
        options (`dict`): arguments of `generate` that all methods share.
        seed (`int`, *optional*): seeds torch before the call.
    """
    rows, seconds = timed_rows(pair, inputs, method, options, seed)
    return Call(rows[0], seconds, pair.drafter.speculative_stats if method.speculative else None)


def timed_rows(
    pair: Pair, inputs: dict[str, torch.Tensor], method: Method, options: dict[str, Any], seed: int | None = None
) -> tuple[list[list[int]], float]:
    """The same of a batch, with inputs of shape `(batch_size, prompt_length)`.

    Returns:
        `tuple[list[list[int]], float]`: each row's new tokens, and the seconds of the call.
    """
    import torch

    if seed is not None:
        torch.manual_seed(seed)
    if not method.speculative:
        options = {name: value for name, value in options.items() if "assistant" not in name}
    with method.surroundings():
        _synchronize(pair)
        start = time.perf_counter()
        output = pair.target.generate(**inputs, **options, **method.arguments)
        _synchronize(pair)
        seconds = time.perf_counter() - start
    return output[:, inputs["input_ids"].shape[1] :].tolist(), seconds


def bare_step_seconds(pair: Pair, token_ids: Sequence[int], context_length: int, step_tokens: int) -> float:
    """Median time of a bare target forward with a cache.

    Args:
        pair (`Pair`): its target is measured.
        token_ids (`Sequence[int]`): a text; the steps run over it (and over its last token again at its end).
        context_length (`int`): tokens in the cache before the first step, at least 1.
        step_tokens (`int`): tokens a step, at least 1.

    Returns:
        `float`: seconds a step.
    """
    import torch
    from transformers import DynamicCache

    from .compat import cache_argument

    cache = DynamicCache(config=pair.target.config)
    keywords = {cache_argument(pair.target): cache, "use_cache": True}
    wanted = context_length + step_tokens * BARE_STEPS
    ids = list(token_ids[:wanted])
    ids += ids[-1:] * (wanted - len(ids))
    text = torch.tensor([ids], device=pair.target.device)
    times = []
    with torch.no_grad():
        pair.target(text[:, :context_length], logits_to_keep=1, **keywords)
        for start in range(context_length, wanted, step_tokens):
            chunk = text[:, start : start + step_tokens]
            _synchronize(pair)
            begin = time.perf_counter()
            pair.target(chunk, **keywords)
            _synchronize(pair)
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def bare_draft_seconds(pair: Pair, context_length: int, new_tokens: int) -> float:
    """Median time of a bare greedy draft by the drafter's own defaults: one backbone pass and the sequential loop,
    without the engine around it.

    Args:
        pair (`Pair`): its drafter is measured.
        context_length (`int`): positions remembered before each draft.
        new_tokens (`int`): positions observed since the draft before, at least 1.

    Returns:
        `float`: seconds a block.
    """
    import torch

    from .modeling.draft_context import DraftContext

    drafter, target = pair.drafter, pair.target
    config, device = drafter.config, drafter.device
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
    width = len(config.target_layer_ids) * config.target_hidden_size
    block = drafter.block_tokens(torch.full((1,), config.mask_token_id, device=device))
    options = drafter.generation_config
    window, top_k = (getattr(options, name, None) for name in ("draft_context_window", "draft_top_k"))
    capacity = 2 * context_length if window is None else 2 * window
    context = DraftContext(config, [0], capacity, window, options.compile_config)
    times = []
    with torch.no_grad():
        for step in range(1 + BARE_STEPS):
            length = new_tokens if step else context_length
            taps = torch.randn(length, width, device=device, dtype=drafter.dtype)
            _synchronize(pair)
            begin = time.perf_counter()
            hidden = drafter(drafter.embed(block, embedding), taps, [length], context)
            drafter.draft(hidden, block[:, 0], head, top_k=top_k)
            _synchronize(pair)
            times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def warm_up(pair: Pair, inputs: dict[str, torch.Tensor], methods: Iterable[Method], options: dict[str, Any]) -> None:
    """Run each method for a few tokens, so that no first-time cost is measured.

    Raises:
        `CommandError`: target and drafter do not go together, or do not take these options.
    """
    short = options | {"max_new_tokens": min(WARM_UP_TOKENS, options["max_new_tokens"])}
    for method in methods:
        with reporting(f"{method.name} with --target {pair.names[0]!r} and --drafter {pair.names[1]!r}"):
            timed_generate(pair, inputs, method, short, seed=0)


def _synchronize(pair: Pair) -> None:
    """Wait for the device, so that a clock read on the host means something."""
    if pair.target.device.type == "cuda":
        import torch

        torch.cuda.synchronize(pair.target.device)
