"""Which captured step stores a prompt, and from which pass of its size on there is one."""

from __future__ import annotations

from collections import Counter

from exl_kernels.selection import PACKED_ROWS, is_decode_step

from .environment import eager_prompts
from .step_inputs import Bucket

__all__ = ["PromptBuckets"]

MAX_COUNTED = 4096
"""Most buckets of prompts whose passes are counted. Beyond them counting begins anew."""


class PromptBuckets:
    """Buckets of steps without logits, and the number of eager passes of each.

    The first passes of a bucket are not captured: many prompts are the only ones of their size.
    """

    def __init__(self) -> None:
        self._eager: Counter[Bucket] = Counter()

    def find(self, bucket: Bucket, places: int, *, last: bool) -> Bucket | None:
        """Return the bucket that is captured for a prompt; None where it runs eagerly, which is counted.

        Args:
            bucket: rows, tokens a row and pages of the prompt.
            places: pages of the cache.
            last: the step ends with hidden states for the head.
        """
        pages = min(1 << (bucket.pages - 1).bit_length(), places)
        # Beyond so many windows only multiples: of few buckets each is captured soon. Rows of whole prompts are exact.
        windows = max(PACKED_ROWS // bucket.q_len, 1)
        exact = not is_decode_step(bucket.q_len) or bucket.batch <= windows
        batch = bucket.batch if exact else -(-bucket.batch // windows) * windows
        found = bucket._replace(batch=batch, pages=pages, stores=not last, last=last)
        if self._eager[found] >= eager_prompts():
            return found
        if len(self._eager) > MAX_COUNTED:
            self._eager.clear()
        self._eager[found] += 1
        return None

    def forget(self, bucket: Bucket) -> None:
        """Count the passes of a bucket anew: its step was dropped, so prompts of its size are rare again."""
        self._eager.pop(bucket, None)

    def clear(self) -> None:
        """Count the passes of all buckets anew."""
        self._eager.clear()
