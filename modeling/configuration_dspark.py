"""Configuration of a DSpark drafter: what the block looks like, which heads follow, how the family differs."""

import difflib

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN


MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn")
LAYER_TYPES = ("full_attention", "sliding_attention")
# RoPE variants whose frequencies do not depend on the length of the sequence.
ROPE_TYPES = ("default", "linear", "llama3", "proportional", "yarn")


class DSparkConfig(PreTrainedConfig):
    """
    Configuration of [`DSparkDraftModel`].

    Args:
        vocab_size (`int`): Vocabulary of the target.
        hidden_size (`int`): Width of the drafter; also of the target wherever embedding or head are borrowed from it.
        target_hidden_size (`int`, *optional*): Width of one tapped hidden state. Defaults to `hidden_size`.
        target_layer_ids (`list[int]`):
            Tapped layers of the target, increasing: id `i` is the output of layer `i`, -1 the embedding output.
            The last layer is not allowed (Transformers returns it after the final norm).
        num_target_layers (`int`): Number of decoder layers of the target.
        block_size (`int`): Draft tokens a round, at least 1.
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
        final_logit_softcapping (`float`, *optional*): `c * tanh(logits / c)` on the base logits.
        layer_types (`list[str]`, *optional*): `"full_attention"` or `"sliding_attention"` for each layer.
        sliding_window (`int`, *optional*): Window of the sliding layers, the current position included.
        rope_parameters (`dict`): `rope_type`, `rope_theta` and the variant's own values.
        num_anchors (`int`, *optional*): Blocks drawn from each training sequence; decoding does not use it.
        confidence_temperatures (`list[dict]`, *optional*):
            What `dspark calibrate` fitted, one entry a sampling temperature: `sampling_temperature` (0 is greedy
            decoding), `temperatures` (one a slot; the confidence is the sigmoid of the head's output over it) and
            `made_with` (prompts, sizes, calibration errors).

    Source: DSpark (arXiv 2607.05147) Section 3; field names as in DeepSpec.
    """

    model_type = "dspark"
    keys_to_ignore_at_inference = ["past_key_values"]

    vocab_size: int = 32000
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
    sliding_window: int | None = None
    target_layer_ids: list[int] | None = None
    num_target_layers: int | None = None
    block_size: int = 7
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
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        if self.rope_parameters is None:
            self.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
        super().__post_init__(**kwargs)

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
        self._validate_confidence_temperatures()

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
        at_least = dict.fromkeys(
            "vocab_size hidden_size target_hidden_size intermediate_size num_hidden_layers num_attention_heads "
            "num_key_value_heads head_dim block_size num_target_layers".split(),
            1,
        ) | {"markov_rank": 0}
        for name, least in at_least.items():
            value = getattr(self, name)
            if not _is_integer(value) or value < least:
                raise ValueError(f"`{name}` is {value!r}; it must be an integer of at least {least}.")
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
        if self.final_logit_softcapping is not None and not self.final_logit_softcapping > 0:
            raise ValueError(
                f"`final_logit_softcapping` is {self.final_logit_softcapping}; it must be above 0, or null for none."
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
        window = self.sliding_window
        if "sliding_attention" in self.layer_types and (not _is_integer(window) or window < 1):
            raise ValueError(
                f"`sliding_window` is {window!r} but `layer_types` has sliding layers; it must be an "
                "integer of at least 1."
            )

    def _validate_rope(self) -> None:
        rope_type = self.rope_parameters.get("rope_type", "default")
        if rope_type not in ROPE_TYPES:
            raise ValueError(f"`rope_parameters` has rope_type {rope_type!r}; supported are {', '.join(ROPE_TYPES)}.")
        if self.rope_parameters.get("rope_theta") is None:
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
        if self.head_dim % 2:
            raise ValueError(f"`head_dim` is {self.head_dim}; it must be even to be rotated.")

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
        if any(not _is_integer(tap) or not -1 <= tap < self.num_target_layers - 1 for tap in taps):
            raise ValueError(
                f"`target_layer_ids` is {taps}; each must be an integer from -1 (embedding output) to "
                f"{self.num_target_layers - 2} (the target has {self.num_target_layers} layers; the last one is "
                "only available after the final norm)."
            )
        if any(first >= second for first, second in zip(taps, taps[1:], strict=False)):
            raise ValueError(f"`target_layer_ids` is {taps}; the ids must be increasing.")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


__all__ = ["DSparkConfig"]
