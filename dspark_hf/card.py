"""The model card of a drafter: the template of hub_cards/ filled with what is known, saying what is not."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from .card_inputs import (
    TRAINING_NAME,
    Benchmark,
    Evaluation,
    Sampling,
    hardware_words,
    read_benchmark,
    read_evaluation,
    read_training,
)
from .card_tables import acceptance_details, acceptance_table, calibration_table, position_table, speed_table


if TYPE_CHECKING:
    from .modeling import DSparkConfig, DSparkDraftModel

logger = logging.getLogger(__name__)

PLOT_NAME = "calibration.png"
FIGURES_FOLDER = "figures"
CODE_LICENCE = "Apache-2.0"
# Dtypes that the card's code names; with any other it says "auto".
_SNIPPET_DTYPES = ("bfloat16", "float16", "float32")
# The word for leaving it to the template, in more words.
_THINKING = {"default": "as the chat template has it by default"}
# Stands for the target's id in the card's code where that is not known.
_PLACEHOLDER = "TARGET"
_MARK = "<!-- Written by dspark; SHA-256 of all above: {} -->\n"
_MARK_PATTERN = re.compile(r"<!-- Written by dspark; SHA-256 of all above: ([0-9a-f]{64}) -->\n?$")


@dataclass(frozen=True)
class CardSources:
    """
    What a card is made from besides the drafter and its `training.json`.

    Attributes:
        evaluations, benchmarks (`Sequence`): Files of `dspark eval` and of `dspark bench`.
        plot (`str` or `Path`, *optional*): Calibration plot (`dspark calibrate --plot`); by default the folder's
            `calibration.png`, if it has one.
        target (`str`, *optional*): Hub id of the target; by default what the files say.
        licence (`str`, *optional*): Of the weights, as the Hub names it, for example `"apache-2.0"`.
        datasets (`Sequence[str]`): Hub ids of data sets it was trained on, besides those that `training.json` names.
    """

    evaluations: Sequence[str | Path] = ()
    benchmarks: Sequence[str | Path] = ()
    plot: str | Path | None = None
    target: str | None = None
    licence: str | None = None
    datasets: Sequence[str] = ()


@dataclass(frozen=True)
class Known:
    """All that was read of a drafter; what is not known is `None` or empty."""

    drafter: DSparkDraftModel
    training: dict[str, Any] | None
    evaluations: list[Evaluation]
    benchmarks: list[Benchmark]
    target: str | None  # a Hub id
    dtype: str | None  # the target's
    licence: str | None
    trained_target: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def target_words(self) -> str:
        """The target in a sentence."""
        return f"`{self.target}`" if self.target else "the target it was trained for"


def template_path() -> Path:
    """The template: installed, hub_cards/ lies in the package; in a checkout, beside it."""
    package = Path(__file__).parent
    installed = package / "hub_cards" / "template.md"
    return installed if installed.is_file() else package.parent / "hub_cards" / "template.md"


def hub_id(value: str | None) -> str | None:
    """`value` if it can be the id of a Hub repository, with its namespace; `None` if not."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if value is None or value.count("/") != 1:
        return None
    try:
        validate_repo_id(value)
    except HFValidationError:
        return None
    return value


def plot_file(folder: Path, sources: CardSources) -> Path | None:
    """The calibration plot: the given one, else the folder's, else none."""
    if sources.plot is not None:
        return Path(sources.plot).expanduser()
    own = folder / PLOT_NAME
    return own if own.is_file() else None


def render_card(
    drafter: DSparkDraftModel, folder: Path, sources: CardSources | None = None, repo_id: str | None = None
) -> str:
    """
    Fill the template.

    Args:
        drafter ([`DSparkDraftModel`]): As loaded from `folder`.
        folder (`Path`): Its folder, with a `training.json` if how it was trained is known.
        sources ([`CardSources`], *optional*): What else goes in.
        repo_id (`str`, *optional*): The repository that the card's code loads; by default the folder, by its name.

    Returns:
        `str`: Markdown with the Hub's metadata at its head, and a mark at its end that [`is_unedited`] checks.

    Raises:
        `ValueError`: a file is of something else, or an id is none.
    """
    from huggingface_hub import ModelCard, ModelCardData

    sources = sources or CardSources()
    known = _read(drafter, folder, sources)
    for name, value, example in (("target", known.target, "NAMESPACE/NAME"), ("licence", known.licence, "apache-2.0")):
        if value is None:
            logger.warning("The card says that its %s is not known; state it with `--%s %s`.", name, name, example)
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        license=sources.licence,
        base_model=known.target,
        datasets=_datasets(known, sources.datasets) or None,
        tags=drafter.model_tags,
    )
    context = card_context(known, repo_id or f"./{folder.resolve().name}", plot_file(folder, sources) is not None)
    card = ModelCard.from_template(data, template_path=str(template_path()), **context)
    text = re.sub(r"\n{3,}", "\n\n", str(card)).rstrip("\n") + "\n\n"
    return text + _MARK.format(_digest(text))


def is_unedited(text: str) -> bool:
    """Whether a card is as [`render_card`] wrote it, whichever drafter it was for."""
    text = text.replace("\r\n", "\n")
    mark = _MARK_PATTERN.search(text)
    return mark is not None and mark.group(1) == _digest(text[: mark.start()])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _read(drafter: DSparkDraftModel, folder: Path, sources: CardSources) -> Known:
    if sources.target is not None and hub_id(sources.target) is None:
        raise ValueError(f"The target {sources.target!r} is no id of a Hub repository; give NAMESPACE/NAME.")
    path = folder / TRAINING_NAME
    training = read_training(path) if path.is_file() else None
    evaluations = [read_evaluation(file) for file in sources.evaluations]
    for one in evaluations:
        if one.block_size not in (None, drafter.config.block_size):
            raise ValueError(
                f"{one.path} is of another drafter: its `block_size` is {one.block_size}, and here it is "
                f"{drafter.config.block_size}. Evaluate this one."
            )
    benchmarks = [read_benchmark(file) for file in sources.benchmarks]
    trained = (training or {}).get("target", {})
    measured = [*evaluations, *benchmarks]
    names = [sources.target, trained.get("id"), *(one.target for one in measured)]
    dtypes = [trained.get("dtype"), *(one.dtype for one in measured)]
    return Known(
        drafter,
        training,
        evaluations,
        benchmarks,
        next((name for name in names if hub_id(name) is not None), None),
        next((dtype for dtype in dtypes if dtype is not None), None),
        sources.licence,
        trained,
        (training or {}).get("data", {}),
    )


def _datasets(known: Known, given: Sequence[str]) -> list[str]:
    """Hub ids of data sets: those given, and those among the sources of the training prompts."""
    for name in given:
        if hub_id(name) is None:
            raise ValueError(f"The data set {name!r} is no id of a Hub repository; give NAMESPACE/NAME.")
    named = [entry["source"] for entry in known.data.get("prompts", [])]
    # A path to a file can look like an id, but for its ending.
    named = [name for name in named if hub_id(name) is not None and not Path(name).suffix]
    return list(dict.fromkeys([*given, *named]))


def card_context(known: Known, source: str, has_plot: bool) -> dict[str, Any]:
    """
    What the template is filled with.

    Args:
        known (`Known`): What was read.
        source (`str`): What the card's code loads the drafter from.
        has_plot (`bool`): Whether a calibration plot lies beside the card.
    """
    config = known.drafter.config
    sampling, why = _recommended_sampling(known)
    target = known.target or _PLACEHOLDER
    command = ["dspark", "generate", "--target", target, "--drafter", source, "--chat", "--prompt", "What is 12 * 7?"]
    return {
        "name": source.rpartition("/")[2],
        "block_size": config.block_size,
        "target_words": known.target_words,
        "warnings": _warnings(known),
        "facts": _facts(known),
        "target_literal": json.dumps(target),
        "source_literal": json.dumps(source),
        "on_hub": hub_id(source) is not None,
        "dtype_literal": f"torch.{known.dtype}" if known.dtype in _SNIPPET_DTYPES else '"auto"',
        "template_arguments": _template_arguments(sampling),
        "sampling_arguments": _sampling_arguments(sampling),
        "sampling_words": sampling.words + why,
        "command_line": shlex.join(command),
        "evaluations": [
            {
                "caption": _caption(known, one, acceptance_details(one)),
                "table": acceptance_table(one),
                "positions": position_table(one),
            }
            for one in known.evaluations
        ],
        "training_acceptance": _training_acceptance(known),
        "benchmarks": [
            {"caption": _caption(known, one, _speed_details(one)), "table": speed_table(one)}
            for one in known.benchmarks
        ],
        "calibration": _calibration(config),
        "calibration_table": calibration_table(config) if config.confidence_temperatures else None,
        "plot": PLOT_NAME if has_plot else None,
        "training": None if known.training is None else _training_context(known.training),
        "limits": _limits(known),
        "licence": known.licence,
        "code_licence": CODE_LICENCE,
    }


def _warnings(known: Known) -> list[str]:
    warnings = []
    if known.training is None:
        warnings.append(f"How this drafter was trained is not recorded (no `{TRAINING_NAME}`).")
    if known.target is None:
        warnings.append(
            f"The Hub id of its target is not known. Put the model that it was trained for in place of "
            f"`{_PLACEHOLDER}`: for any other it drafts next to nothing that is accepted."
        )
    if known.licence is None:
        warnings.append("No licence is stated.")
    return warnings


def _facts(known: Known) -> list[tuple[str, str]]:
    config, drafter = known.drafter.config, known.drafter
    heads = [f"{config.markov_head_type} Markov head of rank {config.markov_rank}"] if config.markov_rank else []
    heads.append("confidence head" if config.enable_confidence_head else "no confidence head")
    owners = {
        name: "its own" if owns else "the target's"
        for name, owns in (("embedding", config.owns_embedding), ("output head", config.owns_lm_head))
    }
    revision = known.trained_target.get("revision")
    target = f"`{known.target}`" if known.target else "not known"
    return [
        ("target", target + (f" at revision `{revision}`" if revision else "")),
        ("target's dtype", known.dtype or "not recorded"),
        ("drafter", f"{drafter.num_parameters() / 1e6:.1f} M parameters, {str(drafter.dtype).removeprefix('torch.')}"),
        ("layers", f"{config.num_hidden_layers} of width {config.hidden_size}"),
        ("drafts a round", f"{config.block_size} (`block_size`)"),
        ("heads", ", ".join(heads)),
        *owners.items(),
        ("hidden states read", f"of the target's layers {', '.join(map(str, config.target_layer_ids))}"),
        ("vocabulary", _vocabulary(config)),
    ]


def _vocabulary(config: DSparkConfig) -> str:
    if config.draft_vocab_size is None:
        return f"{config.vocab_size:,} tokens, the target's"
    return f"{config.draft_vocab_size:,} of the target's {config.vocab_size:,} tokens are drafted, all are read"


def _recommended_sampling(known: Known) -> tuple[Sampling, str]:
    """What the card's code shows, and why: where most is accepted, else what it was trained on, else greedy."""
    thinking = known.data.get("thinking")
    settings = [setting for evaluation in known.evaluations for setting in evaluation.settings]
    measured = [setting for setting in settings if setting.macro.mean_acceptance_length is not None]
    if measured:
        best = max(measured, key=lambda setting: setting.macro.mean_acceptance_length).sampling
        best = best if best.thinking is not None else replace(best, thinking=thinking)
        return best, ", where most drafts are accepted of what was measured below"
    drawn_at = [value for value in known.data.get("temperatures", []) if isinstance(value, (int, float))]
    if drawn_at:
        return Sampling(float(drawn_at[0]), thinking=thinking), ", as the texts it was trained on were drawn"
    return Sampling(0.0, thinking=thinking), ", where as a rule most drafts are accepted"


def _sampling_arguments(sampling: Sampling) -> str:
    if sampling.temperature == 0:
        return "do_sample=False"
    values = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    return ", ".join(["do_sample=True", *(f"{name}={value:g}" for name, value in values.items() if value is not None)])


def _template_arguments(sampling: Sampling) -> str:
    """Arguments of the chat template; Qwen3's name for the switch, which templates without one leave unread."""
    modes = {"on": True, "off": False}
    return f", enable_thinking={modes[sampling.thinking]}" if sampling.thinking in modes else ""


def _speed_details(benchmark: Benchmark) -> list[str]:
    details = [benchmark.sampling.words]
    if not benchmark.batched:
        details.append("batch size 1")
    if benchmark.max_new_tokens is not None:
        details.append(f"{benchmark.max_new_tokens} new tokens")
    calls = [speed.calls for speed in benchmark.speeds if speed.calls is not None]
    if calls:
        least, most = min(calls), max(calls)
        counted = f"{least:g}" if least == most else f"{least:g} to {most:g}"
        details.append(f"{counted} call{'s' * (most > 1)} each")
    return details


def _caption(known: Known, measured: Evaluation | Benchmark, details: Iterable[str]) -> str:
    """How and where something was measured."""
    parts = [*details, measured.dtype, measured.hardware]
    parts += [f"{name} {measured.versions[name]}" for name in ("torch", "transformers") if name in measured.versions]
    if measured.target not in (None, known.target):
        parts.append(f"target `{measured.target}`")
    link = f"[{measured.path.name}]({FIGURES_FOLDER}/{quote(measured.path.name)})"
    text = ", ".join(filter(None, parts))
    return f"{text[0].upper()}{text[1:]} ({link}):"


def _calibration(config: DSparkConfig) -> str:
    if not config.enable_confidence_head:
        return "There is no confidence head: whole blocks are sent (the schedule `constant`)."
    if not config.confidence_temperatures:
        return (
            "The confidence is not calibrated, so thresholds and the hardware-aware schedules go by survivals that "
            "may be off. `dspark calibrate` fits it on prompts of your own."
        )
    return (
        "Temperatures of the confidence by block position (Sequential Temperature Scaling), and expected calibration "
        "errors of the survival. They are in `config.json` (`confidence_temperatures`, with what they were made with) "
        'and in force: after `dspark profile`, `num_assistant_tokens_schedule="hardware_aware"` sends the drafts that '
        "pay. `dspark calibrate --check` tells whether they hold for prompts of your own."
    )


def _training_acceptance(known: Known) -> str | None:
    evaluations = (known.training or {}).get("evaluations") or [{}]
    last = evaluations[-1]
    lengths = [
        f"{name} {value:.2f}"
        for name, value in last.get("mean_acceptance_length", {}).items()
        if isinstance(value, (int, float))
    ]
    if not lengths:
        return None
    at = f", step {last['step']:,}" if "step" in last else ""
    return f"Last evaluation in training{at}: `mean_acceptance_length` {', '.join(lengths)}."


def _training_context(training: dict[str, Any]) -> dict[str, Any]:
    target, data = training.get("target", {}), training.get("data", {})
    prompts = [
        entry["source"] + (f" ({entry['count']:,})" if isinstance(entry.get("count"), int) else "")
        for entry in data.get("prompts", [])
    ]
    seconds = training.get("seconds")
    versions = training.get("versions", {})
    facts = {
        "target": ", ".join(f"`{target[key]}`" for key in ("id", "revision", "dtype") if key in target),
        "prompts": ", ".join(prompts),
        "responses": _responses(data),
        "trained for": _counted(training, ("steps", "blocks", "supervised_tokens")),
        "time": "" if seconds is None else _duration(seconds),
        "machine": hardware_words(training["machine"]) if "machine" in training else "",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "command": "",
    }
    shown = {label: value for label, value in facts.items() if value}
    if "started_from" in training:
        shown["started from"] = f"`{training['started_from']}`"
    if earlier := training.get("earlier_runs"):
        shown["trained before that, run by run"] = "; ".join(map(_run_words, earlier))
    command = training.get("command")
    unknown = [label for label, value in facts.items() if not value and not (label == "command" and command)]
    if unknown:
        shown["not recorded"] = ", ".join(unknown)
    return {"facts": list(shown.items()), "command": shlex.join(map(str, command)) if command else None}


def _run_words(run: dict[str, Any]) -> str:
    words = [_counted(run, ("steps", "blocks", "supervised_tokens"))]
    if "seconds" in run:
        words.append(_duration(run["seconds"]))
    if "started_from" in run:
        words.append(f"from `{run['started_from']}`")
    return ", ".join(filter(None, words))


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds:.0f} s"


def _responses(data: dict[str, Any]) -> str:
    parts = [_counted(data, ("samples", "tokens", "supervised_tokens"))]
    if data.get("temperatures"):
        parts.append(f"drawn at temperature {', '.join(map(str, data['temperatures']))}")
    if "thinking" in data:
        parts.append(f"thinking {data['thinking']}")
    return ", ".join(filter(None, parts))


def _counted(record: dict[str, Any], keys: Iterable[str]) -> str:
    return ", ".join(f"{record[key]:,} {key.replace('_', ' ')}" for key in keys if key in record)


def _limits(known: Known) -> list[str]:
    config, target = known.drafter.config, known.target_words
    thinking = known.data.get("thinking")
    longest = (known.training or {}).get("arguments", {}).get("max_length", known.data.get("max_length"))
    return [
        f"**Target and tokenizer**: it reads the hidden states of {target} and drafts in its vocabulary of "
        f"{config.vocab_size:,} tokens. Another model or tokenizer does not work; a fine-tune or a quantised copy "
        "does, and accepts fewer drafts.",
        f"**Thinking mode**: trained on texts with thinking {_THINKING.get(thinking, thinking)}; in another mode "
        "fewer drafts are accepted."
        if thinking
        else "**Thinking mode**: which mode of the chat template the training texts were in is not recorded. If the "
        "target has several, expect them to differ.",
        f"**Context length**: texts were cut at {longest:,} tokens in training; beyond that fewer drafts may be "
        "accepted."
        if isinstance(longest, int)
        else "**Context length**: how long the training texts were is not recorded; the config allows "
        f"{config.max_position_embeddings:,} positions.",
        "**Sampling**: at temperature 1 fewer drafts are accepted than greedily, as a rule, and what a small target "
        "writes there is close to noise; a lower temperature or top_p serves both.",
        "**Ties**: in bfloat16 and float16 a block and a single step may round differently, so near-equal logits can "
        "change places and a greedy text can differ from plain `generate`'s. In float32 they are the same.",
        "**When it does not pay**: with `mean_acceptance_length` near 1, in large batches that fill the machine "
        "already, and for a target so small that a draft costs about as much as a step. `dspark bench` tells for your "
        "machine.",
    ]
