"""Executors of one captured step and of joined launches. `select` makes them for a pass that they can run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..device import out_of_memory_as_error
from .eager import first_step, logits_of, matmuls_of

if TYPE_CHECKING:
    from ..contracts import ForwardResult
    from .captured_step import StepReplay
    from .executor import ExecutableModel
    from .forward_pass import ForwardPass
    from .fused import JoinedLaunches

__all__ = ["Captured", "CapturedLast", "CapturedStore", "Joined"]


class Captured:
    """Run one captured step, whose inputs are filled in."""

    __slots__ = ("_step",)

    def __init__(self, step: StepReplay) -> None:
        self._step = step

    def run(self, model: ExecutableModel, asked: ForwardPass) -> ForwardResult:
        """Queue the step; see `Executor.run`."""
        self._step.send()
        return {"logits": self._step.launch()}


class CapturedStore:
    """Run one captured step without logits, whose inputs are filled in."""

    __slots__ = ("_step",)

    def __init__(self, step: StepReplay) -> None:
        self._step = step

    def run(self, model: ExecutableModel, asked: ForwardPass) -> ForwardResult:
        """Queue the step; see `Executor.run`."""
        self._step.send()
        self._step.store()
        return {}


class CapturedLast:
    """Run one captured prompt of a sharded model, whose inputs are filled in, and the head for the last tokens."""

    __slots__ = ("_step",)

    def __init__(self, step: StepReplay) -> None:
        self._step = step

    @torch.no_grad()
    def run(self, model: ExecutableModel, asked: ForwardPass) -> ForwardResult:
        """Queue the step; see `Executor.run`."""
        cache = asked.cache
        assert cache is not None, "a captured step has one"
        before = cache.current_seq_len
        self._step.send()
        self._step.store()
        hidden = self._step.captured.hidden
        assert hidden is not None, "`last` was asked for"
        try:
            with out_of_memory_as_error("run the model"), matmuls_of(model, asked):
                logits = logits_of(model, hidden)
        except Exception:
            cache.current_seq_len = before  # as after any failed pass
            raise
        return {"logits": logits.view(asked.ids.shape[0], 1, logits.shape[1])}


class Joined:
    """Run a checked pass by the joined launches of its model."""

    __slots__ = ("_launches",)

    def __init__(self, launches: JoinedLaunches) -> None:
        self._launches = launches

    @torch.no_grad()
    def run(self, model: ExecutableModel, asked: ForwardPass) -> ForwardResult:
        """Run a pass; see `Executor.run`."""
        result: ForwardResult = {}
        with out_of_memory_as_error("run the model"), matmuls_of(model, asked):
            step = first_step(model, asked)
            batch = asked.ids.shape[0]
            flat = asked.ids.reshape(-1).to(step.slots.device)
            if asked.preprocess_only:
                self._launches.store(flat, step)
            else:
                hidden = self._launches.hidden(flat, step, "last" if asked.last_id_only else "all")
                logits = self._launches.head(hidden, step)
                result["logits"] = logits.view(batch, -1, logits.shape[-1])
        if asked.cache is not None:  # last, so that a failed pass leaves the cache's length unchanged
            asked.cache.current_seq_len = asked.end()
        return result
