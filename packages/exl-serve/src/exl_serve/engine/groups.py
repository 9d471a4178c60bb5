"""The engine process's records of a request and its completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from exl_serve.engine.admission import Entry
from exl_serve.engine.jobs import Reader
from exl_serve.engine.wire import address_of
from exl_serve.request.internal import EngineRequest

if TYPE_CHECKING:
    from exl_generate import ExLlamaV2DynamicJob

__all__ = ["Group", "Running"]


@dataclass(eq=False)
class Group:
    """One request and its completions; the later completions begin when the first has computed the prompt."""

    worker: bytes
    tag: int
    request: EngineRequest
    filters: Sequence[Any] = ()
    loras: Sequence[Any] = ()
    #: of its images
    embeddings: Sequence[Any] = ()
    #: the job of the first completion, while the request is queued
    first: ExLlamaV2DynamicJob | None = None
    #: by choice
    running: dict[int, Running] = field(default_factory=dict)
    #: by choice: jobs that advance over the ids of an earlier run
    resuming: dict[int, ExLlamaV2DynamicJob] = field(default_factory=dict)
    waiting: list[int] = field(default_factory=list)
    #: tokens of all completions so far
    generated: int = 0
    #: those of them that its key was charged for
    charged: int = 0
    #: rows that each completion takes of a step
    rows: int = 1
    #: prompt tokens that its key was charged for when it left the queue; 0 once the prompt has started
    reserved: int = 0
    cancelled: bool = False
    paused: bool = False
    entry: Entry | None = None
    #: its constraints are being compiled and its images encoded, or wait for that
    compiling: bool = False

    @classmethod
    def of(cls, worker: bytes, tag: int, request: EngineRequest) -> Group:
        """Build the record of a new request. Completions that are over do not wait."""
        return cls(worker, tag, request, waiting=list(request.open_choices))

    @property
    def first_choice(self) -> int:
        """The completion that begins first."""
        return self.request.open_choices[0]

    @property
    def unfinished(self) -> list[int]:
        """The completions that have not ended."""
        return sorted([*self.waiting, *self.resuming, *self.running])

    def pause(self, paused: bool) -> None:
        """Pause the jobs of the request, or let them go on."""
        self.paused = paused
        for one in self.running.values():
            if paused:
                one.job.pause()
            else:
                one.job.unpause()

    def summary(self) -> dict[str, Any]:
        """Return id, key, numbers of tokens and state, as the operator sees them."""
        return {
            "id": self.request.id,
            "key": self.request.key,
            "prompt_tokens": len(self.request.prompt) // 4,
            "generated": self.generated,
            "state": "running" if self.running or self.resuming else "queued",
        }


class Running:
    """A completion that the generator has queued or runs, with everything that is needed for each of its tokens."""

    __slots__ = ("address", "choice", "group", "job", "number", "reader", "worker")

    def __init__(self, group: Group, choice: int, job: ExLlamaV2DynamicJob, reader: Reader) -> None:
        self.group, self.choice, self.job, self.reader = group, choice, job, reader
        self.worker = group.worker
        #: of its tokens in messages
        self.address = address_of(group.tag, choice)
        assert job.serial_number is not None
        self.number = job.serial_number

    @property
    def leads(self) -> bool:
        """Whether the request's other completions wait for this one to compute the prompt."""
        return self.choice == self.group.first_choice

    @property
    def rows(self) -> int:
        """Rows of a step that it takes: two with classifier-free guidance."""
        return len(self.job.sequences)

    @property
    def serial(self) -> int:
        """The serial number of its job, as in columns."""
        return self.number & 0xFFFFFFFF
