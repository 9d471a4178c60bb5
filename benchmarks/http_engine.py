"""The engine of a benchmark over HTTP: in this process's main thread, as in an engine process, beside API workers."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

__all__ = ["host_in", "received", "run_beside"]


def host_in(place: str, generator: Any, folder: str, limits: Any, floor: Any) -> tuple[Any, str]:
    """Return an engine that is not running yet, and the address at which it listens.

    Args:
        place: folder of its socket and of its status.
        generator: what it serves.
        folder: the model's.
        limits: `exl_serve.config.model.Limits`.
        floor: least seconds of a step, by its number of jobs; None for none.
    """
    from exl_serve.config.model import ModelConfig
    from exl_serve.engine.client import ModelCard
    from exl_serve.engine.host import Host
    from exl_serve.engine.status import StatusWriter

    card = ModelCard(
        id="bench",
        folder=folder,
        max_seq_len=generator.max_seq_len,
        max_batch_size=generator.max_batch_size,
        cache_tokens=generator.max_total_tokens,
        vocab_size=generator.model.config.vocab_size,
        eos_ids=(2,),
        digest="0" * 32,
    )
    address = f"ipc://{place}/engine-{time.monotonic_ns()}"
    status = StatusWriter(Path(place) / f"status-{time.monotonic_ns()}", os.urandom(16))
    config = ModelConfig(id="bench", path=folder)
    return Host(generator, card, address, status, config=config, limits=limits, step_floor=floor), address


def run_beside(
    host: Any,
    workers: Sequence[BaseProcess],
    measure: Callable[[], None],
    around: contextlib.AbstractContextManager[Any] | None = None,
) -> None:
    """Run an engine here and `measure` in another thread, until `measure` has ended; then end the API workers.

    around: entered while the engine runs: a profiler.
    """

    def watch() -> None:
        try:
            measure()
        finally:
            host.stop()

    for one in workers:
        one.start()
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    with around or contextlib.nullcontext():
        host.run()
    watcher.join()
    for one in workers:
        one.terminate()
        one.join()


def received(out: Any, sender: Any) -> Any:
    """Return what a process has put into a queue. Raises RuntimeError if it has ended without."""
    while True:
        try:
            return out.get(timeout=0.5)
        except queue.Empty:
            if not sender.is_alive():
                raise RuntimeError("the load generator has failed") from None
