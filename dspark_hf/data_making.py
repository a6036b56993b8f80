"""How a data set comes about: prompts that the target writes, its answers, or conversations as they are."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .answering import Answering, AnswerSettings
from .batch_decoding import Sampling, check_sampling
from .chat_format import ChatFormat, chat_loss_mask, end_tokens
from .data_folder import DataFolder
from .environment import machine, package_versions
from .loading import CommandError, load_target, load_tokenizer, reporting, resolve_target, sampling_in_force
from .near_duplicates import ExcludedTexts
from .progress import Progress
from .prompt_sources import Prompt
from .shards import Shards
from .synthesis import Synthesis, SynthesisSettings


if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel


@dataclass
class Making:
    """
    A target at work on a data set, whose settings are those of [`DataFolder`].

    Attributes:
        folder ([`DataFolder`]): The data set's.
        target (`PreTrainedModel`): Writes.
        chat ([`ChatFormat`]): Its prompts.
        batch_size (`int`): Rows decoded at a time.
        deadline (`float`, *optional*): As `time.monotonic()` counts.
        console (`rich.console.Console`): Prints.
        facts (`dict`): What provenance says so far.
    """

    folder: DataFolder
    target: PreTrainedModel
    chat: ChatFormat
    batch_size: int
    deadline: float | None
    console: Console
    facts: dict[str, Any]

    @classmethod
    def of_target(
        cls,
        folder: DataFolder,
        placement: tuple[str, str, int | None],
        batch_size: int,
        deadline: float | None,
        console: Console,
        facts: dict[str, Any],
    ) -> Making:
        """
        Load the target.

        Args:
            placement (`tuple`): Dtype, device and threads as [`load_target`] takes them.

        Raises:
            `CommandError`: if something given cannot be loaded, or does not go together.
        """
        name, thinking = folder.settings["--target"], folder.settings["--thinking"]
        target, source = load_target(name, *placement)
        with reporting(f"--target {name!r}"):
            chat = ChatFormat(load_tokenizer(name), thinking)
            if max(folder.settings["--temperature"]) > 0:
                check_sampling(target)
        facts = facts | target_facts(name, source, target) | chat_facts(chat, thinking)
        return cls(folder, target, chat, batch_size, deadline, console, facts)

    @property
    def end_tokens(self) -> frozenset[int]:
        """The tokens that end the target's texts."""
        return end_tokens(self.target.generation_config, self.chat.tokenizer)

    def synthesize(self, known: Sequence[Prompt], examples: Sequence[str], excluded: Sequence[str]) -> list[Prompt]:
        """
        Let the target write prompts, or go on with it.

        Args:
            known (`Sequence[Prompt]`): Prompts that need not be written again.
            examples (`Sequence[str]`): Texts to write others like.
            excluded (`Sequence[str]`): Texts that must not be written.

        Returns:
            `list[Prompt]`: as many as asked for, or none if the time is up.

        Raises:
            `CommandError`: if the target's chat template does not allow it, or hardly anything it writes is of use.
        """
        given = self.folder.settings
        settings = SynthesisSettings(
            given["--synthesize"],
            tuple(given["--system-prompt"] or ()),
            tuple(examples),
            self.batch_size,
            given["--seed"],
        )
        with reporting(f"--synthesize {settings.count}"):
            synthesis = Synthesis(
                self.target,
                self.chat,
                settings,
                self.end_tokens,
                [text for prompt in known for text in prompt.user_texts],
                ExcludedTexts(excluded),
                Shards(self.folder.work / "prompts"),
            )
        if synthesis.texts:
            self._go_on("prompts", f"{len(synthesis.prompts)} of {settings.count} prompts are written")
        bar = Progress("Prompts", settings.count, len(synthesis.prompts), "prompt")
        with bar as progress, self._reporting():
            complete = synthesis.run(self.deadline, progress)
        self.console.print(
            f"{len(synthesis.prompts)} prompts of {synthesis.texts} texts that the target wrote; dropped: "
            f"{synthesis.reasons()}",
            soft_wrap=True,
            highlight=False,
        )
        self.facts["synthesis"] = synthesis.facts()
        return synthesis.prompts if complete else []

    def answer(self, given: Sequence[Prompt], written: Sequence[Prompt]) -> bool:
        """
        Answer prompts, those given and those that the target wrote, or go on with it, and write the data set.

        Returns:
            `bool`: whether it is complete.

        Raises:
            `CommandError`: if there is nothing to write.
        """
        prompts, settings = [*given, *written], self._settings()
        shards = Shards(self.folder.work / "answers")
        answering = Answering(self.target, self.chat, prompts, settings, shards)
        self._announce(len(prompts), settings)
        if len(shards):
            tokens = sum(sum(record["loss_mask"]) for record in shards.records())
            self._go_on("answers", f"{answering.done} of {answering.total} samples, {tokens:,} tokens, are done")
        bar = Progress("Answers", answering.total, answering.done, "sample")
        with bar as progress, self._reporting():
            complete = answering.run(self.deadline, progress)
        too_long = sum(answering.too_long.values())
        if next(shards.records(), None) is None:
            if complete:
                raise CommandError(
                    f"--target {self.folder.settings['--target']!r}: all {too_long} prompts are too long for its "
                    f"{answering.limit} positions; give shorter ones"
                )
            raise CommandError("--time-limit: no answer was finished in that time; give more")
        if too_long:
            self.console.print(f"Left out: {too_long} samples, whose prompts leave no room for an answer")
        samples = {"planned": answering.total, "done": answering.done, "too_long": too_long}
        done = {"sampling": sampling_facts(settings), "samples": samples, "seconds": round(answering.seconds, 1)}
        files = {"prompts.jsonl": "".join(json.dumps({"prompt": p.user_texts[0]}) + "\n" for p in written)}
        self.folder.write(shards.records(), origin() | self.facts | done, complete, files if written else {})
        return complete

    def _reporting(self) -> AbstractContextManager[None]:
        """Context in which errors about texts, as of a template that fails on one of them, are the caller's."""
        return reporting(f"--target {self.folder.settings['--target']!r}")

    def _settings(self) -> AnswerSettings:
        given, sampling = self.folder.settings, Sampling()
        if max(given["--temperature"]) > 0:
            cut = sampling_in_force(self.target, max(given["--temperature"]), given["--top-p"], given["--top-k"])
            sampling = Sampling(**cut, min_p=self.target.generation_config.min_p or 0.0)
        return AnswerSettings(
            temperatures=tuple(given["--temperature"]),
            samples_per_prompt=given["--samples-per-prompt"],
            max_new_tokens=given["--max-new-tokens"],
            sampling=sampling,
            end_tokens=self.end_tokens,
            batch_size=self.batch_size,
            seed=given["--seed"],
        )

    def _go_on(self, part: str, found: str) -> None:
        """Say what an earlier run has left."""
        self.console.print(f"Going on with {self.folder.work / part}: {found}.", soft_wrap=True, highlight=False)

    def _announce(self, prompts: int, settings: AnswerSettings) -> None:
        temperatures = " ".join(f"{temperature:g}" for temperature in settings.temperatures)
        dtype = str(self.target.dtype).removeprefix("torch.")
        self.console.print(
            f"target {self.folder.settings['--target']} ({self.target.num_parameters() / 1e6:.0f} M, {dtype} on "
            f"{self.target.device}), {prompts * settings.samples_per_prompt} samples at temperature {temperatures}, "
            f"top_p {settings.sampling.top_p:g}, top_k {settings.sampling.top_k}, up to {settings.max_new_tokens} "
            f"tokens an answer, batches of {self.batch_size}",
            soft_wrap=True,
            highlight=False,
        )


def keep(folder: DataFolder, prompts: Sequence[Prompt], facts: dict[str, Any]) -> None:
    """
    Write a data set of conversations as they are.

    Args:
        folder ([`DataFolder`]): The data set's.
        prompts (`Sequence[Prompt]`): With the assistant's turns.
        facts (`dict`): What provenance says so far.

    Raises:
        `CommandError`: if the tokenizer has no chat template, or it does not tell the assistant's turns apart.
    """
    from transformers import GenerationConfig

    name, thinking = folder.settings["--target"], folder.settings["--thinking"]
    source = resolve_target(name)
    with reporting(f"--target {name!r}"):
        chat = ChatFormat(load_tokenizer(name), thinking)
    if chat.template is None:
        raise CommandError(
            f"--keep-responses: the tokenizer of --target {name!r} has no chat template to write conversations with; "
            "give another target"
        )
    try:
        ends = end_tokens(GenerationConfig.from_pretrained(source), chat.tokenizer)
    except OSError:  # a checkpoint need not have one
        ends = end_tokens(None, chat.tokenizer)

    def records() -> Iterator[dict[str, Any]]:
        for number, prompt in enumerate(prompts, start=1):
            with reporting(f"--keep-responses: conversation {number}, of {prompt.source}"):
                token_ids, mask = chat_loss_mask(chat.tokenizer, prompt.messages, ends, chat.options)
            last = max((place for place, loss in enumerate(mask) if loss), default=None)
            yield {
                "input_ids": token_ids,
                "loss_mask": mask,
                "temperature": None,
                "source": prompt.source,
                "finished": last is not None and token_ids[last] in ends,
                "prompt": prompt.key,
            }

    facts = facts | target_facts(name, source, None) | chat_facts(chat, thinking)
    folder.write(records(), origin() | facts | {"responses": "kept as they were"}, complete=True)


def origin() -> dict[str, Any]:
    """When, where and with what."""
    return {
        "command": ["dspark", *sys.argv[1:]],
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": package_versions(),
    }


def target_facts(name: str, source: str | Path, target: PreTrainedModel | None) -> dict[str, Any]:
    """Which target it was: its commit on the Hub, or the sizes of its folder's weights."""
    facts: dict[str, Any] = {"id": name}
    if target is not None:
        facts |= {
            "class": type(target).__name__,
            "parameters": target.num_parameters(),
            "dtype": str(target.dtype).removeprefix("torch."),
            "commit": getattr(target.config, "_commit_hash", None),
        }
    if Path(source).is_dir():
        weights = sorted(Path(source).glob("*.safetensors"))
        facts |= {"folder": str(source), "weights": {file.name: file.stat().st_size for file in weights}}
    return {"target": facts}


def chat_facts(chat: ChatFormat, thinking: str) -> dict[str, Any]:
    """The tokenizer, its template, and whether the target was to think."""
    return {"tokenizer": chat.describe(), "thinking": thinking}


def sampling_facts(settings: AnswerSettings) -> dict[str, Any]:
    """How the answers were decoded."""
    return {
        "temperatures": list(settings.temperatures),
        "samples_per_prompt": settings.samples_per_prompt,
        "max_new_tokens": settings.max_new_tokens,
        "top_p": settings.sampling.top_p,
        "top_k": settings.sampling.top_k,
        "min_p": settings.sampling.min_p,
        "end_tokens": sorted(settings.end_tokens),
        "batch_size": settings.batch_size,
        "seed": settings.seed,
    }
