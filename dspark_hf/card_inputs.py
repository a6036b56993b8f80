"""What a drafter's card is made from: the files that training, `dspark eval` and `dspark bench` write, read strictly.

A part that is not there is fine, for a card says what is not known. A part of the wrong kind, or a file of something
else, is an error that names the file and the part.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any


TRAINING_NAME = "training.json"
# The ways of decoding under the names that `dspark bench` gives them.
PLAIN, PROMPT_LOOKUP, DSPARK = "plain generate", "prompt lookup", "DSpark"
MACRO = "macro"
# The sets of prompts that the paper measures on, by its domains; any other set is of the domain "other".
DOMAINS = {
    "math": ("gsm8k", "math500", "aime25", "school-maths"),
    "code": ("mbpp", "humaneval", "livecodebench"),
    "chat": ("mt-bench", "alpaca", "arena-hard", "arena-hard-v2"),
}
OTHER = "other"

_NUMBER = (int, float)
# Parts of a training.json that a card uses, by kind.
_TRAINING = {
    "command": list,
    "versions": dict,
    "machine": dict,
    "target": dict,
    "data": dict,
    "arguments": dict,
    "steps": int,
    "blocks": int,
    "supervised_tokens": int,
    "seconds": _NUMBER,
    "started_from": str,
    "earlier_runs": list,
    "evaluations": list,
}
# Those that say of the drafter a run went on from how it was trained.
RUN = ("command", "started_from", "steps", "blocks", "supervised_tokens", "seconds")
_TRAINING_TARGET = {"id": str, "revision": str, "dtype": str}
_TRAINING_DATA = {
    "prompts": (list, dict),
    "temperatures": list,
    "sampling": dict,
    "thinking": str,
    "samples": (int, dict),
    "tokens": int,
    "supervised_tokens": int,
    "max_length": int,
    "parts": list,
}
_TRAINING_EVALUATION = {"step": int, "blocks": int, "tokens": int, "mean_acceptance_length": dict}


@dataclass(frozen=True)
class Sampling:
    """
    How tokens were drawn.

    Attributes:
        temperature (`float`): 0 is greedy decoding.
        top_p, top_k (*optional*): `None` if not given.
        thinking (`str`, *optional*): The chat template's thinking mode.
    """

    temperature: float
    top_p: float | None = None
    top_k: int | None = None
    thinking: str | None = None

    @property
    def words(self) -> str:
        """In words, for a heading."""
        parts = ["greedy" if self.temperature == 0 else f"temperature {self.temperature:g}"]
        if self.temperature > 0 and self.top_p is not None and self.top_p < 1:
            parts.append(f"top_p {self.top_p:g}")
        if self.temperature > 0 and self.top_k:
            parts.append(f"top_k {self.top_k}")
        return ", ".join(parts + ([] if self.thinking in (None, "default") else [f"thinking {self.thinking}"]))


@dataclass(frozen=True)
class Acceptance:
    """
    What was accepted on one set of prompts.

    Attributes:
        prompts (`int`, *optional*): How many there were.
        mean_acceptance_length (`float`, *optional*): Tokens a round, bonus included.
        interval (`tuple[float, float]`, *optional*): Of that.
        by_position (`tuple`): Share accepted at each position of those that reached it; `None` where none did.
    """

    prompts: int | None
    mean_acceptance_length: float | None
    interval: tuple[float, float] | None = None
    by_position: tuple[float | None, ...] = ()


@dataclass(frozen=True)
class EvaluatedSetting:
    """One way of drawing tokens, and what was accepted by set of prompts; `macro` is over the sets."""

    sampling: Sampling
    max_new_tokens: int | None
    tasks: dict[str, Acceptance]
    macro: Acceptance


@dataclass(frozen=True)
class Evaluation:
    """A file of `dspark eval`; `block_size` is that of the drafter it measured."""

    path: Path
    target: str | None
    dtype: str | None
    block_size: int | None
    hardware: str
    versions: dict[str, str]
    settings: tuple[EvaluatedSetting, ...]


@dataclass(frozen=True)
class Speed:
    """
    How fast one way of decoding was, over the calls of one set of prompts or batch size.

    Attributes:
        place (`str`): The set of prompts, or the schedule.
        batch_size (`int`): Rows.
        plain (`float`): Tokens a second of plain `generate`.
        ratio (`float`): Against plain `generate`.
        prompt_lookup (`float`, *optional*): The ratio of prompt lookup.
        mean_acceptance_length (`float`, *optional*): Tokens a round, bonus included.
        calls (`float`, *optional*): How many it is the median of.
    """

    place: str
    batch_size: int
    plain: float
    ratio: float
    prompt_lookup: float | None
    mean_acceptance_length: float | None
    calls: float | None


@dataclass(frozen=True)
class Benchmark:
    """A file of `dspark bench`: by set of prompts at batch size 1, or by batch size and schedule (`batched`)."""

    path: Path
    target: str | None
    dtype: str | None
    hardware: str
    versions: dict[str, str]
    sampling: Sampling
    max_new_tokens: int | None
    batched: bool
    speeds: tuple[Speed, ...]


def domain_of(task: str) -> str:
    """The domain that a set of prompts is of."""
    name = task.lower().replace("_", "-")
    return next((domain for domain, tasks in DOMAINS.items() if name in tasks), OTHER)


def by_domain(tasks: Iterable[str]) -> dict[str, list[str]]:
    """Sets of prompts by domain, domains and sets in the order of [`DOMAINS`]."""
    grouped: dict[str, list[str]] = {domain: [] for domain in (*DOMAINS, OTHER)}
    for task in tasks:
        grouped[domain_of(task)].append(task)
    return {domain: names for domain, names in grouped.items() if names}


def read_training(path: Path) -> dict[str, Any]:
    """
    Read the provenance that training writes beside a drafter.

    Args:
        path (`Path`): A `training.json`.

    Returns:
        `dict`: The parts a card uses, of the right kinds; parts that are absent or null are left out.

    Raises:
        `ValueError`: if it is not JSON, or a part is of the wrong kind.
    """
    training = _parts(path, _load(path), _TRAINING)
    if "target" in training:
        training["target"] = _parts(path, training["target"], _TRAINING_TARGET, "target")
    if "data" in training:
        training["data"] = _training_data(path, training["data"])
    training["earlier_runs"] = [
        _parts(
            path,
            _object(path, entry, "an entry of earlier_runs"),
            {name: _TRAINING[name] for name in RUN},
            "earlier_runs",
        )
        for entry in training.get("earlier_runs", [])
    ]
    training["evaluations"] = [
        _parts(path, _object(path, entry, "an entry of evaluations"), _TRAINING_EVALUATION, "evaluations")
        for entry in training.get("evaluations", [])
    ]
    return training


def _training_data(path: Path, record: dict[str, Any]) -> dict[str, Any]:
    """What is known of the training texts, also where it stands as `dspark prepare-data` groups it."""
    data = _parts(path, record, _TRAINING_DATA, "data")
    prompts, samples = data.get("prompts", []), data.get("samples")
    if isinstance(prompts, dict):
        counts = _part(path, prompts, "sources", dict, "data.prompts")
        prompts = [{"source": source, "count": count} for source, count in counts.items()]
    for entry in prompts:
        _part(path, _object(path, entry, "an entry of data.prompts"), "source", str, "data.prompts")
    grouped = {
        "temperatures": _part(path, data.get("sampling", {}), "temperatures", list, "data.sampling", needed=False),
        "samples": _part(path, samples, "done", int, "data.samples") if isinstance(samples, dict) else samples,
    }
    data |= {"prompts": prompts} | {key: value for key, value in grouped.items() if value}
    return data | _of_parts(path, data["parts"]) if data.get("parts") else data


def _of_parts(path: Path, parts: list[Any]) -> dict[str, Any]:
    """What is known of training texts that are several data sets together, which may be so themselves."""
    known = [_training_data(path, _object(path, part, "an entry of data.parts")) for part in parts]
    counts: dict[str, int] = {}
    for entry in (entry for data in known for entry in data.get("prompts", [])):
        count = entry.get("count")
        counts[entry["source"]] = counts.get(entry["source"], 0) + (count if isinstance(count, int) else 0)
    prompts = [{"source": source, "count": count or None} for source, count in counts.items()]
    found: dict[str, Any] = {"prompts": prompts}
    for name in ("temperatures", "thinking"):
        if all(name in data and data[name] == known[0][name] for data in known):
            found[name] = known[0][name]
    return found


def read_evaluation(path: str | Path) -> Evaluation:
    """
    Read what `dspark eval --output` wrote.

    Raises:
        `ValueError`: if it is something else, naming what is missing.
    """
    path = Path(path).expanduser()
    record = _load(path)
    settings = record.get("settings")
    if not isinstance(settings, list) or not settings:
        other = " (it is one of `dspark bench`: give it as --bench)" if isinstance(settings, dict) else ""
        raise ValueError(f"{path} is not a file of `dspark eval`: it has no list of `settings`{other}.")
    target = _part(path, record, "target", dict)
    drafter = _part(path, record, "drafter", dict, needed=False) or {}
    machine = _part(path, record, "machine", dict)
    return Evaluation(
        path,
        _part(path, target, "id", str, "target", needed=False),
        _part(path, target, "dtype", str, "target", needed=False),
        _part(path, drafter, "block_size", int, "drafter", needed=False),
        hardware_words(machine),
        _part(path, record, "versions", dict, needed=False) or {},
        tuple(_evaluated(path, _object(path, setting, "an entry of settings")) for setting in settings),
    )


def _evaluated(path: Path, setting: dict[str, Any]) -> EvaluatedSetting:
    tasks = _part(path, setting, "tasks", dict, "settings")
    if not tasks:
        raise ValueError(f"{path} has a setting without `tasks`: nothing was evaluated.")
    accepted = {name: _acceptance(path, values, f"tasks.{name}") for name, values in tasks.items()}
    macro = _part(path, setting, "macro", dict, "settings", needed=False)
    if macro is None:
        lengths = [task.mean_acceptance_length for task in accepted.values()]
        macro = {"mean_acceptance_length": mean(lengths)}
    total = _acceptance(path, macro, MACRO)
    if not total.by_position:
        positions = zip_longest(*(task.by_position for task in accepted.values()))
        total = replace(total, by_position=tuple(mean(shares) for shares in positions))
    return EvaluatedSetting(
        _sampling(path, setting, _part(path, setting, "thinking", str, "settings", needed=False)),
        _part(path, setting, "max_new_tokens", int, "settings", needed=False),
        accepted,
        total,
    )


def _acceptance(path: Path, values: Any, where: str) -> Acceptance:
    values = _object(path, values, where)
    if "mean_acceptance_length" not in values:
        raise ValueError(f"{path}: {where} has no `mean_acceptance_length`.")
    length = _part(path, values, "mean_acceptance_length", _NUMBER, where, needed=False)
    if length is not None and not (math.isfinite(length) and length >= 1):
        raise ValueError(
            f"{path}: {where} has a `mean_acceptance_length` of {length}; tokens a round, the target's own included, "
            "are at least 1."
        )
    interval = _part(path, values, "mean_acceptance_length_interval", list, where, needed=False)
    if interval is not None and not (len(interval) == 2 and all(isinstance(bound, _NUMBER) for bound in interval)):
        raise ValueError(f"{path}: {where} has a `mean_acceptance_length_interval` of {interval}, not of two numbers.")
    positions = _part(path, values, "acceptance_by_position", list, where, needed=False) or []
    if not all(share is None or isinstance(share, _NUMBER) for share in positions):
        raise ValueError(f"{path}: {where} has an `acceptance_by_position` of other things than numbers.")
    prompts = _part(path, values, "prompts", int, where, needed=False)
    return Acceptance(prompts, length, None if interval is None else tuple(interval), tuple(positions))


def read_benchmark(path: str | Path) -> Benchmark:
    """
    Read what `dspark bench --output` wrote, with or without `--batch-sizes`.

    Raises:
        `ValueError`: if it is something else, naming what is missing, or was measured with synthetic acceptance.
    """
    path = Path(path).expanduser()
    record = _load(path)
    settings, summary = record.get("settings"), record.get("summary")
    if not isinstance(settings, dict) or not isinstance(summary, (dict, list)) or not summary:
        other = " (it is one of `dspark eval`: give it as --eval)" if isinstance(settings, list) else ""
        raise ValueError(f"{path} is not a file of `dspark bench`: it has no `settings` with a `summary`{other}.")
    if settings.get("synthetic"):
        raise ValueError(
            f"{path} was measured with --synthetic-acceptance: it says nothing of the drafter. Measure without."
        )
    machine = _part(path, record, "machine", dict)
    batched = isinstance(summary, list)
    return Benchmark(
        path,
        _part(path, settings, "target", str, "settings", needed=False),
        _part(path, settings, "dtype", str, "settings", needed=False),
        hardware_words(machine, _part(path, settings, "device", str, "settings", needed=False)),
        _part(path, record, "versions", dict, needed=False) or {},
        _sampling(path, settings),
        _part(path, settings, "max_new_tokens", int, "settings", needed=False),
        batched,
        _batch_speeds(path, summary) if batched else _set_speeds(path, summary),
    )


def _set_speeds(path: Path, summary: dict[str, Any]) -> tuple[Speed, ...]:
    speeds = []
    for name, methods in summary.items():
        methods = _object(path, methods, f"summary.{name}")
        if DSPARK not in methods and any(method.startswith(f"{DSPARK}, ") for method in methods):
            raise ValueError(f"{path} was measured with --methods; give a file of `dspark bench` without.")
        ours, plain = (_part(path, methods, method, dict, f"summary.{name}") for method in (DSPARK, PLAIN))
        lookup = _part(path, methods, PROMPT_LOOKUP, dict, f"summary.{name}", needed=False) or {}
        speeds.append(
            Speed(
                name,
                1,
                _part(path, plain, "tokens_per_second", _NUMBER, f"summary.{name}"),
                _part(path, ours, "ratio", _NUMBER, f"summary.{name}"),
                _part(path, lookup, "ratio", _NUMBER, f"summary.{name}", needed=False),
                _part(path, ours, "mean_acceptance_length", _NUMBER, f"summary.{name}", needed=False),
                _part(path, ours, "calls", _NUMBER, f"summary.{name}", needed=False),
            )
        )
    return tuple(speeds)


def _batch_speeds(path: Path, summary: list[Any]) -> tuple[Speed, ...]:
    cells = [_object(path, cell, "an entry of summary") for cell in summary]
    places = [
        (_part(path, cell, "batch_size", int, "summary"), _part(path, cell, "method", str, "summary"), cell)
        for cell in cells
    ]
    plain = {size: cell for size, method, cell in places if method == PLAIN}
    speeds = []
    for size, method, cell in places:
        if method == PLAIN:
            continue
        if size not in plain:
            raise ValueError(f"{path} has no `{PLAIN}` at batch size {size} to compare with.")
        speeds.append(
            Speed(
                method,
                size,
                _part(path, plain[size], "tokens_per_second", _NUMBER, "summary"),
                _part(path, cell, "ratio", _NUMBER, "summary"),
                None,
                _part(path, cell, "mean_acceptance_length", _NUMBER, "summary", needed=False),
                _part(path, cell, "calls", _NUMBER, "summary", needed=False),
            )
        )
    return tuple(speeds)


def _sampling(path: Path, settings: dict[str, Any], thinking: str | None = None) -> Sampling:
    return Sampling(
        _part(path, settings, "temperature", _NUMBER, "settings", needed="do_sample" not in settings) or 0.0,
        _part(path, settings, "top_p", _NUMBER, "settings", needed=False),
        _part(path, settings, "top_k", int, "settings", needed=False),
        thinking,
    )


def hardware_words(machine: dict[str, Any], device: str | None = None) -> str:
    """
    What something ran on, in words.

    Args:
        machine (`dict`): As [`dspark_hf.environment.machine`] tells it.
        device (`str`, *optional*): The torch device; by default CUDA if the machine has any.
    """
    cuda = machine.get("cuda")
    has_cuda = cuda not in (None, "no device")
    if has_cuda and (device is None or device.startswith("cuda")):
        return f"CUDA {cuda}"
    parts = [str(machine["processor"])] if machine.get("processor") else []
    for key, word in (("cores", "core"), ("torch_threads", "thread")):
        if machine.get(key):
            parts.append(f"{machine[key]} {word}{'' if machine[key] == 1 else 's'}")
    return ", ".join(parts) or "an unknown machine"


def mean(values: Iterable[float | None]) -> float | None:
    """Mean of the values that there are; `None` if there are none."""
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None


def _load(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}); give a JSON file that a command wrote."
        ) from error
    except ValueError as error:  # not JSON, not text
        raise ValueError(f"{path} is not JSON ({error}); give a file as a command wrote it.") from error
    return _object(path, record, "it")


def _object(path: Path, value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{path}: {where} is {_shortened(value)}, not a JSON object.")
    return value


def _parts(path: Path, record: dict[str, Any], kinds: dict[str, Any], where: str = "") -> dict[str, Any]:
    found = {key: _part(path, record, key, kind, where, needed=False) for key, kind in kinds.items()}
    return {key: value for key, value in found.items() if value is not None}


def _part(path: Path, record: dict[str, Any], key: str, kind: Any, where: str = "", needed: bool = True) -> Any:
    """A part of a record, of the kind it has to be; `None` if it is absent, null and not needed."""
    value = record.get(key)
    place = f"`{where}.{key}`" if where else f"`{key}`"
    if value is None:
        if needed:
            raise ValueError(f"{path} has no {place}; give a file as the command wrote it.")
        return None
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or isinstance(value, bool):
        names = " or ".join(one.__name__ for one in kinds)
        raise ValueError(f"{path}: {place} is {_shortened(value)}; it has to be of type {names}.")
    return value


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
