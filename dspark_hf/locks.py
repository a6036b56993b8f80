"""One lock a target: while a stream runs, the target's attention is switched."""

import threading
import weakref

from transformers import PreTrainedModel


_locks: "weakref.WeakKeyDictionary[PreTrainedModel, threading.RLock]" = weakref.WeakKeyDictionary()
_guard = threading.Lock()


def lock_of(target: PreTrainedModel) -> threading.RLock:
    """The lock that belongs to a target."""
    with _guard:
        return _locks.setdefault(target, threading.RLock())
