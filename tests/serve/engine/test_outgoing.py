"""Results of steps become the messages of workers: every token once, to its own worker, in columns or as an event."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from exl_generate import COLUMN_FLAGS, StepColumns
from exl_generate.dynamic.columns import Extra
from exl_serve.engine import wire
from exl_serve.engine.events import Tokens
from exl_serve.engine.outgoing import Outgoing

HELD, FIRST = COLUMN_FLAGS["held"], COLUMN_FLAGS["first"]
COMPLETIONS = 6
ENTRY = st.tuples(
    st.integers(0, 3),  # tokens
    st.sampled_from(["", "a", "bc"]),
    st.sampled_from([0, 0, 0, HELD, FIRST]),
    st.booleans(),  # more than columns hold
)


def one(number: int) -> Any:
    """The completion of a serial number: two workers, and two completions of each request."""
    tag, choice = divmod(number, 2)
    return SimpleNamespace(
        worker=b"ab"[tag % 2 : tag % 2 + 1],
        address=wire.address_of(tag, choice),
        tag=tag,
        choice=choice,
        number=number,
        group=SimpleNamespace(generated=0),
    )


@given(
    steps=st.lists(
        st.one_of(
            st.dictionaries(st.integers(0, COMPLETIONS), ENTRY),
            st.tuples(st.integers(1, 3)),  # the step before again, so often, with a token of each
        ),
        max_size=8,
    )
)
def test_every_token_reaches_its_worker(steps: list[Any]) -> None:
    outgoing = Outgoing()
    running = {number: one(number) for number in range(COMPLETIONS)}  # the last number is of one that has ended
    generated = dict.fromkeys(running, 0)
    entries: dict[int, tuple[int, str, int, bool]] = {}
    ids = 0
    for step in steps:
        again = isinstance(step, tuple)
        entries = dict.fromkeys(entries, (1, "x", 0, False)) if again else step
        for _ in range(step[0] if again else 1):
            expected: dict[bytes, list[tuple[int, Tokens]]] = {}
            others = []
            told = {}
            for number, (count, text, flags, more) in entries.items():
                told[number] = tuple(range(ids, ids + count))
                ids += count
                if number not in running:
                    continue
                generated[number] += count
                if flags & ~HELD or more:
                    others.append((number, told[number], text, flags))
                elif count or text:
                    its = running[number]
                    expected.setdefault(its.worker, []).append((its.tag, Tokens(its.choice, told[number], text)))
            columns = StepColumns(
                np.array(list(entries), np.uint32),
                np.array([count for count, *_ in entries.values()], np.uint16),
                np.array([id for own in told.values() for id in own], "<i4").tobytes(),
                [text for _, text, *_ in entries.values()],
                np.array([flags for _, _, flags, _ in entries.values()], np.uint8),
                {number: Extra() for number, (*_, more) in entries.items() if more},
            )
            new, rest = outgoing.add_step(columns, running)
            assert [(e.running.number, e.ids, e.text, e.flags) for e in rest] == others
            assert new == sum(len(told[number]) for number in told if number in running)
            sent = {worker: list(message.all()) for worker, message in outgoing.take()}
            assert {worker: events for worker, events in sent.items() if events} == expected
    outgoing.count()
    assert {number: its.group.generated for number, its in running.items()} == generated
