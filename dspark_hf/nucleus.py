"""Top-p filtering without a sort of the whole vocabulary, where that gives the same tokens to the last one."""

import torch
from transformers import TopPLogitsWarper


# Most likely tokens that are looked at first, and at most; a larger nucleus is left to the sort.
_FIRST_LOOK, _LAST_LOOK = 64, 512
# Tokens of a chunk whose highest probability is found before those of its tokens.
_CHUNK = 64


def filter_nucleus(processor: TopPLogitsWarper, scores: torch.Tensor, looked_at: int = _FIRST_LOOK) -> torch.Tensor:
    """
    What the processor makes of scores, from the tokens with the highest probability only: a sort of the vocabulary is
    slow on a CPU, and a round has one for each draft and one for each token verified.

    The processor keeps a token if its probability and those of all less likely ones sum to more than 1 - top_p, added
    up in float32 from the least likely on. Rows where that sum comes so close to the limit that rounding decides, or
    where equal probabilities stand on both sides of it, are left to the processor.

    Args:
        processor (`TopPLogitsWarper`): Transformers' own.
        scores (`torch.Tensor` of shape `(positions, vocab_size)`): In float32 or better, on a CPU.
        looked_at (`int`): Most likely tokens of each row that are looked at first.

    Returns:
        `torch.Tensor` of shape `(positions, vocab_size)`: equal to `processor(None, scores)`.
    """
    looked_at = min(looked_at, scores.shape[-1])
    if looked_at <= processor.min_tokens_to_keep:
        return processor(None, scores)
    limit = 1.0 - processor.top_p
    probs = scores.softmax(dim=-1)
    highest = _highest(probs, looked_at)
    # What a token and all less likely ones sum to, (positions, looked_at).
    tails = probs.sum(dim=-1, keepdim=True, dtype=torch.float64) - highest.double().cumsum(dim=-1) + highest
    kept = (tails > limit).sum(dim=-1, keepdim=True).clamp(min=processor.min_tokens_to_keep)
    # n numbers added up in any order with unit roundoff eps / 2 are off by n * eps / 2 of their sum at most: once in
    # the sum itself, once in the denominator of either softmax.
    rounding = 2.0 * torch.finfo(scores.dtype).eps * limit * (probs > 0).sum(dim=-1)
    last_in = highest.gather(1, kept - 1)
    first_out = highest.gather(1, kept.clamp(max=looked_at - 1))
    sure = ((tails - limit).abs().amin(dim=-1) > rounding) & (last_in > first_out).squeeze(1)  # NaN is never sure
    filtered = scores.masked_fill(probs < last_in, processor.filter_value)
    if not sure.all():
        left = scores[~sure]
        more = looked_at < min(_LAST_LOOK, scores.shape[-1])
        filtered[~sure] = filter_nucleus(processor, left, _LAST_LOOK) if more else processor(None, left)
    return filtered


def _highest(probs: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` highest of each row of `(positions, vocab_size)`, the highest first: `(positions, count)`."""
    chunks = probs.shape[-1] // _CHUNK
    if chunks <= count:
        return probs.topk(count, dim=-1).values
    # Each of them is in one of the `count` chunks with the highest maxima, or behind the last whole chunk.
    chunked = probs[:, : chunks * _CHUNK].unflatten(-1, (chunks, _CHUNK))
    best = chunked.amax(dim=-1).topk(count, dim=-1).indices
    candidates = chunked.gather(1, best[..., None].expand(-1, -1, _CHUNK)).flatten(1)
    return torch.cat([candidates, probs[:, chunks * _CHUNK :]], dim=-1).topk(count, dim=-1).values
