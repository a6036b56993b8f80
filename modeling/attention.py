"""Attention over keys and values that stay grouped: shared by the drafter and by the target's flattened stream."""

import torch
from torch import nn


def grouped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Scaled dot product attention without expanded copies of grouped keys and values: the query heads that share a
    key head are folded into the query's length.

    Args:
        query (`torch.Tensor` of shape `(rows, heads, query_length, head_dim)`): Queries.
        key, value (`torch.Tensor` of shape `(rows, key_heads, key_length, head_dim)`): Grouped keys and values.
        mask (`torch.Tensor` of shape `(rows or 1, 1, query_length or 1, key_length)`, *optional*): True where a
            query sees a key; `None` if every query sees every key.
        scaling (`float`): Factor of the scores.
        softcap (`float`, *optional*): `softcap * tanh(scores / softcap)` before the mask.
        sinks (`torch.Tensor` of shape `(heads,)`, *optional*): One more score a head that takes weight and gives none.

    Returns:
        `torch.Tensor` of shape `(rows, heads, query_length, value_dim)`.
    """
    rows, heads, query_length, head_dim = query.shape
    groups = heads // key.shape[1]
    if mask is not None and groups > 1 and mask.shape[2] > 1:
        mask = mask.repeat(1, 1, groups, 1)
    query = query.reshape(rows, heads // groups, groups * query_length, head_dim)
    if softcap is None and sinks is None:
        output = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
        return output.reshape(rows, heads, query_length, value.shape[-1])
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.float()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        sink_scores = sinks.float().reshape(1, -1, groups, 1).repeat_interleave(query_length, dim=2)
        scores = torch.cat([scores, sink_scores.expand(rows, -1, -1, -1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[2]].to(value.dtype)
    return torch.matmul(weights, value).reshape(rows, heads, query_length, value.shape[-1])
