"""The engine of a benchmark over HTTP: in this process's main thread, as in an engine process, with API workers."""

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

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from exl_generate import ExLlamaV2DynamicGenerator, StepColumns
    from exl_generate.testing import ScriptedModel
    from exl_serve.config.model import Limits
    from exl_serve.engine.host import Host

__all__ = ["Floor", "HostSteps", "PassTimes", "host_in", "received", "run_alongside"]

Floor = Callable[[int], float]
"""Least seconds of a step, by its number of jobs."""
PASS_TOKENS = (0, 64, 65, 96, 128, 129, 160, 192, 256, 257, 512, 2048)
PASS_SECONDS = (0.0027, 0.0039, 0.005, 0.0055, 0.0066, 0.009, 0.0095, 0.0102, 0.0126, 0.0137, 0.0186, 0.0542)
"""Seconds of a pass over so many prompt tokens: an 8B model on an H200, not in strict mode (docs/design/prompts.md)."""
INVARIANT_TOKENS = 256
"""Most tokens of a pass there on packed weights: shorter prompts share no pass with longer ones."""


class PassTimes:
    """A `Floor` of steps on a scripted model: the seconds of decoding the rows of a step, and of its prompt passes.

    Args:
        model: its `forward_chunk` and `invariant_tokens` are replaced.
        decoding: seconds of a step by its number of rows.
    """

    def __init__(self, model: ScriptedModel, decoding: Floor) -> None:
        self._compute, self._decoding = model.forward_chunk, decoding
        self._rows, self._seconds = 0, 0.0
        model.forward_chunk = self._pass  # type: ignore[method-assign]
        model.invariant_tokens = lambda: INVARIANT_TOKENS  # type: ignore[method-assign]

    def _pass(self, input_ids: Tensor, *given: Any, **named: Any) -> Any:
        if named.get("preprocess_only") or named.get("last_id_only"):
            self._seconds += float(np.interp(input_ids.numel(), PASS_TOKENS, PASS_SECONDS))
        else:
            self._rows += len(input_ids)
        return self._compute(input_ids, *given, **named)

    def __call__(self, jobs: int) -> float:
        """Return the least seconds of the step that has been computed."""
        found = self._seconds + (self._decoding(self._rows) if self._rows else 0.0)
        self._rows, self._seconds = 0, 0.0
        return found


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


def run_alongside(
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
