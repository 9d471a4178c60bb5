"""A stopwatch for a `with` block."""

from __future__ import annotations

import time

__all__ = ["Timer"]


class Timer:
    """Measures the time of a block: `with Timer() as t: ...`, then `t.interval` seconds.

    `start_time` and `end_time` are readings of the same clock, in seconds.
    """

    def __init__(self) -> None:
        self.start_time = 0.0
        self.end_time = 0.0
        self.interval = 0.0

    def __enter__(self) -> Timer:
        self.start_time = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.end_time = time.perf_counter()
        self.interval = self.end_time - self.start_time
