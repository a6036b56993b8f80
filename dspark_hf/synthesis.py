"""
Prompts from the target itself, for those who have none: behind the header of a user's turn, an instruct model writes
what a user would say.

Source: Magpie (arXiv 2406.08464).
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from .batch_decoding import Sampling, decode_rows
from .chat_format import ChatFormat
from .loading import CommandError
from .near_duplicates import ExcludedTexts, NearDuplicates, normalise, repetition
from .progress import Progress
from .prompt_sources import Prompt
from .shards import Shards


if TYPE_CHECKING:
    from transformers import PreTrainedModel

TEMPERATURE, TOP_P = 1.0, 0.9
MOST_TOKENS, FEWEST_TOKENS = 256, 4
# Shares of a text: what may repeat itself, and what of it must be letters or digits.
MOST_REPEATED, FEWEST_LETTERS = 0.4, 0.5
# Examples shown at a time, drawn anew for each text.
EXAMPLES_SHOWN = 3
EXAMPLES_INTRODUCTION = "The user asks one question. It is a new one, of the same kind as these:"
# Texts for each prompt wanted, after which it is given up; and the fewest.
MOST_TEXTS, FEWEST_TEXTS = 20, 512
# Of a batch, what is not waited for.
LEFT_OUT = 1 / 16


@dataclass(frozen=True)
class SynthesisSettings:
    """
    What prompts are wanted.

    Attributes:
        count (`int`): How many.
        systems (`tuple[str, ...]`): System prompts, taken in turn; none leaves it to the chat template.
        examples (`tuple[str, ...]`): Prompts to write others like.
        batch_size (`int`): Rows decoded at a time.
        seed (`int`): Of the draws.
    """

    count: int
    systems: tuple[str, ...]
    examples: tuple[str, ...]
    batch_size: int
    seed: int = 0


class Synthesis:
    """
    Writes prompts batch by batch, sorts out what is of no use, and can be stopped anywhere as answering can.

    Args:
        target (`PreTrainedModel`): Writes.
        chat ([`ChatFormat`]): With a chat template.
        settings ([`SynthesisSettings`]): What is wanted.
        end_tokens (`frozenset[int]`): The target's.
        known (`Sequence[str]`): Texts that need not be written again.
        excluded ([`ExcludedTexts`]): Texts that must not be.
        shards ([`Shards`]): Of an earlier run with the same arguments, or new.

    Raises:
        `ValueError`: if the chat template does not allow it.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        chat: ChatFormat,
        settings: SynthesisSettings,
        end_tokens: frozenset[int],
        known: Sequence[str],
        excluded: ExcludedTexts,
        shards: Shards,
    ):
        self.target, self.chat, self.settings, self.shards = target, chat, settings, shards
        self.header = lru_cache(maxsize=256)(chat.user_turn)
        self.control = frozenset(chat.tokenizer.all_special_ids) | frozenset(chat.tokenizer.added_tokens_decoder)
        behind = self.header(self._system(random.Random(0), 0))[1]
        self.end_tokens = end_tokens | frozenset(token for token in behind[:1] if token in self.control)
        self.excluded, self.seen = excluded, NearDuplicates()
        for text in (*known, *settings.examples):
            self.seen.add(text)
        self.texts, self.prompts, self.dropped = 0, [], Counter[str]()
        for record in shards.records():
            self._judge(record)

    @property
    def is_complete(self) -> bool:
        """Whether there are enough prompts."""
        return len(self.prompts) >= self.settings.count

    def run(self, deadline: float | None, progress: Progress) -> bool:
        """
        Go on until there are enough, or until a deadline.

        Args:
            deadline (`float`, *optional*): As `time.monotonic()` counts.
            progress ([`Progress`]): Is told of prompts and tokens.

        Returns:
            `bool`: whether there are enough.

        Raises:
            `CommandError`: if hardly anything that the target writes is of use.
        """
        while not self.is_complete and (deadline is None or time.monotonic() < deadline):
            if self.texts >= max(FEWEST_TEXTS, MOST_TEXTS * self.settings.count):
                raise CommandError(
                    f"--synthesize {self.settings.count}: of {self.texts} texts that the target wrote, "
                    f"{len(self.prompts)} were of use ({self.reasons()}); give other --system-prompt or --examples, "
                    "or prompts with --prompts"
                )
            start, found, number = time.monotonic(), len(self.prompts), len(self.shards)
            torch.manual_seed(self.settings.seed + 1_000_003 * number)
            rng = random.Random(f"{self.settings.seed}:{number}")
            systems = [
                (self.texts + row) % max(len(self.settings.systems), 1) for row in range(self.settings.batch_size)
            ]
            headers = [self.header(self._system(rng, system))[0] for system in systems]
            written = decode_rows(
                self.target,
                headers,
                [MOST_TOKENS] * len(headers),
                [TEMPERATURE] * len(headers),
                Sampling(top_p=TOP_P),
                self.end_tokens,
                self.chat.tokenizer.pad_token_id or 0,  # masked, so any token will do
                leave=int(len(headers) * LEFT_OUT),
                deadline=deadline,
                on_step=progress.add_tokens,
            )
            if deadline is not None and time.monotonic() >= deadline:
                break  # what was cut short is not like the rest
            records = [{"system": s, "token_ids": tokens} for s, tokens in zip(systems, written, strict=True)]
            self.shards.append({"seconds": round(time.monotonic() - start, 3)}, records)
            for record in records:
                self._judge(record)
            progress.add_units(len(self.prompts) - found)
        return self.is_complete

    def reasons(self) -> str:
        """How many texts were dropped, and why."""
        return ", ".join(f"{count} {reason}" for reason, count in self.dropped.most_common()) or "none dropped"

    def facts(self) -> dict[str, Any]:
        """What provenance says."""
        return {
            "prompts": len(self.prompts),
            "texts": self.texts,
            "dropped": dict(self.dropped),
            "system_prompts": list(self.settings.systems),
            "examples": len(self.settings.examples),
            "temperature": TEMPERATURE,
            "top_p": TOP_P,
            "seconds": round(sum(state["seconds"] for state in self.shards.states()), 1),
        }

    def _system(self, rng: random.Random, number: int) -> str | None:
        """A system prompt, with some of the examples if there are any."""
        system = self.settings.systems[number] if self.settings.systems else None
        if not self.settings.examples:
            return system
        shown = rng.sample(self.settings.examples, min(EXAMPLES_SHOWN, len(self.settings.examples)))
        return "\n\n".join([*([system] if system else []), EXAMPLES_INTRODUCTION, *(f"- {text}" for text in shown)])

    def _judge(self, record: dict[str, Any]) -> None:
        """Take a text for a prompt, or count why not."""
        if self.is_complete:
            return
        self.texts += 1
        token_ids = record["token_ids"]
        text = self.chat.decode(token_ids[:-1]).strip()
        reason = next(self._objections(token_ids, text), None)
        if reason is not None:
            self.dropped[reason] += 1
            return
        number = f" {record['system'] + 1}" if len(self.settings.systems) > 1 else ""
        self.prompts.append(Prompt.of_text(f"synthetic{number}", text))

    def _objections(self, token_ids: Sequence[int], text: str) -> Iterator[str]:
        if token_ids[-1] not in self.end_tokens:
            yield "unfinished"
        if any(token in self.control for token in token_ids[:-1]):
            yield "with control tokens"
        if len(token_ids) <= FEWEST_TOKENS or len(normalise(text)) < FEWEST_TOKENS:
            yield "too short"
        visible = [character for character in text if not character.isspace()]
        if "\ufffd" in text or sum(map(str.isalnum, visible)) < FEWEST_LETTERS * len(visible):
            yield "not text"
        if repetition(text) > MOST_REPEATED:
            yield "repeating themselves"
        if text in self.excluded:
            yield "excluded"
        if not self.seen.add(text):
            yield "alike"
