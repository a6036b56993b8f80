"""Acceptance at each block position among the rounds that reached it, as a module that `evaluate.load` reads."""

# `evaluate.load` runs a copy of this file elsewhere, and takes the first metric class that it finds in it: the imports
# are absolute, and of modules only.
import datasets
import evaluate

from dspark_hf.statistics import SpeculativeStats


DESCRIPTION = (
    "Speculative decoding: how often the draft at each block position was accepted, among the rounds in which all "
    "before it were and it was sent (DSpark, Figure 2)."
)
INPUTS = """
Args:
    accepted (`list[int]`): Of each round, the drafts that the target accepted.
    verified (`list[int]`): Of each round, the drafts that it was sent.

Returns:
    acceptance_by_position (`list[float | None]`): Of each position up to the most drafts sent; `None` if no round
        reached it.
    reached_by_position (`list[int]`): The rounds that did.

Example:
    >>> metric = evaluate.load("dspark_hf/metrics/acceptance_by_position")
    >>> metric.compute(accepted=[2, 0], verified=[2, 2])
    {'acceptance_by_position': [0.5, 1.0], 'reached_by_position': [2, 1]}
"""


class AcceptanceByPosition(evaluate.Metric):
    """Conditional acceptance of rounds by position."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="arXiv 2607.05147",
            inputs_description=INPUTS,
            features=datasets.Features(
                {"accepted": datasets.Value("int64"), "verified": datasets.Value("int64")},
            ),
        )

    def _compute(self, accepted: list[int], verified: list[int]) -> dict[str, list[float | None] | list[int]]:
        stats = SpeculativeStats.of_rounds(verified, accepted)
        return {
            "acceptance_by_position": stats.acceptance_by_position,
            "reached_by_position": stats.sent_by_position,
        }
