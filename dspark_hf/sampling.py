"""
Logits to tokens, and the rule that keeps the target's distribution. All randomness of decoding comes from
[`draw_tokens`] and [`draw_accepts`], so that a test can enumerate every outcome.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F


# Tokens whose probabilities are added up before it is known which of them are of interest.
_CHUNK = 64
# Tokens whose highest score is found before the one that has it.
_COMPARED = 1024


def pays_by_step(device: torch.device) -> bool:
    """Whether one position after the other is faster than all at once where some are never reached: work is dear and
    a wait is not."""
    return device.type == "cpu"


def probabilities(scores: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension, in float32 or better."""
    return scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))


def draw_tokens(probs: torch.Tensor) -> torch.LongTensor:
    """
    One token a row from `(rows, vocab_size)` probabilities: `torch.LongTensor` of shape `(rows,)`.

    On a CPU by inverting the distribution function, first over chunks of the vocabulary and then within one, added up
    in float64 but for a chunk's own sum: a uniform number a row takes the place of `torch.multinomial`'s one a token,
    which is most of its time.
    """
    if probs.device.type != "cpu":
        return torch.multinomial(probs, num_samples=1).squeeze(1)
    missing = -probs.shape[-1] % _CHUNK
    chunks = (F.pad(probs, (0, missing)) if missing else probs).unflatten(-1, (-1, _CHUNK))
    cumulative = chunks.sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)  # (rows, chunks)
    total = cumulative[:, -1:]
    if not torch.isfinite(total).all() or (total <= 0).any():
        raise ValueError(
            "The scores hold no distribution to draw from (NaN, or every token at -inf). Check the logits processors, "
            "or the dtype if the model overflows."
        )
    drawn = torch.rand_like(total) * total
    # Tokens of probability zero leave the function flat, and `right=True` steps over flat parts.
    chunk = torch.searchsorted(cumulative, drawn, right=True)
    before = torch.where(chunk > 0, cumulative.gather(1, (chunk - 1).clamp(min=0)), 0.0)
    within = chunks[torch.arange(len(probs)), chunk.squeeze(1)].double().cumsum(dim=-1)  # (rows, _CHUNK)
    # Rounding may put what is left of the number at the chunk's end, where no token is.
    left = torch.minimum(drawn - before, within[:, -1:].nextafter(torch.zeros_like(total)))
    return (chunk * _CHUNK + torch.searchsorted(within, left, right=True)).squeeze(1)


def draw_among(probs: torch.Tensor, ids: torch.LongTensor | None) -> torch.LongTensor:
    """One token a row, `(rows,)`, from `(rows, tokens)` probabilities of all tokens or of `ids`, of the same shape."""
    places = draw_tokens(probs)
    return places if ids is None else ids.gather(1, places[:, None]).squeeze(1)


def most_likely(scores: torch.Tensor) -> torch.LongTensor:
    """
    Argmax over the last dimension of `(rows, ..., vocab_size)`, the first of equal scores.

    On a CPU by the highest score of each chunk of the vocabulary, then within the first chunk that holds it: a maximum
    alone is found several times as fast as its place.
    """
    wide = torch.promote_types(scores.dtype, torch.float32)
    if scores.device.type != "cpu":
        return scores.to(wide).max(dim=-1).indices
    chunks = scores.shape[-1] // _COMPARED
    whole = chunks * _COMPARED
    highest = scores[..., :whole].unflatten(-1, (chunks, _COMPARED)).amax(dim=-1)
    if whole < scores.shape[-1]:
        highest = torch.cat([highest, scores[..., whole:].amax(dim=-1, keepdim=True)], dim=-1)
    # `max` of float32 takes the first of equals.
    first = highest.to(wide).max(dim=-1, keepdim=True).indices * _COMPARED
    places = (first + torch.arange(_COMPARED)).clamp(max=scores.shape[-1] - 1)
    return first.squeeze(-1) + scores.gather(-1, places).to(wide).max(dim=-1).indices


def draw_accepts(accept_probs: torch.Tensor) -> torch.BoolTensor:
    """A coin for each acceptance probability, of the same shape."""
    return torch.rand_like(accept_probs) < accept_probs


@dataclass
class Verdict:
    """
    What verification decided.

    Attributes:
        accepted (`torch.LongTensor` of shape `(rows,)`): Length of each row's accepted prefix.
        tokens (`torch.LongTensor` of shape `(rows, longest verify_length + 1)`): Each row's accepted drafts, followed
            by the target's own token; what comes after that is of no meaning.
    """

    accepted: torch.LongTensor
    tokens: torch.LongTensor


class Verification:
    """
    A flattened stream of scores seen row by row: row `r` has `verify_lengths[r]` drafts and one score more.

    Args:
        drafts (`torch.LongTensor` of shape `(rows, block_size)`): Draft tokens.
        verify_lengths (`list[int]`): Drafts of each row that the target saw.
    """

    def __init__(self, drafts: torch.LongTensor, verify_lengths: list[int]):
        longest = max(verify_lengths)
        self.drafts = drafts[:, :longest]
        lengths = torch.tensor(verify_lengths, device=drafts.device)
        first = (lengths + 1).cumsum(0) - lengths - 1
        steps = torch.arange(longest + 1, device=drafts.device)
        self.lengths = lengths
        self.index = torch.minimum(first[:, None] + steps, (first + lengths)[:, None])  # (rows, longest + 1)
        self.sent = steps[:longest] < lengths[:, None]

    def _verdict(self, accepts: torch.BoolTensor, own_tokens) -> Verdict:
        accepted = (accepts & self.sent).long().cumprod(dim=1).sum(dim=1)
        tokens = torch.cat([self.drafts, self.drafts.new_zeros(len(self.drafts), 1)], dim=1)
        return Verdict(accepted, tokens.scatter(1, accepted[:, None], own_tokens(accepted)[:, None]))

    def greedy(self, scores: torch.Tensor, synthetic: torch.Tensor | None = None) -> Verdict:
        """
        Accept while the draft is the target's argmax.

        Args:
            scores (`torch.Tensor` of shape `(sum(verify_lengths) + rows, vocab_size)`): The target's processed scores.
            synthetic (`torch.Tensor` of shape `(rows, block_size)`, *optional*): Accept each draft with this
                probability instead, right or wrong.
        """
        choices = most_likely(scores)[self.index]  # (rows, longest + 1)
        accepts = self.drafts == choices[:, :-1]
        if synthetic is not None:
            accepts = draw_accepts(synthetic[:, : accepts.shape[1]].to(scores.device))
        return self._verdict(accepts, lambda accepted: choices.gather(1, accepted[:, None]).squeeze(1))

    def sampled(
        self,
        target_probs: torch.Tensor,
        draft_probs: torch.Tensor,
        synthetic: torch.Tensor | None = None,
        draft_ids: torch.LongTensor | None = None,
    ) -> Verdict:
        """
        Rejection sampling: accept draft x with probability min(1, target_probs(x) / draft_probs(x)); at the first
        rejection draw from the positive part of `target_probs - draft_probs`.

        Args:
            target_probs (`torch.Tensor` of shape `(sum(verify_lengths) + rows, vocab_size)`): Of the target.
            draft_probs (`torch.Tensor` of shape `(rows, block_size, vocab_size)`): The very tensor that the drafts
                were drawn from.
            synthetic (`torch.Tensor` of shape `(rows, block_size)`, *optional*): Accept each draft with this
                probability instead, right or wrong.
            draft_ids (`torch.LongTensor` of shape `(tokens,)` or `(rows, block_size, tokens)`, *optional*): The
                tokens, increasing, that the last dimension of `draft_probs` stands for; all others have draft
                probability 0.

        Source: DSpark, "Speculative Decoding: Draft, Then Verify"; Leviathan et al. 2023, Algorithm 1.
        """
        longest = self.drafts.shape[1]
        of_target = target_probs[self.index[:, :longest], self.drafts]
        own = draft_ids is not None and draft_ids.dim() == 3
        ids = draft_ids[:, :longest].contiguous() if own else draft_ids
        drafts = self.drafts[..., None].contiguous()
        of_drafter = probabilities_of(drafts, draft_probs[:, :longest], ids).squeeze(2)
        accept_probs = (of_target / of_drafter).clamp(max=1.0)
        if synthetic is not None:
            accept_probs = synthetic[:, :longest].to(accept_probs)
        accepts = draw_accepts(accept_probs)

        def own_tokens(accepted: torch.LongTensor) -> torch.LongTensor:
            probs = target_probs[self.index.gather(1, accepted[:, None]).squeeze(1)]
            if longest == 0:
                return draw_tokens(probs)
            rows = torch.arange(len(accepted), device=accepted.device)
            at = accepted.clamp(max=longest - 1)
            ids = draft_ids[rows, at] if own else draft_ids
            left = residual(probs, draft_probs[rows, at], ids)
            return draw_tokens(torch.where((accepted < self.lengths)[:, None], left, probs))

        return self._verdict(accepts, own_tokens)

    def sampled_by_step(
        self,
        target_law: Callable[[torch.LongTensor], tuple[torch.Tensor, torch.LongTensor | None]],
        draft_probs: torch.Tensor,
        synthetic: torch.Tensor | None = None,
        draft_ids: torch.LongTensor | None = None,
    ) -> Verdict:
        """
        The same, one draft of each row after the other, so that nothing is asked of the target behind a rejected one.
        Each step waits for its coins, see [`pays_by_step`].

        Args:
            target_law (`Callable`): Called with places among the target's scores, `(places,)`; returns the target's
                probabilities there, `(places, vocab_size)`, and `None`, or `(places, tokens)` and the tokens,
                increasing, of the same shape, that they are of: all others have target probability 0.
            draft_probs, synthetic, draft_ids: As for [`Verification.sampled`].
        """
        accepted = torch.zeros_like(self.lengths)
        tokens = torch.cat([self.drafts, self.drafts.new_zeros(len(self.drafts), 1)], dim=1)
        rows = torch.arange(len(tokens), device=tokens.device)  # whose drafts were accepted so far
        for step in range(tokens.shape[1]):
            probs, ids = target_law(self.index[rows, step])
            if step == self.drafts.shape[1]:
                tokens[rows, step] = draw_among(probs, ids)
                break
            sent, drafts, of_drafter = self.sent[rows, step], self.drafts[rows, step, None], draft_probs[rows, step]
            own = draft_ids[rows, step] if draft_ids is not None and draft_ids.dim() == 3 else draft_ids
            if synthetic is None:
                accept_probs = probabilities_of(drafts, probs, ids) / probabilities_of(drafts, of_drafter, own)
            else:
                accept_probs = synthetic[rows, step, None].to(probs)
            accepts = draw_accepts(torch.where(sent, accept_probs.squeeze(1).clamp(max=1.0), 0.0)) & sent
            if not accepts.all():
                ends = ~accepts
                probs, ids = probs[ends], None if ids is None else ids[ends]
                own = own[ends] if own is not None and own.dim() == 2 else own
                left = of_drafter[ends] if ids is None else probabilities_of(ids, of_drafter[ends], own)
                left = residual(probs, left, own if ids is None else None)
                if not sent[ends].all():  # all of a row's drafts were accepted
                    left = torch.where(sent[ends, None], left, probs)
                tokens[rows[ends], step] = draw_among(left, ids)
            rows = rows[accepts]
            if len(rows) == 0:
                break
            accepted[rows] += 1
        return Verdict(accepted, tokens)


def probabilities_of(tokens: torch.LongTensor, probs: torch.Tensor, ids: torch.LongTensor | None) -> torch.Tensor:
    """
    Look up the probabilities of some tokens.

    Args:
        tokens (`torch.LongTensor` of shape `(..., wanted)`): The tokens.
        probs (`torch.Tensor` of shape `(..., known)`): Probabilities.
        ids (`torch.LongTensor` of shape `(known,)` or `(..., known)`, *optional*): The tokens, increasing, that they
            are of, all others having none; by default all tokens.

    Returns:
        `torch.Tensor` of shape `(..., wanted)`.
    """
    if ids is None:
        return probs.gather(-1, tokens)
    places = torch.searchsorted(ids, tokens).clamp(max=probs.shape[-1] - 1)
    found = (ids[places] if ids.dim() == 1 else ids.gather(-1, places)) == tokens
    return torch.where(found, probs.gather(-1, places), 0.0)


def residual(
    target_probs: torch.Tensor, draft_probs: torch.Tensor, ids: torch.LongTensor | None = None
) -> torch.Tensor:
    """
    The distribution of the token that replaces a rejected draft.

    Where both distributions are equal nothing is left over; a rejection there is a rounding of the uniform draw, and
    the target's own distribution is the answer.

    Args:
        target_probs (`torch.Tensor` of shape `(rows, vocab_size)`): Of the target.
        draft_probs (`torch.Tensor` of shape `(rows, vocab_size)` or `(rows, tokens)`): Of the drafter.
        ids (`torch.LongTensor` of shape `(tokens,)` or `(rows, tokens)`, *optional*): The tokens that `draft_probs` is
            of, each once.

    Returns:
        `torch.Tensor` of shape `(rows, vocab_size)`.
    """
    if ids is None:
        left = target_probs - draft_probs
    else:
        left = target_probs.scatter_add(1, ids.expand_as(draft_probs), -draft_probs.to(target_probs.dtype))
    total = left.clamp_(min=0.0).sum(dim=-1, keepdim=True)
    left /= total.clamp(min=torch.finfo(left.dtype).tiny)
    if total.device.type == "cpu" and (total > 0).all():  # elsewhere asking would be a wait
        return left
    return torch.where(total > 0, left, target_probs)
