"""Names for sets of adapters, so that K/V computed under one set is never taken for another's."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence
from typing import Any

__all__ = ["adapter_names"]

_counter = itertools.count()
_serials: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def adapter_names(loras: Sequence[Any]) -> list[str]:
    """A name for each adapter that no other object of this process has had, in the order given: several adapters add
    up in their order, and the first replacement of a matrix counts."""
    with _lock:
        for lora in loras:
            if lora not in _serials:
                _serials[lora] = next(_counter)
        return [f"adapter {_serials[lora]} x {getattr(lora, 'lora_scaling', 1.0)!r}" for lora in loras]
