"""
The logits processors of a call, applied as plain `generate` would: each position sees the tokens before it and no
others, once, in order.
"""

import copy
from collections.abc import Sequence

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as host


# These read only the scores, so all positions can be given to them at once.
_READ_ONLY_SCORES = (
    host.EpsilonLogitsWarper,
    host.EtaLogitsWarper,
    host.InfNanRemoveLogitsProcessor,
    host.LogitNormalization,
    host.MinPLogitsWarper,
    host.SuppressTokensLogitsProcessor,
    host.TemperatureLogitsWarper,
    host.TopKLogitsWarper,
    host.TopPLogitsWarper,
    host.TypicalLogitsWarper,
)
# These keep a state that cannot be taken back when a draft is rejected.
_CANNOT_ROLL_BACK = (
    host.ClassifierFreeGuidanceLogitsProcessor,
    host.SynthIDTextWatermarkLogitsProcessor,
    host.UnbatchedClassifierFreeGuidanceLogitsProcessor,
)


def _snapshot(value):
    """Copy what can change inside a processor (containers and tensors); everything else is taken to be constant."""
    if isinstance(value, dict):
        return (
            type(value)((key, _snapshot(item)) for key, item in value.items())
            if type(value) is dict
            else copy.copy(value)
        )
    if type(value) in (list, tuple, set):
        return type(value)(_snapshot(item) for item in value)
    return value.clone() if isinstance(value, torch.Tensor) else value


class ProcessorChain:
    """
    Applies a list of logits processors to positions of several rows.

    Processors of the user's own may keep state in their attributes (numbers, strings, containers, tensors): it is put
    back after drafting and after rejected positions, so it sees the generated tokens only. With more than one row such
    a state would mix the rows in an order that plain batched `generate` does not have; it is refused then.

    Args:
        processors (`LogitsProcessorList`): As `generate` prepared them.
        num_rows (`int`): Number of rows.

    Raises:
        `ValueError`: if a processor cannot be used with a drafter.
    """

    def __init__(self, processors: LogitsProcessorList, num_rows: int):
        for processor in processors:
            if isinstance(processor, _CANNOT_ROLL_BACK):
                raise ValueError(
                    f"{type(processor).__name__} keeps a state that cannot follow rejected drafts. Call `generate` "
                    "without `assistant_model`, or without the option that adds it."
                )
        self.processors = list(processors)
        self.num_rows = num_rows
        self.own = [
            processor
            for processor in self.processors
            if hasattr(processor, "__dict__") and not type(processor).__module__.startswith("transformers.")
        ]
        self._states: list[list[dict]] = []

    def __bool__(self) -> bool:
        return bool(self.processors)

    def __call__(
        self, prefixes: Sequence[tuple[int, torch.LongTensor]], scores: torch.Tensor, record: bool = False
    ) -> torch.Tensor:
        """
        Process the scores of several positions.

        Args:
            prefixes (`Sequence[tuple[int, torch.LongTensor]]`): For each position its row and the tokens before it,
                of shape `(1, length)`.
            scores (`torch.Tensor` of shape `(positions, vocab_size)`): Overwritten or not, as the processors do.
            record (`bool`): Whether to remember the state after each position, for [`ProcessorChain.commit`].

        Returns:
            `torch.Tensor` of shape `(positions, vocab_size)`.
        """
        if self.own:
            return self._position_by_position(prefixes, scores, record)
        for processor in self.processors:
            if type(processor) in _READ_ONLY_SCORES:
                scores = processor(None, scores)
            else:
                scores = torch.cat(
                    [
                        self._apply(processor, row, ids, scores[position : position + 1])
                        for position, (row, ids) in enumerate(prefixes)
                    ]
                )
        return scores

    def _position_by_position(self, prefixes, scores: torch.Tensor, record: bool) -> torch.Tensor:
        # A state is only right if each position goes through the whole list before the next one does.
        self._states, processed = [], []
        for position, (row, ids) in enumerate(prefixes):
            row_scores = scores[position : position + 1]
            for processor in self.processors:
                row_scores = self._apply(processor, row, ids, row_scores)
            processed.append(row_scores)
            if record:
                self._states.append(self.state())
        return torch.cat(processed)

    def _apply(self, processor, row: int, ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        if isinstance(processor, host.PrefixConstrainedLogitsProcessor) and row > 0:
            # Called on one row alone it would name every row 0.
            function = processor._prefix_allowed_tokens_fn
            processor = type(processor)(lambda _, tokens: function(row, tokens), 1)
        return processor(ids, scores)

    def state(self) -> list[dict]:
        """The state of the user's own processors."""
        return [_snapshot(processor.__dict__) for processor in self.own]

    def restore(self, state: list[dict]) -> None:
        """Put a state back."""
        for processor, attributes in zip(self.own, state, strict=True):
            if self.num_rows > 1 and not _same(processor.__dict__, attributes):
                raise ValueError(
                    f"The logits processor {type(processor).__name__} changes its attributes while it is called. With "
                    f"{self.num_rows} rows and a drafter it would not see the rows as plain `generate` shows them. "
                    "Generate one row at a time or without `assistant_model`."
                )
            processor.__dict__.clear()
            processor.__dict__.update(_snapshot(attributes))

    def commit(self, positions: int) -> None:
        """Go back to the state after the first `positions` positions of the last recorded call."""
        if self.own and self._states:
            self.restore(self._states[positions - 1])


def _same(first, second) -> bool:
    if isinstance(first, torch.Tensor):
        return first is second or (isinstance(second, torch.Tensor) and torch.equal(first, second))
    if isinstance(first, dict):
        return (
            type(first) is type(second)
            and first.keys() == second.keys()
            and all(_same(first[k], second[k]) for k in first)
        )
    if isinstance(first, (list, tuple)):
        return type(first) is type(second) and len(first) == len(second) and all(map(_same, first, second))
    return first is second or first == second
