"""How well a drafter's survival foretells acceptance, position by position, as a module that `evaluate.load` reads."""

# `evaluate.load` runs a copy of this file elsewhere, and takes the first metric class that it finds in it: the imports
# are absolute, and of modules only.
import datasets
import evaluate
import numpy as np

from dspark_hf.calibration import position_metrics


DESCRIPTION = (
    "Calibration and discrimination of survivals, the cumulative products of confidences: expected calibration error "
    "over 15 bins of equal width, Brier score and ROC-AUC by block position (DSpark, Figure 6)."
)
INPUTS = """
Args:
    confidence_logits (`list[list[float]]`): Of each block, the confidence head's output for each position.
    accepted (`list[int]`): Of each block, the length of its accepted prefix. All blocks were verified whole.
    temperatures (`list[float]`, *optional*): What the logits of each position are divided by; by default 1.

Returns:
    ece, brier (`list[float]`): By position.
    roc_auc (`list[float | None]`): By position; `None` where all blocks ended alike.
    reached_by_position (`list[int]`): Blocks in which all before a position were accepted.

Example:
    >>> metric = evaluate.load("dspark_hf/metrics/calibration_error")
    >>> metric.compute(confidence_logits=[[0.0], [0.0]], accepted=[1, 0])
    {'ece': [0.0], 'brier': [0.25], 'roc_auc': [0.5], 'reached_by_position': [2]}
"""


class CalibrationError(evaluate.Metric):
    """Calibration error, Brier score and ROC-AUC of survivals by position."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="arXiv 2607.05147",
            inputs_description=INPUTS,
            features=datasets.Features(
                {
                    "confidence_logits": datasets.Sequence(datasets.Value("float64")),
                    "accepted": datasets.Value("int64"),
                }
            ),
        )

    def _compute(
        self, confidence_logits: list[list[float]], accepted: list[int], temperatures: list[float] | None = None
    ) -> dict[str, list[float | None] | list[int]]:
        width = len(confidence_logits[0])
        if any(len(logits) != width for logits in confidence_logits):
            raise ValueError(
                f"`confidence_logits` has blocks of {sorted(set(map(len, confidence_logits)))} positions; give blocks "
                "of one size, each verified whole."
            )
        used = [1.0] * width if temperatures is None else temperatures
        metrics = position_metrics(np.array(confidence_logits, dtype=float), np.array(accepted), used)
        values = {name: [getattr(each, name) for each in metrics] for name in ("ece", "brier", "roc_auc")}
        return values | {"reached_by_position": [each.reached for each in metrics]}
