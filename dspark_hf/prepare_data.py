"""Make training data, prompts answered by the target itself: `dspark prepare-data`."""

from __future__ import annotations

import datetime
import hashlib
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .chat_format import ChatFormat, end_tokens
from .command_files import check_writable
from .data import QUANTILES, GroupStatistics, chat_loss_mask, data_statistics, import_datasets, load_training_data
from .data_folder import DataFolder
from .loading import (
    CommandError,
    check_source,
    load_target,
    load_tokenizer,
    reporting,
    resolve_target,
    sampling_in_force,
)
from .near_duplicates import ExcludedTexts
from .prompt_sources import Prompt, read_dataset, read_files


if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel

    from .answering import AnswerSettings

# Unless others are asked for: the target's distribution as it is.
TEMPERATURE = 1.0


def run(
    *,
    target: str,
    prompts: list[str] | None,
    dataset: str | None,
    subset: str | None,
    split: str,
    column: str | None,
    limit: int | None,
    exclude: list[str] | None,
    output: str,
    keep_responses: bool,
    temperatures: list[float] | None,
    samples_per_prompt: int | None,
    max_new_tokens: int,
    top_p: float | None,
    top_k: int | None,
    seed: int,
    thinking: str,
    batch_size: int,
    time_limit: float | None,
    dtype: str,
    device: str,
    threads: int | None,
) -> int:
    """`dspark prepare-data`: read, answer, write, and print what it amounts to. The command line's help says the rest.

    Returns:
        `int`: the exit code, 0.

    Raises:
        `CommandError`: something given cannot be used.
    """
    deadline = None if time_limit is None else time.monotonic() + 60 * time_limit
    check_source("--target", target)
    path = output_path(output)
    check_decoding(temperatures, samples_per_prompt, top_p, top_k, keep_responses)
    with reporting(f"--output {output!r}"):
        import_datasets()
    found = read_prompts(prompts, dataset, subset, split, column, limit, keep_responses)
    kept, dropped = without_excluded(found, exclude or [])

    from rich.console import Console

    console = Console()
    print_prompts(kept, dropped, console)
    settings: dict[str, Any] = {
        "--target": target,
        "what is asked": hashlib.sha256("".join(prompt.key for prompt in kept).encode()).hexdigest(),
        "--keep-responses": keep_responses,
        "--thinking": thinking,
    }
    used = temperatures or [TEMPERATURE]
    if not keep_responses:
        settings |= {
            "--temperature": used,
            "--samples-per-prompt": samples_per_prompt or len(used),
            "--max-new-tokens": max_new_tokens,
            "--top-p": top_p,
            "--top-k": top_k,
            "--seed": seed,
            "--dtype": dtype,
        }
    folder = DataFolder(path, settings)
    if folder.is_complete():
        folder.remove_work()
        console.print(f"{path} is complete, made with the same arguments.", highlight=False, soft_wrap=True)
        print_statistics(path, console)
        return 0
    with folder.working() as work:
        facts: dict[str, Any] = {"prompts": {"sources": count_sources(kept), "dropped": dropped}}
        if keep_responses:
            complete = keep(folder, target, kept, thinking, facts)
        else:
            model, source = load_target(target, dtype, device, threads)
            with reporting(f"--target {target!r}"):
                chat = ChatFormat(load_tokenizer(target), thinking)
                check_roles(chat, kept)
                how = answer_settings(model, chat, settings, batch_size)
                facts |= target_facts(target, source, model) | chat_facts(chat, thinking)
                print_plan(model, target, kept, how, console)
                complete = answer(folder, work, model, chat, kept, how, deadline, facts, console)
        print_statistics(path, console)
    if complete:
        folder.remove_work()
    else:
        console.print(f"Not complete yet: the same command goes on. In {path} is what there is.", soft_wrap=True)
    return 0


def output_path(output: str) -> Path:
    """
    The folder to write.

    Raises:
        `CommandError`: if it cannot be written, or holds something else.
    """
    check_writable("--output", output)
    path = Path(output).expanduser().absolute()
    ours = (path / "provenance.json").is_file()
    if path.exists() and not ours and (not path.is_dir() or any(path.iterdir())):
        raise CommandError(f"--output {output!r}: it exists and holds no training data; give a new folder")
    if not os.access(path.parent, os.W_OK):
        raise CommandError(f"--output {output!r}: {path.parent} cannot be written; give another folder")
    return path


def check_decoding(
    temperatures: Sequence[float] | None,
    samples_per_prompt: int | None,
    top_p: float | None,
    top_k: int | None,
    keep_responses: bool,
) -> None:
    """
    Refuse what would have no effect.

    Raises:
        `CommandError`: naming the argument.
    """
    used = temperatures or [TEMPERATURE]
    given = {
        "--temperature": temperatures,
        "--samples-per-prompt": samples_per_prompt,
        "--top-p": top_p,
        "--top-k": top_k,
    }
    for argument, value in given.items():
        if value is None:
            continue
        if keep_responses:
            raise CommandError(f"{argument}: with --keep-responses nothing is decoded; leave one of them out")
        if argument.startswith("--top") and max(used) == 0:
            raise CommandError(f"{argument} {value}: it has no effect at --temperature 0; leave it out")
    if 0 in used and (samples_per_prompt or 0) > len(used):
        raise CommandError(
            f"--samples-per-prompt {samples_per_prompt}: with {len(used)} temperatures a prompt would be answered at "
            "temperature 0 more than once, and in the same way; give more temperatures or fewer samples"
        )


def read_prompts(
    prompts: list[str] | None,
    dataset: str | None,
    subset: str | None,
    split: str,
    column: str | None,
    limit: int | None,
    keep_responses: bool,
) -> list[Prompt]:
    """
    All prompts given.

    Raises:
        `CommandError`: if there are none, or some cannot be read.
    """
    if prompts is None and dataset is None:
        raise CommandError("--prompts is missing: give prompts to answer with --prompts or --dataset")
    for argument, value in (("--subset", subset), ("--column", column)):
        if dataset is None and value is not None:
            raise CommandError(f"{argument} {value!r}: it is for --dataset; leave it out or give that as well")
    found = read_files("--prompts", prompts or [], limit, keep_responses)
    if dataset is not None:
        found += read_dataset(dataset, subset, split, column, limit, keep_responses)
    return found


def without_excluded(prompts: Sequence[Prompt], exclude: Sequence[str]) -> tuple[list[Prompt], dict[str, int]]:
    """
    The prompts that are not excluded.

    Args:
        prompts (`Sequence[Prompt]`): Of any source.
        exclude (`Sequence[str]`): Files and folders of prompts.

    Returns:
        `tuple`: the prompts, and how many were dropped, by reason.

    Raises:
        `CommandError`: if nothing is left, or the files cannot be read.
    """
    if not exclude:
        return list(prompts), {}
    excluded = ExcludedTexts(text for prompt in read_files("--exclude", exclude, None) for text in prompt.user_texts)
    kept = [prompt for prompt in prompts if not any(text in excluded for text in prompt.user_texts)]
    if not kept:
        raise CommandError(f"--exclude {' '.join(exclude)}: it excludes all {len(prompts)} prompts; give others")
    return kept, {"excluded": len(prompts) - len(kept)}


def count_sources(prompts: Iterable[Prompt]) -> dict[str, int]:
    """Prompts by source."""
    return dict(Counter(prompt.source for prompt in prompts))


def check_roles(chat: ChatFormat, prompts: Iterable[Prompt]) -> None:
    """
    Write one prompt of each kind, so that a template's objection comes before the work.

    Raises:
        `ValueError`: as [`ChatFormat.encode_prompt`].
    """
    seen = set()
    for prompt in prompts:
        roles = tuple(message["role"] for message in prompt.messages)
        if roles not in seen:
            seen.add(roles)
            messages = []
            for message in prompt.messages:
                if messages and messages[-1]["role"] == "user":
                    messages.append({"role": "assistant", "content": "Yes."})
                messages.append(message)
            chat.encode_prompt(messages)


def answer_settings(
    model: PreTrainedModel, chat: ChatFormat, settings: dict[str, Any], batch_size: int
) -> AnswerSettings:
    """
    How prompts are to be answered.

    Raises:
        `ValueError`: if the target samples in a way that is not done here.
    """
    from .answering import AnswerSettings
    from .batch_decoding import Sampling, check_sampling

    temperatures, sampling = settings["--temperature"], Sampling()
    if max(temperatures) > 0:
        check_sampling(model)
        cut = sampling_in_force(model, max(temperatures), settings["--top-p"], settings["--top-k"])
        sampling = Sampling(**cut, min_p=model.generation_config.min_p or 0.0)
    return AnswerSettings(
        temperatures=tuple(temperatures),
        samples_per_prompt=settings["--samples-per-prompt"],
        max_new_tokens=settings["--max-new-tokens"],
        sampling=sampling,
        end_tokens=end_tokens(model.generation_config, chat.tokenizer),
        batch_size=batch_size,
        seed=settings["--seed"],
    )


def answer(
    folder: DataFolder,
    work: Path,
    model: PreTrainedModel,
    chat: ChatFormat,
    prompts: Sequence[Prompt],
    how: AnswerSettings,
    deadline: float | None,
    facts: dict[str, Any],
    console: Console,
) -> bool:
    """
    Answer prompts, or go on with it, and write the data set.

    Returns:
        `bool`: whether it is complete.
    """
    from .answering import Answering
    from .progress import Progress
    from .shards import Shards

    shards = Shards(work / "answers")
    answering = Answering(model, chat, prompts, how, shards)
    with Progress("Answers", answering.total, answering.done, "sample") as progress:
        complete = answering.run(deadline, progress)
    done = {
        "sampling": {
            "temperatures": list(how.temperatures),
            "samples_per_prompt": how.samples_per_prompt,
            "max_new_tokens": how.max_new_tokens,
            "top_p": how.sampling.top_p,
            "top_k": how.sampling.top_k,
            "min_p": how.sampling.min_p,
            "end_tokens": sorted(how.end_tokens),
            "batch_size": how.batch_size,
            "seed": how.seed,
        },
        "samples": {
            "planned": answering.total,
            "done": answering.done,
            "too_long": sum(answering.too_long.values()),
        },
        "seconds": round(answering.seconds, 1),
    }
    too_long = sum(answering.too_long.values())
    if next(shards.records(), None) is None:
        if complete:
            raise CommandError(
                f"--target {facts['target']['id']!r}: all {too_long} prompts are too long for its {answering.limit} "
                "positions; give shorter ones"
            )
        raise CommandError("--time-limit: no answer was finished in that time; give more")
    if too_long:
        console.print(f"Left out: {too_long} samples, whose prompts leave no room for an answer", highlight=False)
    folder.write(shards.records(), origin() | facts | done, complete)
    return complete


def keep(folder: DataFolder, target: str, prompts: Sequence[Prompt], thinking: str, facts: dict[str, Any]) -> bool:
    """
    Write a data set of conversations as they are.

    Returns:
        `bool`: that it is complete.

    Raises:
        `CommandError`: if the tokenizer has no chat template, or it does not tell the assistant's turns apart.
    """
    from transformers import GenerationConfig

    source = resolve_target(target)
    with reporting(f"--target {target!r}"):
        chat = ChatFormat(load_tokenizer(target), thinking)
        if chat.template is None:
            raise CommandError(
                f"--keep-responses: the tokenizer of --target {target!r} has no chat template to write conversations "
                "with; give another target"
            )
        try:
            ends = end_tokens(GenerationConfig.from_pretrained(source), chat.tokenizer)
        except OSError:  # a checkpoint need not have one
            ends = end_tokens(None, chat.tokenizer)

    def records() -> Iterator[dict[str, Any]]:
        for number, prompt in enumerate(prompts, start=1):
            with reporting(f"--keep-responses: conversation {number}, of {prompt.source}"):
                token_ids, mask = chat_loss_mask(chat.tokenizer, prompt.messages, ends, chat.options)
            yield {
                "input_ids": token_ids,
                "loss_mask": mask,
                "temperature": None,
                "source": prompt.source,
                "finished": token_ids[len(mask) - 1 - mask[::-1].index(1)] in ends if 1 in mask else False,
                "prompt": prompt.key,
            }

    facts = facts | target_facts(target, source, None) | chat_facts(chat, thinking)
    folder.write(records(), origin() | facts | {"responses": "kept as they were"}, complete=True)
    return True


# Provenance.


def origin() -> dict[str, Any]:
    """When, where and with what."""
    from .environment import machine, package_versions

    return {
        "command": ["dspark", *sys.argv[1:]],
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": package_versions(),
    }


def target_facts(target: str, source: str | Path, model: PreTrainedModel | None) -> dict[str, Any]:
    """Which target it was: its commit on the Hub, or the sizes of its folder's weights."""
    facts: dict[str, Any] = {"id": target}
    if model is not None:
        facts |= {
            "class": type(model).__name__,
            "parameters": model.num_parameters(),
            "dtype": str(model.dtype).removeprefix("torch."),
            "commit": getattr(model.config, "_commit_hash", None),
        }
    if Path(source).is_dir():
        weights = sorted(Path(source).glob("*.safetensors"))
        facts |= {"folder": str(source), "weights": {file.name: file.stat().st_size for file in weights}}
    return {"target": facts}


def chat_facts(chat: ChatFormat, thinking: str) -> dict[str, Any]:
    """The tokenizer, its template, and whether the target was to think."""
    return {"tokenizer": chat.describe(), "thinking": thinking}


# What is printed.


def print_prompts(prompts: Sequence[Prompt], dropped: dict[str, int], console: Console) -> None:
    """What there is to answer, and what was dropped and why."""
    sources = ", ".join(f"{count} of {source}" for source, count in count_sources(prompts).items())
    reasons = "".join(f"; dropped: {count} {reason}" for reason, count in dropped.items())
    console.print(f"{len(prompts)} prompts, {sources}{reasons}", highlight=False)


def print_plan(
    model: PreTrainedModel, target: str, prompts: Sequence[Prompt], how: AnswerSettings, console: Console
) -> None:
    """What is going to be done."""
    temperatures = " ".join(f"{temperature:g}" for temperature in how.temperatures)
    console.print(
        f"target {target} ({model.num_parameters() / 1e6:.0f} M, {str(model.dtype).removeprefix('torch.')} on "
        f"{model.device}), {len(prompts) * how.samples_per_prompt} samples at temperature {temperatures}, top_p "
        f"{how.sampling.top_p:g}, top_k {how.sampling.top_k}, up to {how.max_new_tokens} tokens an answer, batches of "
        f"{how.batch_size}",
        highlight=False,
    )


def print_statistics(path: Path, console: Console) -> None:
    """The table of a data set."""
    from rich.table import Table

    statistics = data_statistics(load_training_data(path))
    table = Table(title=f"Training data in {path.name}", box=None, padding=(0, 1))
    table.add_column("")
    named = " ".join("most" if quantile == 1 else f"{quantile:.0%}" for quantile in QUANTILES)
    for column in ("samples", "tokens", "with loss", f"length\n{named}", "finished"):
        table.add_column(column, justify="right", no_wrap=True)

    def add(name: str, group: GroupStatistics) -> None:
        counts = (f"{count:,}" for count in (group.samples, group.tokens, group.supervised))
        table.add_row(name, *counts, " ".join(map(str, group.lengths)), f"{group.finished:.0%}")

    for source, group in statistics.by_source.items():
        add(source, group)
    for temperature, group in statistics.by_temperature.items():
        add("as given" if temperature is None else f"temperature {temperature:g}", group)
    add("all", statistics.total)
    console.print(table)
