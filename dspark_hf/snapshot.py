"""What an object of the user's own holds at one moment, so that it can be made what it was."""

import copy
import types
from collections import deque
from typing import Any

import numpy
import torch
from transformers import PreTrainedTokenizerBase


# Values that have no state of their own, or none that decoding changes.
_CONSTANTS = (
    *(type(None), bool, int, float, complex, str, bytes, range, frozenset, torch.dtype, torch.device, torch.Size),
    *(type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType),
    *(torch.nn.Module, PreTrainedTokenizerBase),
)


class Snapshot:
    """
    An object and everything in it. Containers, tensors, arrays and the attributes of plain objects are put back into
    the very same objects, so that whoever else holds one of them sees it put back as well; what is of another kind is
    replaced by a copy. Models, tokenizers and functions count as constant.

    Args:
        value (`Any`): What to remember.
        name (`str`): What to call it in messages.

    Raises:
        `ValueError`: if a part can neither be taken apart nor copied.
    """

    def __init__(self, value: Any, name: str):
        self._seen: dict[int, _Part] = {}
        self._parts: list[_Part] = []  # those inside another come before it
        self._save(value, name)

    def restore(self) -> None:
        """Make everything what it was."""
        for part in self._parts:
            part.restore()

    def is_unchanged(self) -> bool:
        """Whether everything is what it was."""
        return all(part.is_unchanged() for part in self._parts)

    def _save(self, value: Any, name: str) -> "_Part":
        if isinstance(value, _CONSTANTS):
            return _Part(value)
        if id(value) in self._seen:
            return self._seen[id(value)]
        kind = next((kind for types_, kind in _KINDS if isinstance(value, types_)), None)
        plain = type(value).__reduce__ is object.__reduce__ and hasattr(value, "__dict__")
        if kind is None:
            kind = _Part if plain else _Copied
        part = self._seen[id(value)] = kind(value, name)
        if kind is _Part:
            self._save(vars(value), name)
        part.parts = [self._save(item, f"{name}[{key!r}]") for key, item in part.items()]
        self._parts.append(part)
        return part


class _Part:
    """A value that stays the same object."""

    def __init__(self, value: Any, name: str = ""):
        self.value, self.name = value, name
        self.parts: list[_Part] = []

    def items(self) -> list[tuple[Any, Any]]:
        """What is inside, each with a name."""
        return []

    def restore(self) -> None:
        """Make the value what it was."""

    def is_unchanged(self) -> bool:
        """Whether the value is what it was, apart from what is inside its parts."""
        found = [item for _, item in self.items()]
        return len(found) == len(self.parts) and all(map(_is_still, found, self.parts))


def _is_still(found: Any, part: _Part) -> bool:
    if found is part.value:
        return True
    return isinstance(found, _CONSTANTS) and type(found) is type(part.value) and found == part.value


class _Mapping(_Part):
    def __init__(self, value: dict, name: str):
        super().__init__(value, name)
        self.keys = list(value)

    def items(self):
        return list(self.value.items())

    def restore(self):
        self.value.clear()
        for key, part in zip(self.keys, self.parts, strict=True):
            self.value[key] = part.value

    def is_unchanged(self):
        return list(self.value) == self.keys and super().is_unchanged()


class _Sequence(_Part):
    def items(self):
        return list(enumerate(self.value))

    def restore(self):
        self.value.clear()
        self.value.extend(part.value for part in self.parts)


class _Tuple(_Part):
    def items(self):
        return list(enumerate(self.value))

    def restore(self):
        if not self.is_unchanged():  # a part was replaced by a copy
            self.value = tuple.__new__(type(self.value), [part.value for part in self.parts])


class _Elements(_Part):
    def __init__(self, value: Any, name: str):
        super().__init__(value, name)
        self.held = value.clone() if isinstance(value, torch.Tensor) else value.copy()

    def restore(self):
        if isinstance(self.value, set):
            self.value.clear()
            self.value.update(self.held)
        else:
            self.value[...] = self.held

    def is_unchanged(self):
        if isinstance(self.value, torch.Tensor):
            return torch.equal(self.value, self.held)
        if isinstance(self.value, numpy.ndarray):
            return numpy.array_equal(self.value, self.held)
        return self.value == self.held


class _Copied(_Part):
    def __init__(self, value: Any, name: str):
        super().__init__(value, name)
        self.held = self._copy(value)

    def restore(self):
        self.value = self._copy(self.held)

    def is_unchanged(self):
        return self.held is self.value or bool(self.held == self.value)

    def _copy(self, value: Any) -> Any:
        try:
            return copy.deepcopy(value)
        except TypeError as error:
            raise ValueError(
                f"{self.name} is a {type(value).__name__}, which cannot be put back when a draft is rejected "
                f"({error}). Keep what changes in numbers, containers or tensors, or call `generate` without "
                "`assistant_model`."
            ) from error


_KINDS = (
    (dict, _Mapping),
    ((list, deque), _Sequence),
    (tuple, _Tuple),
    ((torch.Tensor, numpy.ndarray, set), _Elements),
)
