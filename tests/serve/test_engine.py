"""The engine host and its client: requests, events, refusals, cancellation, fairness."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from raw_worker import RawWorker

from exl_generate import ExLlamaV2DynamicJob
from exl_generate.testing.small import AsAsked
from exl_serve.config.model import ModelConfig
from exl_serve.engine import wire
from exl_serve.engine.events import Failed, Finished, Progress, Started, Tokens
from exl_serve.engine.failures import BY_CODE
from exl_serve.engine.jobs import make_job, settings_of
from exl_serve.engine.load import Loaded
from exl_serve.engine.local import LocalEngine
from exl_serve.errors import ServeError
from exl_serve.request.internal import Constraint, EngineRequest, Sampling
from exl_serve.testing.local import EngineThread
from exl_serve.testing.waiting import until

GREEDY = Sampling(temperature=0.0)


def request(thread: EngineThread, text: str = "Once upon a time", **fields: Any) -> EngineRequest:
    ids = thread.generator.tokenizer.encode_ids(text, add_bos=True)
    given: dict[str, Any] = {"id": "r", "sampling": GREEDY, "seeds": (1,), "max_tokens": 12} | fields
    return EngineRequest(prompt=np.array(ids, dtype="<i4").tobytes(), **given)


class Sink:
    def __init__(self) -> None:
        self.events: list[Any] = []
        self.changed = asyncio.Event()

    def __call__(self, event: Any) -> None:
        self.events.append(event)
        self.changed.set()

    async def until(self, done: Callable[[list[Any]], bool]) -> list[Any]:
        async with asyncio.timeout(120):
            while not done(self.events):
                self.changed.clear()
                await self.changed.wait()
        return self.events

    async def ended(self, choices: int = 1) -> list[Any]:
        return await self.until(lambda es: sum(isinstance(e, Finished | Failed) for e in es) == choices)

    def text(self, choice: int = 0) -> str:
        return "".join(e.text for e in self.events if isinstance(e, Tokens) and e.choice == choice)


def on(thread: EngineThread, work: Callable[[LocalEngine], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        engine = await thread.connect()
        try:
            return await work(engine)
        finally:
            await engine.close()

    return asyncio.run(run())


def idle(thread: EngineThread) -> bool:
    """Whether nothing is left of any request, within a few steps."""
    g = thread.generator
    return bool(until(lambda: not g.num_remaining_jobs() and not g.referenced_pages and not thread.host.requests()))


def library(thread: EngineThread, asked: EngineRequest, choice: int = 0) -> str:
    """Return the library's output for the same request."""
    ids = torch.from_numpy(np.frombuffer(asked.prompt, "<i4").astype(np.int64))[None]
    job = ExLlamaV2DynamicJob(
        ids,
        asked.max_tokens,
        gen_settings=settings_of(asked.sampling, thread.card.vocab_size),
        seed=asked.seeds[choice],
        stop_conditions=list(thread.card.eos_ids),
    )
    generator = type(thread.generator)(
        thread.generator.model,
        type(thread.generator.cache)(thread.generator.model, max_seq_len=1024),
        thread.generator.tokenizer,
    )
    generator.enqueue(job)
    text = ""
    while generator.num_remaining_jobs():
        text += "".join(result.get("text", "") for result in generator.iterate())
    return text


def test_the_library_s_tokens(fable: EngineThread) -> None:
    asked = request(fable, seeds=(3, 4, 5), sampling=Sampling(temperature=1.0), max_tokens=30)

    async def work(engine: LocalEngine) -> Sink:
        sink = Sink()
        await engine.submit(asked, sink)
        await sink.ended(3)
        return sink

    sink = on(fable, work)
    assert isinstance(sink.events[0], Started)
    for choice in range(3):
        assert sink.text(choice) == library(fable, asked, choice)
    assert len({sink.text(choice) for choice in range(3)}) > 1
    assert idle(fable)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"max_tokens": 5000}, "context_length_exceeded"),
        ({"sampling": Sampling(top_k=-1)}, "invalid_value"),
        ({"sampling": Sampling(logit_bias={10**6: 1.0})}, "token_id"),
        ({"constraints": (Constraint(kind="json_schema", source='{"type": "nothing"}'),)}, "invalid_schema"),
        ({"constraints": (Constraint(kind="regex", source="("),)}, "invalid_grammar"),
        ({"adapter": "none"}, "model_not_found"),
        ({"deadline": 1.0}, "deadline_exceeded"),
        ({"seeds": ()}, "invalid_value"),
    ],
)
def test_impossible_requests_are_refused_at_once(fable: EngineThread, fields: dict[str, Any], code: str) -> None:
    async def work(engine: LocalEngine) -> str:
        sink = Sink()
        with pytest.raises(ServeError) as caught:
            await engine.submit(request(fable, **fields), sink)
        assert not sink.events
        return caught.value.code

    assert on(fable, work) == code
    assert idle(fable)


def test_constraints_hold(fable: EngineThread) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    asked = request(
        fable,
        constraints=(Constraint(kind="json_schema", source=json.dumps(schema)),),
        max_tokens=60,
        seeds=(1, 2),
        sampling=Sampling(),
    )

    async def work(engine: LocalEngine) -> Sink:
        sink = Sink()
        await engine.submit(asked, sink)
        await sink.ended(2)
        return sink

    sink = on(fable, work)
    for choice in range(2):
        assert isinstance(json.loads(sink.text(choice))["n"], int)


def test_log_probabilities_are_the_model_s(fable: EngineThread) -> None:
    asked = request(fable, logprobs=3, max_tokens=5, sampling=Sampling(temperature=0.7, top_k=5))

    async def work(engine: LocalEngine) -> list[Any]:
        sink = Sink()
        await engine.submit(asked, sink)
        return await sink.ended()

    tokens = [e for e in on(fable, work) if isinstance(e, Tokens)]
    ids = [i for e in tokens for i in e.ids]
    found = [p for e in tokens for p in e.logprobs]
    assert [p.id for p in found] == ids
    prompt = np.frombuffer(asked.prompt, "<i4").tolist()
    whole = torch.tensor([prompt + ids])
    logits = fable.generator.model.forward(whole)[0, len(prompt) - 1 :, : fable.card.vocab_size].double()
    expected = torch.log_softmax(logits, -1)
    for at, one in enumerate(found):
        assert one.logprob == pytest.approx(float(expected[at, one.id]), abs=1e-3)
        best = expected[at].topk(3)
        assert [i for i, _ in one.top] == best.indices.tolist()


def told(events: list[Any], choice: int = 0) -> tuple[list[int], str, list[Any], Any]:
    """Ids, text, log-probabilities and end of a completion; checks that its events come in order."""
    own = [e for e in events if e.choice == choice]
    order = [(Started, Progress, Tokens, Finished).index(type(e)) for e in own]
    assert order == sorted(order)
    assert (order.count(0), order.count(3)) == (1, 1)
    tokens = [e for e in own if isinstance(e, Tokens)]
    assert all(e.ids or e.text for e in tokens), "an event that says nothing"
    return (
        [i for e in tokens for i in e.ids],
        "".join(e.text for e in tokens),
        [p for e in tokens for p in e.logprobs],
        own[-1],
    )


def read_dicts(thread: EngineThread, asked: EngineRequest) -> tuple[list[int], str, torch.Tensor, dict[str, Any]]:
    """Ids, text, logits and last result of the same request in a generator of its own, read as dicts."""
    generator = type(thread.generator)(
        thread.generator.model,
        type(thread.generator.cache)(thread.generator.model, max_seq_len=1024),
        thread.generator.tokenizer,
    )
    card = thread.card
    generator.enqueue(make_job(asked, 0, vocab_size=card.vocab_size, eos_ids=card.eos_ids))
    results: list[dict[str, Any]] = []
    while generator.num_remaining_jobs():
        results += generator.iterate()
    ids = [i for r in results if "token_ids" in r for i in r["token_ids"][0].tolist()]
    logits = [row for r in results if "logits" in r for row in r["logits"][0]]
    text = "".join(r.get("text", "") for r in results)
    return ids, text, torch.stack(logits) if logits else torch.empty(0), results[-1]


ASKED: list[dict[str, Any]] = [
    {"seeds": (1,)},
    {"seeds": (2,), "stop_strings": (" the", "."), "max_tokens": 60},
    {"seeds": (3,), "logprobs": 2},
    {"seeds": (4,), "logprobs": 0, "stop_strings": ("e ",)},
    {"seeds": (5,), "max_tokens": 0},
    {"seeds": (6,), "banned_strings": ("and", "a"), "logprobs": 1, "max_tokens": 30},
    {"seeds": (7,), "token_healing": True},
]
REASONS = {"stop_token": "stop_token", "stop_string": "stop_string", "max_new_tokens": "length"}


def test_events_equal_the_results_of_the_library(fable: EngineThread) -> None:
    """Requests run together, some with log-probabilities and some without."""
    requests = [request(fable, sampling=Sampling(temperature=0.9), **fields) for fields in ASKED]

    async def work(engine: LocalEngine) -> list[Sink]:
        sinks = [Sink() for _ in requests]
        for asked, sink in zip(requests, sinks, strict=True):
            await engine.submit(asked, sink)
        for sink in sinks:
            await sink.ended()
        return sinks

    for asked, sink in zip(requests, on(fable, work), strict=True):
        ids, text, logprobs, end = told(sink.events)
        expected_ids, expected_text, logits, last = read_dicts(fable, asked)
        assert (ids, text) == (expected_ids, expected_text)
        assert end.reason == REASONS[last["eos_reason"]]
        assert end.stop == last.get("eos_triggering_token_id", last.get("eos_triggering_string"))
        assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (last["prompt_tokens"], last["new_tokens"])
        if asked.logprobs is None:
            assert logprobs == []
            continue
        assert [p.id for p in logprobs] == ids
        assert [len(p.top) for p in logprobs] == [asked.logprobs] * len(ids)
        rows = torch.log_softmax(logits[:, : fable.card.vocab_size].double(), -1)
        assert [p.logprob for p in logprobs] == pytest.approx(
            [float(rows[at, i]) for at, i in enumerate(ids)], abs=1e-3
        )
    assert idle(fable)


def test_several_tokens_of_a_step_are_one_event(fable: EngineThread) -> None:
    """The guesses of this completion hold."""
    asked = request(fable, "one two one two one two one two", max_tokens=200, logprobs=1, ignore_eos=True)
    thread = EngineThread(ModelConfig(id="guessing", path=fable.card.folder, device="cpu", ngram=True))
    thread.generator.drafter.length = AsAsked(thread.generator.num_draft_tokens)  # whatever it costs

    async def work(engine: LocalEngine) -> list[Any]:
        sink = Sink()
        await engine.submit(asked, sink)
        return await sink.ended()

    try:
        events = on(thread, work)
    finally:
        thread.close()
    ids, text, logprobs, end = told(events)
    assert (ids, text) == read_dicts(fable, asked)[:2]
    assert [p.id for p in logprobs] == ids
    assert end.usage.drafts_accepted > 0
    assert sum(isinstance(e, Tokens) for e in events) <= len(ids) - end.usage.drafts_accepted


def test_cancelling_frees_everything(scripted: EngineThread) -> None:
    async def work(engine: LocalEngine) -> None:
        for wait in (0, 0, 0.001, 0.005, 0.02):
            sink = Sink()
            running = await engine.submit(request(scripted, seeds=(1, 2, 3), max_tokens=500), sink)
            await asyncio.sleep(wait)
            running.cancel()
            running.cancel()
            seen = len(sink.events)
            await asyncio.sleep(0.05)
            assert len(sink.events) == seen

    on(scripted, work)
    assert idle(scripted)


def test_a_task_that_is_cancelled_leaves_nothing(scripted: EngineThread) -> None:
    async def work(engine: LocalEngine) -> None:
        task = asyncio.create_task(engine.submit(request(scripted, max_tokens=500), Sink()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    on(scripted, work)
    assert idle(scripted)


def test_a_client_that_leaves_takes_its_requests_along(scripted: EngineThread) -> None:
    async def work(engine: LocalEngine) -> Sink:
        sink = Sink()
        await engine.submit(request(scripted, max_tokens=900), sink)
        await sink.until(lambda es: len(es) > 2)
        return sink

    sink = on(scripted, work)
    assert isinstance(sink.events[-1], Failed)
    assert sink.events[-1].code == "engine_restarting"
    assert idle(scripted)


def test_a_paused_request_waits_and_continues(scripted: EngineThread) -> None:
    async def work(engine: LocalEngine) -> tuple[str, str]:
        plain, sink = Sink(), Sink()
        await engine.submit(request(scripted, max_tokens=200), plain)
        await plain.ended()
        running = await engine.submit(request(scripted, max_tokens=200), sink)
        await sink.until(lambda es: len(es) > 3)
        running.pause()
        seen = 0
        while len(sink.events) != seen:  # the steps that were in progress
            seen = len(sink.events)
            await asyncio.sleep(0.2)
        assert not any(isinstance(e, Finished | Failed) for e in sink.events)
        running.resume()
        await sink.ended()
        return plain.text(), sink.text()

    one, other = on(scripted, work)
    assert one == other


def test_an_error_in_a_round_ends_its_requests_alone(scripted: EngineThread, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(engine: LocalEngine) -> None:
        sink = Sink()
        with monkeypatch.context() as patched:
            patched.setattr(scripted.generator, "iterate_columns", lambda: 1 / 0)
            await engine.submit(request(scripted), sink)
            events = await sink.ended()
        assert (events[-1].status, events[-1].code) == (500, "engine_error")
        again = Sink()
        await engine.submit(request(scripted), again)
        assert isinstance((await again.ended())[-1], Finished)

    on(scripted, work)
    assert idle(scripted)


def test_completions_go_on_without_the_first(scripted: EngineThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first fails before its prompt is computed; the others wait for just that."""

    async def work(engine: LocalEngine) -> Sink:
        sink = Sink()
        enqueue, times = scripted.generator.enqueue, iter(range(100))

        def failing(job: Any) -> Any:
            if next(times) == 0:
                raise RuntimeError("not this one")
            return enqueue(job)

        with monkeypatch.context() as patched:
            patched.setattr(scripted.generator, "enqueue", failing)
            await engine.submit(request(scripted, seeds=(1, 2, 3)), sink)
            await sink.ended(3)
        return sink

    ends = [type(e) for e in on(scripted, work).events if isinstance(e, Finished | Failed)]
    assert sorted(kind.__name__ for kind in ends) == ["Failed", "Finished", "Finished"]
    assert idle(scripted)


@pytest.mark.full
def test_the_log_of_a_refused_resumption_holds_no_text_of_the_request(
    fable: EngineThread, caplog: pytest.LogCaptureFixture
) -> None:
    ids = fable.generator.tokenizer.encode("the")[0].numpy().astype("<i4")
    asked = request(fable, resume=(ids.tobytes(),), banned_strings=("the",), max_tokens=30)

    async def work(engine: LocalEngine) -> list[Any]:
        sink = Sink()
        await engine.submit(asked, sink)
        return await sink.ended()

    (last,) = on(fable, work)
    assert isinstance(last, Failed)
    assert (last.code, "'the'" in last.message) == ("resume_refused", True)
    assert f"request {asked.id} failed: ResumeError" in caplog.text
    assert "'the'" not in caplog.text
    assert "resume_from" not in caplog.text


def test_the_queue_has_an_end(scripted: EngineThread) -> None:
    async def work(engine: LocalEngine) -> None:
        refused, sinks = [], []
        for _ in range(120):
            sink = Sink()
            try:
                await engine.submit(request(scripted, max_tokens=40), sink)
                sinks.append(sink)
            except ServeError as error:
                refused.append(error)
        assert refused
        assert all(e.status == 429 and e.code == "queue_full" for e in refused)
        assert all(e.retry_after is not None and 0.8 <= e.retry_after <= 72 for e in refused)
        for sink in sinks:
            assert isinstance((await sink.ended())[-1], Finished)

    on(scripted, work)
    assert idle(scripted)


def test_the_status_page(scripted: EngineThread) -> None:
    async def work(engine: LocalEngine) -> None:
        sink = Sink()
        before = engine.status.step
        await engine.submit(request(scripted, max_tokens=20), sink)
        await sink.ended()
        async with asyncio.timeout(120):
            while (status := engine.status).decoding or status.pages_pinned or status.step <= before:
                await asyncio.sleep(0.01)
        assert status.state == "ready"
        assert status.step > before
        assert (status.decoding, status.queued, status.pages_pinned) == (0, 0, 0)
        assert status.pages_free + status.pages_cached == scripted.generator.max_pages

    on(scripted, work)


# ---- the wire ------------------------------------------------------------------------------------------------------


@given(data=st.binary(max_size=200))
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    for decode in (wire.decode_to_engine, wire.decode_to_worker):
        try:
            message = decode(data)
        except wire.WireError:
            continue
        assert decode(wire.encode(message)) == message


def test_messages_survive_the_wire(fable: EngineThread) -> None:
    asked = request(fable, constraints=(Constraint(kind="lark", source="start: x", after="<tool>"),), key="k")
    for message in (
        wire.Hello(1, "w"),
        wire.Submit(7, asked),
        wire.Cancel(3),
        wire.Ping(),
        wire.Call(1, "x", {"a": 1}),
    ):
        assert wire.decode_to_engine(wire.encode(message)) == message
    events = wire.StepEvents([(1, Tokens(0, (1, 2), "ab")), (2, Failed(0, 500, "t", "c", "m"))])
    assert wire.decode_to_worker(wire.encode(events)) == events
    assert wire.encode(wire.Cancel(3)) == b"\x92\xa6cancel\x03"


def test_a_malformed_message_ends_that_worker_s_requests_alone(scripted: EngineThread) -> None:
    async def work(engine: LocalEngine) -> None:
        other, mine = RawWorker(scripted), Sink()
        await engine.submit(request(scripted, max_tokens=300), mine)
        assert isinstance(other.submit(1, request(scripted, max_tokens=900)), wire.Accepted)
        other.send(b"\xc1 no message")
        assert isinstance((await mine.ended())[-1], Finished)
        refused = other.submit(2, request(scripted))
        assert isinstance(refused, wire.Rejected)
        assert "restarted" in refused.message
        other.close()

    on(scripted, work)
    assert idle(scripted)


# ---- tables --------------------------------------------------------------------------------------------------------


def test_no_default_of_the_library_leaks_in() -> None:
    import dataclasses

    from exl_generate import ExLlamaV2Sampler

    made = settings_of(Sampling(), 100)
    known = set(Sampling.__struct_fields__) - {"logit_bias", "allowed_token_ids"}
    state = {"mirostat_mu", "ngram_trie", "ngram_index", "ngram_history", "post_sampling_hooks", "token_bias"}
    own = (
        {f.name for f in dataclasses.fields(ExLlamaV2Sampler.Settings)} - state - {"dry_max_ngram", "xtc_ignore_tokens"}
    )
    assert known == own
    for name in known:
        assert getattr(made, name) == getattr(Sampling(), name), name


def test_every_error_code_is_in_the_table() -> None:
    from exl_core import errors as core  # noqa: F401, so that its classes are there
    from exl_filters.errors import FilterError
    from exl_generate import errors as generate  # noqa: F401
    from exl_kernels.errors import ExlError

    def below(kind: Any) -> set[Any]:
        return {kind}.union(*(below(sub) for sub in kind.__subclasses__()))

    codes = {
        kind.code for base in (ExlError, FilterError) for kind in below(base) if kind.__module__.startswith("exl_")
    }
    internal = {
        "error", "format", "shape", "dtype", "device", "config", "config_file", "config_key", "config_type",
        "missing_tensor", "model_state", "cache", "tokenizer_file", "job_state", "user_code", "filter_error",
        "filter_rejected", "filter_busy", "filter_failed", "peer",
    }  # fmt: skip
    assert codes - internal <= set(BY_CODE) <= codes
    assert not internal & set(BY_CODE)


def test_an_engine_that_has_ended_may_be_stopped_again(fable: EngineThread) -> None:
    """An engine may end by itself while another thread stops it."""
    made = Loaded(fable.generator, fable.card, None)
    thread = EngineThread(ModelConfig(id="again", path=fable.card.folder), loaded=made)
    thread.close()
    assert not thread.running
    thread.host.stop()


def engine_threads() -> set[int]:
    return {one.native_id for one in threading.enumerate() if one.name == "exl-engine" and one.native_id is not None}


@pytest.mark.full  # counts in one second of wall clock
def test_an_idle_engine_rarely_wakes(scripted: EngineThread) -> None:
    """A request that has ended and a connected worker do not keep it awake. ops/test_operation.py counts the waits of
    all processes.
    """
    others = engine_threads()
    thread = EngineThread(ModelConfig(id="idle", path=scripted.card.folder, device="cpu", engine="free"))
    (task,) = engine_threads() - others

    def waits() -> int:
        status = Path(f"/proc/self/task/{task}/status").read_text()
        return int(re.findall(r"^voluntary_ctxt_switches:\s*(\d+)", status, re.MULTILINE)[0])

    async def work(engine: LocalEngine) -> int:
        sink = Sink()
        await engine.submit(request(thread), sink)
        await sink.ended()
        await asyncio.sleep(0.2)  # the engine deletes the request
        before = waits()
        await asyncio.sleep(1.0)
        return waits() - before

    found = on(thread, work)
    thread.close()
    # Once a second by itself, once for the worker's sign of life; each may wait for the interpreter as well.
    assert found <= 6
