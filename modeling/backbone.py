"""The layers of the drafter's backbone: attention of a block's slots over the context and the block itself."""

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .attention import grouped_attention
from .configuration_dspark import DSparkConfig
from .draft_context import BackbonePass
from .slot_buffer import SlotBuffer


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
