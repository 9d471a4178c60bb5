"""Masks of many jobs in one native call that runs on several threads.

A pool of Python threads hands the interpreter's lock over several times for every mask. For the jobs of a batch these
hand-overs take longer than the masks. Here one thread asks llguidance for all masks; its own threads need no lock.
Filters of one template whose mask is the same (`regex_states.py`) have it computed once.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from exl_filters import bits
from exl_filters.background import Pending
from exl_filters.host import worth_a_thread
from exl_filters.library import llguidance

if TYPE_CHECKING:
    from exl_filters.host import FilterStack
    from exl_filters.llg import Matcher

__all__ = ["executor", "prefetch_together"]

FEWEST = 2
"""Fewest masks that are computed together."""

# The answers of `_asks_a_matcher` so far.
_kinds: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


@cache
def executor() -> Any:
    """Return llguidance's executor, whose threads compute the masks of all stacks of this process."""
    return llguidance().LLExecutor()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=executor.cache_clear)  # the threads exist only in the parent


def prefetch_together(stacks: Sequence[FilterStack], pool: Executor) -> int:
    """Compute the next masks of many stacks on `pool`, in one task; `FilterStack.next_mask` returns them.

    Call it right after `feed`. Stacks of one grammar each take part, of the llguidance back end, if all their masks
    together take longer than the hand-over to a thread. A method of any of these stacks, or of their filters, waits for
    all masks. If no thread has begun the task when the first mask is needed, the caller runs it.

    Args:
        stacks: stacks of one host, which uses them on one thread.
        pool: runs the task.

    Returns:
        The number of stacks that take part. Call `prefetch` for the others.
    """
    found = [(stack, matcher) for stack in stacks if (matcher := _matcher_of(stack)) is not None]
    if len(found) < FEWEST or not worth_a_thread([stack for stack, _ in found]):
        return 0
    pending = Pending("", lambda: _compute([pair for pair in found if pair[0].expects(pending)]))
    pending.future = future = pool.submit(pending.run, partial(_compute, found))
    for stack, _ in found:
        stack.expect(pending, future)
    return len(found)


def _matcher_of(stack: FilterStack) -> Matcher | None:
    """Return the matcher whose mask is the stack's, or None."""
    only: Any = stack.only
    if only is None or not stack.is_due or not _asks_a_matcher(type(only)):
        return None
    return only.asked_matcher  # type: ignore[no-any-return]


def _asks_a_matcher(kind: type) -> bool:
    """Whether filters of this class are grammars with the mask of their matcher."""
    if kind not in _kinds:
        if "exl_filters.grammar" not in sys.modules:
            return False  # nobody has made such a filter
        from exl_filters.grammar import ExLlamaV2GrammarFilter as Grammar

        _kinds[kind] = issubclass(kind, Grammar) and kind.fill_bitmask is Grammar.fill_bitmask
    return _kinds[kind]


def _compute(found: Sequence[tuple[FilterStack, Matcher]]) -> None:
    threads = executor()
    asked, waiting = _without_repeats(found)
    by_width: dict[int, list[tuple[FilterStack, Matcher]]] = {}
    for stack, matcher in asked:
        by_width.setdefault(bits.word_count(matcher.width), []).append((stack, matcher))
    began = time.perf_counter()
    for words, group in by_width.items():
        group.sort(key=lambda pair: id(pair[1].lexer))  # one thread gets all matchers of a lexer, so none waits for it
        masks = np.empty((len(group), words), dtype=np.int32)
        wanted = [(matcher.raw, place) for place, (_, matcher) in enumerate(group)]
        threads.unsafe_compute_mask_ptr(wanted, masks.ctypes.data, 4 * words, len(group))
        each = (time.perf_counter() - began) / len(group)
        for mask, (stack, matcher) in zip(masks, group, strict=True):
            stack.take(matcher, mask, each)
        began = time.perf_counter()
    for stack, matcher in waiting:
        stack.take(matcher, None, 0.0)


def _without_repeats(
    found: Sequence[tuple[FilterStack, Matcher]],
) -> tuple[list[tuple[FilterStack, Matcher]], list[tuple[FilterStack, Matcher]]]:
    """Return the stacks whose masks are computed, and those whose mask is known by then."""
    asked, waiting, seen = [], [], set()
    for stack, matcher in found:
        key = stack.mask_key
        if key is not None and (key in seen or stack.knows_mask):
            waiting.append((stack, matcher))
            continue
        seen.add(key)
        asked.append((stack, matcher))
    return asked, waiting
