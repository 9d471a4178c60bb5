"""The queues of an engine, and its wire, by themselves: pure data."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exl_serve.engine import wire
from exl_serve.engine.admission import SPARE, Admission, Entry, Rates
from exl_serve.engine.events import Failed, Finished, Progress, Started, TokenLogprob, Tokens, Usage
from exl_serve.engine.fair_queue import FairQueue
from exl_serve.errors import ServeError
from exl_serve.request.internal import Constraint, EngineRequest, Sampling


def entry(key: str, now: float = 0.0, **fields: Any) -> Entry:
    given: dict[str, Any] = {
        "weight": 1.0,
        "priority": 1,
        "prompt_tokens": 10,
        "new_tokens": 10,
        "deadline": None,
        "payload": None,
    } | fields
    return Entry(key=key, arrived=now, **given)


# ---- who is next ---------------------------------------------------------------------------------------------------


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["add", "add", "pop", "remove", "charge"]),
            st.sampled_from("abcd"),
            st.integers(0, 2),
            st.integers(0, 40),
        ),
        max_size=60,
    )
)
def test_the_next_is_the_first_by_class_then_cost_then_arrival(steps: list[tuple[str, str, int, int]]) -> None:
    queue, waiting, now = Admission(1000, ageing=30.0), [], 0.0
    for what, key, priority, size in steps:
        now += size / 2
        if what == "add":
            one = entry(key, now, priority=priority, deadline=now + 1000.0)
            queue.add(one, now, Rates())
            waiting.append(one)
        elif what == "charge":
            queue.charge(key, 1.0, generated=size)
        elif what == "remove" and waiting:
            assert queue.remove(waiting.pop(size % len(waiting)))
        elif what == "pop":

            def rank(one: Entry, now: float = now) -> tuple[int, float, int]:
                aged = max(0, one.priority - int((now - one.arrived) / 30.0))
                return aged, queue.counters.get(one.key, 0.0), one.number

            expected = min(waiting, key=rank, default=None)
            assert queue.pop(now) is expected
            if expected is not None:
                waiting.remove(expected)
    assert queue.count == len(waiting)
    assert {id(one) for one in queue.expired(now + 2000.0)} == {id(one) for one in waiting}


def test_prompts_that_the_generator_computes_count_as_waiting() -> None:
    queue = Admission(10, max_prompt_tokens=100)
    queue.add(entry("a", prompt_tokens=500), 0.0, Rates(), 99)  # one may be longer than the limit
    assert queue.pop(0.0) is not None
    with pytest.raises(ServeError, match="100 prompt tokens wait, and at most 100 may"):
        queue.add(entry("a"), 0.0, Rates(), 100)
    with pytest.raises(ServeError, match=r"predicted wait of 20.0 s"):
        queue.add(entry("a", deadline=10.0), 0.0, Rates(prefill=4.5), 90)
    queue.add(entry("a", deadline=30.0), 0.0, Rates(prefill=4.5), 90)


def test_requests_that_have_gone_are_not_kept() -> None:
    """Neither for their deadline, nor for the accounts of their key."""
    queue = Admission(10)
    queue.add(entry("busy"), 0.0, Rates())
    assert queue.pop(0.0) is not None
    queue.charge("busy", 1.0, generated=1)
    for number in range(4 * SPARE):
        one = entry(str(number), deadline=1e9)
        queue.add(one, 0.0, Rates())
        assert queue.pop(0.0) is one
        queue.charge(one.key, 1.0)
        queue.done(one.key)
    gc.collect()
    assert sum(type(one) is Entry for one in gc.get_objects()) <= 2 * SPARE
    assert len(queue.counters) <= 2 * SPARE


def test_a_key_that_was_forgotten_has_saved_nothing_up() -> None:
    queue = Admission(10)
    queue.add(entry("busy"), 0.0, Rates())
    assert queue.pop(0.0) is not None
    queue.charge("busy", 1.0, prompt=500)
    queue.charge("rich", 1.0, prompt=900)
    for number in range(2 * SPARE):
        queue.charge(str(number), 1.0, prompt=1)
    queue.done("gone")
    assert queue.counters == {"busy": 500.0, "rich": 900.0}
    queue.add(entry("new"), 0.0, Rates())
    assert queue.counters["new"] == 500.0


# ---- whose grammar is compiled -------------------------------------------------------------------------------------


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["add", "take", "done", "remove"]), st.sampled_from("abc"), st.integers(0, 50)),
        max_size=80,
    ),
    at_once=st.integers(1, 4),
    of_a_key=st.integers(1, 3),
)
def test_fair_queue_keeps_its_limits(steps: list[tuple[str, str, int]], at_once: int, of_a_key: int) -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue(at_once, of_a_key)
    waiting: list[tuple[str, int]] = []
    working: list[str] = []
    for number, (what, key, pick) in enumerate(steps):
        if what == "add":
            queue.add(key, (key, number))
            waiting.append((key, number))
        elif what == "take":
            taken = queue.take()
            if taken is None:
                free = [k for k, _ in waiting if working.count(k) < of_a_key]
                assert not free or len(working) >= at_once
            else:
                assert taken == next(one for one in waiting if one[0] == taken[0])  # first come, first served
                waiting.remove(taken)
                working.append(taken[0])
        elif what == "done" and working:
            queue.done(working.pop(pick % len(working)))
        elif what == "remove" and waiting:
            gone = waiting.pop(pick % len(waiting))
            assert queue.remove(gone[0], gone)
            assert not queue.remove(gone[0], gone)
        assert len(working) <= at_once
        assert all(working.count(k) <= of_a_key for k in working)
        assert len(queue) == len(waiting) + len(working)


def test_a_key_with_one_waits_for_one_turn_of_another() -> None:
    queue: FairQueue[str] = FairQueue(1, 1)
    for number in range(1000):
        queue.add("many", f"many {number}")
    assert queue.take() == "many 0"
    queue.add("one", "one")
    taken = []
    for key in ("many", "many"):
        queue.done(key)
        one = queue.take()
        assert one is not None
        taken.append(one)
        if one == "one":
            break
    assert taken[-1] == "one"


# ---- the wire ------------------------------------------------------------------------------------------------------

ASKED = EngineRequest(
    id="r",
    prompt=b"\1\0\0\0",
    sampling=Sampling(logit_bias={3: -1.0}),
    seeds=(1, 2),
    max_tokens=5,
    constraints=(Constraint(kind="choice", source='["a"]', options={"x": [1, {"y": None}]}),),
)
USAGE = Usage(prompt_tokens=1, completion_tokens=2)
TO_ENGINE = [
    wire.Hello(1, "w"),
    wire.Submit(1, ASKED),
    wire.Cancel(1),
    wire.Pause(1),
    wire.Resume(1),
    wire.Call(1, "load_adapter", {"name": "a", "path": "b", "more": [1, {"x": 1.5}]}),
    wire.Ping(),
    wire.Goodbye(),
]
TO_WORKER = [
    wire.Welcome(1, b"boot", b"{}", "/status"),
    wire.Accepted(1),
    wire.Rejected(1, 429, "t", "c", "m", None, 1.5),
    wire.Reply(1, {"requests": [{"id": "x"}]}),
    wire.StepEvents(
        [
            (1, Started(0, 4, 2)),
            (1, Progress(0, 1, 4)),
            (1, Tokens(0, (1, 2), "ab", (TokenLogprob(1, -0.5, ((1, -0.5),)),))),
            (1, Finished(0, "stop_token", 2, USAGE)),
            (2, Failed(1, 500, "t", "c", "m", USAGE)),
        ]
    ),
    wire.StepEvents(
        [],
        wire.TokenColumns(
            wire.address_of(7, 0) + wire.address_of(9, 2), b"\x02\x00\x01\x00", bytes(4) + b"\x05\0\0\0" * 2, ["ab", ""]
        ),
    ),
]


@given(
    engine=st.booleans(),
    which=st.integers(0, 100),
    edits=st.lists(
        st.tuples(st.sampled_from(["set", "cut", "insert"]), st.integers(0, 10_000), st.binary(min_size=1, max_size=9)),
        max_size=4,
    ),
)
def test_a_damaged_message_is_a_message_or_refused(
    engine: bool, which: int, edits: list[tuple[str, int, bytes]]
) -> None:
    messages = TO_ENGINE if engine else TO_WORKER
    decode = wire.decode_to_engine if engine else wire.decode_to_worker
    message = messages[which % len(messages)]
    data = bytearray(wire.encode(message))  # type: ignore[arg-type]
    assert decode(bytes(data)) == message
    for how, at, value in edits:
        at %= len(data) + 1
        if how == "set":
            data[at : at + len(value)] = value
        elif how == "cut":
            del data[at : at + len(value)]
        else:
            data[at:at] = value
    with contextlib.suppress(wire.WireError):
        found = decode(bytes(data))
        if isinstance(found, wire.StepEvents):
            list(found.all())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x93\xa5hello\x01\xa1w", wire.Hello(1, "w")),
        (b"\x92\xa5pause\x07", wire.Pause(7)),
        (b"\x91\xa4ping", wire.Ping()),
        (b"\x94\xa4call\x01\xa5drain\x80", wire.Call(1, "drain", {})),
    ],
)
def test_messages_to_an_engine_by_bytes(data: bytes, message: Any) -> None:
    assert wire.decode_to_engine(data) == message
    assert wire.encode(message) == data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x92\xa8accepted\x07", wire.Accepted(7)),
        (
            b"\x93\xa4step\x91\x92\x07\x95\x02\x00\x92\x01\x02\xa2ab\x90\xc0",
            wire.StepEvents([(7, Tokens(0, (1, 2), "ab"))]),
        ),
        (b"\x93\xa4step\x91\x92\x07\x94\x01\x00\x05\x09\xc0", wire.StepEvents([(7, Progress(0, 5, 9))])),
        (
            b"\x93\xa4step\x90\x94\xc4\x0c\x07\0\0\0\0\0\0\0\x01\0\0\0\xc4\x02\x01\0\xc4\x04\x05\0\0\0\x91\xa1a",
            wire.StepEvents([], wire.TokenColumns(wire.address_of(7, 1), b"\x01\0", b"\x05\0\0\0", ["a"])),
        ),
    ],
)
def test_messages_to_a_worker_by_bytes(data: bytes, message: Any) -> None:
    assert wire.decode_to_worker(data) == message
    assert wire.encode(message) == data


def test_a_buffer_holds_the_last_message_alone() -> None:
    buffer = bytearray()
    long = wire.StepEvents([(7, Tokens(0, (1, 2), "ab" * 500))])
    for message in (wire.Accepted(7), long, wire.Accepted(8)):
        wire.encode_into(message, buffer)
        assert wire.decode_to_worker(bytes(buffer)) == message
    with pytest.raises(wire.WireError, match="UTF-8"):
        wire.encode_into(wire.StepEvents([(7, Tokens(0, (1,), "\ud800"))]), buffer)
    wire.encode_into(wire.Accepted(9), buffer)
    assert wire.decode_to_worker(bytes(buffer)) == wire.Accepted(9)


def test_columns_are_read_as_events() -> None:
    to = wire.address_of(7, 0) + wire.address_of(9, 2) + wire.address_of(1 << 40, 1)
    columns = wire.TokenColumns(to, b"\x02\0\0\0\0\0", b"\x05\0\0\0\x06\0\0\0", ["ab", "", "c"])
    message = wire.StepEvents([(3, Progress(0, 1, 2))], columns)
    found = wire.decode_to_worker(wire.encode(message))
    assert isinstance(found, wire.StepEvents)
    # An entry without tokens and text says nothing.
    assert list(found.all()) == [
        (3, Progress(0, 1, 2)),
        (7, Tokens(0, (5, 6), "ab")),
        (1 << 40, Tokens(1, (), "c")),
    ]


@pytest.mark.parametrize(
    "columns",
    [
        wire.TokenColumns(bytes(11), b"\1\0", bytes(4), ["a"]),
        wire.TokenColumns(bytes(12), b"\1", bytes(4), ["a"]),
        wire.TokenColumns(bytes(12), b"\1\0", bytes(3), ["a"]),
        wire.TokenColumns(bytes(12), b"\2\0", bytes(4), ["a"]),
        wire.TokenColumns(bytes(12), b"\1\0", bytes(4), []),
    ],
)
def test_columns_of_different_lengths_are_rejected(columns: wire.TokenColumns) -> None:
    with pytest.raises(wire.WireError):
        wire.decode_to_worker(wire.encode(wire.StepEvents([], columns)))


@pytest.mark.parametrize("tag", [-1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("kind", ["submit", "cancel", "pause", "resume", "call"])
def test_a_tag_that_an_address_cannot_hold_is_rejected(kind: str, tag: int) -> None:
    submit = msgspec.to_builtins(
        EngineRequest(id="r", prompt=b"", sampling=Sampling(), seeds=(1,), max_tokens=1), builtin_types=(bytes,)
    )
    fields = {"submit": [submit], "call": ["drain", {}]}.get(kind, [])
    assert wire.decode_to_engine(msgspec.msgpack.encode([kind, 2**63 - 1, *fields])) is not None
    with pytest.raises(wire.WireError):
        wire.decode_to_engine(msgspec.msgpack.encode([kind, tag, *fields]))


def test_a_message_that_cannot_be_encoded_is_an_error() -> None:
    with pytest.raises(wire.WireError, match="UTF-8"):
        wire.encode(wire.Call(1, "\ud800", {}))
    with pytest.raises(wire.WireError, match="16777216"):
        wire.encode(wire.Call(1, "x" * wire.MAX_MESSAGE, {}))
