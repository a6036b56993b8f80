"""Configuration of a DSpark drafter: what the block looks like, which heads follow, how the family differs."""

import difflib
import types
import typing
from typing import Any

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN


MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn")
LAYER_TYPES = ("full_attention", "sliding_attention")
# RoPE variants whose frequencies do not depend on the length of the sequence.
ROPE_TYPES = ("default", "linear", "llama3", "proportional", "yarn")
# What some of them cannot do without.
_ROPE_NEEDS = {
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
DTYPES = ("float32", "bfloat16", "float16", "float64")
# Far above any drafter: what exceeds these is a mistake, or a file meant to exhaust the memory.
_MOST_LAYERS = 1024
_LONGEST_BLOCK = 1024
_LARGEST_SIZE = 2**24
_LARGEST_NUMBER = 1e30
# How messages call the kinds of values.
_KINDS = {int: "an integer", float: "a number", bool: "true or false", str: "a string", dict: "an object"}


class DSparkConfig(PreTrainedConfig):
    """
    Configuration of [`DSparkDraftModel`].

    Args:
        vocab_size (`int`): Vocabulary of the target.
        draft_vocab_size (`int`, *optional*):
            Size of a reduced vocabulary: only tokens whose ids stand in the model's buffer `d2t` are drafted; outside
            the heads all tokens are the target's. Defaults to the whole vocabulary.
        hidden_size (`int`): Width of the drafter; also of the target wherever embedding or head are borrowed from it.
        target_hidden_size (`int`, *optional*): Width of one tapped hidden state. Defaults to `hidden_size`.
        target_layer_ids (`list[int]`):
            Tapped layers of the target, increasing: id `i` is the output of layer `i`, -1 the embedding output.
            The last layer is not allowed (Transformers returns it after the final norm).
        num_target_layers (`int`, *optional*):
            Number of decoder layers of the target. `None` if the checkpoint does not say; the taps are then compared
            with the target at first use.
        block_size (`int`): Draft tokens a round, at least 1.
        sample_from_anchor (`bool`):
            Whether the anchor's own slot gives the first draft: slot k then predicts the position after its own, and
            a block has `block_size` slots. Otherwise slot k predicts its own position, slot 0 gives no draft, and a
            block has one slot more.
        mask_token_id (`int`): Token that fills the slots after the anchor.
        markov_rank (`int`): Rank of the sequential head (Eq. 5); 0 for none.
        markov_head_type (`str`): `"vanilla"` (Eq. 5), `"gated"` or `"rnn"` (Eq. 6).
        enable_confidence_head (`bool`): Whether there is a confidence head (Eq. 7).
        confidence_head_with_markov (`bool`): Whether it also reads the Markov embedding of the previous token.
        owns_embedding, owns_lm_head (`bool`): Whether the checkpoint has its own; otherwise they are the target's.
        query_key_norm, value_norm (`bool`): RMS norm of queries and keys (with scale), of values (without).
        attention_k_eq_v (`bool`): Values are the key projection (before its norm and rotation).
        attention_scaling (`float`, *optional*): Factor of the attention scores. Defaults to `head_dim ** -0.5`.
        attention_bias, attention_output_bias, mlp_bias (`bool`): Biases of q/k/v, of the output, of the MLP.
        sandwich_norms (`bool`): Norms also after attention and MLP, before their residual additions.
        layer_scalar (`bool`): A scalar buffer that multiplies each layer's output.
        embedding_scale (`float`): Factor of the raw embeddings.
        output_multiplier (`float`): Factor of the base logits, before the softcap.
        final_logit_softcapping (`float`, *optional*): `c * tanh(logits / c)` on the base logits.
        layer_types (`list[str]`, *optional*): `"full_attention"` or `"sliding_attention"` for each layer.
        causal_layer_types (`list[str]`, *optional*):
            Those of the two in which a slot does not see the later slots of its block. Defaults to neither.
        sliding_window (`int`, *optional*): Window of the sliding layers, the current position included.
        window_from_anchor (`bool`):
            Whether the window is counted from the anchor: every slot then sees the last `sliding_window` positions
            before the anchor, and of its block what causality leaves.
        rope_parameters (`dict`): `rope_type`, `rope_theta` and the variant's own values.
        num_anchors (`int`, *optional*): Blocks drawn from each training sequence; decoding does not use it.
        confidence_temperatures (`list[dict]`, *optional*):
            What `dspark calibrate` fitted, one entry a sampling temperature: `sampling_temperature` (0 is greedy
            decoding), `temperatures` (one a draft; the confidence is the sigmoid of the head's output over it) and
            `made_with` (prompts, sizes, calibration errors).

    Source: DSpark (arXiv 2607.05147) Section 3; field names as in DeepSpec and, for those it lacks, as in speculators.
    """

    model_type = "dspark"
    keys_to_ignore_at_inference = ["past_key_values"]

    vocab_size: int = 32000
    draft_vocab_size: int | None = None
    hidden_size: int = 512
    target_hidden_size: int | None = None
    intermediate_size: int = 1408
    num_hidden_layers: int = 5
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    rope_parameters: dict | None = None
    layer_types: list[str] | None = None
    causal_layer_types: list[str] | None = None
    sliding_window: int | None = None
    window_from_anchor: bool = False
    target_layer_ids: list[int] | None = None
    num_target_layers: int | None = None
    block_size: int = 7
    sample_from_anchor: bool = True
    mask_token_id: int | None = None
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    owns_embedding: bool = False
    owns_lm_head: bool = False
    query_key_norm: bool = True
    value_norm: bool = False
    attention_k_eq_v: bool = False
    attention_scaling: float | None = None
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    sandwich_norms: bool = False
    layer_scalar: bool = False
    embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    num_anchors: int | None = None
    confidence_temperatures: list[dict] | None = None
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | list[int] | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs) -> None:
        for name in kwargs:
            close = difflib.get_close_matches(name, list(self.__class__.__annotations__), n=1, cutoff=0.8)
            if close:
                raise ValueError(f"DSparkConfig has no argument `{name}`; did you mean `{close[0]}`?")
        self._check_kinds()
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // max(self.num_attention_heads, 1)
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        if self.num_hidden_layers > _MOST_LAYERS:
            raise ValueError(f"`num_hidden_layers` is {self.num_hidden_layers}; it must be at most {_MOST_LAYERS}.")
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        if self.causal_layer_types is None:
            self.causal_layer_types = []
        if self.rope_parameters is None:
            self.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
        super().__post_init__(**kwargs)

    @property
    def block_slots(self) -> int:
        """Slots of a block: one a draft, and one more for an anchor that gives none."""
        return self.block_size + (not self.sample_from_anchor)

    def validate_drafter(self) -> None:
        """
        Check what the drafter itself can know of its configuration.

        Raises:
            `ValueError`: naming the field, its value and what is allowed.
        """
        self._validate_sizes()
        self._validate_taps()
        self._validate_heads()
        self._validate_layers()
        self._validate_rope()
        self._validate_numbers()
        self._validate_confidence_temperatures()

    def _check_kinds(self) -> None:
        """Each field against its annotation, so that a file cannot put a string where a size belongs."""
        for name, annotation in self.__class__.__annotations__.items():
            value = getattr(self, name)
            if not _is_of_kind(value, annotation):
                raise ValueError(f"`{name}` is {value!r}; it must be {_named(annotation)}.")
        plain = (str, int, float, list, type(None))
        for name, value in (self.rope_parameters or {}).items():
            if not isinstance(value, plain) or (isinstance(value, list) and not all(map(_is_number, value))):
                raise ValueError(
                    f"`rope_parameters` has {name!r} {value!r}; it must be a number, a string or numbers."
                )
        if self.dtype is not None and str(self.dtype).removeprefix("torch.") not in DTYPES:
            raise ValueError(f"`dtype` is {self.dtype!r}; it must be one of {', '.join(DTYPES)}.")

    def temperatures_for(self, sampling_temperature: float) -> list[float]:
        """
        The confidence temperatures of each slot for a call: those fitted for greedy decoding if it is greedy, else
        those fitted at the nearest temperature; 1 where nothing was fitted.

        Args:
            sampling_temperature (`float`): Of the call; 0 is greedy decoding.
        """
        fits = [
            fit
            for fit in self.confidence_temperatures or []
            if (fit["sampling_temperature"] > 0) == (sampling_temperature > 0)
        ]
        if not fits:
            return [1.0] * self.block_size
        nearest = min(fits, key=lambda fit: abs(fit["sampling_temperature"] - sampling_temperature))
        return [float(value) for value in nearest["temperatures"]]

    def _validate_sizes(self) -> None:
        sizes = (
            "vocab_size hidden_size target_hidden_size intermediate_size num_attention_heads num_key_value_heads "
            "head_dim"
        ).split()
        limits = dict.fromkeys(sizes, (1, _LARGEST_SIZE)) | {
            "num_hidden_layers": (1, _MOST_LAYERS),
            "block_size": (1, _LONGEST_BLOCK),
            "markov_rank": (0, _LARGEST_SIZE),
        }
        if self.num_target_layers is not None:
            limits["num_target_layers"] = (1, _LARGEST_SIZE)
        if self.draft_vocab_size is not None:
            limits["draft_vocab_size"] = (1, self.vocab_size)
        for name, (least, most) in limits.items():
            value = getattr(self, name)
            if not _is_integer(value) or not least <= value <= most:
                raise ValueError(
                    f"`{name}` is {value!r}; it must be an integer of at least {least} and at most {most}."
                )
        if self.num_attention_heads * self.head_dim > _LARGEST_SIZE:
            raise ValueError(
                f"`num_attention_heads` is {self.num_attention_heads} and `head_dim` {self.head_dim}; their product "
                f"must be at most {_LARGEST_SIZE}."
            )
        if not _is_integer(self.mask_token_id) or not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"`mask_token_id` is {self.mask_token_id!r}; it must be a token of the vocabulary, 0 to "
                f"{self.vocab_size - 1}: the one that filled the block in training."
            )
        if not (self.owns_embedding and self.owns_lm_head) and self.hidden_size != self.target_hidden_size:
            raise ValueError(
                f"`hidden_size` is {self.hidden_size} but `target_hidden_size` is {self.target_hidden_size}; they "
                "must be equal where embedding or head are the target's (`owns_embedding` or `owns_lm_head` false)."
            )

    def _validate_heads(self) -> None:
        if self.markov_rank > 0 and self.markov_head_type not in MARKOV_HEAD_TYPES:
            raise ValueError(
                f"`markov_head_type` is {self.markov_head_type!r}; it must be one of {', '.join(MARKOV_HEAD_TYPES)}."
            )
        if self.enable_confidence_head and self.confidence_head_with_markov and self.markov_rank == 0:
            raise ValueError(
                "`confidence_head_with_markov` is true but `markov_rank` is 0: there is no Markov embedding to read. "
                "Set `confidence_head_with_markov` to false or give the drafter a Markov head."
            )

    def _validate_layers(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"`num_attention_heads` ({self.num_attention_heads}) must be a multiple of `num_key_value_heads` "
                f"({self.num_key_value_heads})."
            )
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"`hidden_act` is {self.hidden_act!r}; it must be one of {', '.join(ACT2FN)}.")
        if len(self.layer_types) != self.num_hidden_layers or set(self.layer_types) - set(LAYER_TYPES):
            raise ValueError(
                f"`layer_types` is {self.layer_types}; it must name one of {', '.join(LAYER_TYPES)} for each of the "
                f"{self.num_hidden_layers} layers."
            )
        if set(self.causal_layer_types) - set(LAYER_TYPES):
            raise ValueError(
                f"`causal_layer_types` is {self.causal_layer_types}; it must name none, one or both of "
                f"{', '.join(LAYER_TYPES)}."
            )
        window = self.sliding_window
        if "sliding_attention" in self.layer_types and (not _is_integer(window) or window < 1):
            raise ValueError(
                f"`sliding_window` is {window!r} but `layer_types` has sliding layers; it must be an "
                "integer of at least 1."
            )

    def _validate_rope(self) -> None:
        rope_type = self.rope_parameters.get("rope_type", "default")
        if not isinstance(rope_type, str) or rope_type not in ROPE_TYPES:
            raise ValueError(f"`rope_parameters` has rope_type {rope_type!r}; supported are {', '.join(ROPE_TYPES)}.")
        theta = self.rope_parameters.get("rope_theta")
        if not _is_number(theta) or not 0 < theta <= _LARGEST_NUMBER:
            raise ValueError(
                f"`rope_parameters` is {self.rope_parameters}; it must hold `rope_theta`, the base the drafter was "
                "trained with."
            )
        partial = self.rope_parameters.get("partial_rotary_factor") or 1.0
        if partial != 1.0 and rope_type != "proportional":
            raise ValueError(
                f"`rope_parameters` has partial_rotary_factor {partial} with rope_type {rope_type!r}; only "
                "'proportional' rotates a part of each head, otherwise it must be 1."
            )
        for name in _ROPE_NEEDS.get(rope_type, ()):
            value = self.rope_parameters.get(name)
            if not _is_number(value) or not 0 < value <= _LARGEST_NUMBER:
                raise ValueError(
                    f"`rope_parameters` has {name} {value!r}; rope_type {rope_type!r} needs it as a number above 0."
                )
        if self.head_dim % 2:
            raise ValueError(f"`head_dim` is {self.head_dim}; it must be even to be rotated.")

    def _validate_numbers(self) -> None:
        positive = ("rms_norm_eps", "attention_scaling", "embedding_scale", "final_logit_softcapping")
        for name in (*positive, "output_multiplier", "initializer_range"):
            value = getattr(self, name)
            if value is None and name in ("attention_scaling", "final_logit_softcapping"):
                continue
            if not _is_number(value) or not abs(value) <= _LARGEST_NUMBER or (name in positive and value <= 0):
                wanted = "a finite number above 0" if name in positive else "a finite number"
                raise ValueError(f"`{name}` is {value!r}; it must be {wanted}.")

    def _validate_confidence_temperatures(self) -> None:
        for fit in self.confidence_temperatures or []:
            values = fit.get("temperatures") if isinstance(fit, dict) else None
            at = fit.get("sampling_temperature") if isinstance(fit, dict) else None
            sound = isinstance(values, list) and len(values) == self.block_size and _is_number(at) and at >= 0
            if not sound or not all(_is_number(value) and 1e-3 <= value <= 1e3 for value in values):
                raise ValueError(
                    f"`confidence_temperatures` has the entry {fit!r}; each needs a `sampling_temperature`, at least "
                    f"0, and `temperatures`, {self.block_size} numbers from 0.001 to 1000. Fit them with "
                    "`dspark calibrate`."
                )

    def _validate_taps(self) -> None:
        taps = self.target_layer_ids
        if not taps or not isinstance(taps, (list, tuple)):
            raise ValueError(
                f"`target_layer_ids` is {taps!r}; a drafter needs the target layers it was trained on (there is no "
                "default that fits: a wrong one drafts badly without any error)."
            )
        last = None if self.num_target_layers is None else self.num_target_layers - 2
        if any(not _is_integer(tap) or tap < -1 or (last is not None and tap > last) for tap in taps):
            raise ValueError(
                f"`target_layer_ids` is {taps}; each must be an integer from -1 (embedding output) to "
                f"{'the last layer but one' if last is None else last} (the target has "
                f"{self.num_target_layers or 'an unknown number of'} layers; the last one is only available after the "
                "final norm)."
            )
        if any(first >= second for first, second in zip(taps, taps[1:], strict=False)):
            raise ValueError(f"`target_layer_ids` is {taps}; the ids must be increasing.")
        if len(taps) > _MOST_LAYERS:
            raise ValueError(f"`target_layer_ids` names {len(taps)} layers; at most {_MOST_LAYERS} can be tapped.")


def _is_of_kind(value: Any, annotation: Any) -> bool:
    if isinstance(annotation, types.UnionType):
        return any(_is_of_kind(value, choice) for choice in typing.get_args(annotation))
    if annotation is types.NoneType:
        return value is None
    if typing.get_origin(annotation) is list:
        (kind,) = typing.get_args(annotation)
        return isinstance(value, (list, tuple)) and all(_is_of_kind(item, kind) for item in value)
    if annotation in (int, float):
        return _is_integer(value) if annotation is int else _is_number(value)
    return isinstance(value, annotation)


def _named(annotation: Any) -> str:
    """A kind of value in words."""
    if isinstance(annotation, types.UnionType):
        return " or ".join(map(_named, typing.get_args(annotation)))
    if typing.get_origin(annotation) is list:
        return f"a list of which each is {_named(typing.get_args(annotation)[0])}"
    return "null" if annotation is types.NoneType else _KINDS[annotation]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


__all__ = ["DSparkConfig"]
