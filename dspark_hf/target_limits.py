"""Targets that cannot be verified several tokens at a time: what is known of them before they run."""

from collections.abc import Iterator, Sequence

from transformers import Cache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import StaticLayer


_ADVICE = "Call `generate` without `assistant_model`."
# By model type, where nothing in the code says so. Most of the like are found by `_is_stateful` or by their cache.
_NOT_STEP_BY_STEP = {
    "cpmant": "lets tokens of one pass see those after them",
    "flaubert": "puts a mask token behind the text in each step",
    "prophetnet": "reads one token at a time",
    "xlm": "puts a mask token behind the text in each step",
}
# Their masks know of no window: the cache forgets what is too old, so it must be told token by token.
_WINDOW_IN_CACHE_ONLY = ("kyutai_speech_to_text", "moshi")
# What configs call the length of their table of positions or distances.
_POSITIONS = ("max_position_embeddings", "max_target_positions", "max_seq_len")
# Their masks of left-padded rows are right for one token at a time only.
_NO_PADDING = ("unlimited_ocr_text",)


def check_target(target: PreTrainedModel, keep_attentions: bool) -> None:
    """
    Check what a target's class and config tell.

    Args:
        target (`PreTrainedModel`): The verifying model.
        keep_attentions (`bool`): Whether attention weights are wanted.

    Raises:
        `ValueError`: if its text could not be that of plain `generate`.
    """
    name, config = type(target).__name__, target.config.get_text_config(decoder=True)
    if target.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder model; DSpark drafts for decoders only. {_ADVICE}")
    if target._is_stateful:
        raise ValueError(f"{name} has a recurrent state, which cannot forget rejected drafts. {_ADVICE}")
    if config.model_type in _NOT_STEP_BY_STEP:
        raise ValueError(f"{name} {_NOT_STEP_BY_STEP[config.model_type]}, so drafts cannot be verified. {_ADVICE}")
    if config.model_type == "doge" and config.is_moe:
        raise ValueError(
            f"{name} with `is_moe` routes each token by its neighbours, so drafts cannot be verified. {_ADVICE}"
        )
    # PEFT prepares the inputs of the model it wraps; only its virtual tokens change what a position is.
    preparer = getattr(target.prepare_inputs_for_generation, "__self__", target)
    peft_config = getattr(preparer, "active_peft_config", None)
    if preparer is not target and peft_config is not None and peft_config.is_prompt_learning:
        raise ValueError(
            f"{name} is wrapped by PEFT with virtual tokens ({type(peft_config).__name__}), which have no place in a "
            f"drafter's context. {_ADVICE}"
        )
    if keep_attentions and config.model_type in _WINDOW_IN_CACHE_ONLY:
        raise ValueError(f"{name} cannot return attention weights with a drafter. Leave `output_attentions` out.")


def check_prompts(target: PreTrainedModel, lengths: Sequence[int], padded: bool, new_tokens: int) -> None:
    """
    Check what depends on the prompts: mostly that no position is reached where the rotary embedding of a position
    depends on those after it.

    Args:
        target (`PreTrainedModel`): The verifying model.
        lengths (`Sequence[int]`): Of the prompts.
        padded (`bool`): Whether any of them is padded.
        new_tokens (`int`): Tokens that may come.

    Raises:
        `ValueError`: if the text could not be that of plain `generate`.
    """
    config = target.config.get_text_config(decoder=True)
    if padded and config.model_type in _NO_PADDING:
        raise ValueError(
            f"{type(target).__name__} cannot verify drafts of padded prompts. Give prompts of one length, or call "
            "`generate` without `assistant_model`."
        )
    last = max(lengths) + new_tokens - 1
    for rope_type, limit in _changing_ropes(config):
        # The long factors of longrope are constant again.
        if last > limit and not (rope_type == "longrope" and min(lengths) > limit):
            raise ValueError(
                f"{type(target).__name__} changes its rotary embeddings ({rope_type}) when the text grows past "
                f"{limit} "
                f"tokens, and {max(lengths)} + {new_tokens} could; drafts cannot be verified across that. Lower "
                "`max_new_tokens`, or call `generate` without `assistant_model`."
            )


def places_for(target: PreTrainedModel, cache: Cache) -> int | None:
    """
    How many tokens of a row can be run at all, so that drafts do not go where the text itself never may: the end of a
    table of positions, the room of a static cache. `None` for no limit.
    """
    config = target.config.get_text_config(decoder=True)
    limits = [layer.max_cache_len for layer in cache.layers if type(layer) is StaticLayer]
    if not getattr(config, "rope_parameters", None):
        limits.append(position_limit(config))
    return min((limit for limit in limits if limit), default=None)


def position_limit(config: PreTrainedConfig) -> int | None:
    """The positions that a target was made for, by its text config, whatever that calls them."""
    limits = [getattr(config, name, None) for name in _POSITIONS]
    return min((limit for limit in limits if limit), default=None)


def _changing_ropes(config: PreTrainedConfig) -> Iterator[tuple[str, int]]:
    """The kinds of rotary embedding that depend on the length of the text, and the length up to which they do not."""
    parameters = getattr(config, "rope_parameters", None) or {}
    for rope in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        rope_type = rope.get("rope_type")
        if rope_type == "longrope":
            yield rope_type, rope["original_max_position_embeddings"]
        elif rope_type == "dynamic":
            yield rope_type, config.max_position_embeddings
