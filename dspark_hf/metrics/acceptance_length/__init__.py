"""The metric `acceptance_length`."""

from .acceptance_length import AcceptanceLength


__all__ = ["AcceptanceLength"]
