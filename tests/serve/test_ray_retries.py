"""Retries of requests on Ray whose replica ends, rejects them or serves another model; results that clients receive."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from effort import trials
from ray_fakes import CARD, USAGE, Answer, FakeEngine, StartedReplica, frame

from exl_serve.engine import wire
from exl_serve.engine.events import EngineEvent, Failed, Finished, Progress, Started, Tokens
from exl_serve.errors import ServeError
from exl_serve.ray.client import RayEngine
from exl_serve.ray.replica import decode_events, encode_events
from exl_serve.ray.resume import Completion
from exl_serve.request.internal import Constraint, EngineRequest, Sampling
from exl_serve.testing.local import EngineThread
from exl_serve.testing.waiting import HANG_SECONDS


def test_a_completion_continues_after_the_tokens_that_the_client_has() -> None:
    one = Completion()
    first: list[EngineEvent] = [Started(0, 3, 0), Progress(0, 3, 3), Tokens(0, (1, 2), "ab")]
    assert [one.feed(event) for event in first] == first
    assert one.ids == np.array([1, 2], "<i4").tobytes()
    assert one.feed(Started(0, 3, 0)) is None
    assert one.feed(Progress(0, 5, 5)) is None
    last: list[EngineEvent] = [Tokens(0, (3,), "c"), Finished(0, "stop_token", 2, USAGE)]
    assert [one.feed(event) for event in last] == last
    assert one.ended
    assert one.feed(Tokens(0, (4,), "d")) is None


class Fragile:
    """A deployment of replicas over one engine. The first one ends after `at` events of a request."""

    def __init__(self, engine: Any, folder: Path, at: int) -> None:
        self._engine, self._folder, self._left = engine, folder, at
        self.taken: list[EngineRequest] = []
        self.generate = self.tell = self.describe = self

    def options(self, **_: Any) -> Fragile:
        return self

    def remote(self, *given: Any, **named: Any) -> Any:
        if given and isinstance(given[0], str):
            return asyncio.sleep(0)
        return Answer(self._stream(given[0], named["ingress"], named["tag"]))

    async def _stream(self, frame: bytes, ingress: str, tag: int) -> AsyncIterator[bytes]:
        self.taken.append(msgspec.msgpack.decode(frame, type=EngineRequest))
        stream = StartedReplica(self._engine, self._folder).generate(frame, ingress=ingress, tag=tag)
        yield await anext(stream)
        async for item in stream:
            if isinstance(wire.decode_to_worker(item), wire.Rejected):
                yield item
            for event in decode_events(item):
                if self._left == 0 and len(self.taken) == 1:
                    await stream.aclose()  # type: ignore[attr-defined]
                    raise RuntimeError("the actor has died")
                self._left -= 1
                yield encode_events([event])


ARRAY = '{"type": "array", "items": {"type": "string", "maxLength": 6}, "minItems": 3, "maxItems": 5}'


CASES: dict[str, dict[str, Any]] = {
    "plain": {"logprobs": 1},
    "three": {"seeds": (3, 4, 5)},
    "schema": {"constraints": (Constraint(kind="json_schema", source=ARRAY),)},
    "stop": {"stop_strings": (" the", "ing")},
    "bans": {"banned_strings": ("a ", "s")},
    "budget": {"max_tokens": 5, "min_tokens": 4},
    "mirostat": {"sampling": Sampling(mirostat=True)},
}


def told(events: list[EngineEvent], n: int) -> list[tuple[Any, ...]]:
    """Return what a client receives of each completion, tokens joined."""
    found = []
    for choice in range(n):
        own = [event for event in events if event.choice == choice]
        parts = [event for event in own if isinstance(event, Tokens)]
        kinds = [type(event) for event in own if not isinstance(event, Progress | Tokens)]
        last = own[-1]
        assert isinstance(last, Finished), last
        ids, text = sum((part.ids for part in parts), ()), "".join(part.text for part in parts)
        numbers = sum((part.logprobs for part in parts), ())
        found.append((kinds, ids, text, numbers, last.reason, last.stop, last.usage.completion_tokens))
    return found


@pytest.mark.parametrize("case", sorted(CASES))
def test_a_stream_continues_on_another_replica(fable: EngineThread, tmp_path: Path, case: str) -> None:
    """Wherever the first one ends: the client receives what one replica would have sent."""
    fields: dict[str, Any] = {"id": "r", "prompt": np.array([1, 40, 50, 60], "<i4").tobytes(), "sampling": Sampling()}
    asked = EngineRequest(**(fields | {"seeds": (3,), "max_tokens": 20} | CASES[case]))

    async def ran(engine: Any) -> list[EngineEvent]:
        events: list[EngineEvent] = []
        left = set(range(asked.n))
        ended = asyncio.Event()

        def take(event: EngineEvent) -> None:
            events.append(event)
            if isinstance(event, Finished | Failed):
                left.discard(event.choice)
                if not left:
                    ended.set()

        await engine.submit(asked, take)
        async with asyncio.timeout(HANG_SECONDS):
            await ended.wait()
        return events

    async def steps() -> None:
        local = await fable.connect()
        try:
            whole = await ran(local)
            for at in range(0, len(whole), 1 if case == "stop" else trials(4, 9)):
                handle = Fragile(local, tmp_path, at)
                engine = RayEngine(handle, "i", local.card)
                assert told(await ran(engine), asked.n) == told(whole, asked.n), at
                first, second = handle.taken
                assert not any(first.resume)
                assert (first.again, second.again) == (False, True)
                over = tuple(event.choice for event in whole[:at] if isinstance(event, Finished))
                assert (first.over, sorted(second.over)) == ((), sorted(over))
        finally:
            await local.close()

    asyncio.run(steps())


@pytest.mark.parametrize("accepted", [True, False])
@pytest.mark.parametrize("code", ["resume_refused", "engine_error", "filter_dead_end"])
def test_another_answer_is_never_joined(tmp_path: Path, code: str, *, accepted: bool) -> None:
    """The second replica would not have produced the first one's ids: the request ends with an error."""

    async def steps() -> None:
        fake = FakeEngine()
        engine = RayEngine(Fragile(fake, tmp_path, 1), "i", CARD)
        events: list[EngineEvent] = []
        await engine.submit(msgspec.msgpack.decode(frame(), type=EngineRequest), events.append)
        if not accepted:
            fake.rejection = ServeError(409, "conflict", code, "resume_from[1] is 8")
        fake.sinks[0](Tokens(0, (7, 8), "ab"))
        fake.sinks[0](Tokens(0, (9,), "c"))
        async with asyncio.timeout(HANG_SECONDS):
            while len(fake.requests) < 2:
                await asyncio.sleep(0)
            assert fake.requests[1].resume == (np.array([7, 8], "<i4").tobytes(),)
            if accepted:
                fake.sinks[1](Failed(0, 409, "conflict", code, "resume_from[1] is 8"))
            while len(events) < 2:
                await asyncio.sleep(0)
        assert isinstance(last := events[-1], Failed)
        assert (last.status, last.code) == (503, "engine_restarting")
        assert "8" not in last.message
        assert len(fake.requests) == 2
        await engine.close()

    asyncio.run(steps())


@pytest.mark.parametrize("resumed", [True, False])
def test_an_error_of_a_running_request_stays_what_it_is(tmp_path: Path, *, resumed: bool) -> None:
    async def steps() -> None:
        fake = FakeEngine()
        engine = RayEngine(Fragile(fake, tmp_path, 1 if resumed else 9), "i", CARD)
        events: list[EngineEvent] = []
        await engine.submit(msgspec.msgpack.decode(frame(), type=EngineRequest), events.append)
        if resumed:
            fake.sinks[0](Tokens(0, (7, 8), "ab"))
            fake.sinks[0](Tokens(0, (9,), "c"))
        async with asyncio.timeout(HANG_SECONDS):
            while len(fake.requests) < 1 + resumed:
                await asyncio.sleep(0)
            if resumed:
                fake.sinks[-1](Tokens(0, (9,), "c"))
            fake.sinks[-1](Failed(0, 500, "server_error", "filter_dead_end", "no token is allowed"))
            while not events or not isinstance(events[-1], Failed):
                await asyncio.sleep(0)
        assert events[-1] == Failed(0, 500, "server_error", "filter_dead_end", "no token is allowed")
        await engine.close()

    asyncio.run(steps())


class Silent(FakeEngine):
    """Never answers a question about its labels, as an engine that dies meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.failed = asyncio.Event(), asyncio.Event()

    async def control(self, _: str) -> Any:
        self.asked.set()
        await asyncio.Event().wait()

    def fail(self, _: str) -> None:
        self.failed.set()


class Watched(StartedReplica):
    """Its engine process runs until `code` is set."""

    def __init__(self, engine: Any, folder: Path) -> None:
        super().__init__(engine, folder)
        self.code: int | None = None
        self._process = SimpleNamespace(poll=lambda: self.code, returncode=-9)  # type: ignore[assignment]

    async def watch(self) -> None:
        await self._watch()


def test_a_replica_ends_with_its_engine_also_while_it_asks_for_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(code: int) -> None:
        raise SystemError(code)

    async def steps() -> None:
        engine = Silent()
        replica = Watched(engine, tmp_path)
        async with asyncio.timeout(HANG_SECONDS):
            watching = asyncio.create_task(replica.watch())
            await engine.asked.wait()
            replica.code = -9
            with monkeypatch.context() as patch:
                patch.setattr("exl_serve.ray.replica.os._exit", leave)
                with pytest.raises(SystemError):
                    await watching
        assert engine.failed.is_set()

    asyncio.run(steps())


class Interrupted:
    """A deployment of two replicas over engines of their own. The first stream breaks, though its replica goes on."""

    def __init__(self, folder: Path) -> None:
        self.engines = {"a": FakeEngine(), "b": FakeEngine()}
        self._replicas = {name: StartedReplica(engine, folder, name) for name, engine in self.engines.items()}
        self.asked: list[tuple[str, int]] = []
        self.streams: list[Answer] = []
        self.broken = asyncio.Event()
        self.generate = self.tell = self.describe = self

    def options(self, **_: Any) -> Interrupted:
        return self

    def remote(self, *given: Any, **named: Any) -> Any:
        if given and isinstance(given[0], str):
            return self._replicas[named["to"]].tell(*given, **named)
        name = next(name for name in self._replicas if name not in named["avoid"])
        self.asked.append((name, named["tag"]))
        self.streams.append(Answer(self._stream(name, given[0], named["tag"])))
        return self.streams[-1]

    async def _stream(self, name: str, frame: bytes, tag: int) -> AsyncIterator[bytes]:
        stream = self._replicas[name].generate(frame, ingress="i", tag=tag)
        yield await anext(stream)
        if name == "a":
            await self.broken.wait()
            raise RuntimeError("the connection to the actor was lost")
        async for item in stream:
            yield item


def test_an_attempt_is_cancelled_before_the_next_one(tmp_path: Path) -> None:
    """A replica whose stream broke may still run the request: it is asked to end it, and the other one is not."""

    async def steps() -> None:
        handle = Interrupted(tmp_path)
        engine = RayEngine(handle, "i", CARD)
        events: list[EngineEvent] = []
        call = await engine.submit(msgspec.msgpack.decode(frame(), type=EngineRequest), events.append)
        handle.broken.set()
        second = handle.engines["b"]
        async with asyncio.timeout(HANG_SECONDS):
            while not second.sinks or not handle.engines["a"].cancelled:
                await asyncio.sleep(0)
        assert handle.asked == [("a", 1), ("b", 2)]
        assert [stream.cancelled for stream in handle.streams] == [True, False]
        assert engine.calls == {2: call}
        second.sinks[0](Finished(0, "length", None, USAGE))
        async with asyncio.timeout(HANG_SECONDS):
            while not events:
                await asyncio.sleep(0)
        assert isinstance(events[0], Finished)
        assert not second.cancelled
        await engine.close()

    asyncio.run(steps())


class Scripted:
    """A deployment whose one replica sends these items."""

    def __init__(self, *items: bytes) -> None:
        self._items = items
        self.told: list[str] = []
        self.streams: list[Answer] = []
        self.generate = self.tell = self.describe = self

    def options(self, **_: Any) -> Scripted:
        return self

    def remote(self, *given: Any, **named: Any) -> Any:
        if given and isinstance(given[0], str):
            self.told.append(given[0])
            return asyncio.sleep(0)
        self.streams.append(Answer(self._stream()))
        return self.streams[-1]

    async def _stream(self) -> AsyncIterator[bytes]:
        yield b'{"replica": "a", "digest": "d", "refused": false}'
        for item in self._items:
            yield item


def test_a_report_counts_prompt_tokens_that_are_not_computed(tmp_path: Path) -> None:
    """The router forgets what it sent of a request that a report names; the engine writes its state now and then."""

    async def steps() -> None:
        fake = FakeEngine()
        replica = StartedReplica(fake, tmp_path)

        def tokens() -> Any:
            report = replica.record_routing_stats()
            assert report["seen"] == {"i": 7}
            return report["queued_tokens"]

        stream = replica.generate(frame(), ingress="i", tag=7, tokens=100)
        await anext(stream)
        assert tokens() == 100
        told: list[tuple[EngineEvent, int]] = [(Started(0, 100, 40), 60), (Progress(0, 90, 100), 10)]
        for event, left in [*told, (Tokens(0, (1,), "a"), 0)]:
            fake.sinks[0](event)
            await anext(stream)
            assert tokens() == left
        fake.sinks[0](Finished(0, "length", None, USAGE))
        async for _ in stream:
            pass
        assert tokens() == 0

    asyncio.run(steps())


@pytest.mark.parametrize("broken", ["sink", "item"])
def test_errors_of_a_sink_and_of_decoding_fail_the_request(broken: str, caplog: pytest.LogCaptureFixture) -> None:
    """They are no death of a replica: running the request again would lose the text that the sink did not take."""
    text = encode_events([Tokens(0, (7,), "a")])

    async def steps() -> None:
        handle = Scripted(text, b"no message" if broken == "item" else text)
        engine = RayEngine(handle, "i", CARD)
        events: list[EngineEvent] = []
        ended = asyncio.Event()

        def take(event: EngineEvent) -> None:
            if broken == "sink" and len(events) == 1 and isinstance(event, Tokens):
                raise RuntimeError("the sink failed")
            events.append(event)
            if isinstance(event, Failed):
                ended.set()

        await engine.submit(msgspec.msgpack.decode(frame(), type=EngineRequest), take)
        async with asyncio.timeout(HANG_SECONDS):
            await ended.wait()
        assert isinstance(last := events[-1], Failed)
        assert (last.status, last.code) == (500, "engine_error")
        assert events[:-1] == [Tokens(0, (7,), "a")]
        await asyncio.sleep(0)
        assert handle.told == ["cancel"]
        assert [stream.cancelled for stream in handle.streams] == [True]
        assert not engine.calls
        await engine.close()

    asyncio.run(steps())
    assert "could not be finished" in caplog.text


class FakeHandle:
    """A deployment with one replica that generates nothing. Notes the messages that it is sent."""

    def __init__(self) -> None:
        self.told: list[tuple[str, list[int]]] = []
        self.generate = self.tell = self.describe = self
        self.stopped = 0

    def options(self, **_: Any) -> FakeHandle:
        return self

    def remote(self, *given: Any, **named: Any) -> Any:
        if given and isinstance(given[0], str):
            self.told.append((given[0], named["tags"]))
            return asyncio.sleep(0)
        return FakeStream(self)


class FakeStream:
    def __init__(self, handle: FakeHandle) -> None:
        self._handle, self._first = handle, True

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> bytes:
        if not self._first:
            await asyncio.Event().wait()
        self._first = False
        return b'{"replica": "here", "digest": "d", "refused": false}'

    def cancel(self) -> None:
        self._handle.stopped += 1


def test_an_operator_s_cancel_reaches_the_replica_and_the_client() -> None:
    async def steps() -> None:
        handle = FakeHandle()
        engine = RayEngine(handle, "i", CARD)
        events: list[EngineEvent] = []
        await engine.submit(msgspec.msgpack.decode(frame(), type=EngineRequest), events.append)
        assert await engine.control("cancel", id="r") == {"cancelled": True}
        await asyncio.sleep(0)
        assert handle.told == [("cancel", [1])]
        assert handle.stopped == 1
        assert [event.code for event in events if isinstance(event, Failed)] == ["cancelled"]
        await engine.close()

    asyncio.run(steps())


class Unwilling:
    """A deployment whose replicas a, b, c ... answer a request in turn: each rejects it with a code, dies before or
    (breaks) after it has accepted, serves another model (mixed), speaks another version (strange), or completes it (""
    and old). A replica that is to be avoided is not asked."""

    def __init__(self, *answers: str) -> None:
        self._answers = dict(zip("abcdef", answers, strict=False))
        self.asked: list[str] = []
        self.streams: list[Answer] = []
        self.told: list[tuple[str, str]] = []
        self.generate = self.tell = self.describe = self

    def options(self, **_: Any) -> Unwilling:
        return self

    def remote(self, *given: Any, **named: Any) -> Any:
        if given and isinstance(given[0], str):
            self.told.append((given[0], named["to"]))
            return asyncio.sleep(0)
        open_to_it = [name for name in self._answers if name not in named["avoid"]]
        self.streams.append(Answer(self._stream((open_to_it or list(self._answers))[0])))
        return self.streams[-1]

    async def _stream(self, name: str) -> AsyncIterator[bytes]:
        self.asked.append(name)
        answer = self._answers[name]
        if answer == "dies":
            del self._answers[name]  # Ray's router forgets it
            raise RuntimeError("the actor has died")
        rejects = answer not in ("", "breaks", "mixed", "old")
        head = {"replica": name, "digest": "another" if answer == "mixed" else "d", "refused": rejects}
        if answer == "old":
            del head["refused"]
        yield json.dumps(head).encode()
        if answer == "breaks":
            raise RuntimeError("the actor has died")
        if answer == "strange":
            yield b"of a later protocol"
        if rejects:
            yield wire.encode(wire.Rejected(1, 429, "rate_limit_error", answer, "no"))
        yield encode_events([Started(0, 1, 0), Finished(0, "length", None, USAGE)])


@pytest.mark.parametrize(
    ("answers", "asked", "code"),
    [
        (["queue_full", ""], "ab", ""),
        (["dies", ""], "ab", ""),
        (["engine_restarting", ""], "ab", ""),
        (["dies", "queue_full", "draining", ""], "abcd", ""),
        (["dies", "engine_restarting", ""], "ab", "engine_error"),
        (["engine_restarting", "engine_restarting", ""], "ab", "engine_error"),
        (["engine_restarting", "queue_full", "dies", ""], "abc", "engine_error"),
        (["queue_full", "queue_full", "queue_full", ""], "abc", "queue_full"),
        (["queue_full"], "aa", "queue_full"),
        (["invalid_value", ""], "a", "invalid_value"),
        (["dies", "dies", "dies", ""], "ab", "engine_error"),
        (["breaks", "breaks", ""], "ab", "engine_error"),
        (["breaks", "engine_restarting", ""], "ab", "engine_error"),
        (["breaks", ""], "ab", ""),
        (["mixed", ""], "ab", ""),
        (["mixed", "mixed", "mixed", ""], "abc", "engine_version"),
        (["strange", "old"], "ab", ""),
    ],
)
def test_a_request_that_a_replica_cannot_take_goes_to_another(answers: list[str], asked: str, code: str) -> None:
    async def steps() -> None:
        handle = Unwilling(*answers)
        engine = RayEngine(handle, "i", CARD)
        ended = asyncio.Event()

        last: list[Finished | Failed] = []

        def take(event: EngineEvent) -> None:
            if isinstance(event, Finished | Failed):
                last.append(event)
                ended.set()

        found = ""
        try:
            await engine.submit(msgspec.msgpack.decode(frame(), type=EngineRequest), take)
            async with asyncio.timeout(HANG_SECONDS):
                await ended.wait()
            found = last[0].code if isinstance(last[0], Failed) else ""
        except ServeError as error:
            found = error.code
        assert found == code
        assert "".join(handle.asked) == asked
        assert not engine.calls
        mixed = [name for name, answer in zip("abcdef", answers, strict=False) if answer == "mixed"]
        await asyncio.sleep(0)
        assert {("cancel", name) for name in mixed} <= set(handle.told)
        assert all(stream.cancelled for name, stream in zip(asked, handle.streams, strict=True) if name in mixed)

    asyncio.run(steps())


def test_the_status_of_a_replica_of_an_older_version_is_read() -> None:
    """Its number of steps has the name that it had in messages always."""
    numbers = dict.fromkeys(
        [
            "began",
            "ended",
            "decoding",
            "prefilling",
            "queued",
            "queued_prompt_tokens",
            "pages_pinned",
            "pages_cached",
            "pages_free",
            "prefill_rate",
            "decode_rate",
        ],
        1,
    )
    status = {"boot": "", "state": "ready", "round": 7} | numbers
    card = {
        "id": "m",
        "folder": "",
        "max_seq_len": 1,
        "max_batch_size": 1,
        "cache_tokens": 1,
        "vocab_size": 1,
        "eos_ids": [],
        "digest": "d",
    }

    class Described:
        async def remote(self) -> dict[str, Any]:
            return {"card": json.dumps(card).encode(), "status": json.dumps(status).encode()}

    async def steps() -> None:
        engine = await RayEngine.connect(SimpleNamespace(describe=Described()), "i")
        assert engine.status.step == 7
        assert json.loads(msgspec.json.encode(engine.status))["round"] == 7
        await engine.close()

    asyncio.run(steps())


def test_a_full_replica_takes_a_request_that_was_accepted_before(tmp_path: Path) -> None:
    async def steps() -> None:
        engine = FakeEngine()
        replica = StartedReplica(engine, tmp_path)
        streams = [replica.generate(frame(), ingress="i", tag=tag) for tag in range(4)]
        for stream in streams:
            assert not json.loads(await anext(stream))["refused"]
        assert json.loads(await anext(replica.generate(frame(), ingress="i", tag=5)))["refused"]
        again = msgspec.structs.replace(msgspec.msgpack.decode(frame(), type=EngineRequest), again=True)
        last = replica.generate(msgspec.msgpack.encode(again), ingress="i", tag=6)
        assert not json.loads(await anext(last))["refused"]
        for stream in (*streams, last):
            await stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(steps())
