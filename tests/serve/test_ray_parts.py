"""The parts of the server on Ray that need no Ray: labels, routing, scaling, going on with a request elsewhere."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exl_generate import ExLlamaV2DynamicJob, ExLlamaV2Sampler
from exl_serve.config.load import ConfigError
from exl_serve.config.model import ModelConfig, ServeConfig, ServerConfig
from exl_serve.engine import wire
from exl_serve.engine.events import EngineEvent, Failed, Finished, Progress, Started, Tokens, Usage
from exl_serve.errors import ServeError
from exl_serve.ray import app
from exl_serve.ray.autoscale import CALM_SECONDS, policy, wanted
from exl_serve.ray.client import RayEngine
from exl_serve.ray.cost import Index, Load, rank
from exl_serve.ray.replica import BATCHES, EngineReplica, decode_events, encode_events
from exl_serve.ray.resume import Completion
from exl_serve.request.internal import Constraint, EngineRequest, MediaRef, Sampling
from exl_serve.request.labels import LABEL_BYTES, page_labels, salted
from exl_serve.testing.local import EngineThread
from exl_serve.testing.waiting import HANG_SECONDS

USAGE = Usage(prompt_tokens=3, completion_tokens=4)


# ---- labels ----------------------------------------------------------------------------------------------------------


def set_card(engine: Any, card: Any) -> None:
    """Give a client the description of an engine that is not there."""
    engine._card = card  # noqa: SLF001


@pytest.mark.parametrize("salt", [b"", b"of a key"])
def test_labels_are_those_of_the_engine_s_page_table(fable: EngineThread, salt: bytes) -> None:
    """A prompt's pages are found in the table under what an ingress computes without it."""
    generator, card = fable.generator, fable.card
    other = type(generator)(
        model=generator.model,
        cache=type(generator.cache)(generator.model, max_seq_len=2048),
        tokenizer=generator.tokenizer,
    )
    ids = np.random.default_rng(3).integers(5, 200, 700).astype("<i4")
    import torch

    job = ExLlamaV2DynamicJob(
        torch.from_numpy(ids.astype(np.int64))[None],
        2,
        gen_settings=ExLlamaV2Sampler.Settings.greedy(),
        cache_salt=salt,
    )
    other.enqueue(job)
    while other.num_remaining_jobs():
        other.iterate()
    held = {page.label[:LABEL_BYTES] for page in other.page_table.pages if page.label is not None}
    labels = page_labels(salted(card.namespace, salt, None), ids.tobytes(), card.page_size)
    assert [pages for pages, _ in labels] == [1, 2]
    assert {label for _, label in labels} <= held


def test_labels_of_long_prompts_are_a_sample() -> None:
    ids = np.arange(256 * 300, dtype="<i4") % 1000
    pages = [page for page, _ in page_labels(b"r" * 16, ids.tobytes(), 256)]
    assert pages[:32] == list(range(1, 33))
    assert pages[32:48] == list(range(34, 65, 2))
    assert pages == sorted(pages)
    assert len(pages) < 90
    shorter = page_labels(b"r" * 16, ids[: 256 * 40].tobytes(), 256)
    assert page_labels(b"r" * 16, ids.tobytes(), 256)[: len(shorter)] == shorter
    with_image = ids.copy()
    with_image[600] = -1
    assert [page for page, _ in page_labels(b"r" * 16, with_image.tobytes(), 256)] == [1, 2]


# ---- routing ---------------------------------------------------------------------------------------------------------

loads = st.dictionaries(
    st.sampled_from("abcdefgh"),
    st.builds(
        Load,
        running=st.integers(0, 64),
        queued=st.integers(0, 500),
        queued_tokens=st.integers(0, 10**6),
        batch=st.integers(1, 64),
        prefill_rate=st.floats(0, 1e5),
    ),
)


@given(
    loads,
    st.integers(0, 10**5),
    st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 10**5)),
    st.binary(max_size=8),
)
def test_every_replica_has_its_rank(found: dict[str, Load], tokens: int, matched: dict[str, int], label: bytes) -> None:
    ranks = rank(matched, tokens, found, label)
    assert sorted(name for names in ranks for name in names) == sorted(found)
    assert ranks == rank(matched, tokens, dict(reversed(found.items())), label)


def test_a_holder_is_taken_until_it_is_too_busy() -> None:
    idle = {name: Load(prefill_rate=1000.0) for name in "abc"}
    assert rank({"b": 2048}, 2100, idle)[0] == ["b"]
    busy = idle | {"b": Load(running=16, queued=20, prefill_rate=1000.0)}
    assert rank({"b": 2048}, 2100, busy)[0] != ["b"]


def report(number: int, labels: bytes = b"", boot: bytes = b"x", **changes: Any) -> dict[str, Any]:
    values = {"running": 0, "queued": 0, "queued_tokens": 0, "batch": 8, "prefill_rate": 1000.0}
    return values | {"report": number, "boot": boot, "labels": labels} | changes


def test_an_index_knows_what_was_sent_and_what_is_reported() -> None:
    now = [0.0]
    index = Index(256, clock=lambda: now[0])
    index.keep(["a", "b"])
    labels = [(1, b"11111111"), (2, b"22222222")]
    assert index.matched("a", labels) == 0
    index.sent("a", labels, 600)
    assert index.matched("a", labels) == 512
    assert index.order(labels, 600)[0] == ["b"], "two prompts are computed sooner side by side"
    now[0] = 1.0
    assert index.order(labels, 600)[0] == ["a"]
    index.report("a", report(1, b"11111111", boot=b""))
    assert index.matched("a", labels) == 512, "sent a moment ago, so not in the report yet"
    now[0] = 10.0
    index.report("a", report(2, b"11111111", boot=b""))
    assert index.matched("a", labels) == 256, "evicted since"
    index.report("a", report(3, b"", boot=b"new"))
    assert index.matched("a", labels) == 0, "a new process has an empty cache"
    index.keep(["b"])
    assert index.order(labels, 600) == [["b"]]


@given(
    st.dictionaries(
        st.sampled_from(["report", "boot", "running", "queued", "queued_tokens", "batch", "prefill_rate", "labels"]),
        st.none() | st.integers() | st.floats() | st.binary(max_size=30) | st.text(max_size=3),
    )
)
def test_reports_that_lie_or_are_late_cost_only_time(stats: dict[str, Any]) -> None:
    """Every replica can still be chosen."""
    index = Index(256)
    index.keep(["a", "b", "c"])
    index.report("a", stats)
    index.report("b", report(1) | stats)
    index.report("gone", report(1))
    found = index.order([(1, b"11111111")], 300)
    assert sorted(name for names in found for name in names) == ["a", "b", "c"]


def simulate(choose: Any, replicas: int, sessions: int, turns: int, pages: int, seed: int) -> tuple[float, float]:
    """(share of the prompt pages found in the cache, largest replica's work over the mean) of multi-turn sessions with
    shared system prompts. Each replica's cache has `pages` pages, the least recently used go first."""
    rng = random.Random(seed)
    caches: dict[str, dict[bytes, None]] = {f"r{i}": {} for i in range(replicas)}
    work = dict.fromkeys(caches, 0.0)
    open_sessions = [[rng.randrange(10), number, 0] for number in range(sessions)]
    found = asked = 0
    while open_sessions:
        session = rng.choice(open_sessions)
        system, number, turn = session
        own = [f"s{system}p{i}" for i in range(8)] + [f"u{number}p{i}" for i in range(2 * turn)]
        labels = [(i + 1, name.encode().ljust(8, b".")) for i, name in enumerate(own)]
        name = choose(labels, 256 * len(labels) + 100, number)
        cache = caches[name]
        run = 0
        while run < len(labels) and labels[run][1] in cache:
            run += 1
        if turn:
            asked += len(labels)
            found += run
        work[name] += len(labels) - run + 2
        for _, label in [
            *labels,
            (0, f"u{number}p{2 * turn}".encode().ljust(8, b".")),
            (0, f"u{number}p{2 * turn + 1}".encode().ljust(8, b".")),
        ]:
            cache.pop(label, None)
            cache[label] = None
        while len(cache) > pages:
            del cache[next(iter(cache))]
        session[2] += 1
        if session[2] == turns:
            open_sessions.remove(session)
    return found / asked, max(work.values()) / (sum(work.values()) / replicas)


def test_a_simulated_cluster_finds_its_pages_and_shares_the_work() -> None:
    """8 replicas, 200 sessions of 6 turns over 10 system prompts: nearly all pages of later turns are found, which
    round robin does not give; and no replica has much more work than the others."""
    index = Index(256)
    names = [f"r{i}" for i in range(8)]
    index.keep(names)
    number = [0]

    def routed(labels: Any, tokens: int, session: int) -> str:
        number[0] += 1
        if number[0] % 40 == 0:  # a report empties what was counted as sent
            for name in names:
                index.report(name, report(number[0], boot=b"", labels=b"".join(index._labels[name])))  # noqa: SLF001
        chosen = index.order(labels, tokens)[0][0]
        index.sent(chosen, labels, tokens)
        return chosen

    turn = [0]

    def round_robin(labels: Any, tokens: int, session: int) -> str:
        turn[0] += 1
        return names[turn[0] % 8]

    hits, imbalance = simulate(routed, 8, 200, 6, 4000, seed=1)
    others, _ = simulate(round_robin, 8, 200, 6, 4000, seed=1)
    assert hits > 0.9
    assert hits > others + 0.1
    assert imbalance < 1.4


# ---- scaling ---------------------------------------------------------------------------------------------------------


def context(loads: list[dict[str, float]], target: int, now: float, state: Any = None, queued: float = 0.0) -> Any:
    names = {name for load in loads for name in load}
    metrics = {name: {f"r{i}": load[name] for i, load in enumerate(loads)} for name in names}
    return SimpleNamespace(
        aggregated_metrics=metrics,
        policy_state=state or {},
        current_time=now,
        target_num_replicas=target,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=5,
        total_queued_requests=queued,
    )


def test_replicas_are_added_when_more_are_wanted_twice() -> None:
    busy = [{"exl_prompt_load": 0.2, "exl_batch_load": 1.3, "exl_page_load": 0.4}] * 2
    assert wanted(busy) == pytest.approx(2.6)
    target, state = policy(context(busy, 2, 0.0))
    assert target == 2
    target, state = policy(context(busy, 2, 2.0, state))
    assert target == 3
    assert policy(context([{"exl_batch_load": 40.0}] * 2, 2, 0.0, {"busy": 1}))[0] == 5, "the most that is allowed"


def test_one_replica_is_taken_away_after_ten_calm_minutes() -> None:
    calm: list[dict[str, float]] = [{"exl_batch_load": 0.1}] * 3
    target, state = policy(context(calm, 3, 0.0))
    assert target == 3
    target, state = policy(context(calm, 3, CALM_SECONDS - 1, state))
    assert target == 3
    target, state = policy(context(calm, 3, CALM_SECONDS, state))
    assert target == 2
    target, state = policy(context(calm[:2], 2, CALM_SECONDS + 1, state))
    assert target == 2, "one at a time"
    _, state = policy(context([{"exl_batch_load": 0.9}] * 2, 2, CALM_SECONDS + 2, state))
    assert policy(context(calm[:2], 2, 3 * CALM_SECONDS, state))[0] == 2, "the ten minutes begin again"


def test_requests_that_nobody_has_taken_want_a_replica() -> None:
    _, state = policy(context([], 1, 0.0, queued=3.0))
    assert policy(context([], 1, 2.0, state, queued=3.0))[0] == 2


def test_a_model_without_replicas_gets_one_for_a_request_alone() -> None:
    def asleep(queued: float, state: Any = None) -> Any:
        made = context([], 0, 0.0, state, queued=queued)
        made.capacity_adjusted_min_replicas = 0
        return made

    target, state = policy(asleep(0.0))
    assert target == 0
    assert policy(asleep(1.0, state))[0] == 1


# ---- going on elsewhere ----------------------------------------------------------------------------------------------


def test_a_completion_continues_behind_what_the_client_has() -> None:
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


class Answer:
    """The response of a call as Ray gives it: a stream that can be cancelled, which may be lost."""

    def __init__(self, items: AsyncIterator[bytes]) -> None:
        self._items = items
        self.cancelled = False

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        return await anext(self._items)

    def cancel(self) -> None:
        self.cancelled = True


class Fragile:
    """A deployment of replicas over one engine. The first one ends behind `at` events of a request."""

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
    """Return what a client is told of each completion, tokens joined."""
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
    """Wherever the first one ends: the client is told what one replica would have told."""
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
            for at in range(0, len(whole), 1 if case == "stop" else 4):
                handle = Fragile(local, tmp_path, at)
                engine = RayEngine(handle, "i")
                set_card(engine, local.card)
                assert told(await ran(engine), asked.n) == told(whole, asked.n), at
                assert len(handle.taken) == 2
                assert not any(handle.taken[0].resume)
        finally:
            await local.close()

    asyncio.run(steps())


@pytest.mark.parametrize("accepted", [True, False])
@pytest.mark.parametrize("code", ["resume_refused", "engine_error", "filter_dead_end"])
def test_another_answer_is_never_joined(tmp_path: Path, code: str, *, accepted: bool) -> None:
    """The second replica would not have produced the first one's ids: the request ends with an error."""

    async def steps() -> None:
        fake = FakeEngine()
        engine = RayEngine(Fragile(fake, tmp_path, 1), "i")
        set_card(engine, SimpleNamespace(digest="d", namespace=b"n" * 16, page_size=256))
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
        engine = RayEngine(Fragile(fake, tmp_path, 1 if resumed else 9), "i")
        set_card(engine, SimpleNamespace(digest="d", namespace=b"n" * 16, page_size=256))
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


# ---- a replica -------------------------------------------------------------------------------------------------------


class FakeEngine:
    """Takes every request, and generates nothing until it is told."""

    card = SimpleNamespace(digest="d")

    def __init__(self) -> None:
        self.requests: list[EngineRequest] = []
        self.sinks: list[Any] = []
        self.images: list[bytes] = []
        self.rejection: ServeError | None = None
        self.cancelled = 0

    async def submit(self, request: EngineRequest, sink: Any) -> Any:
        self.requests.append(request)
        if self.rejection is not None:
            raise self.rejection
        self.sinks.append(sink)
        self.images += [Path(image.path).read_bytes() for image in request.media]
        return SimpleNamespace(cancel=self.cancel, pause=lambda: None, resume=lambda: None)

    def cancel(self) -> None:
        self.cancelled += 1


class StartedReplica(EngineReplica):
    """A replica whose engine process is there already."""

    def __init__(self, engine: Any, folder: Path, name: str = "here") -> None:
        self._model, self._name, self._engine = ModelConfig(id="m", path="m", max_batch_size=1), name, engine
        self._connecting, self._running, self._heard = asyncio.Lock(), {}, {}
        self._open = self._taken = 0
        self._folder = SimpleNamespace(name=str(folder), cleanup=lambda: None)  # type: ignore[assignment]
        self._process = SimpleNamespace(poll=lambda: 0)  # type: ignore[assignment]

    @property
    def open(self) -> int:
        """Requests that it holds."""
        return self._open


def frame(*media: MediaRef) -> bytes:
    request = EngineRequest(id="r", prompt=b"", sampling=Sampling(), seeds=(1,), max_tokens=1, media=media)
    return msgspec.msgpack.encode(request)


@pytest.mark.parametrize("by", ["cancel", "live"])
def test_a_cancelled_request_ends_its_stream(tmp_path: Path, by: str) -> None:
    async def steps() -> None:
        engine = FakeEngine()
        replica = StartedReplica(engine, tmp_path)
        stream = replica.generate(frame(), ingress="i", tag=1)
        await anext(stream)
        tags = [1] if by == "cancel" else []
        await replica.tell(by, ingress="i", tags=tags, to="another", upto=5)
        assert not engine.cancelled, "the message is for another replica"
        await replica.tell(by, ingress="i", tags=tags, to="here", upto=5)
        assert engine.cancelled
        async with asyncio.timeout(HANG_SECONDS):
            assert [item async for item in stream] == []
        assert replica.open == 0

    asyncio.run(steps())


def test_a_full_replica_refuses_and_takes_requests_again(tmp_path: Path) -> None:
    async def steps() -> None:
        engine = FakeEngine()
        replica = StartedReplica(engine, tmp_path)
        streams = [replica.generate(frame(), ingress="i", tag=tag) for tag in range(BATCHES)]
        for stream in streams:
            await anext(stream)
        head, refusal = [item async for item in replica.generate(frame(), ingress="i", tag=9)]
        assert json.loads(head) == {"replica": "here", "digest": "d", "refused": True}
        message = wire.decode_to_worker(refusal)
        assert isinstance(message, wire.Rejected)
        assert (message.status, message.code, message.retry_after) == (429, "queue_full", 1.0)
        engine.sinks[0](Finished(0, "length", None, USAGE))
        assert [len(decode_events(item)) async for item in streams[0]] == [1]
        assert not json.loads(await anext(replica.generate(frame(), ingress="i", tag=9)))["refused"]

    asyncio.run(steps())


def test_images_reach_an_engine_as_files_and_none_is_left(tmp_path: Path) -> None:
    async def steps() -> None:
        engine = FakeEngine()
        large = MediaRef(width=2048, height=4096, digest=b"d", data=bytes(3 * 2048 * 4096))
        assert len(large.data) > wire.MAX_MESSAGE
        await anext(StartedReplica(engine, tmp_path).generate(frame(large), ingress="i", tag=1))
        assert engine.images == [large.data]
        assert len(wire.encode(wire.Submit(1, engine.requests[0]))) < 1000
        assert list(tmp_path.iterdir()) == []

    asyncio.run(steps())


def test_a_request_that_is_too_large_leaves_nothing_behind(fable: EngineThread) -> None:
    async def steps() -> None:
        engine = await fable.connect()
        try:
            large = msgspec.msgpack.decode(frame(), type=EngineRequest)
            large = msgspec.structs.replace(large, prompt=bytes(wire.MAX_MESSAGE))
            with pytest.raises(ServeError, match="a message of") as caught:
                await engine.submit(large, lambda event: None)
            assert caught.value.status == 413
            assert not engine._answers  # noqa: SLF001
            assert not engine._waiting  # noqa: SLF001
        finally:
            await engine.close()

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
    """A replica whose stream broke may still run the request: it is told to end it, and the other one is not."""

    async def steps() -> None:
        handle = Interrupted(tmp_path)
        engine = RayEngine(handle, "i")
        set_card(engine, SimpleNamespace(digest="d", namespace=b"n" * 16, page_size=256))
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


@pytest.mark.parametrize("broken", ["sink", "item"])
def test_errors_of_a_sink_and_of_decoding_fail_the_request(broken: str, caplog: pytest.LogCaptureFixture) -> None:
    """They are no death of a replica: running the request again would lose the text that the sink did not take."""
    text = encode_events([Tokens(0, (7,), "a")])

    async def steps() -> None:
        handle = Scripted(text, b"no message" if broken == "item" else text)
        engine = RayEngine(handle, "i")
        set_card(engine, SimpleNamespace(digest="d", namespace=b"n" * 16, page_size=256))
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


def test_the_end_of_a_run_leaves_another_of_its_tag_alone(tmp_path: Path) -> None:
    async def steps() -> None:
        engine = FakeEngine()
        replica = StartedReplica(engine, tmp_path)
        old = replica.generate(frame(), ingress="i", tag=1)
        await anext(old)
        new = replica.generate(frame(), ingress="i", tag=1)
        await anext(new)
        await old.aclose()  # type: ignore[attr-defined]
        assert engine.cancelled == 1
        await replica.tell("cancel", ingress="i", tags=[1], to="here")
        assert engine.cancelled == 2
        async with asyncio.timeout(HANG_SECONDS):
            assert [item async for item in new] == []

    asyncio.run(steps())


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
        engine = RayEngine(handle, "i")
        set_card(engine, SimpleNamespace(digest="d", namespace=b"n" * 16, page_size=256))
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
        engine = RayEngine(handle, "i")
        set_card(engine, SimpleNamespace(digest="d", namespace=b"n" * 16, page_size=256))
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


# ---- starting --------------------------------------------------------------------------------------------------------


class FakeRay:
    """The calls of Ray that starting makes, on a cluster that may serve already."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, serving: bool) -> None:
        self.calls: list[tuple[str, Any]] = []
        status = SimpleNamespace(applications={"exl": "RUNNING"} if serving else {})

        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError("the application failed")

        serve = SimpleNamespace(
            status=lambda: status,
            start=self.note("serve.start"),
            run=fail,
            delete=self.note("serve.delete"),
            shutdown=self.note("serve.shutdown"),
        )
        ray = SimpleNamespace(__version__="2.60.0", serve=serve, init=self.note("init"), shutdown=self.note("shutdown"))
        monkeypatch.setitem(sys.modules, "ray", ray)
        monkeypatch.setattr(app, "application", lambda config: None)
        monkeypatch.setattr(app.signal, "signal", lambda *_: None)
        monkeypatch.setenv("RAY_AUTH_MODE", "token")

    def note(self, name: str) -> Any:
        return lambda *given, **named: self.calls.append((name, named.get("address", given[0] if given else None)))


CONFIG = ServeConfig(model=(ModelConfig(id="m", path="m"),))


def test_a_refused_start_leaves_the_server_of_the_cluster_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay(monkeypatch, serving=True)
    with pytest.raises(ConfigError, match="serves exl already"):
        app.run(CONFIG, "10.0.0.5:6379")
    assert ray.calls == [("init", "10.0.0.5:6379"), ("shutdown", None)]


def test_a_failed_start_removes_its_application_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay(monkeypatch, serving=False)
    with pytest.raises(RuntimeError, match="failed"):
        app.run(CONFIG, "10.0.0.5:6379")
    assert ray.calls[1:] == [("serve.start", None), ("serve.delete", "exl"), ("shutdown", None)]


def test_without_an_address_a_new_cluster_is_started_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay(monkeypatch, serving=False)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.5:6379")
    with pytest.raises(RuntimeError, match="failed"):
        app.run(CONFIG)
    assert ray.calls[0] == ("init", "local")
    assert ray.calls[-2:] == [("serve.shutdown", None), ("shutdown", None)]


@pytest.mark.parametrize("address", ["auto", "127.0.0.1:6379", "ray://head.example:10001"])
def test_an_address_needs_a_token(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    FakeRay(monkeypatch, serving=False)
    with pytest.raises(ConfigError, match="RAY_AUTH_MODE=token"):
        app.check(CONFIG, address, {})
    app.check(CONFIG, address, {"RAY_AUTH_MODE": "token"})
    app.check(CONFIG, None, {})


@pytest.mark.parametrize("name", ["uds", "tls_cert", "tls_key"])
def test_options_that_ray_would_ignore_are_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    FakeRay(monkeypatch, serving=False)
    made = msgspec.structs.replace(CONFIG, server=msgspec.convert({name: "file"}, ServerConfig))
    with pytest.raises(ConfigError, match=f"server.{name} has no effect on Ray"):
        app.check(made, None, {})


def test_the_server_imports_no_ray() -> None:
    """And the parts of the ingress import no torch."""
    code = (
        "import sys, exl_serve.cli, exl_serve.api.app, exl_serve.ray.client, exl_serve.ray.ingress, exl_serve.ray.app\n"
        "assert not {'torch', 'ray'} & set(sys.modules), sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
