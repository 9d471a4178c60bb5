"""Which combinations belong to training and which are held out, decided by a hash and so the same everywhere."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from typing import Literal, TypeVar

#: "train" and "seed" draw from the same distribution with other seeds; "combo" holds what training never sees.
Split = Literal["train", "seed", "combo"]
T = TypeVar("T")
_ONE_IN = 16


def is_held_out(*parts: object) -> bool:
    """Return whether this combination is kept from training."""
    return zlib.crc32("|".join(map(str, parts)).encode()) % _ONE_IN == 0


def draw(
    rng: random.Random, split: Split, make: Callable[[random.Random], T], key: Callable[[T], tuple[object, ...]]
) -> T:
    """Return `make(rng)`, drawn again until its key lies on the split's side of the line."""
    wanted = split == "combo"
    value = make(rng)
    for _ in range(400):
        if is_held_out(*key(value)) == wanted:
            return value
        value = make(rng)
    return value
