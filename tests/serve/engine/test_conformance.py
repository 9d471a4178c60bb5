"""The duties of every engine client, in this process and over a socket of another one."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from effort import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from raw_worker import RawWorker

from exl_generate import bundled
from exl_serve.config.model import Limits, ModelConfig
from exl_serve.engine import compiling, wire
from exl_serve.engine.__main__ import EngineStart
from exl_serve.engine.events import Failed, Finished, Started, Tokens
from exl_serve.engine.local import LocalEngine
from exl_serve.errors import ServeError
from exl_serve.request.internal import Constraint, EngineRequest, MediaRef, Sampling
from exl_serve.testing.local import EngineThread
from exl_serve.testing.waiting import until

CONFIG = ModelConfig(
    id="scripted",
    path=str(bundled.default_model_dir()),
    device="cpu",
    max_batch_size=4,
    cache_tokens=16 * 256,
    engine="free",
)
HANG = 120.0


def request(**fields: Any) -> EngineRequest:
    given: dict[str, Any] = {
        "id": "r",
        "prompt": np.arange(20, 50, dtype="<i4").tobytes(),
        "sampling": Sampling(),
        "seeds": (1,),
        "max_tokens": 12,
        "ignore_eos": True,
    }
    return EngineRequest(**(given | fields))


class Sink:
    """Keeps the events that it receives, and checks their order."""

    def __init__(self, choices: int = 1) -> None:
        self.ids: dict[int, list[int]] = {choice: [] for choice in range(choices)}
        self.ends: dict[int, Finished | Failed] = {}
        self.changed = asyncio.Event()
        self.events = 0

    def __call__(self, event: Any) -> None:
        assert event.choice not in self.ends, "an event after the last"
        self.events += 1
        if isinstance(event, Tokens):
            self.ids[event.choice] += event.ids
        elif isinstance(event, Finished | Failed):
            self.ends[event.choice] = event
        elif isinstance(event, Started):
            assert not self.ids[event.choice]
        self.changed.set()

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(HANG):
            while not true():
                self.changed.clear()
                await self.changed.wait()

    async def ended(self) -> None:
        await self.until(lambda: len(self.ends) == len(self.ids))


class Place:
    """Somewhere an engine runs."""

    def __init__(self, connect: Callable[[], Awaitable[LocalEngine]]) -> None:
        self.connect = connect
        #: tokens of requests that nothing disturbs, by (seed, most tokens)
        self.plain: dict[tuple[int, int], list[int]] = {}

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[LocalEngine]:
        engine = await self.connect()
        try:
            yield engine
        finally:
            await engine.close()

    async def idle(self) -> None:
        """Nothing is left of any request: no job, no page."""
        async with self.client() as engine, asyncio.timeout(HANG):
            while (await engine.control("requests"))["requests"]:
                await asyncio.sleep(0.01)
            while (s := engine.status).decoding or s.prefilling or s.queued or s.queued_prompt_tokens or s.pages_pinned:
                await asyncio.sleep(0.01)

    async def tokens(self, engine: LocalEngine, seed: int, most: int) -> list[int]:
        if (seed, most) not in self.plain:
            sink = Sink()
            await engine.submit(request(seeds=(seed,), max_tokens=most), sink)
            await sink.ended()
            self.plain[seed, most] = sink.ids[0]
        return self.plain[seed, most]


@pytest.fixture(scope="module")
def thread() -> Iterator[EngineThread]:
    thread = EngineThread(CONFIG)
    yield thread
    thread.close()


@pytest.fixture(scope="module")
def process() -> Iterator[str]:
    """The address of an engine process."""
    with tempfile.TemporaryDirectory(prefix="exl-") as folder:
        address = f"ipc://{folder}/engine.sock"
        start = EngineStart(model=CONFIG, folder=folder, address=address, parent=os.getpid())
        child = subprocess.Popen(
            [sys.executable, "-m", "exl_serve.engine"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(msgspec.json.encode(start).decode() + "\n")
        child.stdin.close()
        for line in child.stdout:
            if msgspec.json.decode(line)["state"] == "ready":
                break
        yield address
        child.terminate()
        assert child.wait(HANG) == 0
        assert [str(path) for path in Path(folder).glob("status*")] == []


@pytest.fixture(scope="module", params=["thread", "process"])
def place(request: pytest.FixtureRequest) -> Place:
    if request.param == "thread":
        thread: EngineThread = request.getfixturevalue("thread")
        return Place(thread.connect)
    address: str = request.getfixturevalue("process")
    return Place(lambda: LocalEngine.connect(address))


def test_completions_of_one_request_are_those_of_many(place: Place) -> None:
    async def work() -> None:
        async with place.client() as engine:
            sink = Sink(3)
            await engine.submit(request(seeds=(5, 6, 7), max_tokens=30), sink)
            await sink.ended()
            for choice, seed in enumerate((5, 6, 7)):
                assert sink.ids[choice] == await place.tokens(engine, seed, 30)
        await place.idle()

    asyncio.run(work())


def test_clients_that_run_together_get_their_own_tokens(place: Place) -> None:
    """Two clients have answers of several completions, and lengths that decode in the same steps."""

    async def work() -> None:
        async with place.client() as first, place.client() as second:
            lengths = {(5, 30): first, (6, 12): second, (7, 21): first, (8, 30): second}
            expected = {at: await place.tokens(first, *at) for at in lengths}
            sinks = {at: Sink(2) for at in lengths}
            for (seed, most), engine in lengths.items():
                await engine.submit(request(seeds=(seed, seed), max_tokens=most), sinks[seed, most])
            for at, sink in sinks.items():
                await sink.ended()
                assert sink.ids == {0: expected[at], 1: expected[at]}
        await place.idle()

    asyncio.run(work())


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"max_tokens": 1 << 40}, 400, "context_length_exceeded"),
        ({"prompt": b""}, 400, "invalid_value"),
        ({"prompt": b"\1\0\0"}, 400, "invalid_value"),
        ({"prompt": np.array([-1], "<i4").tobytes()}, 400, "invalid_value"),
        ({"constraints": (Constraint(kind="json_schema", source="{"),)}, 400, "invalid_schema"),
        ({"constraints": (Constraint(kind="choice", source="["),)}, 400, "invalid_grammar"),
        ({"constraints": (Constraint(kind="plugin", source="none"),)}, 400, "invalid_grammar"),
        ({"media": (MediaRef(width=1, height=1, path="/x", digest=b""),)}, 501, "unsupported"),
        ({"resume": (b"\1\0\0",)}, 400, "invalid_value"),
        ({"resume": (b"\1\0\0\0", b"")}, 400, "invalid_value"),
        ({"resume": (b"\1\0\0\0" * 100,)}, 409, "resume_refused"),
        ({"adapter": "none"}, 404, "model_not_found"),
        ({"deadline": 1.0}, 408, "deadline_exceeded"),
    ],
)
def test_refusals(place: Place, fields: dict[str, Any], status: int, code: str) -> None:
    async def work() -> None:
        async with place.client() as engine:
            sink = Sink()
            with pytest.raises(ServeError) as caught:
                await engine.submit(request(**fields), sink)
            assert (caught.value.status, caught.value.code) == (status, code)
            assert not sink.events
        await place.idle()

    asyncio.run(work())


OPERATION = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 4), st.integers(1, 3), st.sampled_from([1, 20, 300])),
    st.tuples(st.sampled_from(["cancel", "pause", "resume"]), st.integers(0, 20), st.just(0), st.just(0)),
    st.tuples(st.just("wait"), st.integers(0, 5), st.just(0), st.just(0)),
    st.tuples(st.sampled_from(["refused", "cut", "leave"]), st.integers(0, 20), st.just(0), st.just(0)),
)


def test_a_client_that_is_dropped_disconnects(place: Place) -> None:
    async def work() -> None:
        engine = await place.connect()
        await engine.submit(request(seeds=(1,), max_tokens=300), Sink())
        dropped = weakref.ref(engine)
        del engine
        async with asyncio.timeout(HANG):
            while dropped() is not None:
                await asyncio.sleep(0.01)  # until no step of the loop holds it any more
                gc.collect()
        await place.idle()  # the engine has noticed

    asyncio.run(work())


def test_an_engine_that_has_removed_its_status_page_is_about_to_end(slow: EngineThread) -> None:
    worker = RawWorker(slow)
    page = worker.status_path
    moved = page.rename(page.with_suffix(".moved"))
    try:
        with pytest.raises(ServeError) as caught:
            asyncio.run(slow.connect())
        assert (caught.value.status, caught.value.code) == (503, "engine_restarting")
    finally:
        moved.rename(page)
        worker.close()


DROPPED = """
import asyncio, gc, zmq
from exl_serve.engine.local import LocalEngine

async def work():
    engine = LocalEngine("inproc://nobody", zmq.Context())
    engine.itself = engine

asyncio.run(work())
gc.collect()
"""


def test_a_client_that_is_dropped_with_its_context_ends() -> None:
    """In a process of its own: the context would wait for the client's socket for ever."""
    subprocess.run([sys.executable, "-P", "-c", DROPPED], timeout=HANG, check=True)


@examples(15, 2, [HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(operations=st.lists(OPERATION, max_size=25))
def test_random_actions_of_clients_in_any_order(place: Place, operations: list[tuple[str, int, int, int]]) -> None:
    """Every request that goes on gets the tokens that it would have got alone, and one last event a completion;
    nothing is left of any."""

    async def work() -> None:
        async with place.client() as lasting, contextlib.AsyncExitStack() as stack:
            engine = await stack.enter_async_context(place.client())
            running: list[tuple[Any, Sink, int, int]] = []
            for what, number, n, most in operations:
                if what == "submit":
                    sink = Sink(n)
                    seeds = tuple(range(number, number + n))
                    running.append(
                        (await engine.submit(request(seeds=seeds, max_tokens=most), sink), sink, number, most)
                    )
                elif what == "wait":
                    await asyncio.sleep(number / 1000)
                elif what == "refused":
                    with pytest.raises(ServeError):
                        await engine.submit(request(max_tokens=-1), Sink())
                elif what == "cut":
                    task = asyncio.create_task(engine.submit(request(max_tokens=500), Sink()))
                    await asyncio.sleep(0)
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await task
                elif what == "leave":
                    await engine.close()
                    assert all(len(sink.ends) == len(sink.ids) for _, sink, _, _ in running)
                    running = []
                    engine = await stack.enter_async_context(place.client())
                elif running:
                    one, sink, _, _ = running[number % len(running)]
                    getattr(one, what)()
                    if what == "cancel":
                        running = [entry for entry in running if entry[1] is not sink]
            for one, _, _, _ in running:
                one.resume()
            for _, sink, number, most in running:
                await sink.ended()
                for choice, ids in sink.ids.items():
                    assert isinstance(sink.ends[choice], Finished)
                    assert ids == await place.tokens(lasting, number + choice, most)
        await place.idle()

    asyncio.run(work())


# ---- what is seen from inside the engine alone ---------------------------------------------------------------------


@pytest.fixture
def slow(thread: EngineThread, monkeypatch: pytest.MonkeyPatch) -> EngineThread:
    """Steps of 20 ms; silence alone ends nothing."""
    monkeypatch.setattr(thread.host, "step_floor", lambda jobs: 0.02)
    monkeypatch.setattr(wire, "SILENCE", float("inf"))
    return thread


def test_a_leaving_client_hears_of_unfinished_completions(slow: EngineThread) -> None:
    """The first completion is ahead of the others, which wait for its prompt."""

    async def work() -> None:
        engine, sink = await slow.connect(), Sink(3)
        await engine.submit(request(seeds=(1, 2, 3), max_tokens=8), sink)
        await sink.until(lambda: bool(sink.ends))
        await engine.close()
        assert sorted(sink.ends) == [0, 1, 2]
        assert isinstance(sink.ends[0], Finished)

    asyncio.run(work())


@pytest.mark.parametrize("paused", [False, True])
def test_a_worker_that_dies_is_noticed(slow: EngineThread, paused: bool) -> None:
    async def work() -> None:
        worker, other, theirs = RawWorker(slow), await slow.connect(), Sink()
        assert isinstance(worker.submit(1, request(id="mine", max_tokens=900)), wire.Accepted)
        await other.submit(request(max_tokens=100), theirs)
        assert isinstance(worker.receive(), wire.StepEvents)
        if paused:
            worker.send(wire.Pause(1))
        worker.close()
        died = other.status.step
        until(lambda: all(one["id"] != "mine" for one in slow.host.requests()))
        assert other.status.step < died + 400, "it has run to its end"
        await theirs.ended()
        assert isinstance(theirs.ends[0], Finished)
        until(lambda: not slow.generator.referenced_pages)
        await other.close()

    asyncio.run(work())


def test_a_tag_that_is_used_twice_ends_that_worker_s_requests(slow: EngineThread) -> None:
    worker = RawWorker(slow)
    assert isinstance(worker.submit(7, request(max_tokens=900)), wire.Accepted)
    worker.send(wire.Submit(7, request(max_tokens=900)))
    until(lambda: not slow.host.requests())
    until(lambda: not slow.generator.referenced_pages)
    worker.close()


GRAMMAR = (Constraint(kind="regex", source="[a-z]+"),)


def test_one_key_does_not_take_all_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor the whole queue; and who waits for one can be cancelled, and ends with its deadline."""
    gate, begun, most = threading.Event(), [], compiling.COMPILERS_OF_A_KEY

    def slowly(constraints: Any, model: Any, tokenizer: Any) -> list[Any]:
        begun.append(constraints[0].param)
        if constraints[0].param == "held":
            assert gate.wait(HANG)
        return []

    monkeypatch.setattr(compiling, "compile_constraints", slowly)
    held = (Constraint(kind="regex", source="x", param="held"),)
    thread = EngineThread(CONFIG, Limits(max_queued_requests=8))

    async def work() -> None:
        engine = await thread.connect()
        many = [asyncio.create_task(engine.submit(request(key="many", constraints=held), Sink())) for _ in range(6)]
        async with asyncio.timeout(HANG):
            while len(begun) < most:
                await asyncio.sleep(0.01)
        until(lambda: engine.status.queued == 6)  # an engine that is to be unloaded waits for them
        sink = Sink()
        await engine.submit(request(key="one", constraints=GRAMMAR), sink)
        await sink.ended()
        assert begun == [*["held"] * most, "response_format"]
        hasty = request(key="many", constraints=held, deadline=1.0)
        with pytest.raises(ServeError) as caught:
            await engine.submit(hasty, Sink())
        assert (caught.value.status, caught.value.code) == (408, "deadline_exceeded")
        many += [asyncio.create_task(engine.submit(request(key="many", constraints=held), Sink())) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(ServeError) as full:
            await engine.submit(request(key="one", constraints=GRAMMAR), Sink())
        assert (full.value.status, full.value.code) == (429, "queue_full")
        for task in many[most:]:
            task.cancel()
        await asyncio.gather(*many[most:], return_exceptions=True)
        until(lambda: len(thread.host.requests()) == most)
        gate.set()
        for running in await asyncio.gather(*many[:most]):
            running.cancel()
        until(lambda: not thread.host.requests())
        again = Sink()
        await engine.submit(request(key="many", constraints=held), again)  # no compiler is left taken
        await again.ended()
        await engine.close()

    try:
        asyncio.run(work())
    finally:
        gate.set()
        thread.close()
