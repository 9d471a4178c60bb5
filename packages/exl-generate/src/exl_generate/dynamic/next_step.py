"""Prelaunch the next decode step: prepare it while the current one runs, launch it before the host sees the tokens.

Pages, positions and the captured graph are known beforehand; the tokens go from the sampler to the model without
leaving the GPU. Where the step is not a captured graph, or a row was not sampled on the GPU, the host passes the tokens
on as soon as it has them. The engine uses the step's logits only for the windows whose prediction held, and computes
the others again. Pages of an ended job are valid only up to the job's last token, so later writes of the step are never
read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch

from exl_generate.dynamic.runner import Runner, Window, mixable
from exl_generate.dynamic.sequence import Sequence

if TYPE_CHECKING:
    from exl_generate.dynamic.job import ExLlamaV2DynamicJob
    from exl_kernels.sampling import NextInputs

__all__ = ["NextStep", "attempt", "predictable"]

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


def predictable(job: ExLlamaV2DynamicJob) -> bool:
    """Whether everything of the job's next step but its token is known.

    The job must have one sequence, request only logits, have room for one more token, and use adapters that other rows
    may lack. Features that change tokens after they are drawn rule it out.
    """
    return (
        len(job.sequences) == 1
        and mixable(job.sequence)
        and not job.request.return_hidden_state
        and not job.settings.post_sampling_hooks
        and job.remaining_tokens > 1
        and job.pages.room >= 1
    )


class NextStep:
    """A forward pass over the given sequences, each one token longer than now."""

    def __init__(self, runner: Runner, sequences: list[Sequence]) -> None:
        self._runner = runner
        self._rows = {id(sequence): row for row, sequence in enumerate(sequences)}
        self._sequences = sequences  # kept alive, so that the ids above are not reused
        self._positions = [len(sequence) for sequence in sequences]
        self._tokens: list[int] = []
        self._logits: torch.Tensor | None = None
        self._own_logits = False  # no later pass of the model writes over them
        for sequence, position in zip(sequences, self._positions, strict=True):
            sequence.provide(position + 1)
        self._params, self._captured = runner.prepare(sequences, self._positions)
        self._pages = [
            self._page(sequence, position) for sequence, position in zip(sequences, self._positions, strict=True)
        ]

    @property
    def launched(self) -> bool:
        """Whether the step is queued."""
        return self._logits is not None

    def inputs(self) -> NextInputs | None:
        """Return the inputs that the sampler fills in for `launch`, one token a sequence. None if the step is not
        captured.
        """
        return None if self._captured is None else attempt(self._captured.inputs)

    def launch(self) -> None:
        """Queue the step behind the sampling of its tokens, which fills in `inputs`.

        A failure is not a job's failure yet: the step is computed again, and then raises it.
        """
        self._logits, self._own_logits = None, False
        if (captured := self._captured) is not None:
            self._logits = attempt(lambda: captured.launch().float())

    def withdraw(self) -> None:
        """Drop the launched step, because it ran with other tokens."""
        self._logits = None

    def run(self, tokens: list[int]) -> None:
        """Queue the step for these tokens, one a sequence. Failures are handled as in `launch`."""
        self._logits = None
        self._logits = attempt(lambda: self._run(torch.tensor(tokens, dtype=torch.int64).unsqueeze(1)))

    def _run(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor | None = None if self._captured is None else self._captured.run(ids)
        self._own_logits = logits is None
        return self._runner.run(ids, self._sequences, self._params) if logits is None else logits.float()

    def set_tokens(self, tokens: list[int]) -> None:
        """Store the sampled tokens, one a sequence."""
        self._tokens = tokens

    def serve(self, windows: list[Window], keep: bool) -> list[Window]:
        """Give the windows whose prediction held their logits; return the others.

        `keep`: the logits may be read after the model has run again.
        """
        if self._logits is None or not (self._own_logits or (self._captured is not None and self._captured.is_current)):
            return windows  # another user of the model has run it since
        rows = [self._row_of(window) for window in windows]
        logits = (self._logits.clone() if keep or None in rows else self._logits).unbind(0)
        left = []
        for window, row in zip(windows, rows, strict=True):
            if row is None:
                left.append(window)
            else:
                window.logits = logits[row]
        return left

    def _row_of(self, window: Window) -> int | None:
        """Return the row whose input is exactly that of the window; None if there is none."""
        sequence = window.sequence
        row = self._rows.get(id(sequence))
        if row is None or window.wants_state:
            return None
        if not self._tokens:  # an interrupt came before `set_tokens`
            return None
        position = self._positions[row]
        if window.ids != [self._tokens[row]] or sequence.kv_position != position or len(sequence) != position + 1:
            return None
        return row if self._page(sequence, position) == self._pages[row] else None

    @staticmethod
    def _page(sequence: Sequence, position: int) -> int:
        """Return the page that stores the token at `position`."""
        return int(sequence.block[position // sequence.page_size])
