"""Engines that stop at a certain step: however fast a machine is, a request is still running then."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from exl_serve.testing.local import EngineThread

__all__ = ["Held"]


class Held:
    """Let an engine make `steps` steps, and then none until `release` is called. It takes and cancels requests."""

    def __init__(self, engine: EngineThread, monkeypatch: pytest.MonkeyPatch, steps: int = 0) -> None:
        self.steps = steps
        self._released = threading.Event()
        self._iterate = engine.generator.iterate_columns
        monkeypatch.setattr(engine.generator, "iterate_columns", self._step)

    def _step(self) -> Any:
        if self.steps <= 0 and not self._released.is_set():
            time.sleep(0.01)
            return None
        self.steps -= 1
        return self._iterate()

    def release(self) -> None:
        """Let the engine go on."""
        self._released.set()
