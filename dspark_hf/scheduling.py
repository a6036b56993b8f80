"""How many drafts of each row are sent to verification: plain numbers in, plain numbers out."""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul


def survivals(confidences: Sequence[float]) -> list[float]:
    """Cumulative products a_j of a block's confidences c_1 ... c_j (DSpark, Algorithm 1, step 1)."""
    return list(accumulate(confidences, mul))


def lengths_by_threshold(confidences: Sequence[Sequence[float]], threshold: float) -> list[int]:
    """
    Send each row's drafts up to the first whose survival falls below a threshold.

    Whether slot k is sent depends on confidences up to k only, which are known before token k is drawn: the rule
    never looks ahead, so it cannot change the output distribution (DSpark, "The Non-Anticipating Property").

    Args:
        confidences (`Sequence[Sequence[float]]`): For each row the block's confidences, each in [0, 1].
        threshold (`float`): In [0, 1]; 0 sends every block whole.

    Returns:
        `list[int]`: `verify_length` of each row, 0 to its block size.
    """
    return [
        next((slot for slot, survival in enumerate(survivals(row)) if survival < threshold), len(row))
        for row in confidences
    ]
