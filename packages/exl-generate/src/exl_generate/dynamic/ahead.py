"""The next step, queued on the GPU behind the sampling of its tokens, before the host has seen them.

What a step needs beside its tokens (pages, positions, the captured graph) is prepared while the step before it runs;
its tokens go from the sampler to the model without leaving the GPU. Where the step is no captured graph, or some of the
tokens are of no use to it, the host passes them on as soon as it has them. A step ahead decides nothing: the round
after takes its logits for those windows that turn out to be what was computed, and computes the others itself. What a
job that has ended left in its pages lies behind what is valid of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from exl_generate.dynamic.runner import Runner, Window
from exl_generate.dynamic.sequence import Sequence

if TYPE_CHECKING:
    from exl_generate.dynamic.job import ExLlamaV2DynamicJob

__all__ = ["Ahead", "can_run_ahead"]


def can_run_ahead(job: ExLlamaV2DynamicJob) -> bool:
    """Whether the job's next step can be foreseen but for its token: one sequence without adapters, of which the model
    is asked for logits alone, with a place for one token more. What changes tokens after they are drawn forbids it."""
    return (
        len(job.sequences) == 1
        and not job.loras
        and not job.return_hidden_state
        and not job.gen_settings.post_sampling_hooks
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
        self._run: Callable[[list[int] | torch.Tensor], torch.Tensor | None]
        self._run = runner.prepare(sequences, self._positions)
        self._pages = [self._page(sequence, position) for sequence, position in self._places()]

    @property
    def queued(self) -> bool:
        """Whether the step is on its way."""
        return self._logits is not None

    def launch(self, tokens: list[int] | torch.Tensor | None) -> None:
        """Queue the step for these tokens, one a sequence: a list, or int32 on the GPU, where they may still have to be
        sampled; None takes back what was queued for others. If it fails, nothing has been foreseen: whoever computes
        the step again meets the failure."""
        self._logits = None
        if tokens is not None:
            with contextlib.suppress(Exception):
                self._logits = self._run(tokens)

    def know(self, tokens: list[int]) -> None:
        """What the tokens turned out to be."""
        self._tokens = tokens

    def serve(self, windows: list[Window]) -> list[Window]:
        """Gives logits to the windows that were foreseen; returns the others."""
        return [window for window in windows if not self._serves(window)]

    def _serves(self, window: Window) -> bool:
        sequence = window.sequence
        row = self._rows.get(id(sequence))
        if row is None or self._logits is None or window.wants_state or sequence.loras:
            return False
        if not self._tokens:  # an interrupt came between the sampler and us
            return False
        position = self._positions[row]
        if window.ids != [self._tokens[row]] or sequence.kv_position != position or len(sequence) != position + 1:
            return False
        if self._page(sequence, position) != self._pages[row]:
            return False
        window.logits = self._logits[row]
        return True

    def _places(self) -> list[tuple[Sequence, int]]:
        return list(zip(self._sequences, self._positions, strict=True))

    @staticmethod
    def _page(sequence: Sequence, position: int) -> int:
        """The page that the token at `position` is stored in."""
        return int(sequence.block[position // sequence.page_size])
