"""
Training data: whole conversations as tokens, with a mask of those that the target wrote.

A data set is a folder that `datasets.load_from_disk` reads, or one of Parquet files as on the Hub, with one record a
sample:

- `input_ids` (`list[int]`): the conversation, the chat template's tokens included;
- `loss_mask` (`list[int]`): of the same length, 1 at the target's own tokens, the one that ends a turn included;
- `temperature` (`float`, *optional*): at which the target wrote, 0 being greedy; `None` if others wrote;
- `source` (`str`): the prompt's file or data set;
- `finished` (`bool`): whether the target ended its last turn, rather than being cut off;
- `prompt` (`str`): the same for all samples of a prompt, and different for others.

`provenance.json` beside it says how it was made.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np


if TYPE_CHECKING:
    from datasets import Dataset

NEEDED_COLUMNS = ("input_ids", "loss_mask")
# What is read of training data.
TRAINING_COLUMNS = (*NEEDED_COLUMNS, "prompt")
# Of the lengths that statistics tell of.
QUANTILES = (0.05, 0.5, 0.95, 1.0)


def import_datasets() -> ModuleType:
    """
    The package `datasets`, which a minimal installation lacks.

    Raises:
        `ImportError`: saying how to install it.
    """
    if importlib.util.find_spec("datasets") is None:
        raise ImportError(
            "the package datasets is needed, and is not here; pip install 'dspark-hf[train]' (in a checkout "
            "'.[train]')"
        )
    import datasets

    return datasets


def load_training_data(folder: str | Path) -> Dataset:
    """
    Training data from a folder: what `dspark prepare-data` wrote, or a data set of the user's own with the same
    columns `input_ids` and `loss_mask`.

    Args:
        folder (`str` or `Path`): As `datasets.load_from_disk` takes it, or with `.parquet` files.

    Raises:
        `ImportError`: if `datasets` is missing.
        `ValueError`: if there is no data set, it has other columns, or it is empty.
    """
    datasets = import_datasets()
    path = Path(folder).expanduser()
    # A data set that was fetched from the Hub has them in a folder of their own.
    if files := sorted(path.glob("*.parquet")) or sorted((path / "data").glob("*.parquet")):
        return _checked(datasets.Dataset(_read_tables(files, folder)), folder)
    if not (path / "dataset_info.json").is_file() or not (path / "state.json").is_file():
        unfinished = path.with_name(path.name + ".work")
        advice = (
            f"{unfinished} holds what was not finished: run the command that made it again, `--time-limit 0` gathers "
            "what there is."
            if unfinished.is_dir()
            else "Make one with `dspark prepare-data`."
        )
        raise ValueError(f"{folder} holds no data set. {advice}")
    with open(path / "state.json", encoding="utf-8") as file:
        state = json.load(file)
    if not isinstance(state, dict) or "_data_files" not in state:
        raise ValueError(f"{folder} has a state.json that `datasets` did not write; make the data again.")
    if not state["_data_files"]:  # which `datasets` cannot load
        raise ValueError(f"{folder} is empty; make the data again, with prompts.")
    return _checked(datasets.load_from_disk(str(path)), folder)


def _read_tables(files: Sequence[Path], folder: str | Path) -> Any:
    import pyarrow
    from pyarrow import parquet

    try:
        table = pyarrow.concat_tables([parquet.read_table(file) for file in files])
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{folder} has Parquet files that cannot be read together: {error}") from error
    if not len(table):
        raise ValueError(f"{folder} is empty; make the data again, with prompts.")
    return table


def _checked(data: Dataset, folder: str | Path) -> Dataset:
    missing = [name for name in NEEDED_COLUMNS if name not in data.column_names]
    if missing:
        raise ValueError(
            f"{folder} has the columns {', '.join(data.column_names)} and lacks {', '.join(missing)}; make the data "
            "with `dspark prepare-data`."
        )
    features = column_kinds()
    features = data.features | {name: features[name] for name in TRAINING_COLUMNS if name in data.column_names}
    if data.features != features:
        try:
            data = data.cast(import_datasets().Features(features), keep_in_memory=True)
        except (TypeError, ValueError, NotImplementedError) as error:
            raise ValueError(
                f"{folder} has columns of other kinds than whole numbers and texts ({error}); make the data with "
                "`dspark prepare-data`."
            ) from error
    for name in NEEDED_COLUMNS:
        column = data.data.column(name)
        if column.null_count or column.combine_chunks().flatten().null_count:
            raise ValueError(
                f"{folder} has records with nothing, or with holes, in `{name}`; make the data with "
                "`dspark prepare-data`."
            )
    return data


def column_kinds() -> dict[str, Any]:
    """What the columns hold, as `datasets` says it."""
    datasets = import_datasets()
    return {
        "input_ids": datasets.Sequence(datasets.Value("int32")),
        "loss_mask": datasets.Sequence(datasets.Value("int8")),
        "temperature": datasets.Value("float64"),
        "source": datasets.Value("string"),
        "finished": datasets.Value("bool"),
        "prompt": datasets.Value("string"),
    }


def split_by_prompt(data: Dataset, held_out: float, seed: int = 0) -> tuple[Dataset, Dataset]:
    """
    Divide training data so that all samples of a prompt are on the same side. Which side that is depends on the
    prompt and the seed, not on the order of the data.

    Args:
        data (`datasets.Dataset`): With `input_ids`, `loss_mask` and, where there is one, `prompt`; without it, the
            tokens before the first supervised one tell prompts apart.
        held_out (`float`): Share of the prompts in (0, 1) that goes to the second part, at least one.
        seed (`int`, *optional*, defaults to 0): Another one makes another division.

    Returns:
        `tuple`: what to train on, and what to judge by.

    Raises:
        `ValueError`: if one part would be empty.
    """
    if not 0 < held_out < 1:
        raise ValueError(f"`held_out` is {held_out}; give a share between 0 and 1.")
    keys = [hashlib.sha256(f"{seed}:{key}".encode()).digest() for key in _prompt_keys(data)]
    ranked = sorted(set(keys))
    count = max(1, round(held_out * len(ranked)))
    if count >= len(ranked):
        raise ValueError(
            f"`held_out` is {held_out}: of {len(ranked)} prompts it would keep {count} out of the training. Give more "
            "prompts or a smaller share."
        )
    kept_out = set(ranked[:count])
    parts: tuple[list[int], list[int]] = ([], [])
    for index, key in enumerate(keys):
        parts[key in kept_out].append(index)
    return data.select(parts[0]), data.select(parts[1])


def _prompt_keys(data: Dataset) -> list[str]:
    if "prompt" in data.column_names:
        return list(data["prompt"])
    keys = []
    for record in data.select_columns(list(NEEDED_COLUMNS)):
        mask = record["loss_mask"]
        first = mask.index(1) if 1 in mask else len(mask)
        keys.append(",".join(map(str, record["input_ids"][:first])))
    return keys


@dataclass(frozen=True)
class GroupStatistics:
    """
    What some of the records amount to.

    Attributes:
        samples, tokens, supervised (`int`): Records, their tokens, and those with a loss.
        lengths (`tuple[int, ...]`): [`QUANTILES`] of the tokens of a record.
        finished (`float`): Share that the target ended itself.
    """

    samples: int
    tokens: int
    supervised: int
    lengths: tuple[int, ...]
    finished: float

    @classmethod
    def of(cls, tokens: np.ndarray, supervised: np.ndarray, finished: np.ndarray) -> GroupStatistics:
        """Of records' numbers of tokens, of supervised tokens, and whether they are finished; at least one."""
        lengths = tuple(int(length) for length in np.quantile(tokens, QUANTILES, method="nearest"))
        return cls(len(tokens), int(tokens.sum()), int(supervised.sum()), lengths, float(finished.mean()))


@dataclass(frozen=True)
class DataStatistics:
    """
    Statistics of training data.

    Attributes:
        total ([`GroupStatistics`]): Of all records.
        by_source (`dict[str, GroupStatistics]`): Of each source.
        by_temperature (`dict[float | None, GroupStatistics]`): Of each temperature, in ascending order; `None` for
            texts that are not the target's.
    """

    total: GroupStatistics
    by_source: dict[str, GroupStatistics]
    by_temperature: dict[float | None, GroupStatistics]


def data_statistics(data: Dataset) -> DataStatistics:
    """
    Statistics of training data as [`load_training_data`] returns it.

    Args:
        data (`datasets.Dataset`): With all columns, and at least one record.
    """
    tokens, supervised = [], []
    for batch in data.select_columns(list(NEEDED_COLUMNS)).iter(batch_size=1000):
        tokens += map(len, batch["input_ids"])
        supervised += map(sum, batch["loss_mask"])
    numbers = (np.array(tokens), np.array(supervised), np.array(data["finished"], dtype=bool))

    def groups(values: Sequence[Any], order: Sequence[Any]) -> dict[Any, GroupStatistics]:
        members: dict[Any, list[int]] = {value: [] for value in order}
        for index, value in enumerate(values):
            members[value].append(index)
        return {value: GroupStatistics.of(*(part[places] for part in numbers)) for value, places in members.items()}

    sources, temperatures = list(data["source"]), list(data["temperature"])
    known = sorted({value for value in temperatures if value is not None})
    by_temperature = groups(temperatures, known + [None] * (None in temperatures))
    return DataStatistics(GroupStatistics.of(*numbers), groups(sources, sorted(set(sources))), by_temperature)
