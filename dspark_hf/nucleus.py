"""Top-p filtering without a sort of the whole vocabulary, where that gives the same tokens to the last one."""

import torch
from transformers import TopPLogitsWarper


# Most likely tokens that are looked at first, and at most; a larger nucleus is left to the sort.
_FIRST_LOOK, _LAST_LOOK = 64, 512
# Tokens of a chunk whose highest score is found before those of its tokens.
_CHUNK = 64
# Units in the last place by which a softmax's exponential may be off, numerator and denominator together.
_EXP_ULPS = 40
# Differences of scores below this one do not count in a sum of exponentials; their subnormal results take ten times as
# long to compute as others do.
_LOWEST = -80.0


def filter_nucleus(processor: TopPLogitsWarper, scores: torch.Tensor, looked_at: int = _FIRST_LOOK) -> torch.Tensor:
    """
    What the processor makes of scores, from the highest of them only: a sort of the vocabulary is slow on a CPU, and a
    round has one for each draft and one for each token verified.

    The processor keeps a token if its probability and those of all less likely ones sum to more than 1 - top_p, added
    up in the scores' dtype from the least likely on. First all tokens that are not looked at are taken to be as likely
    as the last one that is: a sharp distribution is told by that. For the other rows the exponentials of all are added
    up. Rows where the sum comes so close to the limit that rounding or what is not known decides, or where equal
    scores stand on both sides of it, are left to the processor.

    Args:
        processor (`TopPLogitsWarper`): Transformers' own.
        scores (`torch.Tensor` of shape `(positions, vocab_size)`): In float32 or better, on a CPU.
        looked_at (`int`): Highest scores of each row that are looked at first.

    Returns:
        `torch.Tensor` of shape `(positions, vocab_size)`: equal to `processor(None, scores)`.
    """
    vocab_size = scores.shape[-1]
    looked_at = min(looked_at, vocab_size)
    if looked_at <= processor.min_tokens_to_keep:
        return processor(None, scores)
    limit = 1.0 - processor.top_p
    highest, places = _highest(scores, looked_at)
    most = highest[:, :1]
    weights = (highest - most).double().exp()
    inside = weights.cumsum(dim=-1)
    if looked_at < _LAST_LOOK:
        added, total, unknown = looked_at, inside[:, -1:], (vocab_size - looked_at) * weights[:, -1:]
    else:
        total = (scores - most).clamp_(min=_LOWEST).exp_().sum(dim=-1, keepdim=True).double()
        added, unknown = vocab_size, torch.zeros_like(total)
    # What a token and all less likely ones sum to, (positions, looked_at).
    tails = (total - inside + weights) / total
    kept = (tails > limit).sum(dim=-1, keepdim=True).clamp(min=processor.min_tokens_to_keep)
    # n numbers added up in any order with unit roundoff eps / 2 are off by n * eps / 2 of their sum at most: once in
    # the sum itself, once in the denominator, here and there. Of numbers that are tiny beside the others, as the
    # unknown ones are, each addition loses its number at most.
    rounding = 2.0 * torch.finfo(scores.dtype).eps * limit * (added + _EXP_ULPS) + 4.0 * unknown / total
    last_in = highest.gather(1, kept - 1)
    first_out = highest.gather(1, kept.clamp(max=looked_at - 1))
    clear = (tails - limit).abs().amin(dim=-1, keepdim=True) > rounding  # NaN never is
    sure = (clear & (last_in > first_out)).squeeze(1)
    highest = highest.masked_fill(highest < last_in, processor.filter_value)
    filtered = torch.full_like(scores, processor.filter_value).scatter_(1, places, highest)
    if not sure.all():
        left = scores[~sure]
        more = looked_at < min(_LAST_LOOK, vocab_size)
        filtered[~sure] = filter_nucleus(processor, left, _LAST_LOOK) if more else processor(None, left)
    return filtered


def _highest(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.LongTensor]:
    """The `count` highest of each row of `(rows, vocab_size)`, the highest first, and their places."""
    chunks = scores.shape[-1] // _CHUNK
    if chunks <= count:
        return scores.topk(count, dim=-1)
    # Each of them is in one of the `count` chunks with the highest maxima, or behind the last whole chunk.
    maxima = scores[:, : chunks * _CHUNK].unflatten(-1, (chunks, _CHUNK)).amax(dim=-1)
    best = maxima.topk(count, dim=-1, sorted=False).indices
    places = (best[..., None] * _CHUNK + torch.arange(_CHUNK)).flatten(1)
    behind = torch.arange(chunks * _CHUNK, scores.shape[-1]).expand(len(scores), -1)
    places = torch.cat([places, behind], dim=-1)
    highest, order = scores.gather(1, places).topk(count, dim=-1)
    return highest, places.gather(1, order)
