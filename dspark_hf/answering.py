"""Prompts answered by a target, batch after batch, in a way that can be stopped anywhere and taken up again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from .batch_decoding import Sampling, decode_rows
from .chat_format import ChatFormat
from .progress import Progress
from .prompt_sources import Prompt
from .shards import Shards


if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Samples that are sorted by length, so that those of a batch are of similar length.
WINDOW = 1024
# Of a batch, what may be left for a later one: few long rows would keep it up.
LEFT_OVER = 1 / 8


@dataclass(frozen=True)
class AnswerSettings:
    """
    How prompts are answered.

    Attributes:
        temperatures (`tuple[float, ...]`): Taken in turn; 0 is greedy.
        samples_per_prompt (`int`): Answers to each prompt.
        max_new_tokens (`int`): Of each answer.
        sampling ([`Sampling`]): Above temperature 0.
        end_tokens (`frozenset[int]`): Tokens that end an answer.
        batch_size (`int`): Rows decoded at a time.
        seed (`int`): Of the draws.
    """

    temperatures: tuple[float, ...]
    samples_per_prompt: int
    max_new_tokens: int
    sampling: Sampling
    end_tokens: frozenset[int]
    batch_size: int
    seed: int = 0

    def temperature(self, sample: int) -> float:
        """Of a sample, counted over all prompts."""
        return self.temperatures[sample % len(self.temperatures)]


@dataclass
class Turn:
    """
    An answer under way.

    Attributes:
        sample (`int`): Counted over all prompts.
        token_ids, loss_mask (`list[int]`): The conversation so far.
        answers (`list[str]`): To the turns before.
        room (`int`): Tokens that may follow, at least 1.
    """

    sample: int
    token_ids: list[int]
    loss_mask: list[int]
    answers: list[str]
    room: int


class Answering:
    """
    Answers to prompts. What a batch brought is written with where to go on, so that a run that was killed loses the
    batch under way and nothing else, and another run makes the same of it.

    Args:
        target (`PreTrainedModel`): Answers.
        chat ([`ChatFormat`]): Writes the prompts.
        prompts (`Sequence[Prompt]`): Without answers.
        settings ([`AnswerSettings`]): How.
        shards ([`Shards`]): Of an earlier run with the same prompts and settings (but for the batch size), or new.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        chat: ChatFormat,
        prompts: Sequence[Prompt],
        settings: AnswerSettings,
        shards: Shards,
    ):
        self.target, self.chat, self.prompts, self.settings, self.shards = target, chat, prompts, settings, shards
        self.limit: int | None = getattr(target.config.get_text_config(), "max_position_embeddings", None)
        self.total = len(prompts) * settings.samples_per_prompt
        state = shards.last_state() or {"window": 0, "offset": 0, "done": 0, "too_long": {}, "waiting": []}
        self.window, self.offset, self.done = state["window"], state["offset"], state["done"]
        self.too_long: dict[str, int] = state["too_long"]  # samples without room for an answer, by window
        self.waiting = [Turn(**turn) for turn in state["waiting"]]
        self._fresh: list[Turn] | None = None  # of the window, in order

    @property
    def seconds(self) -> float:
        """Spent on all batches."""
        return sum(state["seconds"] for state in self.shards.states())

    @property
    def is_complete(self) -> bool:
        """Whether all is answered."""
        return not self.waiting and not self._fresh_turns()

    def run(self, deadline: float | None, progress: Progress) -> bool:
        """
        Go on until all is answered, or until a deadline.

        Args:
            deadline (`float`, *optional*): As `time.monotonic()` counts.
            progress ([`Progress`]): Is told of samples and tokens.

        Returns:
            `bool`: whether all is answered.
        """
        while not self.is_complete and (deadline is None or time.monotonic() < deadline):
            start, done = time.monotonic(), self.done
            turns = self._next_batch()
            torch.manual_seed(self.settings.seed + 1_000_003 * len(self.shards))
            new_tokens = decode_rows(
                self.target,
                [turn.token_ids for turn in turns],
                [turn.room for turn in turns],
                [self.settings.temperature(turn.sample) for turn in turns],
                self.settings.sampling,
                self.settings.end_tokens,
                self.chat.tokenizer.pad_token_id or 0,  # masked, so any token will do
                leave=0 if self.is_complete else int(len(turns) * LEFT_OVER),
                deadline=deadline,
                on_step=progress.add_tokens,
            )
            records = []
            for turn, tokens in zip(turns, new_tokens, strict=True):
                record, following = self._take(turn, tokens)
                records += [record] if record is not None else []
                self.waiting += [following] if following is not None else []
                self.done += following is None
            self._write(records, time.monotonic() - start)
            progress.add_units(self.done - done)
        return self.is_complete

    def _next_batch(self) -> list[Turn]:
        """Turns that are waiting once they fill a batch or nothing else is left, otherwise fresh ones."""
        size = self.settings.batch_size
        fresh = self._fresh_turns()
        if len(self.waiting) >= size or not fresh:
            self.waiting.sort(key=lambda turn: (len(turn.token_ids), turn.sample))
            turns, self.waiting = self.waiting[:size], self.waiting[size:]
            return turns
        turns = fresh[:size]
        self.offset += len(turns)
        return turns

    def _fresh_turns(self) -> list[Turn]:
        """What is left of the first window that has something left."""
        while self.window * WINDOW < self.total:
            if self._fresh is None:
                self._fresh = self._open_window()
            if self.offset < len(self._fresh):
                return self._fresh[self.offset :]
            self._fresh, self.window, self.offset = None, self.window + 1, 0
        return []

    def _open_window(self) -> list[Turn]:
        """A window's samples in order of length; those without room for an answer are counted and left out."""
        turns, count = [], 0
        samples = range(self.window * WINDOW, min((self.window + 1) * WINDOW, self.total))
        for sample in samples:
            messages = self._messages_before(sample, [])
            token_ids = self.chat.encode_prompt(messages)
            room = self._room(token_ids)
            if room < 1 or not token_ids:
                count += 1
            else:
                turns.append(Turn(sample, token_ids, [0] * len(token_ids), [], room))
        if str(self.window) not in self.too_long and count:
            self.too_long[str(self.window)] = count
            self.done += count
        return sorted(turns, key=lambda turn: (len(turn.token_ids), turn.sample))

    def _room(self, token_ids: Sequence[int]) -> int:
        room = self.settings.max_new_tokens
        return room if self.limit is None else min(room, self.limit - len(token_ids))

    def _prompt(self, sample: int) -> Prompt:
        return self.prompts[sample // self.settings.samples_per_prompt]

    def _messages_before(self, sample: int, answers: Sequence[str]) -> list[dict[str, str]]:
        """A prompt's messages through the user's turn that follows so many answers, with these in their places."""
        messages, left = [], list(answers)
        for message in self._prompt(sample).messages:
            messages.append(message)
            if message["role"] == "user":
                if not left:
                    break
                messages.append({"role": "assistant", "content": left.pop(0)})
        return messages

    def _take(self, turn: Turn, tokens: list[int]) -> tuple[dict[str, Any] | None, Turn | None]:
        """What new tokens make of a turn: a record or none, and what follows or nothing."""
        turn.token_ids = turn.token_ids + tokens
        turn.loss_mask = turn.loss_mask + [1] * len(tokens)
        turn.room -= len(tokens)
        ended = bool(tokens) and tokens[-1] in self.settings.end_tokens
        if not ended and turn.room > 0:
            return None, turn
        following = self._following(turn) if ended else None
        if following is not None and 1 in following.loss_mask:
            return None, following
        return self._record(turn, ended), following

    def _following(self, turn: Turn) -> Turn | None:
        """
        The prompt's next turn. Its history is what a chat would show the target: the answers' text, in the template.
        Where that gives other tokens than the target wrote (a template may leave out what was thought), the history
        has no loss, and what the target wrote is a record of its own.
        """
        if len(turn.answers) + 1 == len(self._prompt(turn.sample).user_texts):
            return None
        start = len(turn.loss_mask)
        while turn.loss_mask[start - 1]:
            start -= 1
        answers = [*turn.answers, self.chat.decode(turn.token_ids[start:-1])]
        token_ids = self.chat.encode_prompt(self._messages_before(turn.sample, answers))
        room = self._room(token_ids)
        if room < 1:
            return None
        held = len(turn.token_ids)
        loss_mask = turn.loss_mask if token_ids[:held] == turn.token_ids else [0] * held
        loss_mask = (loss_mask + [0] * len(token_ids))[: len(token_ids)]
        return Turn(turn.sample, token_ids, loss_mask, answers, room)

    def _record(self, turn: Turn, finished: bool) -> dict[str, Any]:
        prompt = self._prompt(turn.sample)
        return {
            "input_ids": turn.token_ids,
            "loss_mask": turn.loss_mask,
            "temperature": self.settings.temperature(turn.sample),
            "source": prompt.source,
            "finished": finished,
            "prompt": prompt.key,
        }

    def _write(self, records: list[dict[str, Any]], seconds: float) -> None:
        state = {
            "window": self.window,
            "offset": self.offset,
            "done": self.done,
            "too_long": self.too_long,
            "seconds": round(seconds, 3),
            "waiting": [asdict(turn) for turn in self.waiting],
        }
        self.shards.append(state, records)
