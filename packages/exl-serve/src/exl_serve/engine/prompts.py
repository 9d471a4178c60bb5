"""Prompts of the completions that the generator has: which it has not started, and what is left to compute of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from exl_serve.engine.jobs import PAGES_AT_ONCE

if TYPE_CHECKING:
    from exl_generate import ExLlamaV2DynamicJob

__all__ = ["Prompts", "prompt_tokens_of"]


def prompt_tokens_of(job: ExLlamaV2DynamicJob) -> int:
    """Return the tokens of a job's prompt; of both prompts with classifier-free guidance."""
    return sum(sequence.prompt_length + job.request.healing for sequence in job.sequences)


class Prompts:
    """Counts by the serial numbers of jobs. `page_size`: tokens of a page of the cache."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        #: of jobs that have not started: the most pages that they reserve
        self._pages: dict[int, int] = {}
        #: tokens that are not computed yet
        self._tokens: dict[int, int] = {}

    @property
    def unstarted(self) -> int:
        """Number of jobs that the generator has not started."""
        return len(self._pages)

    @property
    def pages(self) -> int:
        """The most pages that the jobs reserve that have not started."""
        return sum(self._pages.values())

    @property
    def tokens(self) -> int:
        """Prompt tokens that are not computed yet."""
        return sum(self._tokens.values())

    def add(self, serial: int, job: ExLlamaV2DynamicJob, *, cached: bool = False) -> None:
        """Add a job that is queued in the generator.

        cached: another completion of the request has computed its prompt.
        """
        more = job.request.healing + min(job.max_new_tokens, PAGES_AT_ONCE)
        self._pages[serial] = sum(-(-(one.prompt_length + more) // self._page_size) for one in job.sequences)
        self._tokens[serial] = 0 if cached else prompt_tokens_of(job)

    def computed(self, serial: int, left: int) -> None:
        """Record that a job has started, and that `left` tokens of its prompt are not computed."""
        self._pages.pop(serial, None)
        if serial in self._tokens:
            self._tokens[serial] = left

    def forget(self, serial: int) -> None:
        """Remove a job whose prompt is computed, or that has ended."""
        self._pages.pop(serial, None)
        self._tokens.pop(serial, None)
