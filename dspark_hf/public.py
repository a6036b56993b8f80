"""What `import dspark_hf` gives: the public names, Transformers' auto classes and the hook in `generate`."""

from transformers import AutoConfig, AutoModel

from .decoding import DSparkGenerateOutput
from .hook import custom_generate, install, uninstall
from .modeling import DSparkConfig, DSparkDraftModel
from .profiles import Profile, use_profile
from .profiling import measure_profile
from .statistics import SpeculativeStats
from .streaming import DSparkStreamer


AutoConfig.register("dspark", DSparkConfig, exist_ok=True)
AutoModel.register(DSparkConfig, DSparkDraftModel, exist_ok=True)
DSparkConfig.register_for_auto_class()
DSparkDraftModel.register_for_auto_class("AutoModel")
install()

__all__ = [
    "DSparkConfig",
    "DSparkDraftModel",
    "DSparkGenerateOutput",
    "DSparkStreamer",
    "Profile",
    "SpeculativeStats",
    "custom_generate",
    "install",
    "measure_profile",
    "uninstall",
    "use_profile",
]
