"""What a speculative call did: rounds, acceptance, seconds."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Decision:
    """
    What was decided in one round, and what came of it.

    Attributes:
        round (`int`): Counted from 1.
        rows (`list[int]`): The batch's rows that took part; the other lists are in their order.
        survivals (`list[list[float]]`, *optional*): For each row those of its slots, calibrated; `None` where nothing
            was drafted or the drafter has no confidence head.
        confidence_logits (`list[list[float]]`, *optional*): What they were made of, uncalibrated.
        throughput (`float`, *optional*): Expected tokens a second (the paper's Theta), where costs are known.
        capacity (`int`, *optional*): Drafts in all that `"hardware_aware_lagged"` allowed.
        verify_lengths, accepted (`list[int]`): Drafts of each row that were sent, and accepted.
    """

    round: int
    rows: list[int]
    survivals: list[list[float]] | None
    confidence_logits: list[list[float]] | None
    throughput: float | None
    capacity: int | None
    verify_lengths: list[int]
    accepted: list[int]


@dataclass
class SpeculativeStats:
    """
    Counts of one `generate` call.

    Attributes:
        rounds (`int`): Verification rounds, counted for each row that took part.
        drafted, verified, accepted (`int`): Draft tokens drawn, sent to the target, accepted by it. Accepted ones that
            stand behind a stop are counted, since they tell of the drafter, but are not part of the text.
        sent_by_position, accepted_by_position (`list[int]`): For each block position, how often the drafts before it
            had been accepted and it was sent; and was accepted as well.
        seconds_prefill, seconds_draft, seconds_verify, seconds_rest (`float`): Wall time by part of the call; on an
            accelerator, where calls return early, the time until they returned.
        rows (`list[SpeculativeStats]`): The same counts for each row of a batch, without seconds.
        decisions (`list[Decision]`): Round by round, if the call had `return_dict_in_generate=True`.
    """

    rounds: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    sent_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    seconds_prefill: float = 0.0
    seconds_draft: float = 0.0
    seconds_verify: float = 0.0
    seconds_rest: float = 0.0
    rows: list["SpeculativeStats"] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list, repr=False)

    @classmethod
    def of_rounds(cls, verified: Sequence[int], accepted: Sequence[int]) -> "SpeculativeStats":
        """
        Count rounds of which only the outcome is known.

        Args:
            verified, accepted (`Sequence[int]`): Of each round, the drafts sent, which count as drafted too, and
                accepted.

        Raises:
            `ValueError`: one list is longer than the other, or more drafts were accepted than sent.
        """
        if len(verified) != len(accepted):
            raise ValueError(
                f"`verified` has {len(verified)} rounds and `accepted` {len(accepted)}; give one of each."
            )
        stats = cls()
        for sent, kept in zip(verified, accepted, strict=True):
            if not 0 <= kept <= sent:
                raise ValueError(
                    f"A round has {kept} in `accepted` and {sent} in `verified`; accepted must be 0 to verified."
                )
            stats.record(sent, sent, kept)
        return stats

    @classmethod
    def total(cls, each: Iterable["SpeculativeStats"], block_size: int) -> "SpeculativeStats":
        """
        Counts of several calls or rows together, without seconds, rows and decisions.

        Args:
            each (`Iterable[SpeculativeStats]`): Of drafters with one block size.
            block_size (`int`): The positions that the lists get.
        """
        total = cls(sent_by_position=[0] * block_size, accepted_by_position=[0] * block_size)
        for stats in each:
            for name in ("rounds", "drafted", "verified", "accepted"):
                setattr(total, name, getattr(total, name) + getattr(stats, name))
            for name in ("sent_by_position", "accepted_by_position"):
                for position, count in enumerate(getattr(stats, name)):
                    getattr(total, name)[position] += count
        return total

    def record(self, drafted: int, verified: int, accepted: int) -> None:
        """Count one row's round."""
        self.rounds += 1
        self.drafted += drafted
        self.verified += verified
        self.accepted += accepted
        missing = max(verified - len(self.sent_by_position), 0)
        self.sent_by_position += [0] * missing
        self.accepted_by_position += [0] * missing
        for position in range(min(accepted + 1, verified)):
            self.sent_by_position[position] += 1
            self.accepted_by_position[position] += position < accepted

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens a round, the target's own token included (the paper's tau); `None` before the first round."""
        return 1 + self.accepted / self.rounds if self.rounds else None

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted over verified drafts, the target's own token excluded; `None` if none was verified."""
        return self.accepted / self.verified if self.verified else None

    @property
    def acceptance_by_position(self) -> list[float | None]:
        """For each block position, accepted over sent among the rounds whose earlier drafts were all accepted."""
        pairs = zip(self.accepted_by_position, self.sent_by_position, strict=True)
        return [accepted / sent if sent else None for accepted, sent in pairs]

    def to_dict(self) -> dict[str, Any]:
        """Counts, ratios and seconds as plain values."""
        names = ("rounds", "drafted", "verified", "accepted", "mean_acceptance_length", "draft_acceptance_rate")
        seconds = ("seconds_prefill", "seconds_draft", "seconds_verify", "seconds_rest")
        values = {name: getattr(self, name) for name in (*names, "acceptance_by_position", *seconds)}
        if self.rows:
            values["rows"] = [{name: getattr(row, name) for name in names} for row in self.rows]
        return values
