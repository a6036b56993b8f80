"""The sequential head that ties a block's tokens together, and the confidence head."""

import torch
from torch import nn

from .borrowing import is_plain_linear
from .configuration_dspark import DSparkConfig


class DSparkMarkovHead(nn.Module):
    """
    The sequential correction added to the base logits: low-rank bigram bias (Eq. 5), its gated form, or the recurrent
    form (Eq. 6).
    """

    def __init__(self, config: DSparkConfig):
        super().__init__()
        rank, width = config.markov_rank, config.hidden_size
        self.head_type = config.markov_head_type
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size or config.vocab_size, bias=False)
        if self.head_type == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
        elif self.head_type == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    def initial_state(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """The recurrent state s_0 = 0 of shape `(rows, rank)`, or `None` for the heads without one."""
        if self.head_type != "rnn":
            return None
        return hidden_states.new_zeros(len(hidden_states), self.markov_w1.embedding_dim)

    def features(
        self, previous: torch.LongTensor, hidden_states: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        What `markov_w2` turns into the bias of one slot.

        Args:
            previous (`torch.LongTensor` of shape `(rows,)`): The token before the slot's.
            hidden_states (`torch.Tensor` of shape `(rows, hidden_size)`): The backbone's output at the slot.
            state (`torch.Tensor` of shape `(rows, rank)`, *optional*): The recurrent state.

        Returns:
            Features of shape `(rows, rank)` and the next state.
        """
        embedding = self.markov_w1(previous)
        if self.head_type == "vanilla":
            return embedding, None
        if self.head_type == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat([hidden_states, embedding], dim=-1))) * embedding, None
        joint = self.joint_proj(torch.cat([state, embedding, hidden_states], dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)

    def correction(self, features: torch.Tensor, places: torch.LongTensor | None = None) -> torch.Tensor:
        """
        The bias of one slot.

        Args:
            features (`torch.Tensor` of shape `(rows, rank)`): As [`features`] returns them.
            places (`torch.LongTensor` of shape `(rows, tokens)`, *optional*): Of the tokens that it is wanted for,
                among those drafted. Defaults to all.

        Returns:
            `torch.Tensor` of shape `(rows, tokens)`.
        """
        if places is None:
            return self.markov_w2(features)
        if not is_plain_linear(self.markov_w2):
            return self.markov_w2(features).gather(1, places)
        return torch.matmul(self.markov_w2.weight[places], features[..., None]).squeeze(-1)

    def block_features(self, previous: torch.LongTensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """
        [`features`] of whole blocks whose tokens are known, as in training.

        Args:
            previous (`torch.LongTensor` of shape `(rows, block_size)`): The token before each slot's.
            hidden_states (`torch.Tensor` of shape `(rows, block_size, hidden_size)`): The backbone's output.

        Returns:
            `torch.Tensor` of shape `(rows, block_size, rank)`.
        """
        state, features = self.initial_state(hidden_states[:, 0]), []
        for slot in range(previous.shape[1]):
            found, state = self.features(previous[:, slot], hidden_states[:, slot], state)
            features.append(found)
        return torch.stack(features, dim=1)


class DSparkConfidenceHead(nn.Module):
    """Logit of the probability that a slot's token is accepted, given that all before it were (Eq. 7)."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        self.proj = nn.Linear(config.hidden_size + (config.markov_rank if self.with_markov else 0), 1)

    def forward(self, hidden_states: torch.Tensor, markov_embeds: torch.Tensor | None) -> torch.Tensor:
        """Logits of shape `(rows, block_size)` from `(rows, block_size, ...)`."""
        if self.with_markov:
            hidden_states = torch.cat([hidden_states, markov_embeds], dim=-1)
        return self.proj(hidden_states).squeeze(-1)
