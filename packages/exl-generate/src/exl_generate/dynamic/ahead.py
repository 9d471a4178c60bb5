"""The next step, queued on the GPU behind the sampling of its tokens, before the host has seen them.

What a step needs beside its tokens (pages, positions, the captured graph) is prepared while the step before it runs;
its tokens go from the sampler to the model without leaving the GPU. Where the step is no captured graph, or some of the
tokens are of no use to it, the host passes them on as soon as it has them. A step ahead decides nothing: the round
after takes its logits for those windows that turn out to be what was computed, and computes the others itself. What a
job that has ended left in its pages lies behind what is valid of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch

from exl_generate.dynamic.runner import Runner, Window
from exl_generate.dynamic.sequence import Sequence

if TYPE_CHECKING:
    from exl_generate.dynamic.job import ExLlamaV2DynamicJob
    from exl_kernels.sampling import Staged

__all__ = ["Ahead", "attempt", "can_run_ahead"]

T = TypeVar("T")
log = logging.getLogger(__name__)


def attempt(compute: Callable[[], T]) -> T | None:
    """What it computes, or None if it fails, which is no failure yet: the next round computes the step itself, and
    says what is wrong with it."""
    try:
        return compute()
    except Exception:
        log.debug("a step could not be queued ahead of its tokens", exc_info=True)
        return None


def can_run_ahead(job: ExLlamaV2DynamicJob) -> bool:
    """Whether the job's next step can be foreseen but for its token: one sequence without adapters, of which the model
    is asked for logits alone, with a place for one token more. What changes tokens after they are drawn forbids it."""
    return (
        len(job.sequences) == 1
        and not job.loras
        and not job.return_hidden_state
        and not job.settings.post_sampling_hooks
        and job.remaining_tokens > 1
        and job.room >= 1
    )


class Ahead:
    """One step of the given sequences, each one token longer than now. Made while the step before it runs."""

    def __init__(self, runner: Runner, sequences: list[Sequence]) -> None:
        self._rows = {id(sequence): row for row, sequence in enumerate(sequences)}
        self._sequences = sequences  # kept alive, so that the numbers above stay theirs
        self._positions = [len(sequence) for sequence in sequences]
        self._tokens: list[int] = []
        self._pages: list[int] = []
        self._logits: torch.Tensor | None = None
        for sequence, position in zip(sequences, self._positions, strict=True):
            sequence.provide(position + 1)
        self._next = runner.prepare(sequences, self._positions)
        self._pages = [self._page(sequence, position) for sequence, position in self._places()]

    @property
    def queued(self) -> bool:
        """Whether the step is on its way."""
        return self._logits is not None

    def stage(self) -> Staged | None:
        """As `exl_kernels.sampling.Following`: what the sampler is to write for `launch`: a token a sequence."""
        return attempt(self._next.stage)

    def launch(self) -> None:
        """Queue the step behind the sampling of its tokens. If it fails, nothing has been foreseen: whoever computes
        the step again meets the failure."""
        self._take(self._next.launch)

    def withdraw(self) -> None:
        """What was queued was for other tokens."""
        self._logits = None

    def run(self, tokens: list[int]) -> None:
        """Queue the step for these tokens, one a sequence. Failures as of `launch`."""
        self._take(lambda: self._next.run(tokens))

    def _take(self, compute: Callable[[], torch.Tensor]) -> None:
        self._logits = None
        self._logits = attempt(compute)

    def know(self, tokens: list[int]) -> None:
        """What the tokens turned out to be."""
        self._tokens = tokens

    def serve(self, windows: list[Window], keep: bool) -> list[Window]:
        """Gives logits to the windows that were foreseen; returns the others. `keep`: somebody reads them when the
        model has run again."""
        if self._logits is None or not self._next.stands:
            return windows  # who else uses the model has had it since
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
        """The row that is just what the window asks for."""
        sequence = window.sequence
        row = self._rows.get(id(sequence))
        if row is None or window.wants_state or sequence.loras:
            return None
        if not self._tokens:  # an interrupt came between the sampler and us
            return None
        position = self._positions[row]
        if window.ids != [self._tokens[row]] or sequence.kv_position != position or len(sequence) != position + 1:
            return None
        return row if self._page(sequence, position) == self._pages[row] else None

    def _places(self) -> list[tuple[Sequence, int]]:
        return list(zip(self._sequences, self._positions, strict=True))

    @staticmethod
    def _page(sequence: Sequence, position: int) -> int:
        """The page that the token at `position` is stored in."""
        return int(sequence.block[position // sequence.page_size])
