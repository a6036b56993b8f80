"""What each command starts with: a target, a drafter and a tokenizer, or an error that says what to change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .chat_format import apply_template


if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from .modeling import DSparkDraftModel
    from .profiles import Profile

DEMO = "demo"
MOST_THREADS = 4096
DTYPES = ("auto", "bfloat16", "float16", "float32")
# What chat templates of models that can think or not call the choice.
THINKING_VARIABLE = "enable_thinking"


class CommandError(Exception):
    """An error of the caller's: its message names the argument, its value and the fix, and goes out as one line."""


@contextmanager
def reporting(what: str) -> Iterator[None]:
    """Turn the errors that libraries raise about what the caller gave into a [`CommandError`] about `what`.

    Args:
        what (`str`): the argument and its value, for example `"--target 'gpt2'"`.
    """
    try:
        yield
    except (OSError, ValueError, ImportError) as error:
        raise CommandError(f"{what}: {' '.join(str(error).split())}") from error


def told(value: Any) -> str:
    """An option's value as it is typed."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


@dataclass(frozen=True)
class Pair:
    """A target and its drafter, on one device and ready to generate."""

    target: PreTrainedModel
    drafter: DSparkDraftModel
    tokenizer: PreTrainedTokenizerBase
    names: tuple[str, str]

    @property
    def description(self) -> str:
        """One line about the pair for a heading."""
        parameters = [sum(p.numel() for p in model.parameters()) / 1e6 for model in (self.target, self.drafter)]
        dtype = str(self.target.dtype).removeprefix("torch.")
        return (
            f"target {self.names[0]} ({parameters[0]:.0f} M), drafter {self.names[1]} ({parameters[1]:.0f} M), "
            f"{dtype} on {self.target.device}"
        )

    def encode(self, prompt: str, chat: bool | None = None, thinking: bool | None = None) -> dict[str, torch.Tensor]:
        """Tokenise one prompt.

        Args:
            prompt (`str`): the text.
            chat (`bool`, *optional*): whether to wrap it as a user's turn in the tokenizer's chat template. By
                default it is wrapped if there is a template.
            thinking (`bool`, *optional*): the chat template's `enable_thinking`; by default the template's own choice.

        Returns:
            `dict`: `input_ids` and `attention_mask`, `torch.Tensor` of shape `(1, prompt_length)` on the target's
            device.

        Raises:
            `CommandError`: a chat was asked for and the tokenizer has no template, or thinking and the template has no
                such choice, or the template fails, or the prompt is empty.
        """
        has_template = self.tokenizer.chat_template is not None
        if thinking is not None and not (has_template and THINKING_VARIABLE in self.tokenizer.get_chat_template()):
            raise CommandError(
                f"--thinking {'on' if thinking else 'off'}: the chat template of {self.names[0]!r} has no "
                f"`{THINKING_VARIABLE}`; leave --thinking out"
            )
        if chat and not has_template:
            raise CommandError(
                f"--chat: the tokenizer of {self.names[0]!r} has no chat template; leave --chat out to continue "
                "the prompt as plain text"
            )
        if any("\ud800" <= character <= "\udfff" for character in prompt):
            raise CommandError("--prompt: it holds half of a surrogate pair, which is no character; take it out")
        if has_template and chat is not False:
            turn = [{"role": "user", "content": prompt}]
            asked: dict[str, Any] = {} if thinking is None else {THINKING_VARIABLE: thinking}
            asked |= {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
            with reporting(f"--target {self.names[0]!r}"):
                encoded = apply_template(self.tokenizer, turn, **asked)
        else:
            encoded = self.tokenizer(prompt, return_tensors="pt")
        if encoded["input_ids"].shape[-1] == 0:
            raise CommandError(f"--prompt {prompt!r}: it has no tokens; give at least one character")
        return {name: encoded[name].to(self.target.device) for name in ("input_ids", "attention_mask")}


def load_pair(
    target: str = DEMO,
    drafter: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    threads: int | None = None,
) -> Pair:
    """Load a target and its drafter.

    Args:
        target (`str`, *optional*, defaults to `"demo"`): checkpoint folder or Hub id; `"demo"` is the demo target.
        drafter (`str`, *optional*): checkpoint folder or Hub id; `"demo"` is the bundled drafter, the default if the
            target is the demo target.
        dtype (`str`, *optional*, defaults to `"auto"`): one of `DTYPES`. `"auto"` is the dtype of the target's
            checkpoint; the drafter takes the target's.
        device (`str`, *optional*, defaults to `"auto"`): a torch device. `"auto"` is `cuda` if there is one,
            otherwise `cpu`.
        threads (`int`, *optional*): torch's CPU threads from now on.

    Raises:
        `CommandError`: something given cannot be loaded.
    """
    check_source("--target", target)
    if drafter is None:
        if target != DEMO:
            raise CommandError(
                f"--drafter is missing: --target {target!r} needs a drafter trained for it; give its folder or Hub id"
            )
        drafter = DEMO
    check_source("--drafter", drafter)
    model, _ = load_target(target, dtype, device, threads)
    tokenizer = load_tokenizer(target)
    return Pair(model, load_drafter(drafter, model), tokenizer, (target, drafter))


def machine_profile(pair: Pair, asked: str, instead: str = "") -> Profile:
    """
    What this machine has stored of a pair.

    Args:
        pair ([`Pair`]): As it is used.
        asked (`str`): The option that needs it, for messages.
        instead (`str`, *optional*): What else could be given, for messages.

    Raises:
        `CommandError`: it has none, or of the target alone.
    """
    from .profiles import explain_missing, find_profile

    profile = find_profile(pair.target, pair.drafter)
    if profile is None or not profile.block_size:
        alone = "this machine's profile is of the target alone"
        why = explain_missing(pair.target, pair.drafter) if profile is None else alone
        raise CommandError(
            f"{asked}: {why}; run `dspark profile` first, with the same --target, --drafter, --dtype, --device and "
            f"--threads{instead}"
        )
    return profile


def load_drafter(drafter: str, target: PreTrainedModel) -> DSparkDraftModel:
    """Load a drafter for a target that is loaded, in its dtype and on its device.

    Raises:
        `CommandError`: it cannot be loaded.
    """
    from .demo_target import demo_drafter_folder
    from .modeling import DSparkDraftModel

    with reporting(f"--drafter {drafter!r}"):
        source = demo_drafter_folder() if drafter == DEMO else drafter
        return DSparkDraftModel.from_pretrained(source, dtype=target.dtype).to(target.device).eval()


def training_record(drafter: str, option: str) -> dict[str, Any]:
    """How a drafter was trained, as far as the `training.json` beside it says; nothing if there is none.

    Args:
        drafter (`str`): folder or Hub id; `"demo"` is the bundled drafter.
        option (`str`): that named it, for messages.

    Raises:
        `CommandError`: the file cannot be read.
    """
    from .card_inputs import TRAINING_NAME, read_training
    from .demo_target import demo_drafter_folder
    from .modeling.checkpoint_loading import find_file

    source = demo_drafter_folder() if drafter == DEMO else drafter
    file = find_file(source, TRAINING_NAME, {"_raise_exceptions_for_connection_errors": False})
    if file is None:
        return {}
    with reporting(f"{option} {drafter!r}"):
        return read_training(Path(file))


def load_target(target: str, dtype: str, device: str, threads: int | None) -> tuple[PreTrainedModel, str | Path]:
    """Load a target alone, the arguments being those of [`load_pair`].

    Returns:
        The target, and the folder or Hub id that it came from.

    Raises:
        `CommandError`: something given cannot be loaded.
    """
    check_source("--target", target)
    if dtype not in DTYPES:
        raise CommandError(f"--dtype {dtype!r}: it must be one of {', '.join(DTYPES)}")
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise CommandError(f"--threads {threads}: it must be from 1 to {MOST_THREADS}")

    import torch
    from transformers import AutoModelForCausalLM

    if threads is not None:
        torch.set_num_threads(threads)
    placement = resolve_device(device)
    source = resolve_target(target)
    with reporting(f"--target {target!r}"):
        model_dtype = "auto" if dtype == "auto" else getattr(torch, dtype)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=model_dtype).to(placement).eval()
    return model, source


def load_tokenizer(target: str) -> PreTrainedTokenizerBase:
    """A target's tokenizer.

    Raises:
        `CommandError`: it cannot be loaded.
    """
    from transformers import AutoTokenizer

    source = resolve_target(target)
    with reporting(f"--target {target!r}"):
        return AutoTokenizer.from_pretrained(source)


def resolve_target(target: str) -> str | Path:
    """The folder or Hub id that a `--target` value means.

    Raises:
        `CommandError`: the demo target is meant and cannot be made.
    """
    from .demo_target import demo_target_folder

    with reporting(f"--target {target!r}"):
        try:
            return demo_target_folder() if target == DEMO else target
        except RuntimeError as error:
            raise CommandError(str(error)) from error


def left_padded(prompts: Sequence[dict[str, torch.Tensor]], pad_token_id: int) -> dict[str, torch.Tensor]:
    """
    One batch of prompts.

    Args:
        prompts (`Sequence[dict]`): Each with `input_ids` and `attention_mask` of shape `(1, prompt_length)`.
        pad_token_id (`int`): Put where nothing is attended to.

    Returns:
        `dict`: `input_ids` and `attention_mask` of shape `(len(prompts), longest prompt_length)`.
    """
    import torch
    from torch.nn.functional import pad

    longest = max(prompt["input_ids"].shape[1] for prompt in prompts)
    return {
        name: torch.cat([pad(p[name], (longest - p[name].shape[1], 0), value=filling) for p in prompts])
        for name, filling in (("input_ids", pad_token_id), ("attention_mask", 0))
    }


def check_source(argument: str, value: str) -> None:
    """Refuse what is plainly neither a checkpoint folder nor a Hub id, before anything is imported or fetched."""
    path = Path(value).expanduser()
    if value == DEMO:
        return
    if path.is_dir():
        if not (path / "config.json").is_file() and not (path / "adapter_config.json").is_file():
            raise CommandError(
                f"{argument} {value!r}: the folder has no config.json; give the folder that save_pretrained wrote"
            )
    elif path.is_file():
        raise CommandError(f"{argument} {value!r}: it is a file; give the checkpoint folder that holds it")
    elif not value or value.startswith((".", "/", "~")) or value.count("/") > 1:
        raise CommandError(f"{argument} {value!r}: there is no such folder; give a checkpoint folder or a Hub id")


def resolve_device(device: str) -> torch.device:
    """The torch device a `--device` value means.

    Raises:
        `CommandError`: torch does not know the name, or the machine has no such device.
    """
    import torch

    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        placement = torch.device(device)
    except RuntimeError as error:
        raise CommandError(f"--device {device!r}: torch knows no such device; use auto, cpu or cuda:0") from error
    if placement.type == "cuda" and (placement.index or 0) >= torch.cuda.device_count():
        raise CommandError(
            f"--device {device!r}: torch sees {torch.cuda.device_count()} CUDA device(s) here; use --device cpu"
        )
    return placement


def check_drafting(max_new_tokens: int) -> None:
    """Refuse texts in which nothing could be drafted."""
    if max_new_tokens < 2:
        raise CommandError(f"--max-new-tokens {max_new_tokens}: drafting begins with the second; give at least 2")


def generation_options(
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float | None = None,
    top_k: int | None = None,
    threshold: float | None = None,
    schedule: str | None = None,
) -> dict[str, Any]:
    """Keyword arguments of `generate`, the same for every way of decoding.

    Args:
        max_new_tokens (`int`): at least 1.
        temperature (`float`, *optional*, defaults to 0.0): 0 decodes greedily; above, tokens are drawn.
        top_p (`float`, *optional*): nucleus size in (0, 1]; by default the target's own.
        top_k (`int`, *optional*): 0 keeps all tokens; by default the target's own.
        threshold (`float`, *optional*): `assistant_confidence_threshold` in [0, 1); by default the drafter's own.
        schedule (`str`, *optional*): `num_assistant_tokens_schedule`; by default the drafter's own.

    Raises:
        `CommandError`: a sampling option was given for greedy decoding.
    """
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if threshold is not None:
        options["assistant_confidence_threshold"] = threshold
    if schedule is not None:
        options["num_assistant_tokens_schedule"] = schedule
    for argument, value in (("--top-p", top_p), ("--top-k", top_k)):
        if value is not None and temperature == 0:
            raise CommandError(f"{argument} {value}: it has no effect at --temperature 0; set --temperature above 0")
    if temperature > 0:
        options["temperature"] = temperature
        options |= {name: value for name, value in (("top_p", top_p), ("top_k", top_k)) if value is not None}
    return options


def sampling_in_force(
    target: PreTrainedModel, temperature: float, top_p: float | None, top_k: int | None
) -> dict[str, float | int]:
    """`top_p` and `top_k` as a call has them: those given, else the target's own, else Transformers' defaults."""
    if temperature == 0:
        return {}
    from transformers import GenerationConfig

    own, defaults = target.generation_config, GenerationConfig._get_default_generation_params()
    values: dict[str, float | int] = {}
    for name, given in (("top_p", top_p), ("top_k", top_k)):
        values[name] = next(value for value in (given, getattr(own, name), defaults[name]) if value is not None)
    return values


def regime(temperature: float) -> str:
    """A sampling temperature in words."""
    return "greedy" if temperature == 0 else f"temperature {temperature:g}"
