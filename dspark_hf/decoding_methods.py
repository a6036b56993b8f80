"""Ways of decoding that `dspark bench` sets beside plain `generate`, and contexts of a given length to do it at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import CompileConfig

from .card_inputs import DSPARK, PLAIN, PROMPT_LOOKUP
from .host_dflash import host_dflash
from .loading import Pair
from .schedule_options import drafter_defaults, drafter_schedule
from .scheduling import SCHEDULES
from .synthetic import synthetic_acceptance


if TYPE_CHECKING:
    from transformers import PreTrainedModel

STATIC, COMPILED, HOST_DFLASH = "static cache", "torch.compile", "Transformers' DFlash"
COMPILED_DRAFTER = f"{DSPARK}, compiled"


@dataclass(frozen=True)
class Method:
    """
    A way of decoding.

    Attributes:
        name (`str`): For tables.
        arguments (`dict`): What it adds to the arguments of `generate`.
        surroundings (`Callable`): Makes a context that must be in force around the call.
        speculative (`bool`): Whether it is DSpark, so that the drafter has statistics of the call.
        unfit (`str`, *optional*): Why it cannot be run with this pair.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    surroundings: Callable[[], AbstractContextManager[Any]] = nullcontext
    speculative: bool = False
    unfit: str | None = None


def plain_method() -> Method:
    """The target alone."""
    return Method(PLAIN)


def dspark_method(pair: Pair) -> Method:
    """The target with its drafter."""
    return Method(DSPARK, {"assistant_model": pair.drafter}, speculative=True)


def synthetic_methods(pair: Pair, probabilities: Iterable[float]) -> list[Method]:
    """DSpark with drafts forced to be right with a given probability: the engine apart from the drafter's quality.

    Args:
        pair (`Pair`): target and drafter.
        probabilities (`Iterable[float]`): each in [0, 1].
    """
    return [
        Method(
            f"DSpark, synthetic {probability:g}",
            {"assistant_model": pair.drafter},
            partial(synthetic_acceptance, probability),
            speculative=True,
        )
        for probability in probabilities
    ]


def drafting_methods(pair: Pair, windows: Iterable[int], top_ks: Iterable[int]) -> list[Method]:
    """DSpark with a drafter that sees only the last positions before a block, or drafts among a few tokens.

    Args:
        pair (`Pair`): target and drafter.
        windows (`Iterable[int]`): values of `draft_context_window`.
        top_ks (`Iterable[int]`): values of `draft_top_k`.
    """
    values = [(f"last {window}", {"draft_context_window": window}) for window in windows]
    values += [(f"top {top_k}", {"draft_top_k": top_k}) for top_k in top_ks]
    return [
        Method(
            f"{DSPARK}, {name}",
            {"assistant_model": pair.drafter},
            partial(drafter_defaults, pair.drafter, **options),
            speculative=True,
        )
        for name, options in values
    ]


def chosen_methods(pair: Pair, names: Sequence[str], prompt_lookup_tokens: int) -> list[Method]:
    """
    Ways of decoding by their names on the command line.

    Args:
        pair (`Pair`): Target and drafter.
        names (`Sequence[str]`): `"static"`, `"compiled"`, `"prompt-lookup"`, `"dflash"`, `"compiled-drafter"`, and the
            schedules of a drafter.
        prompt_lookup_tokens (`int`): `prompt_lookup_num_tokens`.
    """
    static = {"cache_implementation": "static"}
    others = {
        "static": Method(STATIC, static),
        "compiled": Method(COMPILED, static, partial(compiled, pair.target)),
        "prompt-lookup": Method(PROMPT_LOOKUP, {"prompt_lookup_num_tokens": prompt_lookup_tokens}),
    }
    others["compiled-drafter"] = Method(
        COMPILED_DRAFTER,
        {"assistant_model": pair.drafter},
        partial(drafter_defaults, pair.drafter, compile_config=CompileConfig()),
        speculative=True,
    )
    threshold = pair.drafter.generation_config.assistant_confidence_threshold
    for schedule in SCHEDULES:
        at = (threshold or 0.4) if schedule == "confidence" else None
        surroundings = partial(drafter_schedule, pair.drafter, schedule, at)
        others[schedule] = Method(
            f"{DSPARK}, {schedule}", {"assistant_model": pair.drafter}, surroundings, speculative=True
        )
    if "dflash" in names:
        others["dflash"] = host_dflash_method(pair)
    return [others[name] for name in names]


def host_dflash_method(pair: Pair) -> Method:
    """Transformers' own DFlash path with the drafter's weights."""
    try:
        assistant = host_dflash(pair.drafter, pair.target)
    except ValueError as error:
        return Method(HOST_DFLASH, unfit=str(error))
    return Method(HOST_DFLASH, {"assistant_model": assistant, "speculation_type": "dflash"})


@contextmanager
def compiled(target: PreTrainedModel) -> Iterator[None]:
    """Let a target's forward be compiled, once for all calls; shapes may vary."""
    target.forward = _compiled_forward(target)
    try:
        yield
    finally:
        del target.forward  # the class's own comes back


@cache
def _compiled_forward(target: PreTrainedModel) -> Callable:
    return torch.compile(target.forward, dynamic=True)


def at_contexts(
    encoded: dict[str, list[dict[str, torch.Tensor]]], lengths: Sequence[int]
) -> dict[str, list[dict[str, torch.Tensor]]]:
    """
    Prompts that end like those given and are of certain lengths: cut at the front, or with other prompts before.

    Args:
        encoded (`dict`): Prompts by set, `input_ids` and `attention_mask` of shape `(1, prompt_length)`.
        lengths (`Sequence[int]`): Tokens of a prompt, at least 1.

    Returns:
        `dict`: By length, as many prompts as there were.
    """
    prompts = [inputs["input_ids"] for prompts in encoded.values() for inputs in prompts]
    found = {}
    for length in lengths:
        found[f"context {length}"] = made = []
        for index, prompt in enumerate(prompts):
            pieces, held, before = [prompt], prompt.shape[1], index
            while held < length:
                before -= 1
                pieces.insert(0, prompts[before % len(prompts)])
                held += pieces[0].shape[1]
            ids = torch.cat(pieces, dim=1)[:, -length:]
            made.append({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    return found
