"""One lock a config: while a stream runs, the attention that its config names is switched."""

import threading
import weakref

from transformers import PreTrainedConfig


_locks: dict[int, threading.RLock] = {}
_guard = threading.Lock()


def lock_of(config: PreTrainedConfig) -> threading.RLock:
    """The lock that belongs to a config, which several targets may share."""
    with _guard:
        if id(config) not in _locks:
            _locks[id(config)] = threading.RLock()
            weakref.finalize(config, _locks.pop, id(config), None)
        return _locks[id(config)]
