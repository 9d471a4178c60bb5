"""Prelaunched steps: prepare the next decode step while the current one runs, and launch it before the host sees the
tokens.

A step with draft tokens is launched once the host has read the tokens before it.

Pages, positions and the captured graph are known beforehand; the tokens go from the sampler to the model without
leaving the GPU. Where the step is not a captured graph, or a row was not sampled on the GPU, the host passes the tokens
on as soon as it has them. The engine uses the step's logits only for the windows whose prediction held, and computes
the others again. Pages of an ended job are valid only up to the job's last token, so later writes of the step are never
read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, TypeVar

import torch

from exl_generate.dynamic.runner import Runner, Window, mixable, rows_of
from exl_generate.dynamic.sequence import Sequence

if TYPE_CHECKING:
    from exl_generate.contracts import PrelaunchableStep
    from exl_generate.dynamic.job import ExLlamaV2DynamicJob
    from exl_kernels.sampling import TokenTarget

__all__ = ["PrelaunchedStep", "attempt", "predictable"]

T = TypeVar("T")
log = logging.getLogger(__name__)


def attempt(compute: Callable[[], T]) -> T | None:
    """Return the result of `compute`, or None if it raises.

    The error is not reported here: the engine computes the step again and raises it there.
    """
    try:
        return compute()
    except Exception:
        log.debug("the next step could not be launched early", exc_info=True)
        return None


def predictable(job: ExLlamaV2DynamicJob, missing: int = 1) -> bool:
    """Whether everything of the job's next step but its token is known.

    The job must request only logits, have room for one more token, and use adapters that other rows may lack. Features
    that change tokens after they are drawn rule it out. `missing`: tokens that the current step still adds.
    """
    return (
        mixable(job.sequence)
        and not job.request.return_hidden_state
        and not job.settings.post_sampling_hooks
        and job.remaining_tokens > missing
        and job.pages.room >= missing
    )


class PrelaunchedStep:
    """The next forward pass over the sequences of some jobs, by the model's `PrelaunchableStep` where it has one.

    Args:
        runner: Runs the model.
        jobs: The sequences of each job; all of a job's sequences get the same tokens.
        windows: The ids that each job evaluates, equally many: its last token and its draft tokens. None: one token
            each, which is still to be sampled.
    """

    def __init__(
        self, runner: Runner, jobs: SequenceOf[SequenceOf[Sequence]], windows: list[list[int]] | None = None
    ) -> None:
        self._runner = runner
        # The first sequence of every job, whose rows the sampler fills in, then the others.
        placed = [(number, job, sequence) for job, group in enumerate(jobs) for number, sequence in enumerate(group)]
        placed.sort(key=lambda row: row[0] > 0)
        self._jobs = len(jobs)
        self._job_of = [job for _, job, _ in placed]
        self._sequences = [sequence for _, _, sequence in placed]  # kept alive, so that their ids are not reused
        self._rows = {id(sequence): row for row, sequence in enumerate(self._sequences)}
        self._windows = windows or []
        self._length = 1 if windows is None else len(windows[0])
        self._positions = [len(sequence) - (windows is not None) for sequence in self._sequences]
        self._logits: torch.Tensor | None = None
        self._own_logits = False  # no later pass of the model writes over them
        self._ids: torch.Tensor | None = None  # of all rows, which `launch` completes
        #: When the samples of the step before came, by the clock that measures steps
        self.began: float | None = None
        for sequence, position in zip(self._sequences, self._positions, strict=True):
            sequence.provide(position + self._length)
        self._params, self._step = runner.prelaunchable_step(self._sequences, self._positions, self._length)
        self._pages = [
            self._pages_of(sequence, position)
            for sequence, position in zip(self._sequences, self._positions, strict=True)
        ]

    @property
    def launched(self) -> bool:
        """Whether the step is queued."""
        return self._logits is not None

    def inputs(self) -> TokenTarget | None:
        """Return the inputs that the sampler fills in for `launch`, one token a job. None if the step is not
        captured.
        """
        found = None if self._step is None else attempt(self._step.inputs)
        if found is None or len(self._sequences) == self._jobs:
            return found
        self._ids = found.ids
        return found._replace(ids=found.ids[: self._jobs])

    def launch(self) -> None:
        """Queue the step after the sampling of its tokens, which fills in `inputs`.

        A failure is not a job's failure yet: the step is computed again, and then raises it.
        """
        self._logits, self._own_logits = None, False
        if (step := self._step) is not None:
            self._logits = attempt(lambda: self._launch(step))

    def _launch(self, step: PrelaunchableStep) -> torch.Tensor:
        if self._ids is not None:
            first, others = self._ids[: self._jobs], self._ids[self._jobs :]
            if len(others) == len(first):
                others.copy_(first)
            else:
                places = torch.tensor(self._job_of[self._jobs :])
                places = places.pin_memory().to(first.device, non_blocking=True) if first.is_cuda else places
                torch.index_select(first, 0, places, out=others)
        return step.launch().float()

    def withdraw(self) -> None:
        """Drop the launched step, because it ran with other tokens."""
        self._logits = None

    def launch_known(self) -> None:
        """Queue the step for tokens that the host knows: those that are set. Failures are handled as in `launch`."""
        self._logits = None
        ids = [self._windows[job] for job in self._job_of]
        self._logits = attempt(lambda: self._launch_known(torch.tensor(ids, dtype=torch.int64)))

    def _launch_known(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor | None = None if self._step is None else self._step.run(ids)
        self._own_logits = logits is None
        return self._runner.run_prelaunched(ids, self._sequences, self._params) if logits is None else logits.float()

    def set_tokens(self, tokens: list[int]) -> None:
        """Store the sampled tokens, one a job."""
        self._windows = [[token] for token in tokens]

    def serve(self, windows: list[Window], keep: bool) -> list[Window]:
        """Give the windows whose prediction held their logits; return the others.

        `keep`: the logits may be read after the model has run again.
        """
        if self._logits is None or not (self._own_logits or (self._step is not None and self._step.is_current)):
            return windows  # another user of the model has run it since
        rows = [self._row_of(window) for window in windows]
        logits, length = rows_of(self._logits.clone() if keep or None in rows else self._logits), self._length
        left = []
        for window, row in zip(windows, rows, strict=True):
            if row is None:
                left.append(window)
            else:
                window.logits = logits[row * length : (row + 1) * length]
        return left

    def _row_of(self, window: Window) -> int | None:
        """Return the row whose input is exactly that of the window; None if there is none."""
        sequence = window.sequence
        row = self._rows.get(id(sequence))
        if row is None or window.wants_state:
            return None
        if not self._windows:  # an interrupt came before `set_tokens`
            return None
        position = self._positions[row]
        if (
            window.ids != self._windows[self._job_of[row]]
            or sequence.kv_position != position
            or len(sequence) != position + 1
        ):
            return None
        return row if self._pages_of(sequence, position) == self._pages[row] else None

    def _pages_of(self, sequence: Sequence, position: int) -> list[int]:
        """Return the pages that store the window from `position` on."""
        size = sequence.page_size
        pages: list[int] = sequence.block[position // size : (position + self._length - 1) // size + 1].tolist()
        return pages
