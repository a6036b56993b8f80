"""Make training data, prompts answered by the target itself: `dspark prepare-data`."""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .chat_format import ChatFormat
from .command_files import check_parent
from .data import QUANTILES, GroupStatistics, data_statistics, import_datasets, load_training_data
from .data_folder import DataFolder
from .loading import CommandError, check_source, reporting, told
from .near_duplicates import ExcludedTexts
from .prompt_sources import Prompt, read_dataset, read_files


if TYPE_CHECKING:
    from rich.console import Console

# Unless others are asked for; the temperature is that of the target's distribution as it is.
TEMPERATURE, MAX_NEW_TOKENS, BATCH_SIZE = 1.0, 512, 64


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
    keep_responses: bool,
    synthesize: int | None,
    system_prompts: list[str] | None,
    examples: list[str] | None,
    output: str,
    temperatures: list[float] | None,
    samples_per_prompt: int | None,
    max_new_tokens: int | None,
    top_p: float | None,
    top_k: int | None,
    seed: int,
    thinking: str,
    batch_size: int | None,
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
    if keep_responses:
        check_keeping(
            {
                "--synthesize": synthesize,
                "--temperature": temperatures,
                "--samples-per-prompt": samples_per_prompt,
                "--max-new-tokens": max_new_tokens,
                "--top-p": top_p,
                "--top-k": top_k,
                "--seed": seed or None,
                "--batch-size": batch_size,
                "--time-limit": time_limit,
                "--dtype": None if dtype == "auto" else dtype,
                "--device": None if device == "auto" else device,
                "--threads": threads,
            }  # fmt: skip
        )
    check_decoding(temperatures, samples_per_prompt, top_p, top_k)
    check_synthesis(synthesize, system_prompts, examples)
    with reporting(f"--output {output!r}"):
        import_datasets()
    found = read_prompts(prompts, dataset, subset, split, column, limit, keep_responses, synthesize)
    like, kept_out = user_texts("--examples", examples), user_texts("--exclude", exclude)
    kept, dropped = without_excluded(found, kept_out)

    from rich.console import Console

    console = Console()
    if found:
        print_prompts(kept, dropped, console)
    settings: dict[str, Any] = {
        "--target": target,
        "what is asked": hashlib.sha256("".join(prompt.key for prompt in kept).encode()).hexdigest(),
        "--keep-responses": keep_responses,
        "--thinking": thinking,
    }
    if not keep_responses:
        settings |= {
            "--temperature": temperatures or [TEMPERATURE],
            "--samples-per-prompt": samples_per_prompt or len(temperatures or [TEMPERATURE]),
            "--max-new-tokens": max_new_tokens or MAX_NEW_TOKENS,
            "--top-p": top_p,
            "--top-k": top_k,
            "--seed": seed,
            "--dtype": dtype,
        }
    if synthesize is not None:
        settings |= {
            "--synthesize": synthesize,
            "--system-prompt": system_prompts,
            "what is in --examples": hashed(like),
            "what is in --exclude": hashed(kept_out),
        }
    folder = DataFolder(path, settings)
    if folder.is_complete():
        folder.remove_work()
        console.print(f"{path} is complete, made with the same arguments.", highlight=False, soft_wrap=True)
        print_statistics(path, console)
        return 0
    facts: dict[str, Any] = {"prompts": {"sources": count_sources(kept), "dropped": dropped}}
    with folder.working():
        from .data_making import Making, keep

        if keep_responses:
            keep(folder, kept, facts)
            complete = True
        else:
            placement = (dtype, device, threads)
            making = Making.of_target(folder, placement, batch_size or BATCH_SIZE, deadline, console, facts)
            with reporting(f"--target {target!r}"):
                check_roles(making.chat, kept)
            written = making.synthesize(kept, like, kept_out) if synthesize is not None else []
            in_time = synthesize is None or bool(written)
            complete = in_time and making.answer(kept, written)
        if path.exists():
            print_statistics(path, console)
    if complete:
        folder.remove_work()
    else:
        console.print("Not complete yet: the same command goes on.", soft_wrap=True)
    return 0


def hashed(texts: Iterable[str]) -> str:
    """A name for texts in their order."""
    keys = (Prompt.of_text("", text).key for text in texts)
    return hashlib.sha256("".join(keys).encode()).hexdigest()


def output_path(output: str) -> Path:
    """
    The folder to write.

    Raises:
        `CommandError`: if it cannot be written, or holds something else.
    """
    check_parent("--output", output)
    path = Path(output).expanduser().absolute()
    ours = (path / "provenance.json").is_file()
    if path.exists() and not ours and (not path.is_dir() or any(path.iterdir())):
        raise CommandError(f"--output {output!r}: it exists and holds no training data; give a new folder")
    if not os.access(path.parent, os.W_OK):
        raise CommandError(f"--output {output!r}: {path.parent} cannot be written; give another folder")
    return path


def check_keeping(given: dict[str, Any]) -> None:
    """
    Refuse what has no effect where responses are kept.

    Args:
        given (`dict`): By argument, its value, or `None` if it was left out.

    Raises:
        `CommandError`: naming argument and value.
    """
    for argument, value in given.items():
        if value is not None:
            raise CommandError(
                f"{argument} {told(value)}: with --keep-responses nothing is decoded; leave one of them out"
            )


def check_decoding(
    temperatures: Sequence[float] | None, samples_per_prompt: int | None, top_p: float | None, top_k: int | None
) -> None:
    """
    Refuse what would have no effect.

    Raises:
        `CommandError`: naming the argument.
    """
    used = temperatures or [TEMPERATURE]
    for argument, value in (("--top-p", top_p), ("--top-k", top_k)):
        if value is not None and max(used) == 0:
            raise CommandError(f"{argument} {value}: it has no effect at --temperature 0; leave it out")
    if 0 in used and (samples_per_prompt or 0) > len(used):
        raise CommandError(
            f"--samples-per-prompt {samples_per_prompt}: with {len(used)} temperatures a prompt would be answered at "
            "temperature 0 more than once, and in the same way; give more temperatures or fewer samples"
        )


def check_synthesis(synthesize: int | None, system_prompts: list[str] | None, examples: list[str] | None) -> None:
    """
    Refuse what does not go together.

    Raises:
        `CommandError`: naming the argument.
    """
    for argument, value in (("--system-prompt", system_prompts), ("--examples", examples)):
        if value is not None and synthesize is None:
            raise CommandError(f"{argument}: it is for --synthesize; leave it out or give that as well")


def read_prompts(
    prompts: list[str] | None,
    dataset: str | None,
    subset: str | None,
    split: str,
    column: str | None,
    limit: int | None,
    keep_responses: bool,
    synthesize: int | None,
) -> list[Prompt]:
    """
    All prompts given.

    Raises:
        `CommandError`: if there are none and none are to be written, or some cannot be read.
    """
    if prompts is None and dataset is None and synthesize is None:
        raise CommandError(
            "--prompts is missing: give prompts to answer with --prompts or --dataset, or let the target write some "
            "with --synthesize"
        )
    for argument, value in (("--subset", subset), ("--column", column)):
        if dataset is None and value is not None:
            raise CommandError(f"{argument} {value!r}: it is for --dataset; leave it out or give that as well")
    found = read_files("--prompts", prompts or [], limit, keep_responses)
    if dataset is not None:
        found += read_dataset(dataset, subset, split, column, limit, keep_responses)
    return found


def user_texts(argument: str, paths: list[str] | None) -> list[str]:
    """What users say in files and folders of prompts."""
    return [text for prompt in read_files(argument, paths or [], None) for text in prompt.user_texts]


def without_excluded(prompts: Sequence[Prompt], texts: Sequence[str]) -> tuple[list[Prompt], dict[str, int]]:
    """
    The prompts that are not excluded.

    Args:
        prompts (`Sequence[Prompt]`): Of any source.
        texts (`Sequence[str]`): The excluded ones.

    Returns:
        `tuple`: the prompts, and how many were dropped, by reason.

    Raises:
        `CommandError`: if nothing is left.
    """
    if not texts:
        return list(prompts), {}
    excluded = ExcludedTexts(texts)
    kept = [prompt for prompt in prompts if not any(text in excluded for text in prompt.user_texts)]
    if prompts and not kept:
        raise CommandError(f"--exclude: its {len(texts)} texts exclude all {len(prompts)} prompts; give others")
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


def print_prompts(prompts: Sequence[Prompt], dropped: dict[str, int], console: Console) -> None:
    """What there is to answer, and what was dropped and why."""
    sources = ", ".join(f"{count} of {source}" for source, count in count_sources(prompts).items())
    reasons = "".join(f"; dropped: {count} {reason}" for reason, count in dropped.items())
    console.print(f"{len(prompts)} prompts, {sources}{reasons}", highlight=False, soft_wrap=True)


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
