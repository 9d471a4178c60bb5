"""exl-compat's dynamic generators cancel, close and fail as exllamav2's do, and leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import weakref
from collections.abc import Coroutine
from typing import Any

import pytest

from exl_generate.errors import JobStateError
from exl_generate.testing import ScriptedCache, ScriptedConfig, ScriptedModel, ScriptedTokenizer, check_pages
from exllamav2.generator import (
    ExLlamaV2DynamicGenerator,
    ExLlamaV2DynamicGeneratorAsync,
    ExLlamaV2DynamicJob,
    ExLlamaV2DynamicJobAsync,
    ExLlamaV2Sampler,
)

TOKENIZER = ScriptedTokenizer([chr(c) for c in range(97, 123)])
GREEDY = ExLlamaV2Sampler.Settings.greedy()
# New tokens of a job that ends only when somebody ends it.
ENDLESS = 50_000


def parts(tokens: int = 2 * ENDLESS) -> tuple[ScriptedModel, ScriptedCache, ScriptedTokenizer]:
    model = ScriptedModel(ScriptedConfig(vocab_size=TOKENIZER.get_vocab_size(), max_seq_len=tokens))
    return model, ScriptedCache(model, max_seq_len=2 * tokens), TOKENIZER


def make(tokens: int = 2 * ENDLESS, **kw: Any) -> ExLlamaV2DynamicGeneratorAsync:
    return ExLlamaV2DynamicGeneratorAsync(*parts(tokens), page_size=16, **kw)


def job(generator: ExLlamaV2DynamicGeneratorAsync, text: str = "abc", new: int = ENDLESS, **kw: Any) -> Any:
    return ExLlamaV2DynamicJobAsync(generator, TOKENIZER.encode(text), new, **{"gen_settings": GREEDY, **kw})


def play(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine in a loop where no exception may be left to the loop's handler."""
    unhandled: list[dict[str, Any]] = []

    async def main() -> Any:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        result = await asyncio.wait_for(coroutine, 250)
        gc.collect()
        await asyncio.sleep(0)
        return result

    result = asyncio.run(main())
    assert not unhandled, unhandled
    return result


def failing(after: int = 0) -> Any:
    """Settings whose hook raises when it is called once more than `after` times."""
    calls: list[None] = []
    settings = ExLlamaV2Sampler.Settings.greedy()

    def hook(_: Any) -> None:
        calls.append(None)
        if len(calls) > after:
            raise ZeroDivisionError("in a hook")

    settings.post_sampling_hooks = [hook]
    return settings


async def collect(one: Any) -> list[dict[str, Any]]:
    return [result async for result in one]


async def streaming(stream: Any) -> None:
    """Read until the first text."""
    async for result in stream:
        if "text" in result:
            return
    raise AssertionError("the stream ended without text")


def at_once(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that must not suspend."""
    with pytest.raises(StopIteration):
        coroutine.send(None)


async def pages_free(generator: Any) -> None:
    """Wait for the end of the iteration that is running; then nothing is held."""
    while generator.has_work:
        await asyncio.sleep(0.001)
    check_pages(generator)
    assert generator.page_table.available == generator.max_pages


class Gate:
    """Holds every pass of a model until it is opened."""

    def __init__(self, model: Any) -> None:
        self.entered, self._open = threading.Event(), threading.Event()
        self._forward = model.forward_chunk
        model.forward_chunk = self._held

    def _held(self, *args: Any, **kw: Any) -> Any:
        self.entered.set()
        assert self._open.wait(200), "nobody opened the gate"
        return self._forward(*args, **kw)

    def open(self) -> None:
        self._open.set()

    async def reached(self) -> None:
        while not self.entered.is_set():
            await asyncio.sleep(0.001)


def test_cancel_never_suspends_and_removes_the_job_at_once() -> None:
    async def main() -> None:
        generator = make()
        first, second = job(generator), job(generator, "abd")
        await streaming(first)
        assert set(generator.jobs.values()) == {first, second}
        at_once(first.cancel())
        assert first.cancelled
        assert not second.cancelled
        assert set(generator.jobs) == {second.job}
        assert generator.generator.num_remaining_jobs() == 1
        assert first.job not in generator.generator.active_jobs
        at_once(generator.cancel(second))
        assert (generator.jobs, generator.generator.num_remaining_jobs()) == ({}, 0)
        await pages_free(generator.generator)
        await generator.close()

    play(main())


def test_cancel_during_an_iteration_waits_for_nothing() -> None:
    """Consumers end, the job counts as gone, and the event loop runs on, all while the model is still at work."""

    async def main() -> None:
        generator = make()
        gate = Gate(generator.generator.model)
        one = job(generator)
        consumer = asyncio.create_task(collect(one))
        await gate.reached()
        at_once(one.cancel())
        assert generator.generator.num_remaining_jobs() == 0
        assert generator.generator.active_jobs == generator.generator.pending_jobs == []
        assert [result["stage"] for result in await consumer] in ([], ["started"])
        gate.open()
        await pages_free(generator.generator)
        await generator.close()

    play(main())


def test_a_cancelled_job_gives_no_result_however_many_wait_for_it() -> None:
    async def main() -> None:
        generator = make()
        one = job(generator)
        consumers = [asyncio.create_task(collect(one)) for _ in range(3)]
        await asyncio.sleep(0.02)
        at_once(one.cancel())
        for results in await asyncio.gather(*consumers):
            assert not any(result["eos"] for result in results)
        assert await collect(one) == []
        await generator.close()

    play(main())


def test_cancel_is_idempotent_and_leaves_a_finished_job_alone() -> None:
    async def main() -> None:
        generator = make()
        one = job(generator)
        for _ in range(3):
            at_once(one.cancel())
        done = job(generator, new=3)
        await done.finished()
        at_once(done.cancel())
        assert not done.cancelled
        results = await collect(done)
        assert (results[-1]["eos_reason"], results[-1]["new_tokens"]) == ("max_new_tokens", 3)
        at_once(done.cancel())
        await generator.close()

    play(main())


def test_a_host_cancels_all_jobs_of_its_table_while_streams_leave_it() -> None:
    """The table changes when a stream ends, so nothing may end while the host goes through it."""

    async def main() -> None:
        generator = make()
        table: dict[int, Any] = {}

        async def stream(number: int) -> str:
            table[number] = job(generator, "abc")
            try:
                return "".join([result.get("text", "") async for result in table[number]])
            finally:
                del table[number]

        for _ in range(20):
            streams = [asyncio.create_task(stream(number)) for number in range(4)]
            while len(table) < 4:
                await asyncio.sleep(0)
            await asyncio.sleep(0.002)
            for one in table.values():
                await one.cancel()
            await asyncio.gather(*streams)
            assert table == {}
        await pages_free(generator.generator)
        await generator.close()

    play(main())


@pytest.mark.parametrize("how", ["cancel", "aclose", "task", "drop"])
def test_one_clients_disconnect_ends_its_own_choices_only(how: str) -> None:
    async def main() -> None:
        generator = make()
        want = [r.get("text", "") for r in await collect(job(generator, "abd", 200))]
        other = asyncio.create_task(collect(job(generator, "abd", 200)))
        choices = [job(generator) for _ in range(4)]
        streams = [choice.__aiter__() for choice in choices]
        await asyncio.gather(*map(streaming, streams))
        tasks = [asyncio.create_task(collect(stream)) for stream in streams if how != "drop"]
        await asyncio.sleep(0)
        if how == "cancel":
            for choice in choices:
                at_once(choice.cancel())
            del choice
        elif how == "aclose":
            await asyncio.gather(*(stream.aclose() for stream in streams))
        for task in tasks:
            if how == "task":
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            del task
        del choices, streams, tasks
        assert "".join(r.get("text", "") for r in await other) == "".join(want)
        await pages_free(generator.generator)
        await generator.close()

    play(main())


def test_pages_of_a_cancelled_job_are_free_for_the_next_one() -> None:
    """Each of them takes the whole cache."""

    async def main() -> None:
        generator = make(128)
        generator.generator.max_batch_size = 64
        for _ in range(30):
            big = job(generator, new=120)
            next_one = job(generator, new=120)
            await streaming(big)
            at_once(big.cancel())
            await streaming(next_one)
            at_once(next_one.cancel())
        await pages_free(generator.generator)
        await generator.close()

    play(main())


def test_close_releases_all_who_wait_and_refuses_new_jobs() -> None:
    """Also those whose job waits in the queue, while an iteration runs that takes long."""

    async def main() -> None:
        generator = make(max_batch_size=2)
        gate = Gate(generator.generator.model)
        consumers = [asyncio.create_task(collect(job(generator))) for _ in range(6)]
        await gate.reached()
        closing = asyncio.create_task(generator.close())
        for results in await asyncio.gather(*consumers):
            assert not any(result["eos"] for result in results)
        assert not closing.done()
        with pytest.raises(JobStateError, match="closed"):
            job(generator)
        gate.open()
        await closing
        await asyncio.gather(generator.close(), generator.close())
        with pytest.raises(JobStateError, match="closed"):
            job(generator)
        await pages_free(generator.generator)

    play(main())


def test_an_error_of_a_job_is_raised_where_it_is_read(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        generator = make()
        good = asyncio.create_task(collect(job(generator, "abc", 50)))
        bad = job(generator, gen_settings=failing())
        with pytest.raises(ZeroDivisionError, match="in a hook"):
            await collect(bad)
        assert await collect(bad) == []
        assert (await good)[-1]["new_tokens"] == 50
        assert (await collect(job(generator, "abd", 3)))[-1]["new_tokens"] == 3
        await pages_free(generator.generator)
        await generator.close()

    with caplog.at_level(logging.ERROR, logger="exllamav2"):
        play(main())
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "in a hook" in caplog.text


def test_results_before_an_error_come_before_it() -> None:
    async def main() -> None:
        generator = make()
        bad = job(generator, gen_settings=failing(after=5))
        stream = bad.__aiter__()
        await bad.finished()
        text = ""
        while len(text) < 5:
            text += (await stream.__anext__()).get("text", "")
        with pytest.raises(ZeroDivisionError):
            await stream.__anext__()
        with pytest.raises(StopAsyncIteration):
            await stream.__anext__()
        await generator.close()

    play(main())


def test_the_page_table_is_reset_right_after_a_cancel() -> None:
    async def main() -> None:
        generator = make()
        gate = Gate(generator.generator.model)
        one = job(generator)
        await gate.reached()
        at_once(one.cancel())
        threading.Timer(0.05, gate.open).start()
        generator.generator.reset_page_table()
        assert generator.generator.page_table.available == generator.generator.max_pages
        await generator.close()

    play(main())


def test_a_new_generator_takes_the_cache_right_after_the_old_ones_jobs_were_cancelled() -> None:
    """Servers make a new generator after an error and never close the old one."""

    async def main() -> None:
        shared = parts()
        old = ExLlamaV2DynamicGeneratorAsync(*shared, page_size=16)
        gate = Gate(shared[0])
        streams = [asyncio.create_task(collect(job(old))) for _ in range(2)]
        await gate.reached()
        for one in old.jobs.values():
            await one.cancel()
        threading.Timer(0.05, gate.open).start()
        new = ExLlamaV2DynamicGeneratorAsync(*shared, page_size=16)
        assert (await collect(job(new, "abc", 5)))[-1]["new_tokens"] == 5
        await asyncio.gather(*streams)
        await new.close()

    play(main())


def test_a_generator_without_users_ends_its_thread_and_frees_the_cache() -> None:
    async def main() -> None:
        model, cache, tokenizer = parts()
        before = set(threading.enumerate())
        generator = ExLlamaV2DynamicGeneratorAsync(model, cache, tokenizer, page_size=16)
        await collect(job(generator, "abc", 3))
        kept, (thread,) = weakref.ref(cache), set(threading.enumerate()) - before
        del generator, model, cache
        while thread.is_alive():
            gc.collect()
            await asyncio.sleep(0.001)
        gc.collect()
        assert kept() is None

    play(main())


def test_consumers_of_jobs_that_were_cleared_away_are_released() -> None:
    async def main() -> None:
        generator = make()
        consumers = [asyncio.create_task(collect(job(generator))) for _ in range(2)]
        await asyncio.sleep(0.02)
        generator.generator.cancel(next(iter(generator.jobs)))
        generator.generator.clear_queue()
        for results in await asyncio.gather(*consumers):
            assert not any(result["eos"] for result in results)
        await generator.close()

    play(main())


def test_cancel_from_another_thread_and_loop() -> None:
    async def main() -> None:
        generator = make()
        one = job(generator)
        consumer = asyncio.create_task(collect(one))
        await asyncio.sleep(0.01)
        await asyncio.to_thread(lambda: asyncio.run(one.cancel()))
        assert not any(result["eos"] for result in await consumer)
        await pages_free(generator.generator)
        await generator.close()

    play(main())


def sync_job(text: str = "abc", new: int = ENDLESS, **kw: Any) -> ExLlamaV2DynamicJob:
    return ExLlamaV2DynamicJob(TOKENIZER.encode(text), new, **{"gen_settings": GREEDY, **kw})


def test_the_sync_generator_gives_no_result_of_a_cancelled_job() -> None:
    generator = ExLlamaV2DynamicGenerator(*parts(), page_size=16, max_batch_size=2)
    jobs = [sync_job() for _ in range(3)]
    generator.enqueue(jobs)
    generator.iterate()
    for one in jobs:
        generator.cancel(one)
        generator.cancel(one)
        assert generator.page_table.available <= generator.max_pages
    assert generator.num_remaining_jobs() == generator.num_active_jobs() == generator.num_pending_jobs() == 0
    assert generator.page_table.available == generator.max_pages
    assert generator.iterate() == []
    last = sync_job(new=3)
    generator.enqueue(last)
    while generator.num_remaining_jobs():
        results = generator.iterate()
    generator.cancel(last)
    assert results[-1]["eos_reason"] == "max_new_tokens"


def test_the_sync_generator_raises_a_jobs_error_and_goes_on() -> None:
    generator = ExLlamaV2DynamicGenerator(*parts(), page_size=16)
    good = [sync_job(new=20) for _ in range(2)]
    bad = [sync_job(gen_settings=failing()) for _ in range(2)]
    generator.enqueue([good[0], *bad, good[1]])
    texts = dict.fromkeys(good, "")
    errors, ended = [], []
    while generator.num_remaining_jobs():
        try:
            results = generator.iterate()
        except ZeroDivisionError as error:
            errors.append(str(error))
            continue
        for result in results:
            if result["job"] in texts:
                texts[result["job"]] += result.get("text", "")
            if result["eos"]:
                ended.append(result["job"])
    assert errors == ["in a hook", "in a hook"]
    assert sorted(ended, key=good.index) == good
    assert len(set(texts.values())) == 1
    assert len(texts[good[0]]) == 20
    assert generator.page_table.available == generator.max_pages
