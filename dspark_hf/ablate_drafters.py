"""`dspark ablate drafters`: several drafters of one target on the same prompts, and what they differ in: the mixture
of their training data, block size, heads, layers, vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .ablate import write_report
from .ablate_report import Report, Sheet, differences_sheet, plot_drafters
from .card_inputs import TRAINING_NAME
from .command_files import check_outputs
from .evaluation import RATIOS, Batch, Setting, decode_texts, measure, summarise
from .intervals import mean_ratio_difference_interval
from .loading import (
    CommandError,
    Pair,
    check_drafting,
    check_source,
    generation_options,
    load_drafter,
    load_pair,
    regime,
    reporting,
    training_record,
)
from .tasks import read_tasks


if TYPE_CHECKING:
    from .modeling import DSparkDraftModel

LENGTH = "mean_acceptance_length"
_WARM_UP_TOKENS = 16
# Facts that stand in the table although all drafters agree on them.
_ALWAYS = ("parameters",)

# Numerators and denominators of a ratio, task by task and prompt by prompt.
Groups = list[tuple[list[float], list[float]]]


def run(
    *,
    target: str,
    drafters: Sequence[str],
    tasks: str | None,
    prompts: str | None,
    limit: int | None,
    max_new_tokens: int,
    batch_size: int,
    temperature: float,
    top_p: float | None,
    top_k: int | None,
    seed: int,
    output: str | None,
    markdown: str | None,
    plot: str | None,
    dtype: str,
    device: str,
    threads: int | None,
) -> int:
    """`dspark ablate drafters`: decode with each, print the tables, write the files. The command line's help says what
    is what.

    Returns:
        `int`: the exit code, 0.

    Raises:
        `CommandError`: something given cannot be used.
    """
    check_outputs(output, markdown, plot)
    generation_options(max_new_tokens, temperature, top_p, top_k)  # refuses what has no effect
    _check_drafters(drafters, max_new_tokens)
    prompt_sets = read_tasks(tasks, prompts, limit)
    labels = dict(zip(drafters, labels_of(drafters), strict=True))

    from rich.console import Console

    console = Console()
    setting = Setting(temperature, top_p, top_k, max_new_tokens=max_new_tokens)
    first = load_pair(target, drafters[0], dtype, device, threads)
    models = {name: load_drafter(name, first.target) for name in drafters[1:]}  # all are there before one is measured
    pairs = [first, *(Pair(first.target, each, first.tokenizer, (target, name)) for name, each in models.items())]
    facts = [facts_of(pair.drafter, pair.names[1]) for pair in pairs]
    entries, baseline = [], None
    for pair, known in zip(pairs, facts, strict=True):
        console.print(pair.description, highlight=False)
        with reporting(f"--target {target!r} with --drafters {pair.names[1]!r}"):
            batches = _measured(pair, prompt_sets, setting, batch_size, seed)
        groups = _groups(batches, prompt_sets)
        baseline = groups if baseline is None else baseline
        summary = summarise(pair, setting, batches)
        entries.append(
            {
                "id": pair.names[1],
                "label": labels[pair.names[1]],
                "facts": known,
                "tasks": summary["tasks"],
                "macro": summary["macro"],
                "difference": difference(prompt_sets, groups, baseline),
            }
        )
    title = f"Drafters of {target}: {regime(temperature)}, {max_new_tokens} new tokens at most"
    sampling = {name: summary[name] for name in ("temperature", "top_p", "top_k")}
    results = {
        "target": {"id": target, "dtype": str(first.target.dtype).removeprefix("torch.")},
        "settings": sampling | {"max_new_tokens": max_new_tokens, "batch_size": batch_size, "seed": seed},
        "drafters": entries,
    }
    report = Report(title, [facts_sheet(entries), *differences_sheet(entries)], notes(entries))
    write_report(console, report, results, lambda folder: plot_drafters(folder, entries), output, markdown, plot)
    return 0


def _check_drafters(drafters: Sequence[str], max_new_tokens: int) -> None:
    if len(set(drafters)) < 2 or len(set(drafters)) < len(drafters):
        raise CommandError(
            f"--drafters {' '.join(drafters)}: at least two different ones are compared, each given once; "
            "`dspark eval` measures one"
        )
    for name in drafters:
        check_source("--drafters", name)
    check_drafting(max_new_tokens)


def labels_of(drafters: Sequence[str]) -> list[str]:
    """Short names: the last part of each path, or all of it where two would be called alike."""
    short = [name.rstrip("/").rpartition("/")[2] for name in drafters]
    return [name if short.count(label) > 1 else label for name, label in zip(drafters, short, strict=True)]


def _measured(
    pair: Pair, prompt_sets: dict[str, list[str]], setting: Setting, batch_size: int, seed: int
) -> list[Batch]:
    short = dataclasses.replace(setting, max_new_tokens=min(_WARM_UP_TOKENS, setting.max_new_tokens))
    decode_texts(pair, [pair.encode(next(iter(prompt_sets.values()))[0])], short, seed)
    return list(measure(pair, prompt_sets, [setting], batch_size, seed))


def _groups(batches: Sequence[Batch], prompt_sets: dict[str, list[str]]) -> Groups:
    groups: Groups = []
    for task in prompt_sets:
        counts = [text.counts for batch in batches if batch.task == task for text in batch.texts]
        above, below = zip(*(RATIOS[LENGTH](each) for each in counts), strict=True)
        groups.append((list(above), list(below)))
    return groups


def difference(tasks: Sequence[str], groups: Groups, baseline: Groups) -> dict[str, Any]:
    """
    Tokens a round more than another drafter on the same prompts.

    Args:
        tasks (`Sequence[str]`): Their names.
        groups, baseline (`list[tuple]`): Tokens and rounds of each prompt, task by task.

    Returns:
        `dict`: `macro` and `tasks`, each with `value` and `interval`; `None` for what cannot be had.
    """
    each = {task: _difference([ours], [theirs]) for task, ours, theirs in zip(tasks, groups, baseline, strict=True)}
    return {"macro": _difference(groups, baseline), "tasks": each}


def _difference(groups: Groups, baseline: Groups) -> dict[str, Any]:
    if not all(sum(below) for _, below in [*groups, *baseline]):
        return {"value": None, "interval": None}
    means = [sum(sum(above) / sum(below) for above, below in part) / len(part) for part in (groups, baseline)]
    interval = mean_ratio_difference_interval(groups, baseline)
    return {"value": means[0] - means[1], "interval": None if interval is None else list(interval)}


def facts_of(drafter: DSparkDraftModel, name: str) -> dict[str, Any]:
    """
    What a drafter is and how it was trained, as far as its config and its `training.json` say.

    Args:
        drafter ([`DSparkDraftModel`]): The drafter.
        name (`str`): Its folder or Hub id.
    """
    config = drafter.config
    head = f"{config.markov_head_type}, rank {config.markov_rank}" if config.markov_rank else "none"
    training = training_record(name, "--drafters")
    data = training.get("data", {})
    return {
        "block_size": config.block_size,
        "head": head,
        "confidence_head": config.enable_confidence_head,
        "layers": config.num_hidden_layers,
        "tapped_layers": list(config.target_layer_ids),
        "draft_vocab_size": config.draft_vocab_size,
        "parameters": sum(parameter.numel() for parameter in drafter.parameters()),
        "data": {entry["source"]: entry.get("count") for entry in data.get("prompts", [])} or None,
        "samples": data.get("samples"),
        "steps": training.get("steps"),
        "supervised_tokens": training.get("supervised_tokens"),
    }


def mixture(data: dict[str, int | None] | None) -> str | None:
    """
    A training set's sources and their shares in words.

    Args:
        data (`dict`, *optional*): Prompts by source; the number of some may not be known.
    """
    if not data:
        return None
    names = {source: Path(source).stem or source for source in data}
    if any(count is None for count in data.values()) or not sum(data.values()):
        return ", ".join(names.values())
    total = sum(data.values())
    ordered = sorted(data, key=lambda source: -data[source])
    return ", ".join(f"{names[source]} {data[source] / total:.0%}" for source in ordered)


_SHOWN = {
    "block_size": str,
    "head": str,
    "confidence_head": lambda value: "yes" if value else "no",
    "layers": str,
    "tapped_layers": lambda value: " ".join(map(str, value)),
    "draft_vocab_size": lambda value: f"{value:,}",
    "parameters": lambda value: f"{value / 1e6:.2f} M",
    "data": mixture,
    "samples": lambda value: f"{value:,}",
    "steps": lambda value: f"{value:,}",
    "supervised_tokens": lambda value: f"{value:,}",
}


def facts_sheet(entries: Sequence[dict[str, Any]]) -> Sheet:
    """A row a fact in which the drafters differ, a column a drafter."""
    rows = []
    for name, shown in _SHOWN.items():
        values = [entry["facts"][name] for entry in entries]
        if name in _ALWAYS or any(value != values[0] for value in values):
            nothing = "whole" if name == "draft_vocab_size" else "–"
            rows.append([name.replace("_", " "), *(nothing if value is None else shown(value) for value in values)])
    return Sheet("What they differ in", ["", *(entry["label"] for entry in entries)], rows)


def notes(entries: Sequence[dict[str, Any]]) -> list[str]:
    """What a reader has to know."""
    told = [
        "tokens a round: mean_acceptance_length, the target's own token included. Differences are to "
        f"{entries[0]['label']} on the same prompts; * where their 95% interval, by resampling prompts, leaves 0 out.",
    ]
    if len({entry["facts"]["block_size"] for entry in entries}) > 1:
        told.append(
            "Longer blocks cost more a round as well; `dspark bench` and `dspark ablate cost` say what is left of it."
        )
    if all(entry["facts"]["data"] is None for entry in entries):
        told.append(f"What texts they were trained on is not known: no {TRAINING_NAME} beside them names any.")
    return told
