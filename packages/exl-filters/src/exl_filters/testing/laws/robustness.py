"""LAW-36, LAW-37: the effects of a filter outside itself."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import os
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from hypothesis import strategies as st

from exl_filters.testing.case import Case
from exl_filters.testing.laws.law import law

__all__: list[str] = []

# Growth per generation that counts as a leak: one kept object, less the objects that the interpreter releases
# meanwhile.
KEPT_PER_CYCLE = 0.7

# Iterations after which a bounded cache is full (numpy's cache of small arrays takes a few). A leak still grows then.
ROUNDS = 15


@law(36, level="should", examples=0.02)
def resources(case: Case) -> None:
    """Generations do not pile up memory."""
    with _collections_see_what_is_new():
        kept = _kept_by_a_generation(case)
    case.expect(kept < KEPT_PER_CYCLE, f"{kept:.1f} objects more with every generation, {ROUNDS} iterations of 30")


def _kept_by_a_generation(case: Case) -> float:
    """Return the least growth in Python objects per generation, over up to ROUNDS iterations."""
    f = case.make()
    seed = case.draw(st.integers(0, 2**32 - 1))

    def cycles(count: int) -> None:
        for index in range(count):
            rng = random.Random(seed + index)
            f.begin("")
            for _ in range(6):
                allowed, ends = f.next()
                tokens = sorted(set(allowed) - case.stops) if allowed is not None else case.ordinary()
                if not tokens:
                    break
                token = rng.choice(tokens)
                f.feed(token)
                if token in ends:
                    break

    def rate(count: int) -> float:
        """Return the Python objects kept by each of `count` generations."""
        gc.collect()
        before = sys.getallocatedblocks()
        cycles(count)
        gc.collect()
        return (sys.getallocatedblocks() - before) / count

    # Repeat the same generations: caches fill up at some time, a leak grows every time.
    cycles(30)
    kept = rate(30)
    for _ in range(ROUNDS - 1):
        if kept < KEPT_PER_CYCLE:
            break
        kept = min(kept, rate(30))
    return kept


@contextlib.contextmanager
def _collections_see_what_is_new() -> Iterator[None]:
    """Exclude the existing objects from garbage collection, which takes half a second in a large process.

    A program that has frozen objects itself is left alone.
    """
    free = gc.get_freeze_count() == 0
    if free:
        gc.freeze()
    try:
        yield
    finally:
        if free:
            gc.unfreeze()


@law(37, level="should", examples=0.3)
def no_global_effects(case: Case) -> None:
    """Running a filter changes nothing outside it."""
    given = _given_to(case.factory)
    snapshot = copy.deepcopy(given)
    before = _surroundings()
    f = case.make()
    case.walk(f, 5)
    case.clone(f) if callable(getattr(f, "clone", None)) else None
    after = _surroundings()
    changed = [name for name, value in before.items() if value != after[name]]
    case.expect(not changed, f"running the filter changed {', '.join(changed)}")
    case.expect(given == snapshot, f"the filter changed what its caller gave it: {snapshot!r:.80} became {given!r:.80}")


def _surroundings() -> dict[str, Any]:
    found: dict[str, Any] = {
        "random's state": random.getstate(),
        "numpy's random state": repr(np.random.get_state()),
        "the environment": dict(os.environ),
        "sys.path": list(sys.path),
        "the working directory": os.getcwd(),
        "root logging handlers": list(logging.getLogger().handlers),
        "numpy's error state": np.geterr(),
        "the recursion limit": sys.getrecursionlimit(),
    }
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_num_threads"):
        found["torch's threads"] = torch.get_num_threads()
        found["torch's default dtype"] = torch.get_default_dtype()
    return found


def _given_to(factory: Any) -> list[Any]:
    """Return the mutable values that a factory closes over or defaults to: schemas, options."""
    cells = [cell.cell_contents for cell in getattr(factory, "__closure__", None) or ()]
    values = [*cells, *(getattr(factory, "__defaults__", None) or ()), *getattr(factory, "args", ())]
    values += list((getattr(factory, "keywords", None) or {}).values())
    return [v for v in values if isinstance(v, dict | list | set)]
