"""Counter-based random numbers of a request: without state, so nothing needs to be shared, locked or rewound."""

from __future__ import annotations

import hashlib
import operator
import secrets
from typing import SupportsIndex

from exl_generate.errors import RequestError

__all__ = ["RequestRandom"]

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def _mix(x: int) -> int:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014): a bijection of 64-bit words that passes BigCrush as a
    counter RNG."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _whole(seed: SupportsIndex) -> int:
    try:
        if isinstance(seed, bool):
            raise TypeError
        return operator.index(seed)
    except TypeError:
        raise RequestError(f"seed is {seed!r}; it must be an int of any size, or None for a random one") from None


class RequestRandom:
    """Uniform numbers in [0, 1): a function of seed, position of the token in the request, and attempt there.

    The seed is hashed, so that neighbouring seeds, which batches use on purpose, give unrelated streams.

    Args:
        seed: An integer of any size; None takes 64 bits from the operating system.

    Raises:
        RequestError: `seed` is neither.
    """

    __slots__ = ("_key", "seed")

    def __init__(self, seed: SupportsIndex | None = None) -> None:
        self.seed = secrets.randbits(64) if seed is None else _whole(seed)
        # Python refuses to write thousands of decimal digits; hexadecimal ones it writes.
        text = str(self.seed) if self.seed.bit_length() <= 4096 else hex(self.seed)
        digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"exl-rng").digest()
        self._key = int.from_bytes(digest, "little")

    def uniform(self, position: int, attempt: int = 0) -> float:
        """53 random bits for token `position` (0 = first generated); `attempt` counts rewinds to that position."""
        word = _mix((self._key + (position + 1) * _GAMMA) & _MASK)
        word = _mix((word + (attempt + 1) * _GAMMA) & _MASK)
        return float(word >> 11) * 2.0**-53
