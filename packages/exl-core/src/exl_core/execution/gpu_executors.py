"""Executors of one captured step and of joined launches. `select` makes them for a pass that they can run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..device import out_of_memory_as_error
from .captured import INVALID
from .captured_step import StepReplay, UnrecordedStep
from .eager import asks_invariant_rows, first_step, logits_of
from .executor import Refused

if TYPE_CHECKING:
    from ..contracts import ForwardResult
    from .executor import ExecutableModel
    from .forward_pass import CheckedPass, ForwardPass
    from .fused import JoinedLaunches
    from .prompt_graphs import PreparedPrompt

__all__ = ["Captured", "CapturedLast", "CapturedStore", "Joined"]


class Captured:
    """Run one captured step, which is recorded first if there is none of its bucket."""

    __slots__ = ("_step",)

    def __init__(self, step: StepReplay | UnrecordedStep) -> None:
        self._step = step

    def replay(self) -> StepReplay | str:
        """Return the step, recorded, or the reason why it could not be recorded."""
        return _recorded(self._step)

    def run(self, model: ExecutableModel, asked: ForwardPass) -> ForwardResult | Refused:
        """Queue the step; see `Executor.run`."""
        step = self._step if isinstance(self._step, StepReplay) else _recorded(self._step)
        if isinstance(step, str):
            return Refused(step)
        if not step.fill(asked.ids):
            return Refused(INVALID)
        step.send()
        return {"logits": step.launch()}


class CapturedStore:
    """Run one captured step without logits, which is recorded first if there is none of its bucket."""

    __slots__ = ("_prompt",)

    def __init__(self, prompt: PreparedPrompt) -> None:
        self._prompt = prompt

    def run(self, model: ExecutableModel, asked: ForwardPass) -> ForwardResult | Refused:
        """Queue the step; see `Executor.run`."""
        step = _filled(self._prompt, asked)
        if isinstance(step, Refused):
            return step
        step.send()
        step.store()
        return {}


class CapturedLast:
    """Run one captured prompt, recorded as by `CapturedStore`, and the head for the last token of each sequence."""

    __slots__ = ("_prompt",)

    def __init__(self, prompt: PreparedPrompt) -> None:
        self._prompt = prompt

    @torch.no_grad()
    def run(self, model: ExecutableModel, asked: ForwardPass) -> ForwardResult | Refused:
        """Queue the step; see `Executor.run`."""
        step, cache = _filled(self._prompt, asked), asked.cache
        if isinstance(step, Refused):
            return step
        assert cache is not None, "a captured step has one"
        before = cache.current_seq_len
        step.send()
        step.store()
        hidden = step.captured.hidden
        assert hidden is not None, "`last` was asked for"
        try:
            with out_of_memory_as_error("run the model"):
                if self._prompt.windows is not None:  # the hidden states are those of all tokens
                    ends = torch.tensor(self._prompt.windows.ends)
                    ends = ends.pin_memory().to(hidden.device, non_blocking=True) if hidden.is_cuda else ends
                    hidden = hidden.index_select(0, ends)
                logits = logits_of(model, hidden, invariant=asks_invariant_rows(model, asked))
        except Exception:
            cache.current_seq_len = before  # as after any failed pass
            raise
        return {"logits": logits.view(asked.ids.shape[0], -1, logits.shape[1])}


def _recorded(step: StepReplay | UnrecordedStep) -> StepReplay | str:
    return step.record() if isinstance(step, UnrecordedStep) else step


def _filled(prompt: PreparedPrompt, asked: ForwardPass) -> StepReplay | Refused:
    """Record the step of a prompt, if there is none, and fill in the ids."""
    windows = prompt.windows
    with out_of_memory_as_error("run the model"):
        step = _recorded(prompt.step)
        if isinstance(step, str):
            return Refused(step)
        if windows is None:
            valid = step.fill(asked.ids)
        else:
            valid = step.fill(windows.ids, windows.counts, windows.firsts, windows.longest)
    return step if valid else Refused(INVALID)


class Joined:
    """Run a checked pass by the joined launches of its model."""

    __slots__ = ("_launches",)

    def __init__(self, launches: JoinedLaunches) -> None:
        self._launches = launches

    @torch.no_grad()
    def run(self, model: ExecutableModel, asked: CheckedPass) -> ForwardResult:
        """Run a pass; see `Executor.run`."""
        result: ForwardResult = {}
        with out_of_memory_as_error("run the model"):
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
