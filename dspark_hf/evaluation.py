"""
What a drafter's drafts are worth, measured by decoding prompts: acceptance by task and position, and calibration.

Counting is that of [`SpeculativeStats`]: every round of every text is one, the last of a text that `max_new_tokens`
ends too, although it had less room for drafts than a whole block has; with `max_new_tokens` many times the block size
that hardly shows. Drafts are verified whole unless another schedule is asked for, since a draft that was not sent says
nothing of acceptance. Calibration goes by the blocks that had room to be verified whole.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm.auto import tqdm

from .bench import check_lengths
from .blocks import Blocks, decode_batch, whole_blocks_by_row
from .calibration import position_metrics
from .intervals import mean_ratio_interval, ratio_interval
from .loading import Pair, generation_options, regime, sampling_in_force
from .schedule_options import drafter_schedule
from .statistics import SpeculativeStats


if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from .modeling import DSparkConfig

_ASKED_FOR = {"on": True, "off": False, None: None}


@dataclass(frozen=True)
class Setting:
    """
    How texts are decoded.

    Attributes:
        temperature (`float`): 0 is greedy decoding.
        top_p (`float`, *optional*): With a temperature; by default the target's own.
        top_k (`int`, *optional*): With a temperature, 0 for all tokens; by default the target's own.
        thinking (`str`, *optional*): `"on"` or `"off"`, for chat templates with `enable_thinking`; by default the
            template's own choice.
        max_new_tokens (`int`): Of each text.
        schedule (`str`): `num_assistant_tokens_schedule`, one of `SCHEDULES`.
        threshold (`float`): `assistant_confidence_threshold` of the schedule `"confidence"`.
    """

    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    thinking: str | None = None
    max_new_tokens: int = 128
    schedule: str = "constant"
    threshold: float = 0.0


@dataclass(frozen=True)
class Text:
    """
    One prompt's text as counts.

    Attributes:
        tokens (`int`): New tokens, an end token included.
        counts (`dict`): The fields of its [`SpeculativeStats`] that are counts.
        confidence_logits (`list[list[float]]`): Of each block that was verified whole; none without a confidence head.
        accepted (`list[int]`): Length of each such block's accepted prefix.
    """

    tokens: int
    counts: dict[str, Any]
    confidence_logits: list[list[float]]
    accepted: list[int]

    @property
    def stats(self) -> SpeculativeStats:
        """The counts as what they were."""
        return SpeculativeStats(**self.counts)


COUNTS = ("rounds", "drafted", "verified", "accepted", "sent_by_position", "accepted_by_position")


@dataclass(frozen=True)
class Batch:
    """
    Prompts decoded together.

    Attributes:
        setting (`int`): Index of their [`Setting`].
        task (`str`): Where they come from.
        first (`int`): Index of the first of them in its task.
        seconds (`float`): Of the call.
        texts (`list[Text]`): One a prompt.
    """

    setting: int
    task: str
    first: int
    seconds: float
    texts: list[Text]

    @property
    def place(self) -> tuple[int, str, int]:
        """Which batch of an evaluation this is."""
        return self.setting, self.task, self.first

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Batch:
        """
        From plain values.

        Raises:
            `TypeError`, `KeyError`: they are not those of a batch.
        """
        texts = [Text(**{field.name: text[field.name] for field in fields(Text)}) for text in values["texts"]]
        return cls(**values | {"texts": texts})


def measure_acceptance(
    pair: Pair,
    prompts: dict[str, list[str]],
    temperature: float = 0.0,
    top_p: float | None = None,
    top_k: int | None = None,
    max_new_tokens: int = 128,
    batch_size: int = 8,
    progress: bool = False,
    thinking: str | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """
    Decode prompts with whole blocks and sum up how the drafts fared. Neither torch's random state nor the models'
    training mode is changed by it.

    Args:
        pair ([`Pair`]): Target and drafter.
        prompts (`dict[str, list[str]]`): By task, encoded as [`Pair.encode`] does; at least one prompt each.
        temperature (`float`): 0 decodes greedily.
        top_p (`float`, *optional*): With a temperature; by default the target's own.
        top_k (`int`, *optional*): With a temperature, 0 for all tokens; by default the target's own.
        max_new_tokens (`int`): Of each text.
        batch_size (`int`): Prompts decoded at a time.
        progress (`bool`): Whether a bar shows tok/s and mean_acceptance_length.
        thinking (`str`, *optional*): `"on"` or `"off"`; by default the chat template's own choice.
        seed (`int`): The n-th batch of a task is drawn with this plus n.

    Returns:
        `dict`: as [`summarise`].

    Raises:
        `CommandError`: a sampling option was given for greedy decoding, or a prompt is too long or empty, or the chat
            template has no choice of thinking.
    """
    setting = Setting(temperature, top_p, top_k, thinking, max_new_tokens)
    batches = list(measure(pair, prompts, [setting], batch_size, seed, progress=progress))
    return summarise(pair, setting, batches)


def measure(
    pair: Pair,
    prompts: dict[str, list[str]],
    settings: Sequence[Setting],
    batch_size: int,
    seed: int = 0,
    known: Sequence[Batch] = (),
    progress: bool = True,
) -> Iterator[Batch]:
    """
    Decode all prompts at all settings, batch by batch. What a batch yields depends on nothing that came before it, so
    that an evaluation can be taken up where it was left.

    Args:
        pair, prompts, batch_size, seed, progress: As for [`measure_acceptance`].
        settings (`Sequence[Setting]`): At least one.
        known (`Sequence[Batch]`): Of the same arguments; these are left out.

    Yields:
        [`Batch`], as soon as it is measured.

    Raises:
        As [`measure_acceptance`].
    """
    encoded = [_encode(pair, prompts, setting) for setting in settings]
    done = {batch.place for batch in known}
    bar = tqdm(
        total=len(settings) * sum(map(len, prompts.values())),
        initial=sum(len(batch.texts) for batch in known),
        desc="Evaluation",
        unit="prompt",
        disable=not progress,
    )
    with bar:
        for index, setting in enumerate(settings):
            tokens, seconds, shown = 0, 0.0, SpeculativeStats()
            for task, inputs in encoded[index].items():
                for first in range(0, len(inputs), batch_size):
                    if (index, task, first) in done:
                        continue
                    number = first // batch_size
                    texts, took = decode_texts(pair, inputs[first : first + batch_size], setting, seed + number)
                    tokens, seconds = tokens + sum(text.tokens for text in texts), seconds + took
                    for text in texts:
                        shown.rounds += text.counts["rounds"]
                        shown.accepted += text.counts["accepted"]
                    bar.update(len(texts))
                    if shown.rounds:
                        bar.set_postfix_str(
                            f"{describe(setting)}, {task}: {tokens / seconds:.1f} tok/s, "
                            f"mean_acceptance_length {shown.mean_acceptance_length:.2f}"
                        )
                    yield Batch(index, task, first, took, texts)


def decode_texts(
    pair: Pair, inputs: list[dict[str, torch.Tensor]], setting: Setting, seed: int
) -> tuple[list[Text], float]:
    """
    Decode one batch and keep its counts.

    Args:
        pair ([`Pair`]): Target and drafter.
        inputs (`list[dict]`): As [`Pair.encode`] gives them.
        setting ([`Setting`]): How.
        seed (`int`): Of torch, for this batch alone.

    Returns:
        `tuple[list[Text], float]`: one a prompt, and the seconds of the call.
    """
    import torch

    options = generation_options(
        setting.max_new_tokens, setting.temperature, setting.top_p, setting.top_k, setting.threshold
    )
    device = pair.target.device
    with (
        _in_evaluation_mode(pair.target, pair.drafter),
        drafter_schedule(pair.drafter, setting.schedule, setting.threshold),
        torch.random.fork_rng([device] if device.type == "cuda" else []),
    ):
        torch.manual_seed(seed)
        start = time.perf_counter()
        output = decode_batch(pair, inputs, options, setting.schedule)
        seconds = time.perf_counter() - start
    stats = output.speculative_stats
    longest = max(row["input_ids"].shape[1] for row in inputs)
    ends = pair.target.generation_config.eos_token_id
    end_tokens = set(ends if isinstance(ends, (list, tuple)) else [ends])
    blocks_by_row = whole_blocks_by_row(stats, pair.drafter.config.block_size)
    texts = []
    for ids, row, blocks in zip(output.sequences[:, longest:].tolist(), stats.rows, blocks_by_row, strict=True):
        tokens = next((place for place, token in enumerate(ids, start=1) if token in end_tokens), len(ids))
        counts = {name: getattr(row, name) for name in COUNTS}
        texts.append(Text(tokens, counts, [logits for logits, _ in blocks], [accepted for _, accepted in blocks]))
    return texts, seconds


def blocks_of(batches: Iterable[Batch], setting: Setting) -> Blocks | None:
    """
    The blocks that a setting's batches verified whole; `None` if there are none, or if the schedule chose which.

    Args:
        batches (`Iterable[Batch]`): All of this setting.
        setting ([`Setting`]): How they were decoded.
    """
    pairs = [(batch.task, text) for batch in batches for text in batch.texts]
    sets = [task for task, text in pairs for _ in text.accepted]
    if not sets or setting.schedule != "constant":
        return None
    return Blocks(
        np.array([logits for _, text in pairs for logits in text.confidence_logits], dtype=float),
        np.array([accepted for _, text in pairs for accepted in text.accepted], dtype=int),
        sets,
        float(setting.temperature),
    )


def fitted_temperatures(config: DSparkConfig, sampling_temperature: float) -> list[float] | None:
    """The confidence temperatures that a drafter has for a call; `None` if nothing that fits was fitted."""
    greedy = sampling_temperature == 0
    fitted = [fit for fit in config.confidence_temperatures or [] if (fit["sampling_temperature"] == 0) == greedy]
    return config.temperatures_for(sampling_temperature) if fitted else None


def summarise(pair: Pair, setting: Setting, batches: Sequence[Batch]) -> dict[str, Any]:
    """
    A setting's batches as plain values.

    Args:
        pair ([`Pair`]): Target and drafter.
        setting ([`Setting`]): How the batches were decoded.
        batches (`Sequence[Batch]`): All of this setting, at least one.

    Returns:
        `dict`: `temperature`, `top_p` and `top_k` (those in force), `thinking`, `max_new_tokens`; `tasks`, for each
        `prompts`, `rounds`, `tokens`, `mean_acceptance_length` and `draft_acceptance_rate` (each with `_interval`, of
        95%, see [`ratio_interval`]), `acceptance_by_position` (among the rounds that reached a position, which are
        `reached_by_position`), `drafted_per_round`, `verified_per_round`, `calibration` (`blocks`, and `before` and
        `after` the drafter's temperatures `ece`, `brier` and `roc_auc` by position; no `after` if it has none fitted,
        none at all without a confidence head or with a schedule) and `tokens_per_second`; `macro`, the mean over
        tasks of what is a single number, with intervals. What has no value is `None`: a ratio with nothing below it,
        an interval of one prompt.
    """
    config = pair.drafter.config
    by_task: dict[str, list[Batch]] = {}
    for batch in batches:
        by_task.setdefault(batch.task, []).append(batch)
    texts = {task: [text for batch in own for text in batch.texts] for task, own in by_task.items()}
    tasks = {}
    for task, own in by_task.items():
        seconds = sum(batch.seconds for batch in own)
        blocks, temperatures = blocks_of(own, setting), fitted_temperatures(config, setting.temperature)
        tasks[task] = _acceptance(texts[task], config.block_size) | {
            "calibration": None if blocks is None else _calibration(blocks, temperatures),
            "tokens_per_second": sum(text.tokens for text in texts[task]) / seconds,
        }
    sampling = sampling_in_force(pair.target, setting.temperature, setting.top_p, setting.top_k)
    return {
        "temperature": float(setting.temperature),
        "top_p": sampling.get("top_p"),
        "top_k": sampling.get("top_k"),
        "thinking": setting.thinking,
        "max_new_tokens": setting.max_new_tokens,
        "tasks": tasks,
        "macro": _macro(tasks, texts),
    }


# The two ratios with intervals: what is above and below the line, of one text.
RATIOS = {
    "mean_acceptance_length": lambda counts: (counts["rounds"] + counts["accepted"], counts["rounds"]),
    "draft_acceptance_rate": lambda counts: (counts["accepted"], counts["verified"]),
}


def _acceptance(texts: Sequence[Text], block_size: int) -> dict[str, Any]:
    total = SpeculativeStats.total((text.stats for text in texts), block_size)
    values: dict[str, Any] = {
        "prompts": len(texts),
        "rounds": total.rounds,
        "tokens": sum(text.tokens for text in texts),
    }
    for name in RATIOS:
        values[name] = getattr(total, name)
        values[f"{name}_interval"] = _as_list(ratio_interval(*_parts(name, texts)))
    return values | {
        "acceptance_by_position": total.acceptance_by_position,
        "reached_by_position": total.sent_by_position,
        "drafted_per_round": total.drafted / total.rounds if total.rounds else None,
        "verified_per_round": total.verified / total.rounds if total.rounds else None,
    }


def _calibration(blocks: Blocks, temperatures: Sequence[float] | None) -> dict[str, Any]:
    values: dict[str, Any] = {"blocks": len(blocks)}
    raw = [1.0] * blocks.confidence_logits.shape[1]
    for name, used in (("before", raw), ("after", temperatures)):
        values[name] = None
        if used is not None:
            metrics = position_metrics(blocks.confidence_logits, blocks.accepted, used)
            values[name] = {key: [getattr(each, key) for each in metrics] for key in ("ece", "brier", "roc_auc")}
    return values


def _macro(tasks: dict[str, dict[str, Any]], texts: dict[str, list[Text]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name in (*RATIOS, "drafted_per_round", "verified_per_round", "tokens_per_second"):
        present = [task for task, results in tasks.items() if results[name] is not None]
        values[name] = statistics.fmean(tasks[task][name] for task in present) if present else None
        if name in RATIOS:
            groups = [_parts(name, texts[task]) for task in present]
            values[f"{name}_interval"] = _as_list(mean_ratio_interval(groups))
    return values


def _parts(name: str, texts: Sequence[Text]) -> tuple[list[int], list[int]]:
    """What stands above and below the line of a ratio, text by text."""
    pairs = [RATIOS[name](text.counts) for text in texts]
    return [above for above, _ in pairs], [below for _, below in pairs]


def _as_list(interval: tuple[float, float] | None) -> list[float] | None:
    return None if interval is None else list(interval)


def describe(setting: Setting) -> str:
    """A setting in words, without what it shares with others."""
    words = regime(setting.temperature)
    return words if setting.thinking is None else f"{words}, thinking {setting.thinking}"


def _encode(pair: Pair, prompts: dict[str, list[str]], setting: Setting) -> dict[str, list[dict[str, torch.Tensor]]]:
    thinking = _ASKED_FOR[setting.thinking]
    encoded = {task: [pair.encode(prompt, thinking=thinking) for prompt in each] for task, each in prompts.items()}
    check_lengths(pair, encoded, setting.max_new_tokens)
    return encoded


@contextmanager
def _in_evaluation_mode(*models: PreTrainedModel) -> Iterator[None]:
    """As `eval()`, module by module put back."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
