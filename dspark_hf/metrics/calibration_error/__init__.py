"""The metric `calibration_error`."""

from .calibration_error import CalibrationError


__all__ = ["CalibrationError"]
