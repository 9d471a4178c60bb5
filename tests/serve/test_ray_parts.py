"""The parts of the server on Ray that need no Ray: labels, routing, scaling, replicas, the ingress."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import httpx
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray_fakes import USAGE, Answer, FakeEngine, StartedReplica, frame

from exl_generate import ExLlamaV2DynamicJob, ExLlamaV2Sampler, bundled
from exl_serve.config.model import Log, ModelConfig, ServeConfig
from exl_serve.engine import wire
from exl_serve.engine.events import Finished
from exl_serve.errors import ServeError
from exl_serve.ray.autoscale import CALM_SECONDS, policy, wanted
from exl_serve.ray.cost import Index, Load, rank
from exl_serve.ray.ingress import Application
from exl_serve.ray.replica import BATCHES, decode_events
from exl_serve.request.internal import EngineRequest, MediaRef
from exl_serve.request.labels import LABEL_BYTES, page_labels, salted
from exl_serve.testing.local import EngineThread
from exl_serve.testing.waiting import HANG_SECONDS

# ---- labels ----------------------------------------------------------------------------------------------------------


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
    index.sent("a", labels, 600, "i", 4)
    assert index.matched("a", labels) == 512
    assert index.order(labels, 600)[0] == ["b"], "two prompts are computed sooner side by side"
    now[0] = 1.0
    assert index.order(labels, 600)[0] == ["a"]
    index.report("a", report(1, b"11111111"))
    assert index.matched("a", labels) == 512, "the first report was written before the request came"
    now[0] = 20.0
    index.report("a", report(2, b"11111111", seen={"i": 4}, settled={"i": 3}))
    assert index.matched("a", labels) == 512, "its labels were read before the prompt was computed"
    index.report("a", report(3, b"11111111", settled={"i": 4, "j": 1}))
    assert index.matched("a", labels) == 256, "evicted since"
    index.sent("a", labels, 600, "i", 5)
    index.report("a", report(4, b"", boot=b"new"))
    assert index.matched("a", labels) == 0, "a new process has an empty cache"
    index.keep(["b"])
    assert index.order(labels, 600) == [["b"]]


def test_labels_of_what_never_arrived_go() -> None:
    now = [0.0]
    index = Index(256, clock=lambda: now[0])
    index.keep(["a"])
    index.sent("a", [(1, b"11111111")], 300, "i", 4)
    now[0] = 60.0
    index.report("a", report(1, settled={"i": 3}))
    assert index.matched("a", [(1, b"11111111")]) == 0


def test_a_late_report_does_not_hide_what_was_sent_meanwhile() -> None:
    """The holder gets what it can run at once of a burst with one prefix, though it reports that it is idle."""
    now = [0.0]
    index = Index(256, clock=lambda: now[0])
    index.keep(["a", "b", "c"])
    hot = [(1, b"11111111")]
    for name in "abc":
        index.report(name, report(1, b"11111111" if name == "a" else b"", batch=32))
    taken = dict.fromkeys("abc", 0)
    for tag in range(1, 121):
        if tag % 10 == 0:  # of the moment before the burst
            for name in "abc":
                index.report(name, report(tag, b"11111111" if name == "a" else b"", batch=32, seen={"i": 0}))
        ((name,), *_) = index.order(hot, 300)
        taken[name] += 1
        index.sent(name, hot, 300, "i", tag)
        now[0] += 0.01
    assert min(taken.values()) >= 30
    for name in "abc":
        index.report(name, report(200, seen={"i": 120}))
    assert {load.sent for load in index.loads.values()} == {0}
    assert {load.sent_tokens for load in index.loads.values()} == {0.0}


def test_messages_that_never_arrive_are_not_counted_for_ever() -> None:
    now = [0.0]
    index = Index(256, clock=lambda: now[0])
    index.keep(["a"])
    index.sent("a", [], 300, "i", 7)
    index.report("a", report(1, seen={"i": 6, "j": 9}))
    assert index.loads["a"].sent == 1
    now[0] = 60.0
    index.report("a", report(2, seen={"i": 6, "j": 9}))
    assert index.loads["a"].sent == 0


@given(
    st.dictionaries(
        st.sampled_from(
            [
                "report",
                "boot",
                "seen",
                "settled",
                "running",
                "queued",
                "queued_tokens",
                "batch",
                "prefill_rate",
                "labels",
            ]
        ),
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
    number, sent = [0], {name: dict[bytes, None]() for name in names}

    def routed(labels: Any, tokens: int, session: int) -> str:
        number[0] += 1
        if number[0] % 40 == 0:  # a report empties what was counted as sent
            for name in names:
                index.report(name, report(number[0], boot=b"", labels=b"".join(sent[name])))
        chosen = index.order(labels, tokens)[0][0]
        index.sent(chosen, labels, tokens)
        sent[chosen].update(dict.fromkeys(label for _, label in labels))
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


def test_the_calm_time_is_what_replicas_report() -> None:
    calm: list[dict[str, float]] = [{"exl_batch_load": 0.1, "exl_calm_seconds": 4.0}] * 3
    _, state = policy(context(calm, 3, 0.0))
    assert policy(context(calm, 3, 3.9, state))[0] == 3
    assert policy(context(calm, 3, 4.0, state))[0] == 2


def test_queued_requests_demand_a_replica() -> None:
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


# ---- a replica -------------------------------------------------------------------------------------------------------


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
            sink = mock.Mock()
            with pytest.raises(ServeError, match="a message of") as caught:
                await engine.submit(large, sink)
            assert caught.value.status == 413
            kept = weakref.ref(sink)
            del sink, caught
            gc.collect()
            assert kept() is None
        finally:
            await engine.close()

    asyncio.run(steps())


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


# ---- ingress ---------------------------------------------------------------------------------------------------------


FABLE = ModelConfig(id="fable", path=str(bundled.default_model_dir()), device="cpu")


class Deployment:
    """A deployment's handle with one replica over an engine, which any option selects."""

    def __init__(self, engine: EngineThread, folder: Path) -> None:
        self._engine, self._folder = engine, folder
        self.describe = SimpleNamespace(remote=self._describe)
        self.generate = SimpleNamespace(remote=self._generate)
        self.tell = SimpleNamespace(remote=lambda *_, **__: asyncio.sleep(0))

    def options(self, **_: Any) -> Deployment:
        return self

    async def _describe(self, **_: Any) -> dict[str, Any]:
        engine = await self._engine.connect()
        status = msgspec.json.encode(engine.status)
        await engine.close()
        return {"card": wire.card_bytes(self._engine.card), "status": status, "replica": "here"}

    def _generate(self, frame: bytes, *_: Any, ingress: str, tag: int, **__: Any) -> Answer:
        async def items() -> Any:
            engine = await self._engine.connect()
            async for item in StartedReplica(engine, self._folder).generate(frame, ingress=ingress, tag=tag):
                yield item
            await engine.close()

        return Answer(items())


@pytest.mark.parametrize("level", ["info", "warning"])
def test_an_ingress_logs_requests_as_a_worker_does(
    fable: EngineThread, tmp_path: Path, capsys: pytest.CaptureFixture[str], level: Any
) -> None:
    asked = {"prompt": "One day", "max_tokens": 3, "ignore_eos": True}

    async def ask() -> tuple[httpx.Response, httpx.Response]:
        config = ServeConfig(model=(FABLE,), log=Log(level=level, format="json"))
        made = Application(msgspec.json.encode(config), {"fable": Deployment(fable, tmp_path)})
        async with httpx.AsyncClient(transport=httpx.ASGITransport(made), base_url="http://localhost/v1/") as client:
            done = await client.post("completions", json=asked, headers={"x-request-id": "mine"})
            body = asked | {"model": "other"}
            return done, await client.post("completions", json=body, headers={"x-request-id": "wrong"})

    told, refused = asyncio.run(ask())
    assert (told.status_code, refused.status_code) == (200, 404), told.text
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
    if level == "warning":
        assert not lines
        return
    done, rejected = lines
    assert (done["id"], done["model"], done["status"], done["finish"]) == ("mine", "fable", 200, "length")
    used = told.json()["usage"]
    assert (done["prompt_tokens"], done["completion_tokens"]) == (used["prompt_tokens"], 3)
    assert 0 < done["ttft"] <= done["seconds"]
    assert (rejected["id"], rejected["status"], rejected["code"]) == ("wrong", 404, "model_not_found")
