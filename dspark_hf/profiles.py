"""What a round costs on this machine, as [`measure_profile`] measured it, and where that is kept."""

import contextlib
import functools
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from .environment import ENGINE, cache_folder, package_versions, processor_name
from .files import write_json
from .locks import lock_of
from .scheduling import Costs
from .target_outputs import text_config


logger = logging.getLogger(__name__)

# What of a config does not bear on speed: names, labels, what drafts were calibrated by, and what only training reads.
_NO_COST = (
    "_name_or_path",
    "architectures",
    "confidence_temperatures",
    "dtype",
    "id2label",
    "initializer_range",
    "label2id",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)
_NO_COST_ENDINGS = ("_token_id", "_token_ids", "_token_index", "dropout")
# The entries of a key that name models.
_MODELS = ("target", "drafter")


@dataclass(frozen=True)
class StepCurve:
    """
    Time of a target step by the tokens in it.

    Attributes:
        context (`int`): Tokens that each row held when it was measured.
        tokens (`list[int]`): Tokens of a step, increasing.
        seconds (`list[float]`): Of each, as measured.
        rows (`int`): Rows that the tokens belonged to, in equal shares.
    """

    context: int
    tokens: list[int]
    seconds: list[float]
    rows: int = 1


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
        steps (`list[StepCurve]`): Of one row, by context, increasing.
        draft_greedy, draft_sampled ([`DraftCurve`], *optional*): With argmaxes, and with tokens drawn.
        judge_greedy, judge_sampled (`float`): Seconds that choosing takes for each token of a step, beside the step;
            0 where it takes them for the tokens that come alone, which are as many with drafts as without.
        measured (`bool`): Whether the seconds are a machine's, with its noise, and not given.
        made (`dict`): Date, sweeps and machine; nothing of curves that are given.
        row_steps (`list[StepCurve]`): Of several rows, by context and rows, increasing; each context is one of
            `steps`. Without any, the time depends on the tokens alone.
    """

    key: dict[str, str | int]
    block_size: int
    steps: list[StepCurve]
    draft_greedy: DraftCurve | None = None
    draft_sampled: DraftCurve | None = None
    judge_greedy: float = 0.0
    judge_sampled: float = 0.0
    measured: bool = False
    made: dict[str, Any] = field(default_factory=dict)
    row_steps: list[StepCurve] = field(default_factory=list)

    def step_seconds(self, most_tokens: int, context: float, rows: int = 1) -> np.ndarray:
        """
        Time of a target step with 0 (of no meaning), 1, ... `most_tokens` tokens: as measured, straight lines between,
        the last slope beyond. Several rows add what they were measured to take beyond one row with as many tokens.
        Where more tokens of the same rows were measured to take less time, which is noise, both count as their mean.

        Args:
            most_tokens (`int`): At least 1.
            context (`float`): Tokens that each row holds; between two measured contexts a straight line, outside of
                them the nearest.
            rows (`int`): Rows that the tokens belong to.
        """
        contexts = [curve.context for curve in self.steps]
        place = float(np.clip(context, contexts[0], contexts[-1]))
        after = int(np.searchsorted(contexts, place))
        if contexts[after] == place:
            return self._at_context(after, most_tokens, rows).copy()
        share = (place - contexts[after - 1]) / (contexts[after] - contexts[after - 1])
        before, behind = (self._at_context(index, most_tokens, rows) for index in (after - 1, after))
        return (1 - share) * before + share * behind

    def _at_context(self, index: int, most_tokens: int, rows: int) -> np.ndarray:
        """Seconds by tokens at a measured context, kept for the rounds to come."""
        known = (index, most_tokens, rows)
        if known not in self._known:
            self._known[known] = self._compute(self.steps[index], most_tokens, rows)
        return self._known[known]

    @functools.cached_property
    def _known(self) -> dict[tuple[int, int, int], np.ndarray]:
        return {}

    def _compute(self, one_row: StepCurve, most_tokens: int, rows: int) -> np.ndarray:
        tokens = np.arange(most_tokens + 1)
        seconds = _along(tokens, one_row.tokens, one_row.seconds)
        curves = [curve for curve in self.row_steps if curve.context == one_row.context]
        if rows == 1 or not curves:
            return self._rising(seconds, rows)
        # What rows add follows from how many there are and from the tokens of each.
        counts, added = [1], [np.zeros(len(tokens))]
        for curve in curves:
            beyond = curve.seconds - _along(np.array(curve.tokens), one_row.tokens, one_row.seconds)
            counts.append(curve.rows)
            added.append(np.interp(tokens * (curve.rows / rows), curve.tokens, beyond))
        # Noise aside, nothing is faster than the fastest step of one row.
        return self._rising(np.maximum(seconds + _between(rows, counts, added), min(one_row.seconds)), rows)

    def _rising(self, seconds: np.ndarray, rows: int) -> np.ndarray:
        """Measured seconds from one token a row on as the nearest curve that never falls; given ones as they are."""
        if self.measured:
            levels: list[tuple[float, int]] = []  # means, and how many they are of (pool adjacent violators)
            for value in seconds[rows:].tolist():
                count = 1
                while levels and levels[-1][0] > value:
                    before, many = levels.pop()
                    value = (before * many + value * count) / (many + count)
                    count += many
                levels.append((value, count))
            means, counts = zip(*levels, strict=True)
            seconds[rows:] = np.repeat(means, counts)
        return seconds

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
        verify = self.step_seconds(most, context, rows) + judge * np.arange(most + 1)
        curve = self.draft_sampled if do_sample else self.draft_greedy
        draft = np.zeros(block_size + 1)
        if curve is not None:
            one = _along(np.array([rows]), curve.rows, curve.one_slot)[0]
            whole = _along(np.array([rows]), curve.rows, curve.whole_block)[0]
            draft[1:] = np.linspace(one, whole, block_size) if block_size > 1 else whole
        return Costs(verify, draft.tolist(), noisy=self.measured)

    def save(self, path: str | Path) -> None:
        """Write to a JSON file; an old one stays until the new one is complete."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: str | Path) -> "Profile":
        """
        Read a JSON file.

        Raises:
            `ValueError`: if it is no profile.
        """
        try:
            raw = json.loads(Path(path).read_text(encoding="utf-8"))
            steps = {name: [StepCurve(**curve) for curve in raw.pop(name, [])] for name in ("steps", "row_steps")}
            drafts = {name: raw.pop(name, None) for name in ("draft_greedy", "draft_sampled")}
            drafts = {name: None if curve is None else DraftCurve(**curve) for name, curve in drafts.items()}
            profile = cls(**steps, **drafts, **raw)
            profile.check(path)
        except (TypeError, AttributeError, KeyError, RecursionError, ValueError) as error:
            raise ValueError(f"{path} is no profile ({error}); make one with `dspark profile`.") from error
        return profile

    def check(self, name: object) -> None:
        """
        Check that the numbers can be costs.

        Raises:
            `ValueError`: naming what is wrong.
        """
        curves = [(curve.tokens, curve.seconds) for curve in (*self.steps, *self.row_steps)]
        for curve in (self.draft_greedy, self.draft_sampled):
            if curve is not None:
                curves += [(curve.rows, curve.one_slot), (curve.rows, curve.whole_block)]
        contexts = [curve.context for curve in self.steps]
        places = [(curve.context, curve.rows) for curve in (*self.steps, *self.row_steps)]
        sound = isinstance(self.key, dict) and bool(contexts) and all(_is_count(value) for p in places for value in p)
        sound = sound and _increase(contexts) and _increase([p for p in places if p[1] > 1])
        sound = sound and all(curve.context in contexts and curve.rows > 1 for curve in self.row_steps)
        for counts, seconds in curves:
            sound = sound and isinstance(counts, list) and isinstance(seconds, list)
            sound = sound and len(counts) == len(seconds) > 0 and all(map(_is_count, counts)) and _increase(counts)
            sound = sound and all(_is_time(value) for value in seconds)
        sound = sound and all(value == 0 or _is_time(value) for value in (self.judge_greedy, self.judge_sampled))
        if not sound:
            raise ValueError(
                f"{name} is no profile: contexts, rows and tokens must be whole numbers that increase from 1 on, "
                "seconds must be between 1e-12 and 1e9; make it anew with `dspark profile`."
            )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 10**7


def _is_time(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 1e-12 <= value <= 1e9


def _increase(values: list) -> bool:
    return all(first < second for first, second in zip(values, values[1:], strict=False))


def _along(at: np.ndarray, counts: list[int], seconds: list[float]) -> np.ndarray:
    """A measured curve at other places; beyond its end with the slope of its second half."""
    values = np.interp(at, counts, seconds)
    if len(counts) > 1:
        half = _half(counts)
        slope = max((seconds[-1] - seconds[half]) / (counts[-1] - counts[half]), 0.0)
        values += np.maximum(at - counts[-1], 0) * slope
    return values


def _between(at: int, counts: list[int], curves: list[np.ndarray]) -> np.ndarray:
    """The same for curves by count, between two of them or beyond the last."""
    if at > counts[-1]:
        half = _half(counts)
        slope = np.maximum((curves[-1] - curves[half]) / (counts[-1] - counts[half]), 0.0)
        return curves[-1] + (at - counts[-1]) * slope
    after = max(int(np.searchsorted(counts, at)), 1)
    share = (at - counts[after - 1]) / (counts[after] - counts[after - 1])
    return (1 - share) * curves[after - 1] + share * curves[after]


def _half(counts: list[int]) -> int:
    """Where the second half of at least two increasing counts begins."""
    return min(int(np.searchsorted(counts, counts[-1] / 2)), len(counts) - 2)


def profile_key(target: PreTrainedModel, drafter: Any = None) -> dict[str, str | int]:
    """
    What a measurement holds for: devices, architecture of target and drafter, dtype, attention kernel, threads,
    versions. Models that differ in their weights only share a profile; quantisation and adapters make another.

    Args:
        target (`PreTrainedModel`): The verifying model, as `generate` hands it on: what a wrapper of PEFT or
            `torch.compile` wraps.
        drafter (`DSparkDraftModel`, *optional*): The draft model.
    """
    config = text_config(target)
    with lock_of(config):  # while a stream runs its attention stands there
        attention = str(config._attn_implementation)
    drafter_name = ""
    if drafter is not None:
        drafter_name = _architecture(drafter, drafter.config, str(drafter.dtype), _devices(drafter))
    return {
        "device": _devices(target),
        "target": _architecture(target, config),
        "drafter": drafter_name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "attention": attention,
        "threads": torch.get_num_threads(),
        **_versions(),
    }


def _architecture(model: PreTrainedModel, sizes: PreTrainedConfig, *more: str) -> str:
    """Class and sizes of a model, then a hash of all that makes two of them differ in speed."""
    config = _what_costs(model.config.to_dict())
    modules = Counter(f"{type(module).__module__}.{type(module).__qualname__}" for module in model.modules())
    digest = hashlib.sha256(json.dumps([config, modules, more], sort_keys=True, default=str).encode()).hexdigest()
    return f"{type(model).__name__} {sizes.num_hidden_layers}x{sizes.hidden_size} {digest[:12]}"


def _what_costs(config: dict[str, Any]) -> dict[str, Any]:
    """The entries of a config, and of those within it, that may bear on speed."""
    return {
        name: _what_costs(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if isinstance(name, str) and name not in _NO_COST and not name.endswith(_NO_COST_ENDINGS) and value is not None
    }


def _devices(model: PreTrainedModel) -> str:
    """The devices that a model is spread over, by name."""
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(places) < 2:  # loaded into one place, and perhaps moved to another since
        places = {str(model.device)}
    return " + ".join(sorted(map(_device_name, places)))


def _device_name(place: str) -> str:
    if place == "disk":
        return place
    device = torch.device(int(place) if place.isdigit() else place)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type}: {_processor()}"


@functools.cache
def _processor() -> str:
    return processor_name()


@functools.cache
def _versions() -> dict[str, str]:
    return package_versions(ENGINE)


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
    key = profile_key(target, drafter)
    return stored_profile(key) or stored_profile(key | {"drafter": ""})


def stored_profile(key: dict[str, str | int]) -> Profile | None:
    """The profile with a key, if there is one; one that cannot be read counts as absent, which is said once."""
    path = profile_path(key)
    try:
        return _read(path, path.stat().st_mtime_ns)
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        _warn_damaged(path, str(error))
        return None


@functools.lru_cache(maxsize=128)
def _read(path: Path, changed: int) -> Profile:
    return Profile.load(path)


@functools.cache
def _warn_damaged(path: Path, problem: str) -> None:
    logger.warning(
        "A stored profile counts as absent, since it cannot be read: %s Delete %s, or let `dspark profile --force` "
        "write it anew.",
        problem,
        path,
    )


def explain_missing(target: PreTrainedModel, drafter: Any) -> str:
    """
    Why [`find_profile`] finds none: that nothing of the kind was measured, or in what the nearest that was differs.

    Args:
        target (`PreTrainedModel`): The verifying model.
        drafter (`DSparkDraftModel`): The draft model.

    Returns:
        `str`: A clause without a full stop.
    """
    wanted = profile_key(target, drafter)
    differing = []
    for path in profile_path(wanted).parent.glob("*.json"):
        with contextlib.suppress(
            ValueError, OSError, RecursionError
        ):  # damaged: `stored_profile` speaks of those that are asked for
            key = _read(path, path.stat().st_mtime_ns).key
            if _is_of(key, wanted):
                names = [name for name in wanted if name not in _MODELS and key.get(name) != wanted[name]]
                differing.append([f"{name} {key.get(name)} instead of {wanted[name]}" for name in names])
    if not differing:
        return "this machine has no profile of the pair"
    nearest = min(differing, key=lambda parts: (len(parts), parts))
    # Nothing but a hash: the sizes are the same.
    what = ", ".join(nearest) or "another config, quantisation or adapter"
    return f"this machine's profile of the pair was measured with {what}"


def _is_of(key: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether a profile is of models of the same class and sizes, or of the target alone."""
    of_target, of_drafter = (str(key.get(name)).rpartition(" ")[0] for name in _MODELS)
    target, drafter = (str(wanted[name]).rpartition(" ")[0] for name in _MODELS)
    return of_target == target and of_drafter in (drafter, "")
