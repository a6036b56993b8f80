"""The one place where Transformers is told about DSpark: `generate(assistant_model=drafter)` decodes with it."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from transformers import GenerationMixin, PreTrainedModel
from transformers.generation import GenerationMode

from .decoding import check_call, dspark_decode
from .target_limits import check_target


_MARK = "dspark_hf_original"


def is_drafter(assistant: Any) -> bool:
    """Whether an assistant is a DSpark drafter; asked of the instance, since it may be wrapped, compiled or a copy."""
    return bool(getattr(assistant, "is_dspark_drafter", False))


def install() -> None:
    """
    Let `generate` decode with DSpark when its assistant is a DSpark drafter. Everything else goes where it went.
    `import dspark_hf` does this; calling it again changes nothing.

    Raises:
        `RuntimeError`: if this release of Transformers has no place for it.
    """
    _wrap("_assisted_decoding", _decoding)
    _wrap("_validate_generation_mode", _validation)


def uninstall() -> None:
    """Take the hook out again."""
    for name in ("_assisted_decoding", "_validate_generation_mode"):
        original = getattr(getattr(GenerationMixin, name), _MARK, None)
        if original is not None:
            setattr(GenerationMixin, name, original)


def _wrap(name: str, wrapper: Callable) -> None:
    original = getattr(GenerationMixin, name, None)
    if original is None:
        raise RuntimeError(
            f"This release of transformers has no `GenerationMixin.{name}`; use `custom_generate` "
            "(`dspark_hf.custom_generate(drafter)`) and report the release."
        )
    if hasattr(original, _MARK):
        return
    wrapped = functools.wraps(original)(wrapper(original))
    wrapped.__signature__ = inspect.signature(original)  # generate reads it
    setattr(wrapped, _MARK, original)
    setattr(GenerationMixin, name, wrapped)


def _decoding(original: Callable) -> Callable:
    def assisted_decoding(self, *args, **kwargs):
        if is_drafter(kwargs.get("assistant_model")):
            return dspark_decode(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    return assisted_decoding


def _validation(original: Callable) -> Callable:
    def validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        drafter = generation_mode_kwargs.get("assistant_model")
        if not is_drafter(drafter):
            return original(self, generation_mode, generation_config, generation_mode_kwargs)
        _refuse(self, generation_mode, generation_config)
        check_call(self, drafter, generation_config, bool(generation_mode_kwargs.get("synced_gpus")))
        return None

    return validate_generation_mode


def _refuse(target: PreTrainedModel, generation_mode: GenerationMode, generation_config) -> None:
    """Refuse modes that cannot have a drafter, which Transformers would run without it or break in."""
    check_target(target, bool(generation_config.output_attentions))
    supported = getattr(target, "_supported_generation_modes", None)
    if supported is not None and GenerationMode.ASSISTED_GENERATION not in supported:
        raise ValueError(
            f"{type(target).__name__} generates in its own way ({', '.join(mode.value for mode in supported)} only), "
            "which leaves no place for a drafter. Call `generate` without `assistant_model`."
        )
    causes = {"num_beams": 1, "penalty_alpha": None, "dola_layers": None, "constraints": None, "force_words_ids": None}
    found = {name: getattr(generation_config, name, None) for name in causes}
    found = {name: value for name, value in found.items() if value not in (None, causes[name])}
    # DoLa would be dropped in favour of an assistant, with a warning.
    if generation_mode != GenerationMode.ASSISTED_GENERATION or "dola_layers" in found:
        raise ValueError(
            f"`assistant_model` is a DSpark drafter but these options ask for another kind of decoding: {found}. "
            "Leave them out (greedy decoding or sampling), or call `generate` without `assistant_model`."
        )


def custom_generate(drafter: Any, streamer: Any = None) -> Callable:
    """
    A decoding method for `target.generate(..., custom_generate=...)`, the same as the hook without the hook.

    Args:
        drafter (`DSparkDraftModel`): The draft model.
        streamer (`BaseStreamer`, *optional*): `generate` does not hand its own to such a method.
    """

    def dspark_generate(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
        _refuse(model, GenerationMode.ASSISTED_GENERATION, generation_config)
        return dspark_decode(
            model,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            streamer=streamer,
            assistant_model=drafter,
            **model_kwargs,
        )

    return dspark_generate
