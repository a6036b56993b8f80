"""How a target is verified: which stream fits it."""

import logging
import weakref
from collections.abc import Sequence

from transformers import GenerationConfig, PreTrainedModel

from .flattened_stream import FlattenedStream
from .row_stream import RowStream
from .slot_cache import UnsupportedAttention
from .target_outputs import Prefill


logger = logging.getLogger(__name__)

# Classes of targets whose attention is not what the flattened stream needs, as their first stream showed.
_unstreamable: "weakref.WeakSet[type]" = weakref.WeakSet()


def mark_unstreamable(target: PreTrainedModel) -> None:
    """Remember that this class of targets cannot run flattened streams."""
    _unstreamable.add(type(target))


def open_stream(
    target: PreTrainedModel, prompt: Prefill, generation_config: GenerationConfig, taps: Sequence[int]
) -> FlattenedStream | RowStream:
    """
    The stream that fits a target: flattened over slots where its attention goes through Transformers' attention
    interface, and row by row over its own cache otherwise.

    Args:
        target (`PreTrainedModel`): The verifying model.
        prompt ([`Prefill`]): The prompt as it was run.
        generation_config (`GenerationConfig`): Of the call.
        taps (`Sequence[int]`): The drafter's `target_layer_ids`.

    Raises:
        `ValueError`: if the target's cache cannot forget rejected tokens.
    """
    keep_hidden = bool(generation_config.output_hidden_states)
    keep_attentions = bool(generation_config.output_attentions)
    if not keep_attentions and type(target) not in _unstreamable:
        try:
            return FlattenedStream(target, prompt, taps, keep_hidden)
        except UnsupportedAttention as reason:
            logger.debug("%s is verified row by row: it has %s.", type(target).__name__, reason)
    return RowStream(target, prompt, taps, keep_hidden, keep_attentions)
