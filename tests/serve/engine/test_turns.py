"""The queue of requests: which one the engine starts next."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exl_serve.engine.admission import Admission, Entry, Rates
from exl_serve.errors import ServeError


def entry(key: str, now: float = 0.0, priority: int = 1, prompt: int = 10, **fields: Any) -> Entry:
    given: dict[str, Any] = {"weight": 1.0, "new_tokens": 10, "deadline": None, "payload": None} | fields
    return Entry(key=key, priority=priority, prompt_tokens=prompt, arrived=now, **given)


@given(
    lengths=st.lists(st.integers(1, 400), min_size=40, max_size=120),
    batch=st.integers(1, 8),
    other=st.integers(1, 400),
)
def test_two_busy_keys_are_served_alike(lengths: list[int], batch: int, other: int) -> None:
    """For any sizes of requests, the costs served to the keys differ by at most 2 x (batch x longest job)."""
    queue = Admission(10_000)
    for length in lengths:
        queue.add(entry("a", prompt=length), 0.0, Rates())
        queue.add(entry("b", prompt=other), 0.0, Rates())
    served = {"a": 0.0, "b": 0.0}
    running: list[Entry] = []
    longest = max([*lengths, other])
    waiting = Counter({"a": len(lengths), "b": len(lengths)})
    while all(waiting.values()):
        while len(running) < batch and all(waiting.values()):
            one = queue.pop(0.0)
            assert one is not None
            waiting[one.key] -= 1
            queue.charge(one.key, 1.0, prompt=one.prompt_tokens)
            served[one.key] += one.prompt_tokens
            running.append(one)
        assert abs(served["a"] - served["b"]) <= 2 * batch * longest
        queue.done(running.pop(0).key)


def test_one_request_does_not_wait_for_ten_thousand() -> None:
    queue = Admission(20_000)
    for _ in range(10_000):
        queue.add(entry("many"), 0.0, Rates())
    first = queue.pop(0.0)
    assert first is not None
    queue.charge("many", 1.0, prompt=10)
    queue.add(entry("one"), 0.0, Rates())
    served = []
    for _ in range(2):
        one = queue.pop(0.0)
        assert one is not None
        queue.charge(one.key, 1.0, prompt=10)
        served.append(one.key)
    assert served.count("one") == 1


def test_classes_and_ageing() -> None:
    queue = Admission(100, ageing=30.0)
    queue.add(entry("batch", now=0.0, priority=2), 0.0, Rates())
    queue.add(entry("user", now=50.0, priority=1), 50.0, Rates())
    queue.add(entry("admin", now=50.0, priority=0), 50.0, Rates())
    order = [queue.pop(50.0) for _ in range(3)]
    assert [one and one.key for one in order] == ["admin", "batch", "user"]


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["add", "pop", "remove", "done", "expire"]), st.integers(0, 3), st.integers(1, 50)),
        max_size=80,
    )
)
def test_the_queue_keeps_its_books(steps: list[tuple[str, int, int]]) -> None:
    queue = Admission(10, seed=1)
    waiting: list[Entry] = []
    active: list[Entry] = []
    for now, (what, key, size) in enumerate(steps):
        if what == "add":
            one = entry(str(key), now=now, prompt=size, deadline=now + size)
            if len(waiting) >= 10:
                with pytest.raises(ServeError, match="queue of this model is full"):
                    queue.add(one, now, Rates(prefill=100.0))
            else:
                queue.add(one, now, Rates(prefill=100.0))
                waiting.append(one)
        elif what == "pop":
            popped = queue.pop(now)
            assert (popped is None) == (not waiting)
            if popped is not None:
                one = popped
                waiting.remove(one)
                active.append(one)
        elif what == "remove" and waiting:
            one = waiting.pop(size % len(waiting))
            assert queue.remove(one)
            assert not queue.remove(one)
        elif what == "done" and active:
            queue.done(active.pop().key)
        elif what == "expire":
            late = queue.expired(now)
            assert late == [] or all(one.deadline is not None and now > one.deadline for one in late)
            waiting = [one for one in waiting if one not in late]
        assert queue.count == len(waiting)
        assert queue.queued_tokens == sum(one.prompt_tokens for one in waiting)
