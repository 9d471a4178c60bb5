"""Events of jobs, before `results.py` writes them as dicts or `columns.py` into arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from exl_generate.dynamic.output import Record, Released

if TYPE_CHECKING:
    from exl_generate.dynamic.job import ExLlamaV2DynamicJob

__all__ = ["END", "FIRST", "HELD", "STARTED", "Ending", "Event", "Events", "aborted", "ended"]

#: Bits of `Event.flags`: the job has left the queue; its first token was sampled; this is its last event; tokens after
#: the text are held back.
STARTED, FIRST, END, HELD = 1, 2, 4, 8

_NOTHING = Released("", [])


@dataclass(slots=True)
class Ending:
    """The reason that a job is over, and its statistics as the last result dict has them."""

    reason: str
    statistics: dict[str, Any]
    #: the stop token, with its text as a special token and as the job decodes it
    token: Record | None = None
    token_texts: tuple[str, str] = ("", "")
    #: the stop string, and the text from it on
    string: str | None = None
    held_text: str = ""
    #: what an error or a cancellation has kept from coming out
    kept: Released | None = None
    error: BaseException | None = None


class Event:
    """One event of a job. `stage` as in the result dicts; `released`: text and tokens, perhaps none."""

    __slots__ = ("ending", "flags", "job", "progress", "released", "stage", "suppressed")

    def __init__(self, job: ExLlamaV2DynamicJob, stage: str, released: Released = _NOTHING, flags: int = 0) -> None:
        self.job = job
        self.stage = stage
        self.released = released
        self.flags = flags
        #: prompt tokens in the cache, and all of them; for the stage "prefill"
        self.progress: tuple[int, int] | None = None
        #: text and tokens of a banned string that was taken back
        self.suppressed: tuple[str, list[Record]] | None = None
        self.ending: Ending | None = None

    @property
    def plain(self) -> bool:
        """Whether the event has only text, tokens and flags."""
        return self.progress is None and self.ending is None and self.suppressed is None


Events = list[Event]


def ended(
    job: ExLlamaV2DynamicJob,
    reason: str,
    released: Released,
    *,
    token: Record | None = None,
    string: str | None = None,
    held_text: str = "",
    flags: int = 0,
) -> Event:
    """Return a job's last event. `token`: the stop token; `held_text` begins with the stop string."""
    event = Event(job, "streaming", released, flags | END)
    texts = ("", "") if token is None else (job.piece(token.token, special=True), job.piece(token.token))
    event.ending = Ending(reason, _statistics(job), token, texts, string, held_text)
    return event


def aborted(job: ExLlamaV2DynamicJob, reason: str, kept: Released | None, error: BaseException | None = None) -> Event:
    """Return the last event of a job that was cancelled, or ended by its own `error`."""
    event = Event(job, "streaming", flags=END)
    event.ending = Ending(reason, _statistics(job), kept=kept, error=error)
    return event


def _statistics(job: ExLlamaV2DynamicJob) -> dict[str, Any]:
    queued, prefill, generate = job.times.phases()
    statistics: dict[str, Any] = {
        "full_completion": job.full_completion,
        "new_tokens": max(0, job.new_tokens),
        "prompt_tokens": job.prompt_tokens,
        "time_enqueued": queued,
        "time_prefill": prefill,
        "time_generate": generate,
        "cached_pages": job.cached_pages,
        "cached_tokens": job.cached_tokens,
    }
    if job.drafts.enabled:
        statistics["accepted_draft_tokens"] = job.accepted_draft_tokens
        statistics["rejected_draft_tokens"] = job.rejected_draft_tokens
    return statistics
