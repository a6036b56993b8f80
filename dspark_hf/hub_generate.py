"""
Decoding with a drafter from its own repository, where dspark_hf is not installed. `dspark push` puts this module there
as `custom_generate/generate.py`, with the modules that it needs beside it.
"""

import functools
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedModel

from .hook import custom_generate, is_drafter
from .modeling.checkpoint_loading import HUB_ARGUMENTS
from .modeling.modeling_dspark import DSparkDraftModel


# The repository that this lies in, from where the drafter comes; the push writes it here.
DRAFTER = ""


def generate(model: PreTrainedModel, assistant_model: Any = None, streamer: Any = None, **kwargs: Any) -> Any:
    """
    What `target.generate(..., custom_generate="NAMESPACE/NAME", trust_remote_code=True)` calls.

    Args:
        model (`PreTrainedModel`): The target.
        assistant_model (`DSparkDraftModel` or `str`, *optional*): A drafter, or a folder or Hub id of one; by default
            the one of this repository, loaded at the first call beside the target and in its dtype.
        streamer (`BaseStreamer`, *optional*): As for `generate`.
        kwargs: As for `generate`; `token` and the like go with the drafter as well, and `revision`, the one of this
            repository, with its own drafter.

    Returns:
        What `generate` returns, with `speculative_stats` if `return_dict_in_generate` is set.
    """
    where = {name: kwargs.pop(name) for name in HUB_ARGUMENTS if name in kwargs}
    drafter = assistant_model
    if not is_drafter(drafter):
        source = DRAFTER if drafter is None else str(drafter)
        if drafter is not None:
            where.pop("revision", None)
        if not source:
            raise ValueError("`assistant_model` is not given; pass a DSpark drafter, or the folder or Hub id of one.")
        device = torch.device("cpu") if model.device.type == "meta" else model.device  # offloaded
        drafter = _loaded(source, model.dtype, device, tuple(sorted(where.items())))
    return GenerationMixin.generate(
        model, streamer=streamer, custom_generate=custom_generate(drafter, streamer), **kwargs
    )


@functools.lru_cache(maxsize=4)
def _loaded(source: str, dtype: torch.dtype, device: torch.device, where: tuple) -> DSparkDraftModel:
    return DSparkDraftModel.from_pretrained(source, dtype=dtype, **dict(where)).to(device).eval()
