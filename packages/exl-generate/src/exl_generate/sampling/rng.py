"""Counter-based random numbers that belong to a request: no state, so nothing to share, lock or rewind."""

from __future__ import annotations

import hashlib
import secrets

__all__ = ["RequestRandom"]

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def _mix(x: int) -> int:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014): a bijection of 64-bit words that passes BigCrush as a
    counter RNG."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


class RequestRandom:
    """Uniform numbers in [0, 1) as a function of (seed, position of the token in the request, attempt at that
    position).

    `seed` is any integer; None takes 64 bits from the operating system. The seed is hashed, so that neighbouring
    seeds, which batches use on purpose, give unrelated streams.
    """

    __slots__ = ("_key", "seed")

    def __init__(self, seed: int | None = None) -> None:
        self.seed = secrets.randbits(64) if seed is None else int(seed)
        digest = hashlib.blake2b(str(self.seed).encode(), digest_size=8, person=b"exl-rng").digest()
        self._key = int.from_bytes(digest, "little")

    def uniform(self, position: int, attempt: int = 0) -> float:
        """53 random bits for token `position` (0 = first generated); `attempt` counts rewinds to that position."""
        word = _mix((self._key + (position + 1) * _GAMMA) & _MASK)
        word = _mix((word + (attempt + 1) * _GAMMA) & _MASK)
        return float(word >> 11) * 2.0**-53
