"""Top-p filtering without a sort of the whole vocabulary, where that gives the same tokens to the last one."""

import torch
from transformers import TopPLogitsWarper


# Most likely tokens that are looked at; a larger nucleus is left to the sort.
_LOOKED_AT = 512


def filter_nucleus(processor: TopPLogitsWarper, scores: torch.Tensor) -> torch.Tensor:
    """
    What the processor makes of scores, from the tokens with the highest probability only: a sort of the vocabulary is
    slow on a CPU, and a round has one for each draft and one for each token verified.

    The processor keeps a token if its probability and those of all less likely ones sum to more than 1 - top_p, added
    up in float32 from the least likely on. Rows where that sum comes so close to the limit that rounding decides, or
    where equal probabilities stand on both sides of it, are left to the processor.

    Args:
        processor (`TopPLogitsWarper`): Transformers' own.
        scores (`torch.Tensor` of shape `(positions, vocab_size)`): In float32 or better, on a CPU.

    Returns:
        `torch.Tensor` of shape `(positions, vocab_size)`: equal to `processor(None, scores)`.
    """
    looked_at = min(_LOOKED_AT, scores.shape[-1])
    if looked_at <= processor.min_tokens_to_keep:
        return processor(None, scores)
    limit = 1.0 - processor.top_p
    probs = scores.softmax(dim=-1)
    highest = probs.topk(looked_at, dim=-1).values
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
        filtered[~sure] = processor(None, scores[~sure])
    return filtered
