"""Drafts for several rows at once, cut where the schedule says that more would not pay."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.generation import CandidateGenerator

from . import sampling
from .modeling.draft_context import DraftContext
from .modeling.modeling_dspark import tokens_at
from .processing import ProcessorChain
from .sampling import probabilities
from .scheduling import Choice, Scheduler, survivals
from .sequences import Sequences
from .synthetic import SyntheticAcceptance
from .target_outputs import text_config


# Score of a token outside a reduced vocabulary: its probability is 0 beside any that the drafter gave a score, and it
# is far enough from -inf that penalties and temperatures leave it finite.
_UNLIKELY = -1e6


@dataclass
class Candidates:
    """
    One block a row.

    Attributes:
        tokens (`torch.LongTensor` of shape `(rows, slots)`): Draft tokens.
        choice ([`Choice`]): How many of each row's are worth sending to the target.
        draft_probs (`torch.Tensor` of shape `(rows, slots, vocab_size)`, *optional*): What the tokens were drawn
            from, in float32 or better; `None` for greedy drafts.
        draft_ids (`torch.LongTensor` of shape `(tokens,)` or `(rows, slots, tokens)`, *optional*): The tokens that the
            last dimension of `draft_probs` stands for, if it is shorter than the vocabulary.
        survivals, confidence_logits (`list[list[float]]`, *optional*): For each row those of its slots, if they are
            known here.
        synthetic (`torch.Tensor` of shape `(rows, slots)`, *optional*): Probabilities by which the drafts are to be
            accepted, right or wrong.
    """

    tokens: torch.LongTensor
    choice: Choice
    draft_probs: torch.Tensor | None
    survivals: list[list[float]] | None = None
    confidence_logits: list[list[float]] | None = None
    synthetic: torch.Tensor | None = None
    draft_ids: torch.LongTensor | None = None

    @property
    def verify_lengths(self) -> list[int]:
        """How many of each row's drafts are sent."""
        return self.choice.lengths


class DSparkCandidateGenerator(CandidateGenerator):
    """
    Drafts blocks with a DSpark drafter.

    Args:
        drafter (`DSparkDraftModel`): The draft model; nothing of this call is kept on it.
        target (`PreTrainedModel`): Lends embedding and head where the drafter has none.
        starts (`Sequence[int]`): For each row the position of the first token whose hidden states will be observed.
        processors ([`ProcessorChain`]): Applied to the drafts slot by slot, as to the target.
        do_sample (`bool`): Whether drafts are drawn; otherwise they are argmaxes.
        scheduler ([`Scheduler`]): Says how many drafts are sent.
        temperature (`float`): Of the call; the confidence is calibrated for it.
        keep_confidences (`bool`): Whether confidences are wanted whatever the schedule.
        synthetic ([`SyntheticAcceptance`], *optional*): Takes the place of the drafter's own confidence.
        context_window (`int`, *optional*): Last positions before the anchor that a block sees; by default all.
        top_k (`int`, *optional*): Tokens of each slot, those with the highest base logits, that can be drafted; by
            default all.

    Raises:
        `ValueError`: if the drafter was not made for the target.
    """

    def __init__(
        self,
        drafter,
        target: PreTrainedModel,
        starts: Sequence[int],
        processors: ProcessorChain,
        do_sample: bool,
        scheduler: Scheduler,
        temperature: float | None = None,
        keep_confidences: bool = False,
        synthetic: SyntheticAcceptance | None = None,
        context_window: int | None = None,
        top_k: int | None = None,
    ):
        check_fits(drafter, target)
        config = drafter.config
        self.drafter = drafter
        self.block_size = config.block_size
        self.device = drafter.device
        self.target_embedding = None if config.owns_embedding else target.get_input_embeddings()
        self.target_lm_head = None if config.owns_lm_head else target.get_output_embeddings()
        self.processors, self.do_sample = processors, do_sample
        self.scheduler, self.synthetic, self.top_k = scheduler, synthetic, top_k
        wanted = scheduler.schedule != "constant" or keep_confidences
        self.keep_confidences = wanted and config.enable_confidence_head
        self.confidence_temperatures = torch.tensor(
            config.temperatures_for((1.0 if temperature is None else temperature) if do_sample else 0.0)
        )
        self.context = DraftContext(
            config, starts, window=context_window, compile_config=drafter.generation_config.compile_config
        )
        self.pending: list[list[torch.Tensor]] = [[] for _ in starts]

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

    def get_candidates(self, sequences: Sequences, rows: Sequence[int], room: Sequence[int], slots: int) -> Candidates:
        """
        Draft for each row.

        Args:
            sequences ([`Sequences`]): Holds the rows' tokens, the anchors last; drafts are written behind them.
            rows (`Sequence[int]`): The rows, in the order in which hidden states are observed.
            room (`Sequence[int]`): The most drafts of each row that are of use.
            slots (`int`): Slots of each block that are drawn, 1 to `block_size`.

        Returns:
            [`Candidates`].
        """
        home = sequences.tokens.device
        anchors = sequences.anchors(rows).to(self.device)
        block = self.drafter.block_tokens(anchors)
        counts = [sum(map(len, pieces)) for pieces in self.pending]
        pieces = [piece for pieces in self.pending for piece in pieces]
        if pieces:
            context = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        else:
            context = self.drafter.fc.weight.new_empty(0, self.drafter.fc.in_features)
        # The drafter computes in its own dtype, whatever the caller's autocast says of the target.
        with torch.autocast(self.device.type, enabled=False):
            hidden = self.drafter(
                self.drafter.embed(block, self.target_embedding),
                context_hidden_states=context.to(self.device),
                context_lengths=counts,
                context=self.context,
            )
        self.pending = [[] for _ in rows]
        drawn_from: list[torch.Tensor] = []
        drawn_ids: list[torch.Tensor | None] = []

        def select(slot: int, logits: torch.Tensor, ids: torch.LongTensor | None) -> torch.LongTensor:
            scores = logits.to(home)
            ids = None if ids is None else ids.to(home)
            if self.processors:
                scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
                # Where only some tokens can be drafted, the choice is among these, unless a processor has a say about
                # others too.
                if ids is not None and self.processors.names_tokens:
                    scores, ids = _widened(scores, ids, self.drafter.config.vocab_size), None
                prefixes = ()
                if self.processors.reads_tokens:
                    prefixes = [(row, sequences.prefix(row, slot), slot) for row in rows]
                scores = self.processors(prefixes, scores)
            if self.do_sample:
                drawn_from.append(probabilities(scores))
                tokens = self._draw(drawn_from[-1])
            else:
                tokens = sampling.most_likely(scores)
            tokens = tokens_at(ids, tokens)
            drawn_ids.append(ids)
            if self.processors.reads_tokens:
                sequences.put(rows, tokens[:, None], at=slot)
            return tokens.to(self.device)

        state = self.processors.state()
        with torch.autocast(self.device.type, enabled=False):
            draft = self.drafter.draft(hidden, anchors, self.target_lm_head, select, slots, self.top_k)
        self.processors.restore(state)
        logits = confidences = synthetic = None
        if self.synthetic is not None:
            synthetic = self.synthetic.draw(len(rows), slots)
            confidences = synthetic.tolist()
        elif self.keep_confidences:
            raw = draft.confidence_logits.double().cpu()
            logits, confidences = raw.tolist(), torch.sigmoid(raw / self.confidence_temperatures[:slots]).tolist()
        known = None if confidences is None else [survivals(values) for values in confidences]
        # What has no room in a row's text is no candidate.
        useful = zip(known or [[1.0] * slots] * len(rows), room, strict=True)
        return Candidates(
            tokens=draft.tokens.to(home),
            choice=self.scheduler.choose(rows, [values[:left] for values, left in useful]),
            draft_probs=torch.stack(drawn_from, dim=1) if self.do_sample else None,
            survivals=known,
            confidence_logits=logits,
            synthetic=synthetic,
            draft_ids=_of_block(drawn_ids) if self.do_sample else None,
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


def _of_block(ids: Sequence[torch.LongTensor | None]) -> torch.LongTensor | None:
    """The ids of each slot as those of the block: the same for all, or for each row and slot its own."""
    return ids[0] if ids[0] is None or ids[0].dim() == 1 else torch.stack(list(ids), dim=1)


def _widened(scores: torch.Tensor, ids: torch.LongTensor, vocab_size: int) -> torch.Tensor:
    """
    Scores of some tokens among those of all. The others are as good as impossible but not quite: a
    processor that allows none of the drafter's tokens (a grammar, a forced token) leaves scores to draft from.
    """
    return scores.new_full((len(scores), vocab_size), _UNLIKELY).scatter_(1, ids.expand_as(scores), scores)


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
        if expected is not None and expected != found:
            raise ValueError(
                f"The drafter was made for a target with {name} {expected} (its `{field}`), but "
                f"{type(target).__name__} has {found}. Load the drafter that belongs to this target."
            )
    if (last := config.target_layer_ids[-1]) > wanted.num_hidden_layers - 2:
        raise ValueError(
            f"The drafter reads layer {last} (its `target_layer_ids`), but {type(target).__name__} has only "
            f"{wanted.num_hidden_layers} layers, and the last one's output only after its norm. Load the drafter that "
            "belongs to this target."
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
