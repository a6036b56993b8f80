"""Where releases of Transformers differ: the one place that asks for the version. Floor 5.18, tested up to 5.24."""

import inspect
from collections.abc import Sequence

import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedModel, cache_utils


FLOOR = Version("5.18.0")
VERSION = Version(Version(transformers.__version__).base_version)
if VERSION < FLOOR:
    raise ImportError(
        f"dspark_hf needs transformers {FLOOR} or newer, found {transformers.__version__}: run "
        "`pip install -U transformers`."
    )

# The name of the cache in `generate`'s model arguments and outputs: renamed in 5.24.
CACHE_NAME = "cache" if Version("5.24.0") <= VERSION else "past_key_values"
# Whether `output_hidden_states=[...]` counts the embedding output as entry 0; before 5.23 entry i is layer i's.
_EMBEDDING_COUNTS = Version("5.23.0") <= VERSION
# Cache layers that hold nothing, of model layers that use another's keys: since 5.23; before, they have none.
EMPTY_LAYERS = (cache_utils.DummyLayer,) if Version("5.23.0") <= VERSION else ()


def cache_argument(model: PreTrainedModel) -> str:
    """The name of the cache in `model.forward`: code from elsewhere may still use the old one and swallow the new."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def hidden_states_request(taps: Sequence[int], keep_all: bool) -> bool | list[int]:
    """
    The value of `output_hidden_states` that keeps the tapped layers' outputs and no others.

    Args:
        taps (`Sequence[int]`): Layer ids; -1 is the embedding output.
        keep_all (`bool`): Whether the user asked for all of them.
    """
    if keep_all or (-1 in taps and not _EMBEDDING_COUNTS):
        return True
    return [tap + 1 if _EMBEDDING_COUNTS else tap for tap in taps]


def tapped_hidden_states(
    hidden_states: Sequence[torch.Tensor | None], taps: Sequence[int], num_layers: int
) -> list[torch.Tensor | None]:
    """
    Pick the tapped layers' outputs.

    Args:
        hidden_states (`Sequence` of `torch.Tensor` or `None`): As a model returned them to [`hidden_states_request`].
        taps (`Sequence[int]`): Layer ids; -1 is the embedding output.
        num_layers (`int`): The target's number of layers.
    """
    offset = len(hidden_states) - num_layers  # 1 where the embedding output is entry 0
    return [hidden_states[tap + offset] if tap + offset >= 0 else None for tap in taps]


def is_croppable(layer: cache_utils.CacheLayerMixin) -> bool:
    """
    Whether [`crop`] makes a cache layer forget its last tokens. Older releases say so of quantised layers, and are
    wrong, and do not say so of static ones.
    """
    if isinstance(layer, cache_utils.QuantizedLayer):
        return False
    return type(layer) is cache_utils.StaticLayer or getattr(layer, "is_croppable", False)


def crop(layer: cache_utils.CacheLayerMixin, count: int) -> None:
    """Make a cache layer forget its last `count` tokens."""
    if type(layer) is cache_utils.StaticLayer:
        layer.cumulative_length.sub_(count)
    else:
        layer.crop(-count)
