"""Queue events of jobs for their readers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from exl_generate.dynamic.events import Event, Events

if TYPE_CHECKING:
    from exl_generate.dynamic.job import ExLlamaV2DynamicJob

__all__ = ["Outbox"]


class Outbox:
    """Keep the events of each step until `iterate` returns them.

    Events of jobs that `generate` runs go to a list of that call instead.
    """

    def __init__(self) -> None:
        #: events that wait
        self.events: Events = []
        self._redirects: dict[ExLlamaV2DynamicJob, Events] = {}

    def deliver(self, events: Events) -> None:
        """Append events to the list of their job's reader."""
        if not self._redirects:
            self.events += events
            return
        for event in events:
            self._redirects.get(event.job, self.events).append(event)

    def redirect(self, jobs: list[ExLlamaV2DynamicJob], target: Events) -> None:
        """Append further events of these jobs to `target`."""
        self._redirects.update((job, target) for job in jobs)

    def is_redirected(self, job: ExLlamaV2DynamicJob) -> bool:
        """Whether the job's events go to another list."""
        return job in self._redirects

    def end_redirect(self, job: ExLlamaV2DynamicJob) -> bool:
        """Undo `redirect`. Returns False if the job was not redirected."""
        return self._redirects.pop(job, None) is not None

    def take(self, raise_errors: bool) -> Events:
        """Remove and return all events but those of discarded jobs.

        With `raise_errors` the first job's error among them is raised, and the other events stay.
        """
        events = [event for event in self.events if not event.job.discarded]
        if raise_errors:
            for at, event in enumerate(events):
                if (error := _error_of(event)) is not None:
                    self.events = [*events[:at], *events[at + 1 :]]
                    raise error
        self.events = []
        return events

    def clear(self) -> None:
        """Drop all events that wait."""
        self.events.clear()


def _error_of(event: Event) -> BaseException | None:
    return None if event.ending is None else event.ending.error
