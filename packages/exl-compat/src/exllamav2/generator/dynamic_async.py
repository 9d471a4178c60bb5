"""`exllamav2.generator.dynamic_async`: the async generator with exllamav2's ways of cancelling and failing.

exl_generate's classes return a last result when a job is cancelled or fails. Programs written for exllamav2 do not
expect such results: a cancelled job ends at once, and an error is raised where the job is read.
"""

from __future__ import annotations

import logging
from typing import Any

import exl_generate
from exl_generate.dynamic import ExLlamaV2DynamicJob
from exllamav2.generator.dynamic import ExLlamaV2DynamicGenerator

__all__ = ["ExLlamaV2DynamicGeneratorAsync", "ExLlamaV2DynamicJobAsync"]

log = logging.getLogger(__name__)


class ExLlamaV2DynamicGeneratorAsync(exl_generate.ExLlamaV2DynamicGeneratorAsync):
    """The async generator with silent `cancel` and `close`; errors are raised by the jobs' iterators.

    Args:
        args: positional arguments of `ExLlamaV2DynamicGenerator`.
        kwargs: keyword arguments of `ExLlamaV2DynamicGenerator`.
    """

    generator_class = ExLlamaV2DynamicGenerator

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.generator.raises_job_errors = False  # they are raised where the job is read

    @property
    def jobs(self) -> dict[ExLlamaV2DynamicJob, ExLlamaV2DynamicJobAsync]:
        """A copy of the jobs that have not ended, by their `ExLlamaV2DynamicJob`."""
        return self._worker.jobs  # type: ignore[return-value]

    async def cancel(self, job: exl_generate.ExLlamaV2DynamicJobAsync) -> None:
        """End a job at once; this never suspends. A waiting reader sees the iteration end."""
        job.abandon()

    async def close(self) -> None:
        """End all jobs at once, then the thread. Waiting readers see the iteration end."""
        self._worker.stop()
        for job in self.jobs.values():
            job.abandon()
        await super().close()


class ExLlamaV2DynamicJobAsync(exl_generate.ExLlamaV2DynamicJobAsync):
    """The async job without a last result after a cancellation; its iterator raises errors."""

    async def cancel(self) -> None:
        """End the job at once; this never suspends. Unread results are dropped.

        Calling it again, or when the job has ended, does nothing.
        """
        self.abandon()

    def abandon(self) -> None:
        """Cancel the job, from any thread."""
        if not self._ended.is_set():
            self.cancelled = True
            self.generator.discard(self)
            self._call_in_loop(self._end_silently)

    async def take(self) -> dict[str, Any] | None:
        """Return the next result, None after the last one. Raises the error that ended the job, once."""
        result = await super().take()
        if result is not None and "exception" in result:
            raise result["exception"]
        return result

    def _receive(self, result: dict[str, Any]) -> None:
        if self._ended.is_set():
            return
        if result.get("eos_reason") == "cancelled":
            self._end_silently()
            return
        if "exception" in result:
            log.error("job %s failed", result["serial"], exc_info=result["exception"])
        super()._receive(result)

    def _end_silently(self) -> None:
        if not self._ended.is_set():
            while not self._results.empty():
                self._results.get_nowait()
            self._end()
