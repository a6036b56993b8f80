"""What a round costs on this machine, as `dspark profile` measured it, and where that is kept."""

import contextlib
import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from .environment import cache_folder, package_versions, processor_name
from .scheduling import Costs


# Versions that a measurement holds for.
_PACKAGES = ("dspark-hf", "torch", "transformers")
# What of a config does not bear on speed.
_NAMES = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "id2label", "label2id")


@dataclass(frozen=True)
class StepCurve:
    """
    Time of a target step by the tokens in it.

    Attributes:
        context (`int`): Tokens that each row held when it was measured.
        tokens (`list[int]`): Tokens of a step, increasing.
        seconds (`list[float]`): Of each, as measured.
    """

    context: int
    tokens: list[int]
    seconds: list[float]


@dataclass(frozen=True)
class DraftCurve:
    """
    Time of a draft by the rows in it.

    Attributes:
        rows (`list[int]`): Rows drafted for, increasing.
        one_slot, whole_block (`list[float]`): Seconds with one slot drawn, and with all.
    """

    rows: list[int]
    one_slot: list[float]
    whole_block: list[float]


@dataclass(frozen=True)
class Profile:
    """
    Costs of a target, and of a drafter with it, on one machine.

    Attributes:
        key (`dict[str, str | int]`): What the measurement holds for, see [`profile_key`].
        block_size (`int`): Of the drafter; 0 if none was measured.
        steps (`list[StepCurve]`): By context, increasing.
        draft_greedy, draft_sampled ([`DraftCurve`], *optional*): With argmaxes, and with tokens drawn.
        judge_greedy, judge_sampled (`float`): Seconds that choosing takes for each token of a step, beside the step.
        made (`dict`): Date, command and machine.
    """

    key: dict[str, str | int]
    block_size: int
    steps: list[StepCurve]
    draft_greedy: DraftCurve | None = None
    draft_sampled: DraftCurve | None = None
    judge_greedy: float = 0.0
    judge_sampled: float = 0.0
    made: dict[str, Any] = field(default_factory=dict)

    def step_seconds(self, most_tokens: int, context: float) -> np.ndarray:
        """
        Time of a target step with 0 (none), 1, ... `most_tokens` tokens: as measured, straight lines between, the
        last slope beyond.

        Args:
            most_tokens (`int`): At least 1.
            context (`float`): Tokens that each row holds; between two measured contexts a straight line.
        """
        tokens = np.arange(most_tokens + 1)
        curves = [_along(tokens, curve.tokens, curve.seconds) for curve in self.steps]
        contexts = [curve.context for curve in self.steps]
        place = float(np.clip(context, contexts[0], contexts[-1]))
        after = int(np.searchsorted(contexts, place))
        if contexts[after] == place:
            return curves[after]
        share = (place - contexts[after - 1]) / (contexts[after] - contexts[after - 1])
        return (1 - share) * curves[after - 1] + share * curves[after]

    def costs(self, rows: int, context: float, block_size: int, do_sample: bool) -> Costs:
        """
        What a round costs.

        Args:
            rows (`int`): Active rows.
            context (`float`): Mean number of tokens they hold.
            block_size (`int`): Of the drafter.
            do_sample (`bool`): Whether tokens are drawn.
        """
        most = rows * (1 + block_size)
        judge = self.judge_sampled if do_sample else self.judge_greedy
        verify = self.step_seconds(most, context) + judge * np.arange(most + 1)
        curve = self.draft_sampled if do_sample else self.draft_greedy
        draft = np.zeros(block_size + 1)
        if curve is not None:
            one = _along(np.array([rows]), curve.rows, curve.one_slot)[0]
            whole = _along(np.array([rows]), curve.rows, curve.whole_block)[0]
            draft[1:] = np.linspace(one, whole, block_size) if block_size > 1 else whole
        return Costs(verify, draft.tolist())

    def save(self, path: str | Path) -> None:
        """Write to a JSON file; an old one stays until the new one is complete."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
            json.dump(asdict(self), file, indent=2)
        os.replace(file.name, path)

    @classmethod
    def load(cls, path: str | Path) -> "Profile":
        """
        Read a JSON file.

        Raises:
            `ValueError`: if it is no profile.
        """
        try:
            raw = json.loads(Path(path).read_text(encoding="utf-8"))
            steps = [StepCurve(**curve) for curve in raw.pop("steps")]
            drafts = {name: raw.pop(name) for name in ("draft_greedy", "draft_sampled")}
            drafts = {name: None if curve is None else DraftCurve(**curve) for name, curve in drafts.items()}
            profile = cls(steps=steps, **drafts, **raw)
        except (TypeError, KeyError, AttributeError, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is no profile ({error}); make one with `dspark profile`.") from error
        profile.check(path)
        return profile

    def check(self, name: object) -> None:
        """
        Check that the numbers can be costs.

        Raises:
            `ValueError`: naming what is wrong.
        """
        curves = [(curve.tokens, curve.seconds) for curve in self.steps]
        for curve in (self.draft_greedy, self.draft_sampled):
            if curve is not None:
                curves += [(curve.rows, curve.one_slot), (curve.rows, curve.whole_block)]
        contexts = [curve.context for curve in self.steps]
        sound = contexts and all(first < second for first, second in zip(contexts, contexts[1:], strict=False))
        for counts, seconds in curves:
            sound = sound and len(counts) == len(seconds) > 0 and counts[0] >= 1
            sound = sound and all(first < second for first, second in zip(counts, counts[1:], strict=False))
            sound = sound and all(0 < value < float("inf") for value in seconds)
        if not sound:
            raise ValueError(
                f"{name} is no profile: counts and contexts must increase, seconds must be above 0; make it anew with "
                "`dspark profile`."
            )


def _along(at: np.ndarray, counts: list[int], seconds: list[float]) -> np.ndarray:
    """A measured curve at other places; beyond its end with the slope of its second half."""
    values = np.interp(at, counts, seconds)
    if len(counts) > 1:
        half = min(int(np.searchsorted(counts, counts[-1] / 2)), len(counts) - 2)
        slope = max((seconds[-1] - seconds[half]) / (counts[-1] - counts[half]), 0.0)
    else:
        slope = 0.0
    return values + np.maximum(at - counts[-1], 0) * slope


def profile_key(target: PreTrainedModel, drafter: Any = None) -> dict[str, str | int]:
    """
    What a measurement holds for: device, architecture of target and drafter, dtype, attention kernel, threads,
    versions. Models that differ in their weights only share a profile.

    Args:
        target (`PreTrainedModel`): The verifying model.
        drafter (`DSparkDraftModel`, *optional*): The draft model.
    """
    device = target.device
    versions = package_versions()
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(device.type),
        "target": f"{type(target).__name__}-{_fingerprint(target.config)}",
        "drafter": "" if drafter is None else f"{drafter.config.model_type}-{_fingerprint(drafter.config)}",
        "dtype": str(target.dtype).removeprefix("torch."),
        "attention": str(getattr(target.config, "_attn_implementation", None)),
        "threads": torch.get_num_threads(),
        **{name: versions[name] for name in _PACKAGES},
    }


def _processor(device_type: str) -> str:
    return f"{device_type}: {processor_name()}"


def _fingerprint(config: Any) -> str:
    values = {name: value for name, value in config.to_dict().items() if name not in _NAMES}
    values.pop("confidence_temperatures", None)
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:12]


def profile_path(key: dict[str, str | int]) -> Path:
    """Where the profile with a key is kept."""
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / "profiles" / f"{name}.json"


_in_use: ContextVar[Profile | None] = ContextVar("profile", default=None)


@contextlib.contextmanager
def use_profile(profile: Profile) -> Iterator[None]:
    """
    Let the hardware-aware schedules go by a given profile instead of the machine's own: to plan for other hardware.

    Args:
        profile ([`Profile`]): The costs to go by.
    """
    token = _in_use.set(profile)
    try:
        yield
    finally:
        _in_use.reset(token)


def find_profile(target: PreTrainedModel, drafter: Any) -> Profile | None:
    """The profile in use, else this machine's of the pair, else of the target alone; `None` if there is none."""
    if (given := _in_use.get()) is not None:
        return given
    for key in (profile_key(target, drafter), profile_key(target)):
        path = profile_path(key)
        if path.is_file():
            return _read(path, path.stat().st_mtime_ns)
    return None


@functools.lru_cache(maxsize=32)
def _read(path: Path, changed: int) -> Profile:
    return Profile.load(path)
