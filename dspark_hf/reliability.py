"""Reliability diagrams, drawn alike wherever survivals meet what happened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .calibration import position_metrics, reliability_points, scaled_survivals, survived
from .files import image_format


@dataclass(frozen=True, eq=False)
class ReliabilityRow:
    """
    A row of a figure, a panel a position.

    Attributes:
        label (`str`): Stands at its left.
        confidence_logits (`np.ndarray` of shape `(blocks, block_size)`): Of blocks that were verified whole.
        accepted (`np.ndarray` of shape `(blocks,)`): Length of each block's accepted prefix.
        temperatures (`Sequence[float]`, *optional*): One a position, for the curve "after"; none where there are none.
    """

    label: str
    confidence_logits: np.ndarray
    accepted: np.ndarray
    temperatures: Sequence[float] | None


def draw_reliability(rows: Sequence[ReliabilityRow], path: Path) -> None:
    """
    Draw reliability diagrams, before and after temperatures.

    Args:
        rows (`Sequence[ReliabilityRow]`): At least one, all of one block size.
        path (`Path`): The file to write.

    Source: DSpark, Figure 6.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width = rows[0].confidence_logits.shape[1]
    figure = Figure(figsize=(2.0 * width + 1.0, 2.6 * len(rows) + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(rows), width, sharex=True, sharey=True, squeeze=False)
    for axes, row in zip(panels, rows, strict=True):
        happened = survived(row.accepted, width)
        axes[0].set_ylabel(f"{row.label}\nfrequency")
        errors: list[list[str]] = [[] for _ in axes]
        for label, temperatures in (("before", [1.0] * width), ("after", row.temperatures)):
            if temperatures is None:
                continue
            survivals = scaled_survivals(row.confidence_logits, temperatures)
            metrics = position_metrics(row.confidence_logits, row.accepted, temperatures)
            for position, panel in enumerate(axes):
                predicted, frequency, counts = reliability_points(survivals[:, position], happened[:, position])
                panel.plot(predicted, frequency, linewidth=1)
                panel.scatter(predicted, frequency, s=4 + 60 * counts / len(happened), label=label)
                errors[position].append(f"{metrics[position].ece:.1%}")
        for position, panel in enumerate(axes):
            panel.plot([0, 1], [0, 1], color="grey", linestyle=":", linewidth=1)
            panel.set_title(f"position {position + 1}\nECE {' → '.join(errors[position])}", fontsize=9)
    for panel in panels[-1]:
        panel.set_xlabel("survival")
    panels[0, 0].legend(fontsize=8)
    figure.savefig(path, dpi=120, format=image_format(path))
