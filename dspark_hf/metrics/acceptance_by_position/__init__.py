"""The metric `acceptance_by_position`."""

from .acceptance_by_position import AcceptanceByPosition


__all__ = ["AcceptanceByPosition"]
