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
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from exl_generate import ExLlamaV2DynamicGenerator, StepColumns
    from exl_serve.config.model import Limits
    from exl_serve.engine.host import Host

__all__ = ["Floor", "HostSteps", "host_in", "received", "run_beside"]

Floor = Callable[[int], float]
"""Least seconds of a step, by its number of jobs."""


class HostSteps:
    """The steps that a generator runs for a host while this context lasts. Times are those of `time.perf_counter`.

    Args:
        generator: its `iterate_columns` is replaced meanwhile.
        floor: a step of a scripted model waits until it has lasted so long; None for real models.
    """

    def __init__(self, generator: ExLlamaV2DynamicGenerator, floor: Floor | None) -> None:
        self._generator, self._floor = generator, floor
        #: the end of each step, and the serial numbers of the completions that got tokens
        self.ended: list[tuple[float, list[int]]] = []
        #: seconds from the end of each step to the begin of the next one
        self.outside: list[float] = []

    def __enter__(self) -> HostSteps:
        self._iterate = self._generator.iterate_columns
        self._generator.iterate_columns = self._step  # type: ignore[method-assign]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._generator.iterate_columns = self._iterate  # type: ignore[method-assign]

    def clear(self) -> None:
        """Forget the steps so far."""
        self.ended.clear()
        self.outside.clear()

    def _step(self) -> StepColumns:
        began = time.perf_counter()
        if self.ended:
            self.outside.append(began - self.ended[-1][0])
        jobs = self._generator.num_remaining_jobs()
        columns = self._iterate()
        if self._floor is not None:
            time.sleep(max(0.0, began + self._floor(jobs) - time.perf_counter()))
        told = [serial for serial, count in zip(columns.serials, columns.counts, strict=True) if count]
        self.ended.append((time.perf_counter(), told))
        return columns


def host_in(place: str, generator: ExLlamaV2DynamicGenerator, folder: str, limits: Limits) -> tuple[Host, str]:
    """Return an engine that is not running yet, and the address at which it listens.

    Args:
        place: folder of its socket and of its status.
        generator: what it serves.
        folder: the model's.
        limits: of its queue.
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
    return Host(generator, card, address, status, config=config, limits=limits), address


def run_beside(
    host: Host,
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
