"""The private state that tests read or replace because no public entry point shows it, each with its reason."""

from __future__ import annotations

from typing import Any

import torch


def engine_of(generator: Any) -> Any:
    """The engine of a generator: tests replace its `step` to raise in the middle of an iteration."""
    return generator._engine  # noqa: SLF001


def prelaunch(generator: Any, on: bool) -> None:
    """Have the next step launched before tokens are known, or not: only a GPU does so by default."""
    from exl_generate.dynamic.draft_model import ModelDrafter  # tests of other packages run without it

    engine_of(generator)._runner.asynchronous = on  # noqa: SLF001
    drafter = generator.drafter
    if isinstance(drafter, ModelDrafter):
        drafter._runner.asynchronous = on  # noqa: SLF001


def is_prelaunched(generator: Any) -> bool:
    """Whether the next step is queued already: tests cancel jobs of it."""
    prelaunched = engine_of(generator)._prelaunched  # noqa: SLF001
    return prelaunched is not None and prelaunched.launched


def prelaunches(generator: Any) -> bool:
    """Whether the next step is launched before tokens are known."""
    return bool(engine_of(generator)._runner.asynchronous)  # noqa: SLF001


def has_redirects(generator: Any) -> bool:
    """Whether results of a job are still sent elsewhere; a generator that is idle must hold none."""
    return bool(generator._outbox._redirects)  # noqa: SLF001


def group_of(matrix: Any) -> Any:
    """The native group of a matrix on a GPU: tests plan and launch one kernel by its name."""
    return matrix._group  # noqa: SLF001


def gpu_sleep(cycles: int) -> None:
    """Keep the current stream of a GPU busy."""
    torch.cuda._sleep(cycles)  # noqa: SLF001
