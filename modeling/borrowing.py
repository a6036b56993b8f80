"""Calling an embedding or a head, the drafter's own or the target's; and some rows of a target's head."""

import weakref
from typing import Any

import torch
from torch import nn


# Dtypes a module that is not quantised computes in.
COMPUTE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def call_module(module: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """
    Call an embedding or a head, the drafter's own or the target's, on inputs of the drafter's: wherever its weights
    are, in whatever dtype, quantised or not.
    """
    parameter = next(module.parameters(), None)
    held = parameter if parameter is not None else next(module.buffers(), None)
    # What accelerate has offloaded lies on `meta` between calls; its hook moves the inputs.
    if held is not None and held.device.type != "meta":
        inputs = inputs.to(held.device)
    # Integers and 8-bit floats are storage of quantised weights, whose modules know what to do with their inputs.
    if inputs.is_floating_point() and parameter is not None and parameter.dtype in COMPUTE_DTYPES:
        inputs = inputs.to(parameter.dtype)
    return module(inputs)


def embedding_scale(embedding: nn.Module | None) -> float:
    """The factor that an embedding has multiplied its output by, as Gemma's does; 1 for most."""
    return getattr(embedding, "scalar_embed_scale", getattr(embedding, "embed_scale", 1.0))


class HeadRows:
    """
    Logits of some tokens from a target's head. Of a plain linear head the tokens' rows are selected once and kept, as
    long as the head lives and its weight is the same; any other is called and its output selected from.

    It belongs to one drafter, outside its module tree: nothing of the target is saved, copied or moved with it.
    """

    def __init__(self) -> None:
        self._kept: weakref.WeakKeyDictionary[nn.Module, tuple] = weakref.WeakKeyDictionary()

    def __deepcopy__(self, memo: dict[int, Any]) -> "HeadRows":
        return HeadRows()

    def __reduce__(self) -> tuple:
        return HeadRows, ()

    def logits(self, head: nn.Module, hidden_states: torch.Tensor, token_ids: torch.LongTensor) -> torch.Tensor:
        """
        Args:
            head (`nn.Module`): The target's head.
            hidden_states (`torch.Tensor` of shape `(..., hidden_size)`): Its inputs.
            token_ids (`torch.LongTensor` of shape `(draft_vocab_size,)`): The tokens.

        Returns:
            `torch.Tensor` of shape `(..., draft_vocab_size)`.
        """
        if not is_plain_linear(head):
            output = call_module(head, hidden_states)
            return output.index_select(-1, token_ids.to(output.device))
        weight, bias = self._rows(head, token_ids)
        return nn.functional.linear(hidden_states.to(weight.device, weight.dtype), weight, bias)

    def _rows(self, head: nn.Linear, token_ids: torch.LongTensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        sources = [tensor for tensor in (head.weight, head.bias, token_ids) if tensor is not None]
        state = [_state(tensor) for tensor in sources]
        kept = self._kept.get(head)
        if kept is not None:
            references, kept_state, rows = kept
            same = len(references) == len(sources) and all(
                reference() is tensor for reference, tensor in zip(references, sources, strict=True)
            )
            if same and kept_state == state:
                return rows
        # Outside of inference mode, so that rows selected while generating can be trained through later.
        with torch.inference_mode(False), torch.no_grad():
            index = token_ids.to(head.weight.device)
            rows = tuple(
                None if tensor is None else tensor.detach().index_select(0, index)
                for tensor in (head.weight, head.bias)
            )
        self._kept[head] = [weakref.ref(tensor) for tensor in sources], state, rows
        return rows


def is_plain_linear(head: nn.Module) -> bool:
    """
    Whether a head is a linear map and no more, whose rows can be taken by themselves: not quantised, sharded,
    offloaded, adapted or hooked.
    """
    return (
        type(head) is nn.Linear
        and type(head.weight) is nn.Parameter
        and head.weight.dtype in COMPUTE_DTYPES
        and head.weight.device.type != "meta"
        and "forward" not in vars(head)  # where accelerate puts its hooks
        and not head._forward_hooks
        and not head._forward_pre_hooks
    )


def _state(tensor: torch.Tensor) -> tuple:
    """What changes when a tensor's values, dtype or device do."""
    version = None if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), version, tensor.dtype, tensor.device
