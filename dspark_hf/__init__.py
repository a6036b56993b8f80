"""DSpark speculative decoding for Hugging Face Transformers: `target.generate(**inputs, assistant_model=drafter)`."""

from transformers import AutoConfig, AutoModel

from .modeling import DSparkConfig, DSparkDraftModel


AutoConfig.register("dspark", DSparkConfig, exist_ok=True)
AutoModel.register(DSparkConfig, DSparkDraftModel, exist_ok=True)
DSparkConfig.register_for_auto_class()
DSparkDraftModel.register_for_auto_class("AutoModel")

__all__ = ["DSparkConfig", "DSparkDraftModel"]
