"""
The logits processors of a call, applied as plain `generate` would: each position sees the tokens before it and no
others, once, in order.
"""

import copy
import math
from collections.abc import Collection, Sequence

import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as host

from .nucleus import ROWS_AT_ONCE, filter_nucleus, find_nuclei
from .snapshot import Snapshot


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
# These do not care which token a score belongs to, so they can be given the scores of some tokens only.
_BLIND_TO_TOKENS = tuple(kind for kind in _READ_ONLY_SCORES if kind is not host.SuppressTokensLogitsProcessor)
# These leave a higher score the higher or equal.
_KEEP_ORDER = (host.TemperatureLogitsWarper, host.TopKLogitsWarper)
# These keep a state that cannot be taken back when a draft is rejected.
_CANNOT_ROLL_BACK = (
    host.ClassifierFreeGuidanceLogitsProcessor,
    host.SynthIDTextWatermarkLogitsProcessor,
    host.UnbatchedClassifierFreeGuidanceLogitsProcessor,
)


class ProcessorChain:
    """
    Applies a list of logits processors to positions of several rows.

    Processors of the user's own may keep state in their attributes: it is put back after drafting and after rejected
    positions, so it sees the generated tokens only. With more than one row such a state would mix the rows in an order
    that plain batched `generate` does not have; it is refused then.

    Args:
        processors (`LogitsProcessorList`): As `generate` prepared them.
        num_rows (`int`): Number of rows.
        end_tokens (`Collection[int]`): Tokens that end a row. Code of the user's own is not called after a drafted
            one, where plain `generate` never gets.

    Raises:
        `ValueError`: if a processor cannot be used with a drafter.
    """

    def __init__(self, processors: LogitsProcessorList, num_rows: int, end_tokens: Collection[int] = ()):
        for processor in processors:
            if isinstance(processor, _CANNOT_ROLL_BACK):
                raise ValueError(
                    f"{type(processor).__name__} keeps a state that cannot follow rejected drafts. Call `generate` "
                    "without `assistant_model`, or without the option that adds it."
                )
        self.processors = list(processors)
        self.num_rows = num_rows
        self.end_tokens = frozenset(end_tokens)
        self.own = [
            processor
            for processor in self.processors
            if hasattr(processor, "__dict__") and not type(processor).__module__.startswith("transformers.")
        ]
        self.of_rows = [
            [p if p in self.own else _of_row(p, row, num_rows) for p in self.processors] for row in range(num_rows)
        ]
        self._states: list[list[Snapshot]] = []
        self._constant: list[Snapshot] | None = None

    def __bool__(self) -> bool:
        return bool(self.processors)

    @property
    def reads_tokens(self) -> bool:
        """Whether any of them reads the tokens before a position; otherwise the prefixes can be left out."""
        return any(type(processor) not in _READ_ONLY_SCORES for processor in self.processors)

    @property
    def names_tokens(self) -> bool:
        """Whether any of them tells tokens apart by their ids; otherwise scores of a few tokens can be processed."""
        return any(type(processor) not in _BLIND_TO_TOKENS for processor in self.processors)

    def __call__(
        self, prefixes: Sequence[tuple[int, torch.LongTensor, int]], scores: torch.Tensor, record: bool = False
    ) -> torch.Tensor:
        """
        Process the scores of several positions.

        Args:
            prefixes (`Sequence[tuple[int, torch.LongTensor, int]]`): For each position its row, the tokens before it,
                of shape `(1, length)`, and how many of these are drafts. May be empty if none is read.
            scores (`torch.Tensor` of shape `(positions, vocab_size)`): Overwritten or not; of some tokens only, if no
                processor `names_tokens`.
            record (`bool`): Whether to remember the state after each position, for [`ProcessorChain.commit`].

        Returns:
            `torch.Tensor` of shape `(positions, vocab_size)`.
        """
        if self.own:
            return self._position_by_position(prefixes, scores, record)
        if scores.device.type == "cpu" and len(scores) > ROWS_AT_ONCE and not self.reads_tokens:
            for part in scores.split(ROWS_AT_ONCE):
                part.copy_(self((), part))
            return scores
        for number, processor in enumerate(self.processors):
            if type(processor) is host.TopPLogitsWarper and scores.device.type == "cpu":
                scores = filter_nucleus(processor, scores)
            elif type(processor) in _READ_ONLY_SCORES:
                scores = processor(None, scores)
            else:
                scores = torch.cat(
                    [
                        self._apply(number, prefix, scores[position : position + 1])
                        for position, prefix in enumerate(prefixes)
                    ]
                )
        return scores

    @property
    def ends_in_nucleus(self) -> bool:
        """Whether [`ProcessorChain.nuclei`] can stand in for a call on a CPU."""
        *first, last = self.processors or [None]
        plain = type(last) is host.TopPLogitsWarper and all(type(processor) in _KEEP_ORDER for processor in first)
        return plain and all(getattr(p, "filter_value", -math.inf) == -math.inf for p in self.processors)

    def nuclei(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.LongTensor | None]:
        """
        Process several positions as a call would, and leave out tokens at -inf where few are left.

        Args:
            logits (`torch.Tensor` of shape `(positions, vocab_size)`): On a CPU, in any dtype.

        Returns:
            Scores and tokens as [`find_nuclei`] returns them.
        """
        *warpers, last = self.processors
        return find_nuclei(warpers, last, logits)

    def _position_by_position(
        self, prefixes: Sequence[tuple[int, torch.LongTensor, int]], scores: torch.Tensor, record: bool
    ) -> torch.Tensor:
        # A state is only right if each position goes through the whole list before the next one does.
        self._states, processed = [], []
        for position, prefix in enumerate(prefixes):
            row_scores = scores[position : position + 1]
            for number in range(len(self.processors)):
                row_scores = self._apply(number, prefix, row_scores)
            processed.append(row_scores)
            if record and self.num_rows == 1:
                self._states.append(self.state())
            if self.num_rows > 1 and self._constant is None:  # from the second call on: the first may set things up
                self._constant = self._snapshots()
        self._check_constant()
        return torch.cat(processed)

    def _check_constant(self) -> None:
        for processor, snapshot in zip(self.own, self._constant or [], strict=False):
            if not snapshot.is_unchanged():
                raise ValueError(
                    f"The logits processor {type(processor).__name__} changes its attributes while it is called. With "
                    f"{self.num_rows} rows and a drafter it would not see the rows as plain `generate` shows them. "
                    "Generate one row at a time or without `assistant_model`."
                )

    def _apply(self, number: int, prefix: tuple[int, torch.LongTensor, int], scores: torch.Tensor) -> torch.Tensor:
        row, ids, drafted = prefix
        processor = self.of_rows[row][number]
        if drafted and self._is_foreign(processor) and not self.end_tokens.isdisjoint(ids[0, -drafted:].tolist()):
            return scores
        processed = processor(ids, scores)
        if processed.shape != scores.shape:
            raise ValueError(
                f"The logits processor {type(processor).__name__} turned scores of shape {tuple(scores.shape)} into "
                f"{tuple(processed.shape)}. With a drafter it is called for one row at a time; it must not need all."
            )
        return processed

    def _is_foreign(self, processor: LogitsProcessor) -> bool:
        return isinstance(processor, host.PrefixConstrainedLogitsProcessor) or processor in self.own

    def _snapshots(self) -> list[Snapshot]:
        return [Snapshot(vars(processor), type(processor).__name__) for processor in self.own]

    def state(self) -> list[Snapshot]:
        """The state of the user's own processors; of several rows they have none."""
        return self._snapshots() if self.num_rows == 1 else []

    def restore(self, state: list[Snapshot]) -> None:
        """Put a state back."""
        for snapshot in state:
            snapshot.restore()

    def commit(self, positions: int) -> None:
        """Go back to the state after the first `positions` positions of the last recorded call."""
        if self._states:
            self.restore(self._states[positions - 1])


def _of_row(processor: LogitsProcessor, row: int, num_rows: int) -> LogitsProcessor:
    """A processor of Transformers' own that knows the rows of the batch, as one row alone needs it."""
    if isinstance(processor, host.PrefixConstrainedLogitsProcessor):
        function, batch_id = processor._prefix_allowed_tokens_fn, row // processor._num_beams
        return host.PrefixConstrainedLogitsProcessor(lambda _, tokens: function(batch_id, tokens), 1)
    if isinstance(processor, host.RepetitionPenaltyLogitsProcessor):
        if not isinstance(processor.prompt_ignore_length, torch.Tensor):
            return processor
        processor = copy.copy(processor)
        processor.prompt_ignore_length = processor.prompt_ignore_length[row : row + 1]
    elif isinstance(processor, host.EncoderRepetitionPenaltyLogitsProcessor):
        prompts = processor.encoder_input_ids
        processor = copy.copy(processor)
        processor.encoder_input_ids = prompts[row // (num_rows // len(prompts))][None]
    elif isinstance(processor, host.EncoderNoRepeatNGramLogitsProcessor):
        prompts = processor.generated_ngrams
        processor = copy.copy(processor)
        processor.generated_ngrams, processor.batch_size = [prompts[row // (num_rows // len(prompts))]], 1
    return processor
