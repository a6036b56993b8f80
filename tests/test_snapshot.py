"""What a snapshot puts back."""

import logging
import random
import re
import threading
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy
import pytest
import torch
from tiny import character_tokenizer

from dspark_hf.snapshot import Snapshot


@dataclass
class Slots:
    __slots__ = ("value",)
    value: int


@dataclass
class Inner:
    seen: list[int] = field(default_factory=list)
    calls: int = 0


Pair = namedtuple("Pair", "first second")

# A value, how it is changed, and what shows that it is what it was.
CHANGES = {
    "number": (lambda: 3, lambda holder: setattr(holder, "value", 4), lambda value: value),
    "string": (lambda: "a", lambda holder: setattr(holder, "value", "b"), lambda value: value),
    "none": (lambda: None, lambda holder: setattr(holder, "value", 1), lambda value: value),
    "list": (lambda: [1, [2]], lambda holder: holder.value[1].append(3), list),
    "list, another": (lambda: [1], lambda holder: setattr(holder, "value", [1]), list),
    "tuple": (lambda: (1, [2]), lambda holder: holder.value[1].clear(), list),
    "named tuple": (lambda: Pair(1, Slots(2)), lambda holder: setattr(holder.value.second, "value", 3), list),
    "dict": (lambda: {"a": 1, 2: {}}, lambda holder: holder.value[2].update(x=1), dict),
    "dict, less": (lambda: {"a": 1, "b": 2}, lambda holder: holder.value.pop("a"), lambda value: list(value.items())),
    "counter": (lambda: Counter("abca"), lambda holder: holder.value.update("b"), dict),
    "default dict": (lambda: defaultdict(list), lambda holder: holder.value["x"].append(1), dict),
    "ordered dict": (lambda: OrderedDict(a=1, b=2), lambda holder: holder.value.move_to_end("a"), list),
    "set": (lambda: {1, 2}, lambda holder: holder.value.add(3), set),
    "deque": (lambda: deque([1, 2], maxlen=2), lambda holder: holder.value.append(3), list),
    "tensor": (lambda: torch.zeros(2), lambda holder: holder.value.add_(1), torch.Tensor.tolist),
    "tensor of no dimension": (lambda: torch.zeros(()), lambda holder: holder.value.add_(1), torch.Tensor.tolist),
    "array": (lambda: numpy.zeros(2), lambda holder: holder.value.__iadd__(1), numpy.ndarray.tolist),
    "object": (Inner, lambda holder: holder.value.seen.append(1), vars),
    "object's number": (Inner, lambda holder: setattr(holder.value, "calls", 1), vars),
    "object with slots": (
        lambda: Slots(1),
        lambda holder: setattr(holder.value, "value", 2),
        lambda value: value.value,
    ),
    "iterator": (lambda: iter([1, 2, 3]), lambda holder: next(holder.value), lambda value: value.__length_hint__()),
    "random numbers": (lambda: random.Random(1), lambda holder: holder.value.random(), random.Random.getstate),
    "torch's generator": (
        lambda: torch.Generator().manual_seed(1),
        lambda holder: torch.rand(1, generator=holder.value),
        lambda value: value.get_state().tolist(),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changed_is_put_back(name):
    make, change, look = CHANGES[name]
    holder = SimpleNamespace(value=make())
    before = look(make())
    snapshot = Snapshot(vars(holder), "holder")
    for _ in range(2):  # a snapshot can be put back more than once
        change(holder)
        assert not snapshot.is_unchanged()
        snapshot.restore()
        assert look(holder.value) == before


@pytest.mark.parametrize("name", set(CHANGES) - {"iterator", "random numbers", "torch's generator"})
def test_what_did_not_change_is_told(name):
    holder = SimpleNamespace(value=CHANGES[name][0]())
    assert Snapshot(vars(holder), "holder").is_unchanged()


def test_objects_stay_the_same_objects():
    log, inner, tensor = [1], Inner(), torch.zeros(2)
    holder = SimpleNamespace(log=log, both=(inner, log), tensor=tensor)
    snapshot = Snapshot(vars(holder), "holder")
    log.append(2)
    holder.log = holder.log + [3]
    inner.seen.append(4)
    tensor += 1
    holder.more = 5
    del holder.tensor
    snapshot.restore()
    assert vars(holder).keys() == {"log", "both", "tensor"}
    assert holder.log is log and log == [1]
    assert holder.both[0] is inner and inner == Inner()
    assert holder.tensor is tensor and tensor.tolist() == [0, 0]


def test_circles():
    holder = Inner()
    holder.self, holder.list = holder, [holder]
    holder.list.append(holder.list)
    snapshot = Snapshot(vars(holder), "holder")
    assert snapshot.is_unchanged()
    holder.list.clear()
    snapshot.restore()
    assert holder.list[0] is holder.self is holder and holder.list[1] is holder.list


def test_constants_are_left_alone():
    constants = {
        "model": torch.nn.Linear(1000, 1000),
        "tokenizer": character_tokenizer(),
        "function": re.sub,
        "class": Inner,
        "module": re,
        "pattern": re.compile("a"),
        "logger": logging.getLogger("x"),
        "dtype": torch.float32,
        "method": [].append,
    }
    holder = SimpleNamespace(**constants)
    snapshot = Snapshot(vars(holder), "holder")
    with torch.no_grad():
        holder.model.weight.zero_()
    snapshot.restore()
    assert all(getattr(holder, name) is value for name, value in constants.items())
    assert not holder.model.weight.any()


@pytest.mark.parametrize("value", [(number for number in range(3)), threading.Lock()])
def test_what_cannot_be_put_back_is_an_error_that_names_it(value):
    holder = SimpleNamespace(parts={"inside": [value]})
    kind = type(value).__name__
    with pytest.raises(ValueError, match=rf"holder\['parts'\]\['inside'\]\[0\] is a {kind}, which cannot be put back"):
        Snapshot(vars(holder), "holder")
