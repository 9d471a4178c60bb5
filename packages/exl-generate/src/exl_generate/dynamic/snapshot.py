"""Numbers about a generator, counted as they change, so that reading them is cheap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from exl_generate.dynamic.scheduler import Scheduler

__all__ = ["Counters", "GeneratorSnapshot", "snapshot_of"]


@dataclass(slots=True)
class Counters:
    """Totals since the generator was made. Only the running step writes them."""

    steps: int = 0
    prompt_tokens: int = 0
    found_tokens: int = 0
    prefilled_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class GeneratorSnapshot:
    """The state of a generator.

    A snapshot taken during a step may mix numbers from before and after it. The totals, from `steps` on, never
    decrease.
    """

    decoding_rows: int
    """Sequences in the next decode step."""
    prefilling_jobs: int
    """Running jobs whose prompt is not computed yet."""
    paused_jobs: int
    """Running jobs that `pause` holds after their prompt."""
    queued_jobs: int
    """Jobs that wait for pages or a place in the batch."""
    queued_tokens: int
    """Prompt tokens of the queued jobs, without full pages that were computed when the job was queued."""
    pinned_pages: int
    """Pages in use by running jobs."""
    cached_pages: int
    """Pages that no job uses, whose content can be found again."""
    free_pages: int
    """Pages without content."""
    total_pages: int
    """All pages of the cache."""

    steps: int
    """Steps begun."""
    prompt_tokens: int
    """Tokens of the prompts that have been started, the last one of each, which is never looked up, not counted."""
    found_tokens: int
    """Prompt tokens that were found in the cache."""
    prefilled_tokens: int
    """Prompt tokens computed; a job that went back to the queue may add to them again."""
    generated_tokens: int
    """Tokens sampled, including those taken back because of banned strings."""
    drafted_tokens: int
    """Draft tokens evaluated."""
    accepted_draft_tokens: int
    """Draft tokens that agreed with the model."""


def snapshot_of(scheduler: Scheduler, counters: Counters) -> GeneratorSnapshot:
    """Read all numbers. Takes no lock; may be called from any thread."""
    decoding = prefilling = paused = 0
    for job in tuple(scheduler.active):
        if job.is_finished or job.discarded:
            continue
        if not job.pages.prefilled:
            prefilling += 1
        elif job.paused:
            paused += 1
        else:
            decoding += len(job.sequences)
    table = scheduler.table
    total, unused, cached = len(table.pages), table.unreferenced, table.cached
    return GeneratorSnapshot(
        decoding_rows=decoding,
        prefilling_jobs=prefilling,
        paused_jobs=paused,
        queued_jobs=scheduler.num_pending,
        queued_tokens=scheduler.queued_tokens,
        pinned_pages=total - unused,
        cached_pages=min(cached, unused),
        free_pages=max(0, unused - cached),
        total_pages=total,
        steps=counters.steps,
        prompt_tokens=counters.prompt_tokens,
        found_tokens=counters.found_tokens,
        prefilled_tokens=counters.prefilled_tokens,
        generated_tokens=counters.generated_tokens,
        drafted_tokens=counters.drafted_tokens,
        accepted_draft_tokens=counters.accepted_draft_tokens,
    )
