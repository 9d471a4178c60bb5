"""When a job passed from one phase to the next."""

from __future__ import annotations

import time
from dataclasses import dataclass

__all__ = ["JobTimes"]


@dataclass(slots=True)
class JobTimes:
    """Readings of `time.monotonic`, in seconds; None until the job reaches the phase."""

    enqueued: float | None = None
    first_prefill: float | None = None
    #: start of the first decode step
    first_token: float | None = None
    last_token: float | None = None

    def mark_enqueued(self) -> None:
        """Record that the job has joined the queue."""
        self.enqueued = time.monotonic()

    def mark_prefill(self) -> None:
        """Record that prompt tokens are about to be computed."""
        if self.first_prefill is None:
            self.first_prefill = time.monotonic()

    def mark_decode(self) -> None:
        """Record that the first decode step is about to run."""
        self.mark_prefill()
        self.first_token = time.monotonic()

    def mark_token(self) -> bool:
        """Record that a token was sampled. Returns whether it was the first."""
        first = self.last_token is None
        self.last_token = time.monotonic()
        return first

    def phases(self) -> tuple[float, float, float]:
        """Return the seconds from the queue to the first prefill, from there to the first decode step, and to the last
        token.

        A phase that the job did not reach takes 0 seconds.
        """
        enqueued = self.enqueued or 0.0
        last = self.last_token or self.first_token or self.first_prefill or enqueued
        prefill = self.first_prefill or last
        first = self.first_token or last
        return prefill - enqueued, first - prefill, last - first
