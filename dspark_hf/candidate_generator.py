"""Drafts for several rows at once, cut where the drafter's confidence says the block will not survive."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.generation import CandidateGenerator

from . import sampling
from .modeling.modeling_dspark import DraftContext
from .processing import ProcessorChain
from .sampling import probabilities
from .scheduling import lengths_by_threshold
from .sequences import Sequences
from .target_outputs import text_config


@dataclass
class Candidates:
    """
    One block a row.

    Attributes:
        tokens (`torch.LongTensor` of shape `(rows, block_size)`): Draft tokens.
        verify_lengths (`list[int]`): How many of each row's are worth sending to the target.
        draft_probs (`torch.Tensor` of shape `(rows, block_size, vocab_size)`, *optional*): What the tokens were drawn
            from, in float32 or better; `None` for greedy drafts.
    """

    tokens: torch.LongTensor
    verify_lengths: list[int]
    draft_probs: torch.Tensor | None


class DSparkCandidateGenerator(CandidateGenerator):
    """
    Drafts blocks with a DSpark drafter.

    Args:
        drafter (`DSparkDraftModel`): The draft model; nothing of this call is kept on it.
        target (`PreTrainedModel`): Lends embedding and head where the drafter has none.
        starts (`Sequence[int]`): For each row the position of the first token whose hidden states will be observed.
        processors ([`ProcessorChain`]): Applied to the drafts slot by slot, as to the target.
        do_sample (`bool`): Whether drafts are drawn; otherwise they are argmaxes.
        confidence_threshold (`float`): Least survival of a slot that is sent; 0 sends whole blocks.

    Raises:
        `ValueError`: if the drafter was not made for the target, or has no confidence head to threshold.
    """

    def __init__(
        self,
        drafter,
        target: PreTrainedModel,
        starts: Sequence[int],
        processors: ProcessorChain,
        do_sample: bool,
        confidence_threshold: float = 0.0,
    ):
        check_fits(drafter, target)
        check_threshold(drafter, confidence_threshold)
        config = drafter.config
        self.drafter = drafter
        self.block_size = config.block_size
        self.device = drafter.device
        self.target_embedding = None if config.owns_embedding else target.get_input_embeddings()
        self.target_lm_head = None if config.owns_lm_head else target.get_output_embeddings()
        self.processors, self.do_sample = processors, do_sample
        self.threshold = confidence_threshold
        self.context = DraftContext(config, starts)
        self.pending: list[list[torch.Tensor]] = [[] for _ in starts]
        self.masks = torch.full((len(starts), self.block_size), config.mask_token_id, device=self.device)

    def observe(self, taps: torch.Tensor, counts: Sequence[int]) -> None:
        """
        Take the target's hidden states at positions that were accepted; the next block is drafted from them.

        Args:
            taps (`torch.Tensor` of shape `(sum(counts), taps * hidden_size)`): Row after row.
            counts (`Sequence[int]`): How many belong to each row.
        """
        for pending, piece in zip(self.pending, taps.split(list(counts)), strict=True):
            if len(piece):
                pending.append(piece)

    def get_candidates(self, sequences: Sequences, rows: Sequence[int]) -> Candidates:
        """
        Draft a block for each row.

        Args:
            sequences ([`Sequences`]): Holds the rows' tokens, the anchors last; drafts are written behind them.
            rows (`Sequence[int]`): The rows, in the order in which hidden states are observed.

        Returns:
            [`Candidates`].
        """
        home = sequences.tokens.device
        anchors = sequences.anchors(rows).to(self.device)
        slots = self.masks[: len(rows)].clone()
        slots[:, 0] = anchors
        counts = [sum(map(len, pieces)) for pieces in self.pending]
        pieces = [piece for pieces in self.pending for piece in pieces]
        if pieces:
            context = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        else:
            context = self.drafter.fc.weight.new_empty(0, self.drafter.fc.in_features)
        # The drafter computes in its own dtype, whatever the caller's autocast says of the target.
        with torch.autocast(self.device.type, enabled=False):
            hidden = self.drafter(
                self.drafter.embed(slots, self.target_embedding),
                context_hidden_states=context.to(self.device),
                context_lengths=counts,
                context=self.context,
            )
        self.pending = [[] for _ in rows]
        drawn_from: list[torch.Tensor] = []

        def select(slot: int, logits: torch.Tensor) -> torch.LongTensor:
            scores = logits.to(home)
            if self.processors:
                scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
                scores = self.processors([(row, sequences.prefix(row, slot), slot) for row in rows], scores)
            if self.do_sample:
                drawn_from.append(probabilities(scores))
                tokens = self._draw(drawn_from[-1])
            else:
                tokens = sampling.most_likely(scores)
            if self.processors:
                for index, row in enumerate(rows):
                    sequences.put(row, tokens[index : index + 1], at=slot)
            return tokens.to(self.device)

        state = self.processors.state()
        with torch.autocast(self.device.type, enabled=False):
            draft = self.drafter.draft(hidden, anchors, self.target_lm_head, select)
        self.processors.restore(state)
        if self.threshold > 0:
            confidences = torch.sigmoid(draft.confidence_logits.float()).tolist()
            verify_lengths = lengths_by_threshold(confidences, self.threshold)
        else:
            verify_lengths = [self.block_size] * len(rows)
        return Candidates(
            tokens=draft.tokens.to(home),
            verify_lengths=verify_lengths,
            draft_probs=torch.stack(drawn_from, dim=1) if self.do_sample else None,
        )

    def _draw(self, probs: torch.Tensor) -> torch.LongTensor:
        try:
            return sampling.draw_tokens(probs)
        except ValueError as error:
            raise ValueError(
                f"The drafter ({self.drafter.dtype}) gave scores that are no distribution to draw from. Check its "
                "weights and dtype, and that the logits processors leave a token."
            ) from error

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """Nothing is adapted to the outcome of a round."""

    def keep_rows(self, keep: Sequence[int]) -> None:
        """Drop all rows but those whose indices, among the current ones, are given."""
        self.context.keep_rows(keep)
        self.pending = [self.pending[index] for index in keep]


def check_threshold(drafter, threshold: float) -> None:
    """
    Check `assistant_confidence_threshold` of a call.

    Raises:
        `ValueError`: if it is not in [0, 1] or the drafter has no confidence head.
    """
    if not 0.0 <= threshold <= 1.0:
        raise ValueError(
            f"`assistant_confidence_threshold` is {threshold}; it is a probability, 0 (whole blocks) to 1."
        )
    if threshold > 0 and not drafter.config.enable_confidence_head:
        raise ValueError(
            f"`assistant_confidence_threshold` is {threshold} but this drafter has no confidence head; set it to 0 on "
            "`drafter.generation_config`."
        )


def check_fits(drafter, target: PreTrainedModel) -> None:
    """
    Compare a drafter's config with its target, at first use.

    Raises:
        `ValueError`: naming what differs.
    """
    config, wanted = drafter.config, text_config(target)
    if drafter.device.type == "meta":
        raise ValueError(
            "The drafter's weights are on the `meta` device: offloaded, or not loaded. It is small; load it onto a "
            "device as a whole, `DSparkDraftModel.from_pretrained(..., device_map={'': 'cpu'})` for example."
        )
    for name, found, field in (
        ("vocab_size", wanted.vocab_size, "vocab_size"),
        ("num_hidden_layers", wanted.num_hidden_layers, "num_target_layers"),
        ("hidden_size", wanted.hidden_size, "target_hidden_size"),
    ):
        expected = getattr(config, field)
        if expected != found:
            raise ValueError(
                f"The drafter was made for a target with {name} {expected} (its `{field}`), but "
                f"{type(target).__name__} has {found}. Load the drafter that belongs to this target."
            )
    for kind, owned, module, width in (
        ("embedding", config.owns_embedding, target.get_input_embeddings(), "embedding_dim"),
        ("head", config.owns_lm_head, target.get_output_embeddings(), "in_features"),
    ):
        if owned:
            continue
        found = getattr(module, width, wanted.hidden_size)  # a quantised or wrapped one may not tell
        if module is None or config.hidden_size != found:
            raise ValueError(
                f"The drafter borrows the target's {kind} for its `hidden_size` of {config.hidden_size}, but "
                f"{type(target).__name__} has {'none' if module is None else f'one of width {found}'}. Load the "
                f"drafter that belongs to this target, or one with a {kind} of its own."
            )
