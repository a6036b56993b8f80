"""How a target is verified: which stream fits it."""

import logging
import weakref
from collections.abc import Sequence

from transformers import GenerationConfig, PreTrainedModel

from .flattened_stream import FlattenedStream
from .padded_stream import PaddedStream
from .row_stream import RowStream
from .slot_cache import UnsupportedAttention
from .slot_stream import SlotStream
from .target_outputs import Prefill


logger = logging.getLogger(__name__)

# The fewest rows of which a target could not run a flattened stream, as its first one showed.
_unstreamable: "weakref.WeakKeyDictionary[PreTrainedModel, int]" = weakref.WeakKeyDictionary()


def mark_unstreamable(target: PreTrainedModel, rows: int) -> None:
    """Remember that a target cannot run flattened streams of so many rows or more."""
    _unstreamable[target] = min(rows, _unstreamable.get(target, rows))


def open_stream(
    target: PreTrainedModel, prompt: Prefill, generation_config: GenerationConfig, taps: Sequence[int]
) -> SlotStream | RowStream:
    """
    The stream that fits a target: flattened over slots where its attention goes through Transformers' attention
    interface, a padded batch over slots where several rows of its family are known to run as one, and row by row over
    its own cache otherwise.

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
    rows = len(prompt.visible)
    fitting = []
    if not keep_attentions:
        fitting += [FlattenedStream] if rows < _unstreamable.get(target, rows + 1) else []
        fitting += [PaddedStream] if rows > 1 else []
    for stream_class in fitting:
        try:
            return stream_class(target, prompt, taps, keep_hidden)
        except UnsupportedAttention as reason:
            logger.debug("%s has no %s: it has %s.", type(target).__name__, stream_class.__name__, reason)
    return RowStream(target, prompt, taps, keep_hidden, keep_attentions)
