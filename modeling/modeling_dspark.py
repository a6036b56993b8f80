"""
The DSpark drafter: a parallel backbone over an anchor and mask tokens, fed by the target's hidden states, then a
sequential head that ties the block's tokens together and a confidence head that says how far the block will survive.
"""

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import GENERATION_CONFIG_NAME

from .attention import grouped_attention
from .borrowing import HeadRows, call_module, embedding_scale
from .checkpoint_formats import find_reader
from .checkpoint_loading import (
    HUB_ARGUMENTS,
    check_draft_ids,
    check_loaded,
    check_tensors,
    converted_weights,
    find_file,
    make_config,
    read_raw_config,
    tensor_shapes,
    weight_files,
)
from .configuration_dspark import DSparkConfig
from .format_fields import Reading
from .slot_buffer import SlotBuffer


# What the Hub is told a drafter is.
TAGS = ("speculative-decoding", "draft-model", "dspark")


@dataclass
class BackbonePass:
    """
    Where the tokens of one backbone pass go: the new context of all rows, then the blocks of all rows.

    Attributes:
        positions (`torch.LongTensor` of shape `(tokens,)`): Their positions in the text.
        row_index (`torch.LongTensor` of shape `(tokens,)`, *optional*): Their rows; `None` for a single row.
        slots (`torch.LongTensor` of shape `(tokens,)` or `slice`): Their slots in the layers' buffers.
        used (`int`): Slots in use afterwards.
        masks (`dict[str, torch.Tensor | None]`): For each layer type, `(rows, 1, 1 or slots a row, used)`: True where
            a block's slot sees a key.
    """

    positions: torch.Tensor
    row_index: torch.Tensor | None
    slots: torch.Tensor | slice
    used: int
    masks: dict[str, torch.Tensor | None]


def visible(
    config: DSparkConfig, layer_type: str, keys: torch.Tensor, queries: torch.Tensor, anchors: torch.Tensor
) -> torch.Tensor:
    """
    Which keys a layer lets the slots of a block see, of the context before the anchor and the block itself.

    Args:
        config ([`DSparkConfig`]): Of the drafter.
        layer_type (`str`): The layer's.
        keys, queries, anchors (`torch.Tensor`, shapes that broadcast): Positions.

    Returns:
        `torch.BoolTensor`: Of the shape they broadcast to.
    """
    mask = keys <= queries if layer_type in config.causal_layer_types else keys < anchors + config.block_slots
    if layer_type == "sliding_attention":
        first = anchors if config.window_from_anchor else queries + 1
        mask = mask & (keys >= first - config.sliding_window)
    return mask


class DraftContext:
    """
    What a drafter remembers of the rows it drafts for: the context's keys and values of each layer, computed once for
    each accepted token.

    Args:
        config ([`DSparkConfig`]): Of the drafter.
        starts (`Sequence[int]`): For each row the position of its first remembered token: 0, or the length of a
            prefix whose hidden states are not known (a cache handed in by the user).
        capacity (`int`): Slots a row to begin with.
    """

    def __init__(self, config: DSparkConfig, starts: Sequence[int], capacity: int = 128):
        self.config = config
        self.starts = list(starts)
        self.lengths = [0] * len(self.starts)
        self.layers = [SlotBuffer(len(self.starts), capacity) for _ in range(config.num_hidden_layers)]

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keep the rows whose indices are given, in that order."""
        self.starts = [self.starts[row] for row in rows]
        self.lengths = [self.lengths[row] for row in rows]
        for layer in self.layers:
            device = None if layer.keys is None else layer.keys.device
            layer.keep_rows(torch.tensor(rows, dtype=torch.long, device=device))

    def plan(self, context_lengths: Sequence[int], block_slots: int, device: torch.device) -> BackbonePass:
        """Lay out a pass that appends `context_lengths` tokens to the rows and runs a block behind each."""
        held, starts = self.lengths, self.starts
        totals = [before + new for before, new in zip(held, context_lengths, strict=True)]
        used = max(totals) + block_slots
        if len(totals) == 1:
            slots = torch.arange(held[0], used, device=device)
            row_index, positions, written = None, slots + starts[0], slice(held[0], used)
        else:
            token_rows, token_slots = [], []
            for row, (before, total) in enumerate(zip(held, totals, strict=True)):
                token_slots.extend(range(before, total))
                token_rows.extend([row] * (total - before))
            for row, total in enumerate(totals):
                token_slots.extend(range(total, total + block_slots))
                token_rows.extend([row] * block_slots)
            row_index, written, row_starts = (
                torch.tensor(values, device=device) for values in (token_rows, token_slots, starts)
            )
            positions = written + row_starts[row_index]
        masks: dict[str, torch.Tensor | None] = {}
        for layer_type in set(self.config.layer_types):
            masks[layer_type] = self._mask(layer_type, totals, used, block_slots, device)
        return BackbonePass(positions, row_index, written, used, masks)

    def advance(self, context_lengths: Sequence[int]) -> None:
        """Remember the tokens that a pass appended; its blocks are forgotten."""
        self.lengths = [held + new for held, new in zip(self.lengths, context_lengths, strict=True)]

    def drafts(self, block: torch.Tensor) -> torch.Tensor:
        """The slots of each row's block, in the second dimension, that are drafts."""
        return block[:, self.config.block_slots - self.config.block_size :]

    def _mask(
        self, layer_type: str, totals: Sequence[int], used: int, block_slots: int, device: torch.device
    ) -> torch.Tensor | None:
        sliding = layer_type == "sliding_attention" and used > self.config.sliding_window
        causal = layer_type in self.config.causal_layer_types
        if not sliding and not causal and min(totals) == max(totals):
            return None
        keys = torch.arange(used, device=device)
        anchors = torch.tensor(totals, device=device)[:, None, None, None]
        if not sliding and not causal:
            return keys < anchors + block_slots
        queries = anchors + torch.arange(block_slots, device=device)[:, None]
        return visible(self.config, layer_type, keys, queries, anchors)


@dataclass
class DraftOutput:
    """
    One drafted block a row.

    Attributes:
        tokens (`torch.LongTensor` of shape `(rows, block_size)`): Draft tokens.
        confidence_logits (`torch.Tensor` of shape `(rows, block_size)`, *optional*): The confidence head's output.
    """

    tokens: torch.LongTensor
    confidence_logits: torch.Tensor | None


class LastCall(threading.local):
    """Statistics of each thread's last call; they go with the thread, and a copy of the drafter starts without."""

    stats: Any | None = None

    def __deepcopy__(self, memo: dict) -> "LastCall":
        return LastCall()

    def __reduce__(self) -> tuple:
        return LastCall, ()


class DSparkRMSNorm(nn.Module):
    """Root mean square norm, in float32 inside."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        # Under autocast, queries and keys are of another dtype than the weights.
        weight = self.weight.to(hidden_states.dtype)
        return nn.functional.rms_norm(hidden_states, weight.shape, weight, self.eps)


class DSparkRotaryEmbedding:
    """
    Cosines and sines of positions. Not a module: its frequencies stay float32 whatever dtype the model is cast to.

    Args:
        config ([`DSparkConfig`]): Of the drafter.
    """

    def __init__(self, config: DSparkConfig):
        self.config = config
        self._frequencies: dict[torch.device, tuple[torch.Tensor, float]] = {}

    def frequencies(self, device: torch.device) -> tuple[torch.Tensor, float]:
        """Inverse frequencies, `torch.Tensor` of shape `(head_dim / 2,)` in float32, and the factor of cos and sin."""
        if device not in self._frequencies:
            rope_type = self.config.rope_parameters.get("rope_type", "default")
            with torch.device("cpu"):
                if rope_type == "default":
                    exponents = torch.arange(0, self.config.head_dim, 2, dtype=torch.float32) / self.config.head_dim
                    inverse, factor = 1.0 / self.config.rope_parameters["rope_theta"] ** exponents, 1.0
                else:
                    inverse, factor = ROPE_INIT_FUNCTIONS[rope_type](self.config, torch.device("cpu"))
            self._frequencies[device] = (inverse.to(device=device, dtype=torch.float32), factor)
        return self._frequencies[device]

    def __call__(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cos and sin of shape `(tokens, 1, head_dim)` for positions of shape `(tokens,)`."""
        inverse, factor = self.frequencies(positions.device)
        angles = positions[:, None].float() * inverse
        angles = torch.cat([angles, angles], dim=-1)[:, None, :]
        return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of `(tokens, heads, head_dim)` by the tokens' cos and sin."""
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat([-second, first], dim=-1) * sin


class DSparkAttention(nn.Module):
    """Attention of the block's slots over the context and the block itself (Eq. 3)."""

    def __init__(self, config: DSparkConfig, layer_type: str):
        super().__init__()
        self.layer_type = layer_type
        self.head_dim = config.head_dim
        self.scaling = config.attention_scaling if config.attention_scaling is not None else config.head_dim**-0.5
        self.keys_are_values = config.attention_k_eq_v
        self.value_norm_eps = config.rms_norm_eps if config.value_norm else None
        width = config.hidden_size
        query_width = config.num_attention_heads * config.head_dim
        key_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, query_width, bias=config.attention_bias)
        self.k_proj = nn.Linear(width, key_width, bias=config.attention_bias)
        if not self.keys_are_values:
            self.v_proj = nn.Linear(width, key_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_width, width, bias=config.attention_output_bias)
        if config.query_key_norm:
            self.q_norm = DSparkRMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = DSparkRMSNorm(config.head_dim, config.rms_norm_eps)
        else:
            self.q_norm = self.k_norm = nn.Identity()

    def forward(
        self,
        block: torch.Tensor,
        context: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        buffer: SlotBuffer,
        step: BackbonePass,
    ) -> torch.Tensor:
        rows, block_size, _ = block.shape
        slots = block.flatten(0, 1)  # (rows * block_size, hidden)
        tokens = torch.cat([context, slots]) if len(context) else slots
        key = self.k_proj(tokens).view(len(tokens), -1, self.head_dim)
        value = key if self.keys_are_values else self.v_proj(tokens).view(len(tokens), -1, self.head_dim)
        if self.value_norm_eps is not None:
            value = nn.functional.rms_norm(value, (self.head_dim,), None, self.value_norm_eps)
        cos, sin = rotary
        key = rotate(self.k_norm(key), cos, sin)
        buffer.write(key.transpose(0, 1), value.transpose(0, 1), step.row_index, step.slots, step.used)

        query = self.q_norm(self.q_proj(slots).view(len(slots), -1, self.head_dim))
        query = rotate(query, cos[-len(slots) :], sin[-len(slots) :])
        query = query.view(rows, block_size, -1, self.head_dim).transpose(1, 2)
        output = grouped_attention(query, *buffer.read(step.used), step.masks[self.layer_type], self.scaling)
        return self.o_proj(output.transpose(1, 2).reshape(rows, block_size, -1))


class DSparkMLP(nn.Module):
    """Gated MLP."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


class DSparkLayer(GradientCheckpointingLayer):
    """One layer of the backbone."""

    def __init__(self, config: DSparkConfig, layer_type: str):
        super().__init__()
        self.self_attn = DSparkAttention(config, layer_type)
        self.mlp = DSparkMLP(config)
        self.input_layernorm = DSparkRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = DSparkRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.sandwich = config.sandwich_norms
        if self.sandwich:
            self.pre_feedforward_layernorm = DSparkRMSNorm(config.hidden_size, config.rms_norm_eps)
            self.post_feedforward_layernorm = DSparkRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layer_scalar = nn.Buffer(torch.ones(1)) if config.layer_scalar else None

    def forward(self, block: torch.Tensor, **inputs) -> torch.Tensor:
        attended = self.self_attn(self.input_layernorm(block), **inputs)
        if self.sandwich:
            block = block + self.post_attention_layernorm(attended)
            block = block + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(block)))
        else:
            block = block + attended
            block = block + self.mlp(self.post_attention_layernorm(block))
        return block if self.layer_scalar is None else block * self.layer_scalar


class DSparkMarkovHead(nn.Module):
    """
    The sequential correction added to the base logits: low-rank bigram bias (Eq. 5), its gated form, or the recurrent
    form (Eq. 6).
    """

    def __init__(self, config: DSparkConfig):
        super().__init__()
        rank, width = config.markov_rank, config.hidden_size
        self.head_type = config.markov_head_type
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size or config.vocab_size, bias=False)
        if self.head_type == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
        elif self.head_type == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    def initial_state(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """The recurrent state s_0 = 0 of shape `(rows, rank)`, or `None` for the heads without one."""
        if self.head_type != "rnn":
            return None
        return hidden_states.new_zeros(len(hidden_states), self.markov_w1.embedding_dim)

    def features(
        self, previous: torch.LongTensor, hidden_states: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        What `markov_w2` turns into the bias of one slot.

        Args:
            previous (`torch.LongTensor` of shape `(rows,)`): The token before the slot's.
            hidden_states (`torch.Tensor` of shape `(rows, hidden_size)`): The backbone's output at the slot.
            state (`torch.Tensor` of shape `(rows, rank)`, *optional*): The recurrent state.

        Returns:
            Features of shape `(rows, rank)` and the next state.
        """
        embedding = self.markov_w1(previous)
        if self.head_type == "vanilla":
            return embedding, None
        if self.head_type == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat([hidden_states, embedding], dim=-1))) * embedding, None
        joint = self.joint_proj(torch.cat([state, embedding, hidden_states], dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)

    def block_features(self, previous: torch.LongTensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """
        [`features`] of whole blocks whose tokens are known, as in training.

        Args:
            previous (`torch.LongTensor` of shape `(rows, block_size)`): The token before each slot's.
            hidden_states (`torch.Tensor` of shape `(rows, block_size, hidden_size)`): The backbone's output.

        Returns:
            `torch.Tensor` of shape `(rows, block_size, rank)`.
        """
        state, features = self.initial_state(hidden_states[:, 0]), []
        for slot in range(previous.shape[1]):
            found, state = self.features(previous[:, slot], hidden_states[:, slot], state)
            features.append(found)
        return torch.stack(features, dim=1)


class DSparkConfidenceHead(nn.Module):
    """Logit of the probability that a slot's token is accepted, given that all before it were (Eq. 7)."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        self.proj = nn.Linear(config.hidden_size + (config.markov_rank if self.with_markov else 0), 1)

    def forward(self, hidden_states: torch.Tensor, markov_embeds: torch.Tensor | None) -> torch.Tensor:
        """Logits of shape `(rows, block_size)` from `(rows, block_size, ...)`."""
        if self.with_markov:
            hidden_states = torch.cat([hidden_states, markov_embeds], dim=-1)
        return self.proj(hidden_states).squeeze(-1)


class DSparkDraftModel(PreTrainedModel):
    """
    A DSpark drafter. Hand it to a target's `generate` as `assistant_model`.

    The target is never part of the module tree: embedding and head, where the checkpoint has none of its own, are
    passed in by whoever drafts.

    Source: DSpark (arXiv 2607.05147) Section 3.1; parameter names as in DeepSpec, and `d2t` with ids, not offsets.
    """

    config_class = DSparkConfig
    base_model_prefix = "model"
    main_input_name = "noise_embeds"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DSparkLayer"]
    _supports_sdpa = True
    # What `dspark_hf` looks for on an assistant, wrapped, compiled or loaded as remote code as it may be.
    is_dspark_drafter = True

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        config.validate_drafter()
        drafted = config.draft_vocab_size or config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if config.owns_embedding else None
        self.lm_head = nn.Linear(config.hidden_size, drafted, bias=False) if config.owns_lm_head else None
        # The target ids of a reduced vocabulary, (draft_vocab_size,); the first ones until they are set.
        self.d2t = nn.Buffer(torch.arange(drafted)) if config.draft_vocab_size is not None else None
        self.fc = nn.Linear(len(config.target_layer_ids) * config.target_hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = DSparkRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList([DSparkLayer(config, layer_type) for layer_type in config.layer_types])
        self.norm = DSparkRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.markov_head = DSparkMarkovHead(config) if config.markov_rank > 0 else None
        self.confidence_head = DSparkConfidenceHead(config) if config.enable_confidence_head else None
        self.rotary = DSparkRotaryEmbedding(config)
        self.head_rows = HeadRows()
        # Defaults for drafting only: nothing of the model's config belongs in it.
        self.generation_config = GenerationConfig()
        self.last_call = LastCall()
        self.model_tags = list(TAGS)  # `push_to_hub` adds to it, so each has its own
        self.post_init()

    def get_input_embeddings(self) -> nn.Module | None:
        """The drafter's own embedding, or `None` where it borrows the target's."""
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the drafter's own embedding."""
        self.embed_tokens = value

    def get_output_embeddings(self) -> nn.Module | None:
        """The drafter's own head, or `None` where it borrows the target's."""
        return self.lm_head

    def set_draft_vocabulary(self, token_ids: torch.Tensor) -> None:
        """
        Say which tokens a new drafter with a reduced vocabulary drafts, before it is trained.

        Args:
            token_ids (`torch.Tensor` of shape `(draft_vocab_size,)`): Target ids, increasing.

        Raises:
            `ValueError`: if they are not, or the drafter has the target's whole vocabulary.
        """
        if self.d2t is None:
            raise ValueError(
                "`draft_vocab_size` is null: this drafter drafts every token. Set it in the config first."
            )
        ids = check_draft_ids(torch.as_tensor(token_ids), self.config.vocab_size, "`token_ids`")
        if len(ids) != len(self.d2t):
            raise ValueError(f"`token_ids` has {len(ids)} tokens; `draft_vocab_size` is {len(self.d2t)}.")
        self.d2t.copy_(ids)

    # Drafting

    def block_tokens(self, anchors: torch.LongTensor) -> torch.LongTensor:
        """
        What the slots of a block hold: the anchor, then mask tokens.

        Args:
            anchors (`torch.LongTensor` of shape `(rows,)`): The token each block starts from.

        Returns:
            `torch.LongTensor` of shape `(rows, block_slots)`.
        """
        block = anchors.new_full((len(anchors), self.config.block_slots), self.config.mask_token_id)
        block[:, 0] = anchors
        return block

    def embed(self, token_ids: torch.LongTensor, target_embedding: nn.Module | None = None) -> torch.Tensor:
        """
        Embed tokens with the drafter's own embedding or the target's.

        Args:
            token_ids (`torch.LongTensor` of any shape): Tokens.
            target_embedding (`nn.Module`, *optional*): The target's input embedding, called as a module (a quantised
                or sharded one has no usable weight). Needed if the checkpoint has no embedding.

        Returns:
            `torch.Tensor`: `noise_embeds`, in the drafter's dtype and on its device.

        Raises:
            `ValueError`: if neither has an embedding.
        """
        if self.embed_tokens is None and target_embedding is None:
            raise ValueError("This drafter has no embedding of its own; pass `target_embedding`, the target's.")
        embedding = self.embed_tokens if self.embed_tokens is not None else target_embedding
        embeds = call_module(embedding, token_ids)
        # A wrapper such as Gemma's has multiplied by a scale already, which the drafter's replaces. Both are rounded
        # to the embeddings' dtype, as Gemma does, so equal scales leave the wrapper's output untouched.
        wanted, applied = (
            torch.tensor(float(scale), dtype=embeds.dtype, device="cpu").item()
            for scale in (self.config.embedding_scale, embedding_scale(embedding))
        )
        if wanted != applied:
            embeds = embeds * (wanted / applied)
        return embeds.to(self.fc.weight.device, self.fc.weight.dtype)

    def base_logits(self, hidden_states: torch.Tensor, target_lm_head: nn.Module | None = None) -> torch.Tensor:
        """
        Logits U_k of the parallel backbone, before the sequential correction.

        Args:
            hidden_states (`torch.Tensor` of shape `(..., hidden_size)`): The backbone's output.
            target_lm_head (`nn.Module`, *optional*): The target's head; needed if the checkpoint has none.

        Returns:
            `torch.Tensor` of shape `(..., vocab_size)`, or `(..., draft_vocab_size)` if the vocabulary is reduced.

        Raises:
            `ValueError`: if neither has a head.
        """
        if self.lm_head is None and target_lm_head is None:
            raise ValueError("This drafter has no head of its own; pass `target_lm_head`, the target's.")
        if self.lm_head is not None:
            logits = call_module(self.lm_head, hidden_states)
        elif self.d2t is not None:
            logits = self.head_rows.logits(target_lm_head, hidden_states, self.d2t)
        else:
            logits = call_module(target_lm_head, hidden_states)
        logits = logits.to(hidden_states.device)
        if (multiplier := self.config.output_multiplier) != 1.0:
            logits = logits * multiplier
        if (cap := self.config.final_logit_softcapping) is not None:
            logits = cap * torch.tanh(logits / cap)
        return logits

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        context_lengths: Sequence[int],
        context: DraftContext,
        objective: Callable[[torch.Tensor], Any] | None = None,
    ) -> Any:
        """
        One pass of the parallel backbone: append the new context's keys and values, then run the blocks over it.

        Args:
            noise_embeds (`torch.Tensor` of shape `(rows, block_slots, hidden_size)`):
                Embeddings of each row's anchor followed by mask tokens.
            context_hidden_states (`torch.Tensor` of shape `(sum(context_lengths), taps * target_hidden_size)`):
                The target's tapped hidden states at positions accepted since the last pass, row after row.
            context_lengths (`Sequence[int]`): How many of them belong to each row.
            context ([`DraftContext`]): The rows' remembered context. Afterwards it holds every position strictly
                before the rows' anchors.
            objective (`Callable`, *optional*): Called with the output; what it returns is returned instead. Training
                computes its loss in here, so that wrappers (DDP, FSDP) see the heads at work inside `forward`.

        Returns:
            `torch.Tensor` of shape `(rows, block_size, hidden_size)`: normed output h_k of each draft's slot.

        Source: DSpark Eq. 2 and 3.
        """
        assert sum(context_lengths) == len(context_hidden_states)
        block_slots = noise_embeds.shape[1]
        features = self.hidden_norm(self.fc(context_hidden_states.to(noise_embeds)))
        step = context.plan(context_lengths, block_slots, noise_embeds.device)
        rotary = self.rotary(step.positions, noise_embeds.dtype)
        block = noise_embeds
        for layer, buffer in zip(self.layers, context.layers, strict=True):
            block = layer(block, context=features, rotary=rotary, buffer=buffer, step=step)
        context.advance(context_lengths)
        hidden_states = self.norm(context.drafts(block))
        return hidden_states if objective is None else objective(hidden_states)

    def draft(
        self,
        hidden_states: torch.Tensor,
        anchors: torch.LongTensor,
        target_lm_head: nn.Module | None = None,
        select: Callable[[int, torch.Tensor], torch.LongTensor] | None = None,
        slots: int | None = None,
    ) -> DraftOutput:
        """
        Draw a block left to right: each token's logits are the base logits plus the sequential head's correction for
        the tokens drawn before it (Eq. 4).

        Args:
            hidden_states (`torch.Tensor` of shape `(rows, block_size, hidden_size)`): Output of the backbone.
            anchors (`torch.LongTensor` of shape `(rows,)`): The token each block starts from.
            target_lm_head (`nn.Module`, *optional*): The target's head; needed if the checkpoint has none.
            select (`Callable`, *optional*): Called with the slot and its logits of shape `(rows, vocab_size)`, or
                `(rows, draft_vocab_size)` for the tokens `d2t` of a reduced vocabulary, returns the drawn tokens (the
                target's, as all tokens are) of shape `(rows,)`. Defaults to the argmax.
            slots (`int`, *optional*): How many of the block's slots are drawn, from the first on. Defaults to all.

        Returns:
            [`DraftOutput`].
        """
        select = select or self._most_likely
        hidden_states = hidden_states[:, :slots]
        base = self.base_logits(hidden_states, target_lm_head)
        head = self.markov_head
        state = head.initial_state(hidden_states) if head is not None else None
        previous, tokens = anchors, []
        for slot in range(hidden_states.shape[1]):
            logits = base[:, slot]
            if head is not None:
                features, state = head.features(previous, hidden_states[:, slot], state)
                logits = logits + head.markov_w2(features)
            previous = select(slot, logits)
            tokens.append(previous)
        tokens = torch.stack(tokens, dim=1)
        return DraftOutput(tokens, self.confidence_logits(hidden_states, anchors, tokens))

    def _most_likely(self, slot: int, logits: torch.Tensor) -> torch.LongTensor:
        chosen = logits.argmax(dim=-1)
        return chosen if self.d2t is None else self.d2t[chosen]

    def confidence_logits(
        self, hidden_states: torch.Tensor, anchors: torch.LongTensor, tokens: torch.LongTensor
    ) -> torch.Tensor | None:
        """
        The confidence head's output for whole blocks (Eq. 7).

        Args:
            hidden_states (`torch.Tensor` of shape `(rows, block_size, hidden_size)`): Output of the backbone.
            anchors (`torch.LongTensor` of shape `(rows,)`): The token each block starts from.
            tokens (`torch.LongTensor` of shape `(rows, block_size)`): The block's tokens; the last one is not read.

        Returns:
            `torch.Tensor` of shape `(rows, block_size)`, or `None` without a confidence head.
        """
        if self.confidence_head is None:
            return None
        embeds = None
        if self.confidence_head.with_markov:
            # Slot k reads the token before it, so everything in its confidence is known before token k is drawn.
            embeds = self.markov_head.markov_w1(torch.cat([anchors[:, None], tokens[:, :-1]], dim=1))
        return self.confidence_head(hidden_states, embeds)

    # What transformers asks of a model

    @property
    def speculative_stats(self) -> Any | None:
        """Statistics of this thread's last `generate` with this drafter, or `None`."""
        return self.last_call.stats

    @classmethod
    def can_generate(cls) -> bool:
        """True, so that transformers keeps and saves a `generation_config`: the drafter's defaults for drafting."""
        return True

    def generate(self, *args: Any, **kwargs: Any) -> None:
        """Not possible: a drafter has no text of its own."""
        raise ValueError(
            "A DSpark drafter cannot generate alone: it needs the hidden states of its target. Load the target and "
            "call `target.generate(**inputs, assistant_model=drafter)` after `import dspark_hf`."
        )

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *args: Any,
        config: DSparkConfig | None = None,
        generation_config: GenerationConfig | None = None,
        **kwargs: Any,
    ) -> "DSparkDraftModel":
        """
        Load a drafter from a folder or the Hub: one saved by this library, or by DeepSpec, NeMo AutoModel, z-lab
        DFlash, speculators, SpecForge or NVIDIA ModelOpt. Strictly: each tensor is used, each parameter filled.

        Args:
            pretrained_model_name_or_path (`str` or `Path`): Folder or Hub id.
            config ([`DSparkConfig`], *optional*): Used in place of the folder's; the tensors are called as ours are.
            generation_config (`GenerationConfig`, *optional*): Used in place of the folder's.
            kwargs: As for `PreTrainedModel.from_pretrained`; fields of [`DSparkConfig`] override the folder's.

        Raises:
            `ValueError`: if the format is not readable, the config is wrong, a tensor is missing, left over or of
                another shape, or holds values that are not finite.
            `OSError`: if there is no config or no safetensors file.
        """
        path = str(pretrained_model_name_or_path)
        where = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
        overrides = {name: kwargs.pop(name) for name in list(kwargs) if name in DSparkConfig.__annotations__}
        want_info = kwargs.pop("output_loading_info", False)
        if kwargs.pop("use_safetensors", None) is False:
            raise ValueError("`use_safetensors` is False; only safetensors weights are read.")
        if config is None:
            raw = read_raw_config(pretrained_model_name_or_path, where)
            read = find_reader(raw)
        elif getattr(config, "model_type", None) != cls.config_class.model_type:
            raise ValueError(
                f"`config` is a {type(config).__name__}; pass a DSparkConfig, or none to read the folder's."
            )
        files = weight_files(pretrained_model_name_or_path, where, kwargs.get("variant"))
        shapes = tensor_shapes(files)
        reading = Reading({}) if config is not None else read(raw, set(shapes))
        if config is None:
            config = make_config(cls.config_class, reading.fields)
        config = copy.deepcopy(config)
        for name, value in overrides.items():
            setattr(config, name, value)
        config.validate_drafter()
        check_tensors(cls, config, reading, shapes, path)
        kwargs.pop("force_download", None)  # reading the shapes has fetched the files afresh
        source, weights = pretrained_model_name_or_path, None
        if reading.renamed or "d2t" in shapes:
            source, weights = None, converted_weights(files, reading, config, path)
        model, info = super().from_pretrained(
            source,
            *args,
            config=config,
            state_dict=weights,
            use_safetensors=True,
            output_loading_info=True,
            **kwargs,
        )
        model.name_or_path = model.config.name_or_path = path
        check_loaded(model, info, path)
        if generation_config is not None:
            model.generation_config = generation_config
        elif find_file(pretrained_model_name_or_path, GENERATION_CONFIG_NAME, where) is not None:
            model.generation_config = GenerationConfig.from_pretrained(pretrained_model_name_or_path, **where)
        return (model, info) if want_info else model


__all__ = ["DSparkDraftModel"]
