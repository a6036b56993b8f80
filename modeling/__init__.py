"""The drafter as it travels to the Hub: configuration, model, and what both need, importing nothing of `dspark_hf`."""

from .configuration_dspark import DSparkConfig
from .modeling_dspark import DSparkDraftModel


__all__ = ["DSparkConfig", "DSparkDraftModel"]
