"""Top-p filtering without a sort of the whole vocabulary, where that gives the same tokens to the last one."""

import math
from collections.abc import Sequence

import torch
from transformers import LogitsProcessor, TopPLogitsWarper


# Positions that a CPU takes at a time: fresh memory for more costs more than what is done in it.
ROWS_AT_ONCE = 8
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
    highest, places = _highest(scores, looked_at)
    total = None
    if looked_at == _LAST_LOOK:
        total = (scores - highest[:, :1]).clamp_(min=_LOWEST).exp_().sum(dim=-1, keepdim=True)
    inside, sure = _tell(processor, highest, vocab_size, total)
    highest = highest.masked_fill(~inside, processor.filter_value)
    filtered = torch.full_like(scores, processor.filter_value).scatter_(1, places, highest)
    if not sure.all():
        left = scores[~sure]
        more = looked_at < min(_LAST_LOOK, vocab_size)
        filtered[~sure] = filter_nucleus(processor, left, _LAST_LOOK) if more else processor(None, left)
    return filtered


def find_nuclei(
    warpers: Sequence[LogitsProcessor], processor: TopPLogitsWarper, logits: torch.Tensor
) -> tuple[torch.Tensor, torch.LongTensor | None]:
    """
    What the processors make of logits, of no more tokens than there are in the largest nucleus where that is small.

    Args:
        warpers (`Sequence[LogitsProcessor]`): Applied first; they read nothing but the scores and leave a higher one
            the higher or equal.
        processor (`TopPLogitsWarper`): Applied last. As the others it takes tokens out by a score of -inf.
        logits (`torch.Tensor` of shape `(positions, vocab_size)`): On a CPU.

    Returns:
        `torch.Tensor` of shape `(positions, tokens)`, the scores in float32 or better, and `torch.LongTensor` of the
        same shape, the tokens, increasing: all others' scores are -inf. `None` in place of these if the scores are
        those of the vocabulary.
    """

    def filtered(scores: torch.Tensor) -> torch.Tensor:
        for warper in warpers:
            scores = warper(None, scores)
        return filter_nucleus(processor, scores, _LAST_LOOK)

    dtype, vocab_size = torch.promote_types(logits.dtype, torch.float32), logits.shape[-1]
    looks = [_highest(part.to(dtype), min(_FIRST_LOOK, vocab_size)) for part in logits.split(ROWS_AT_ONCE)]
    scores, tokens = (torch.cat(parts) for parts in zip(*looks, strict=True))
    for warper in warpers:
        scores = warper(None, scores)
    inside, sure = _tell(processor, scores, vocab_size)
    scores = scores.masked_fill(~inside, -math.inf)
    if not sure.all():
        left = torch.cat([filtered(part.to(dtype)) for part in logits[~sure].split(ROWS_AT_ONCE)])
        if _kept(left) > tokens.shape[1]:
            scores = scores.new_full(logits.shape, -math.inf).scatter_(1, tokens, scores)
            scores[~sure] = left
            return scores, None
        scores[~sure], tokens[~sure] = left.topk(tokens.shape[1], dim=-1)
    tokens, order = tokens[:, : _kept(scores)].sort(dim=-1)
    return scores.gather(1, order), tokens


def _tell(
    processor: TopPLogitsWarper, highest: torch.Tensor, vocab_size: int, total: torch.Tensor | None = None
) -> tuple[torch.BoolTensor, torch.BoolTensor]:
    """
    Which tokens are in the nucleus.

    Args:
        highest (`torch.Tensor` of shape `(positions, looked_at)`): Scores, the highest first.
        vocab_size (`int`): How many scores there are.
        total (`torch.Tensor` of shape `(positions, 1)`, *optional*): What the exponentials of all scores' differences
            from the highest sum to.

    Returns:
        `torch.BoolTensor` of shape `(positions, looked_at)`, whether a token is in, and `torch.BoolTensor` of shape
        `(positions,)`, whether that is certain.
    """
    looked_at, limit = highest.shape[-1], 1.0 - processor.top_p
    weights = (highest - highest[:, :1]).double().exp()
    down_to = weights.cumsum(dim=-1)
    if total is None:
        added, total, unknown = looked_at, down_to[:, -1:], (vocab_size - looked_at) * weights[:, -1:]
    else:
        added, total, unknown = vocab_size, total.double(), 0.0
    # What a token and all less likely ones sum to.
    tails = (total - down_to + weights) / total
    kept = (tails > limit).sum(dim=-1, keepdim=True).clamp(min=processor.min_tokens_to_keep).clamp(max=looked_at)
    # n numbers added up in any order with unit roundoff eps / 2 are off by n * eps / 2 of their sum at most: once in
    # the sum itself, once in the denominator, here and there. Of numbers that are tiny beside the others, as the
    # unknown ones are, each addition loses its number at most.
    rounding = 2.0 * torch.finfo(highest.dtype).eps * limit * (added + _EXP_ULPS) + 4.0 * unknown / total
    clear = (tails - limit).abs().amin(dim=-1, keepdim=True) > rounding  # NaN never is
    apart = highest.gather(1, kept - 1) > highest.gather(1, kept.clamp(max=looked_at - 1))
    return torch.arange(looked_at) < kept, (clear & apart).squeeze(1)


def _kept(scores: torch.Tensor) -> int:
    """The most tokens that a row has left, at least one."""
    return max(int((scores != -math.inf).sum(dim=-1).max()), 1)


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
