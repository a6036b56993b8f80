"""The training objective (Eq. 11 to 14): what a drafter's blocks lose against the target, a few slots at a time.

Everything as wide as the vocabulary is made for a few slots at a time, and its gradients with it: the memory is that
of one chunk, whatever the batch, and nothing is computed twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from .modeling import DSparkDraftModel
from .teacher import Teacher
from .training_blocks import TrainingBlocks


# Slots that a CPU makes distributions of at a time, within a chunk.
_ROWS_AT_ONCE = 8


@dataclass(frozen=True)
class LossWeights:
    """
    How the parts of the loss are weighed.

    Attributes:
        cross_entropy, total_variation, confidence (`float`): Of Eq. 14, at least 0.
        decay (`float`): gamma of the position weights `exp(-(k - 1) / gamma)`, above 0.

    Source: DSpark Eq. 14; "default weights 0.1, 0.9, 1.0".
    """

    cross_entropy: float = 0.1
    total_variation: float = 0.9
    confidence: float = 1.0
    decay: float = 7.0

    def by_position(self, block_size: int, device: torch.device | None = None) -> torch.Tensor:
        """Position weights w_k, `torch.Tensor` of shape `(block_size,)` in (0, 1]."""
        return torch.exp(-torch.arange(block_size, device=device) / self.decay)


@dataclass(frozen=True)
class BlockLosses:
    """
    What a batch of blocks lost. Means are weighted by position; they are taken over `weight`.

    Attributes:
        loss (`torch.Tensor`): Eq. 14, with a gradient.
        cross_entropy, total_variation, confidence (`torch.Tensor`): Its parts, each unweighted; without gradients.
        weight (`float`): Sum of the position weights of the slots that counted.
        accept_prob (`torch.Tensor` of shape `(blocks, block_size)`): 1 - half the L1 distance of drafter and target
            (Eq. 8); NaN at slots that are not supervised.
    """

    loss: torch.Tensor
    cross_entropy: torch.Tensor
    total_variation: torch.Tensor
    confidence: torch.Tensor
    weight: float
    accept_prob: torch.Tensor


def block_losses(
    drafter: DSparkDraftModel,
    hidden_states: torch.Tensor,
    blocks: TrainingBlocks,
    teacher: Teacher,
    last_hidden_states: torch.Tensor,
    weights: LossWeights,
    total_weight: float | None = None,
    chunk_slots: int = 128,
) -> BlockLosses:
    """
    The loss of the blocks of a batch of texts.

    Args:
        drafter ([`DSparkDraftModel`]): Its heads are applied.
        hidden_states (`torch.Tensor` of shape `(rows, blocks * block_size, hidden_size)`): Output of the backbone.
        blocks ([`TrainingBlocks`]): Of the same rows.
        teacher ([`Teacher`]): The target.
        last_hidden_states (`torch.Tensor` of shape `(rows, length, hidden_size)`): The target's.
        weights ([`LossWeights`]): Of the parts and positions.
        total_weight (`float`, *optional*): What the sums are divided by. Defaults to this batch's own `weight`;
            several processes hand in what makes their mean that of the whole batch.
        chunk_slots (`int`, *optional*): Slots whose distributions exist at a time.

    Source: DSpark Eq. 11 to 14.
    """
    device, config = hidden_states.device, drafter.config
    rows, count = blocks.anchors.shape
    size = config.block_size
    hidden_states = hidden_states.view(rows, count, size, -1)
    chosen = blocks.supervised[..., 0].to(device)
    supervised = blocks.supervised.to(device)[chosen]  # (blocks, size)
    position_weights = weights.by_position(size, device).expand_as(supervised)[supervised]
    weight = position_weights.sum().item()
    if weight == 0:
        nothing = hidden_states.sum() * 0 + sum(parameter.sum() * 0 for parameter in _heads(drafter))
        return BlockLosses(nothing, *[nothing.detach()] * 3, 0.0, hidden_states.new_empty(0, size))
    position_weights = position_weights / (total_weight or weight)
    hidden_states = hidden_states[chosen]
    previous, labels = blocks.previous.to(device)[chosen], blocks.labels.to(device)[chosen]
    features = drafter.markov_head.block_features(previous, hidden_states) if drafter.markov_head is not None else None

    # Slot k stands at the position before the token it predicts; slots of one position share the target's word.
    starts = blocks.anchors.to(device)[chosen][:, None] + torch.arange(size, device=device)
    text = torch.arange(rows, device=device)[:, None].expand(rows, count)[chosen][:, None]
    places = (text * last_hidden_states.shape[1] + starts)[supervised]
    order = places.argsort(stable=True)
    plan = _Plan(
        base=lambda states: drafter.base_logits(states, teacher.head),
        correction=None if drafter.markov_head is None else drafter.markov_head.markov_w2,
        teacher=lambda found: teacher.logits(last_hidden_states.flatten(0, 1)[found.to(last_hidden_states.device)]),
        draft_ids=drafter.d2t,
        places=places[order],
        labels=draft_labels(drafter, labels[supervised][order]),
        weights=position_weights[order],
        alphas=(weights.cross_entropy, weights.total_variation),
        chunk_slots=chunk_slots,
        widths=(config.draft_vocab_size or config.vocab_size,) * 2 + (config.vocab_size,),
        parameters=[parameter for parameter in _vocabulary_heads(drafter) if parameter.requires_grad],
        differentiate=torch.is_grad_enabled(),
    )
    loss, cross_entropy, distance, accept = _VocabularyLoss.apply(
        plan,
        hidden_states[supervised][order],
        None if features is None else features[supervised][order],
        *plan.parameters,
    )
    accepted = torch.empty_like(accept)
    accepted[order] = accept
    confidence = loss.new_zeros(())
    if config.enable_confidence_head:
        logits = drafter.confidence_logits(hidden_states, previous[:, 0], labels)[supervised].float()
        each = nn.functional.binary_cross_entropy_with_logits(logits, accepted, reduction="none")
        confidence = (each * position_weights).sum()
        loss = loss + weights.confidence * confidence
    accept_prob = torch.full(supervised.shape, math.nan, device=device)
    accept_prob[supervised] = accepted
    return BlockLosses(loss, cross_entropy, distance, confidence.detach(), weight, accept_prob)


def _vocabulary_heads(drafter: DSparkDraftModel) -> list[nn.Parameter]:
    """Parameters of the modules whose outputs are as wide as the vocabulary."""
    modules = [drafter.lm_head, None if drafter.markov_head is None else drafter.markov_head.markov_w2]
    return [parameter for module in modules if module is not None for parameter in module.parameters()]


def _heads(drafter: DSparkDraftModel) -> list[nn.Parameter]:
    modules = [drafter.lm_head, drafter.markov_head, drafter.confidence_head]
    return [parameter for module in modules if module is not None for parameter in module.parameters()]


@dataclass(frozen=True)
class _Plan:
    """The slots of a batch in the order of their places in the texts, and what is applied to them."""

    base: Callable[[torch.Tensor], torch.Tensor]
    correction: nn.Module | None
    teacher: Callable[[torch.Tensor], torch.Tensor]
    draft_ids: torch.LongTensor | None  # (draft_vocab_size,)
    places: torch.LongTensor  # (slots,)
    labels: torch.LongTensor  # (slots,)
    weights: torch.Tensor  # (slots,)
    alphas: tuple[float, float]
    chunk_slots: int
    widths: tuple[int, int, int]  # of the drafter's logits, their gradient and the target's logits
    parameters: list[nn.Parameter]
    differentiate: bool


class _VocabularyLoss(torch.autograd.Function):
    """
    Cross-entropy and total variation over the slots of a batch: their weighted sum with a gradient, then each alone
    and the acceptance probability of each slot without.

    The gradients are made in the forward pass, chunk by chunk, while the distributions are there.
    """

    @staticmethod
    def forward(ctx, plan: _Plan, hidden_states: torch.Tensor, features: torch.Tensor | None, *parameters):
        wanted = [hidden_states, *([] if features is None else [features]), *parameters]
        gradients = [torch.zeros_like(tensor) for tensor in wanted] if plan.differentiate else []
        slots = len(plan.places)
        sums = hidden_states.new_zeros(2, dtype=torch.float32)
        accept = hidden_states.new_empty(slots, dtype=torch.float32)
        # What is as wide as the vocabulary and in float32: fresh memory would cost more than what is done with it, and
        # on a CPU more than a few rows would leave its caches between one pass over them and the next.
        rows = min(slots, plan.chunk_slots, _ROWS_AT_ONCE if hidden_states.device.type == "cpu" else slots)
        scratch = [hidden_states.new_empty(rows, width, dtype=torch.float32) for width in plan.widths]
        for begin in range(0, slots, plan.chunk_slots):
            part = slice(begin, begin + plan.chunk_slots)
            with torch.set_grad_enabled(plan.differentiate):
                states = hidden_states[part].detach().requires_grad_(plan.differentiate)
                inputs, parts = [states], [plan.base(states)]
                if features is not None:
                    inputs.append(features[part].detach().requires_grad_(plan.differentiate))
                    parts.append(plan.correction(inputs[1]))
            places, which = plan.places[part].unique_consecutive(return_inverse=True)
            taught = plan.teacher(places)
            outer = {logits.dtype: torch.empty_like(logits) for logits in parts if plan.differentiate}
            for first in range(0, len(states), rows):
                some = slice(first, first + rows)
                logits = scratch[0][: len(states[some])].copy_(parts[0][some].detach())
                if features is not None:
                    logits += parts[1][some].detach()
                low, high = which[some][[0, -1]].tolist()
                here = taught[low : high + 1]
                losses, accept[part][some], gradient = slot_losses(
                    logits,
                    *draftable(scratch[2][: len(here)].copy_(here), plan.draft_ids),
                    scratch[1][: len(logits)],
                    which[some] - low,
                    plan.labels[part][some],
                    plan.weights[part][some],
                    plan.alphas,
                    plan.differentiate,
                )
                sums += losses
                for slopes in outer.values():
                    slopes[some] = gradient
            if plan.differentiate:
                pieces = torch.autograd.grad(parts, [*inputs, *parameters], [outer[logits.dtype] for logits in parts])
                for position, piece in enumerate(pieces):
                    if position < len(inputs):
                        gradients[position][part] = piece
                    else:
                        gradients[position] += piece
        ctx.save_for_backward(*gradients)
        ctx.has_features = features is not None
        cross_entropy, distance = sums
        loss = plan.alphas[0] * cross_entropy + plan.alphas[1] * distance
        ctx.mark_non_differentiable(cross_entropy, distance, accept)
        return loss, cross_entropy, distance, accept

    @staticmethod
    def backward(ctx, outer: torch.Tensor, *unused):
        gradients = [gradient * outer.to(gradient.dtype) for gradient in ctx.saved_tensors]
        if not ctx.has_features:
            gradients.insert(1, None)
        return None, *gradients


def slot_losses(
    logits: torch.Tensor,
    target_probs: torch.Tensor,
    outside: torch.Tensor | None,
    out: torch.Tensor,
    which: torch.LongTensor,
    labels: torch.LongTensor,
    weights: torch.Tensor,
    alphas: tuple[float, float],
    differentiate: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """
    Cross-entropy and total variation of some slots, and the gradient of their weighted sum.

    Args:
        logits (`torch.Tensor` of shape `(slots, draft_vocab_size)`): The drafter's, in float32; used up.
        target_probs (`torch.Tensor` of shape `(places, draft_vocab_size)`): The target's probabilities.
        outside (`torch.Tensor` of shape `(places,)`, *optional*): Those of all tokens that the drafter cannot draft.
        out (`torch.Tensor` of shape `(slots, draft_vocab_size)`): Memory for the gradient, in float32.
        which (`torch.LongTensor` of shape `(slots,)`): The place of each slot.
        labels (`torch.LongTensor` of shape `(slots,)`): The tokens to predict; -1 for one that cannot be drafted,
            whose slot has no cross-entropy.
        weights (`torch.Tensor` of shape `(slots,)`): Of the slots.
        alphas (`tuple[float, float]`): Of cross-entropy and L1 distance.
        differentiate (`bool`): Whether a gradient is wanted.

    Returns:
        The two weighted sums, `torch.Tensor` of shape `(2,)`; the acceptance probability of each slot, `(slots,)`; the
        gradient with respect to the logits, `(slots, draft_vocab_size)`, or `None`.

    Source: DSpark Eq. 8, 11 and 12.
    """
    # In place wherever it can be: passes over tensors as wide as the vocabulary are what this costs.
    probs = logits.sub_(logits.amax(dim=-1, keepdim=True))
    known = labels >= 0
    place = labels.clamp(min=0)[:, None]
    own = probs.gather(1, place)[:, 0]
    sums = probs.exp_().sum(dim=-1)
    probs *= sums.reciprocal()[:, None]
    difference = torch.index_select(target_probs, 0, which, out=out).sub_(probs)
    distance = torch.linalg.vector_norm(difference, ord=1, dim=-1)
    if outside is not None:
        distance = distance + outside[which]
    counted = weights * known
    cross_entropy = (sums.log() - own) * counted
    losses = torch.stack([cross_entropy.sum(), (distance * weights).sum()])
    accept = (1 - distance / 2).clamp(0, 1)
    if not differentiate:
        return losses, accept, None
    sign = difference.sign_().neg_()
    mean = torch.linalg.vecdot(sign, probs)
    slope, offset = alphas[1] * weights, alphas[0] * counted - alphas[1] * weights * mean
    gradient = sign.mul_(slope[:, None]).add_(offset[:, None]).mul_(probs)
    gradient.scatter_add_(1, place, -alphas[0] * counted[:, None])
    return losses, accept, gradient


def draftable(
    target_logits: torch.Tensor, draft_ids: torch.LongTensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """
    The target's probabilities of the tokens that can be drafted, and of all others together.

    Args:
        target_logits (`torch.Tensor` of shape `(places, vocab_size)`): In float32; used up.
        draft_ids (`torch.LongTensor` of shape `(draft_vocab_size,)`, *optional*): Tokens that can; by default all.

    Returns:
        `torch.Tensor` of shape `(places, draft_vocab_size)`, and `(places,)` or `None`.
    """
    probs = target_logits.sub_(target_logits.amax(dim=-1, keepdim=True)).exp_()
    probs *= probs.sum(dim=-1, keepdim=True).reciprocal_()
    if draft_ids is None:
        return probs, None
    probs = probs.index_select(-1, draft_ids.to(probs.device))
    return probs, (1 - probs.sum(dim=-1)).clamp(min=0)


def draft_labels(drafter: DSparkDraftModel, labels: torch.LongTensor) -> torch.LongTensor:
    """Where labels stand among the tokens that the drafter can draft; -1 for those it cannot."""
    if drafter.d2t is None:
        return labels
    lookup = labels.new_full((drafter.config.vocab_size,), -1)
    lookup[drafter.d2t] = torch.arange(len(drafter.d2t), device=labels.device)
    return lookup[labels]
