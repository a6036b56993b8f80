"""Tokens a round and the share of verified drafts that are accepted, as a module that `evaluate.load` reads."""

# `evaluate.load` runs a copy of this file elsewhere, and takes the first metric class that it finds in it: the imports
# are absolute, and of modules only.
import datasets
import evaluate

from dspark_hf.statistics import SpeculativeStats


DESCRIPTION = "Speculative decoding: tokens a round, the target's own included, and accepted over verified drafts."
INPUTS = """
Args:
    accepted (`list[int]`): Of each round, the drafts that the target accepted.
    verified (`list[int]`): Of each round, the drafts that it was sent.

Returns:
    mean_acceptance_length (`float`): 1 plus the mean of `accepted`.
    draft_acceptance_rate (`float`, *optional*): Sum of `accepted` over sum of `verified`; `None` if none was sent.

Example:
    >>> metric = evaluate.load("dspark_hf/metrics/acceptance_length")
    >>> metric.compute(accepted=[2, 0, 4], verified=[4, 4, 4])
    {'mean_acceptance_length': 3.0, 'draft_acceptance_rate': 0.5}
"""


class AcceptanceLength(evaluate.Metric):
    """`mean_acceptance_length` and `draft_acceptance_rate` of rounds."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="arXiv 2607.05147",
            inputs_description=INPUTS,
            features=datasets.Features(
                {"accepted": datasets.Value("int64"), "verified": datasets.Value("int64")},
            ),
        )

    def _compute(self, accepted: list[int], verified: list[int]) -> dict[str, float | None]:
        stats = SpeculativeStats.of_rounds(verified, accepted)
        return {
            "mean_acceptance_length": stats.mean_acceptance_length,
            "draft_acceptance_rate": stats.draft_acceptance_rate,
        }
