"""Drafts that are accepted by chance, right or wrong: the engine measured apart from a drafter's quality."""

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class SyntheticAcceptance:
    """
    Args:
        accept_prob (`float`): Mean probability of acceptance, in [0, 1].
        auc (`float`, *optional*): ROC-AUC of the confidences that go with it, in (0.5, 1). Each slot's probability of
            acceptance is then drawn from a Beta distribution, and its confidence is that probability: perfectly
            calibrated, as telling as asked for. By default all slots have `accept_prob`.
    """

    accept_prob: float
    auc: float | None = None

    def draw(self, rows: int, slots: int) -> torch.Tensor:
        """Probabilities of acceptance, given that the slots before were accepted, of shape `(rows, slots)`."""
        if self.auc is None:
            return torch.full((rows, slots), self.accept_prob)
        concentration = concentration_of(self.accept_prob, self.auc)
        shape = torch.tensor([self.accept_prob, 1.0 - self.accept_prob]) * concentration
        return torch.distributions.Beta(*shape).sample((rows, slots))


@functools.cache
def concentration_of(mean: float, auc: float) -> float:
    """
    The sum a + b of the Beta(a, b) distribution with a mean of a / (a + b) whose values, taken as probabilities of an
    event, tell it with a given ROC-AUC: P(X > Y), X ~ Beta(a + 1, b) where it happened, Y ~ Beta(a, b + 1) where not.
    """
    grid = (np.arange(20000) + 0.5) / 20000

    def auc_of(concentration: float) -> float:
        a, b = mean * concentration, (1.0 - mean) * concentration
        log_density = (a - 1.0) * np.log(grid) + (b - 1.0) * np.log1p(-grid)
        density = np.exp(log_density - log_density.max())
        happened, not_happened = density * grid, density * (1.0 - grid)
        below = np.cumsum(not_happened) - 0.5 * not_happened
        return float((happened * below).sum() / (happened.sum() * not_happened.sum()))

    low, high = 1e-2, 1e4  # the more concentrated, the less the values tell
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if auc_of(middle) > auc else (low, middle)
    return (low * high) ** 0.5


_in_force: ContextVar[SyntheticAcceptance | None] = ContextVar("synthetic_acceptance", default=None)


@contextlib.contextmanager
def synthetic_acceptance(accept_prob: float, auc: float | None = None) -> Iterator[None]:
    """
    Accept each draft with a given probability, right or wrong, to measure the engine apart from a drafter's quality.
    The text has no meaning.

    Args:
        accept_prob (`float`): In [0, 1]; with `auc` in (0, 1).
        auc (`float`, *optional*): See [`SyntheticAcceptance`].
    """
    if not 0.0 <= accept_prob <= 1.0:
        raise ValueError(f"`accept_prob` is {accept_prob}; it is a probability, 0 to 1.")
    if auc is not None and not (0.5 < auc < 1.0 and 0.0 < accept_prob < 1.0):
        raise ValueError(
            f"`auc` is {auc} and `accept_prob` {accept_prob}; an AUC lies in (0.5, 1), the other in (0, 1)."
        )
    token = _in_force.set(SyntheticAcceptance(accept_prob, auc))
    try:
        yield
    finally:
        _in_force.reset(token)


def synthetic_in_force() -> SyntheticAcceptance | None:
    """What [`synthetic_acceptance`] asks for around this call."""
    return _in_force.get()
