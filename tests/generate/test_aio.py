"""The asynchronous generator: streams, cancels and failures stay with their job, and the event loop keeps running."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import pytest
from internals import engine_of

from exl_generate import (
    CapacityError,
    ExLlamaV2DynamicGeneratorAsync,
    ExLlamaV2DynamicJobAsync,
    ExLlamaV2Sampler,
    JobStateError,
)
from exl_generate.testing import ScriptedCache, ScriptedConfig, ScriptedModel, ScriptedTokenizer, check_pages

TOKENIZER = ScriptedTokenizer([chr(c) for c in range(97, 123)])
GREEDY = ExLlamaV2Sampler.Settings.greedy()


# New tokens of a job that is over only when somebody ends it: a busy machine may let seconds pass between two lines.
ENDLESS = 50_000


def make(tokens: int = 256, **kw: Any) -> ExLlamaV2DynamicGeneratorAsync:
    model = ScriptedModel(ScriptedConfig(vocab_size=TOKENIZER.get_vocab_size(), max_seq_len=tokens))
    cache = ScriptedCache(model, max_seq_len=2 * tokens)
    return ExLlamaV2DynamicGeneratorAsync(model, cache, TOKENIZER, page_size=16, **kw)


def job(generator: ExLlamaV2DynamicGeneratorAsync, text: str, new: int = 12, **kw: Any) -> ExLlamaV2DynamicJobAsync:
    return ExLlamaV2DynamicJobAsync(generator, TOKENIZER.encode(text), new, **{"gen_settings": GREEDY, **kw})


async def read(one: ExLlamaV2DynamicJobAsync) -> str:
    return "".join([result.get("text", "") async for result in one])


def play(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 250))


@pytest.mark.covers("generators: async")
def test_many_streams_at_once() -> None:
    async def main() -> None:
        async with make() as generator:
            want = generator.generator.generate("abc", 12, gen_settings=GREEDY, completion_only=True)
            got = await asyncio.gather(*(read(job(generator, "abc")) for _ in range(20)))
            assert got == [want] * 20
            check_pages(generator.generator)

    play(main())


@pytest.mark.covers("generators: async")
def test_cancel_wakes_a_consumer_in_another_task() -> None:
    async def main() -> None:
        async with make(2 * ENDLESS) as generator:
            one, other = job(generator, "abc", ENDLESS), job(generator, "abd", 30)
            consumer = asyncio.create_task(collect(one))
            await asyncio.sleep(0.01)
            await one.cancel()
            await one.cancel()
            results = await consumer
            assert results[-1]["eos_reason"] == "cancelled"
            assert len(await collect(other)) > 10
            await other.cancel()

    play(main())


async def collect(one: ExLlamaV2DynamicJobAsync) -> list[dict[str, Any]]:
    return [result async for result in one]


@pytest.mark.covers("generators: async")
def test_leaving_the_loop_cancels_the_job() -> None:
    async def main() -> None:
        async with make(2 * ENDLESS) as generator:
            one = job(generator, "abc", ENDLESS)
            stream = one.__aiter__()
            async for result in stream:
                if "text" in result:
                    break
            await stream.aclose()  # type: ignore[attr-defined]
            await one.finished()
            assert one.cancelled
            assert generator.generator.num_remaining_jobs() == 0
            check_pages(generator.generator)

    play(main())


@pytest.mark.covers("generators: async")
@pytest.mark.parametrize("how", ["break", "return", "raise", "close unbegun", "task"])
def test_a_job_that_nobody_reads_any_more_is_cancelled(how: str) -> None:
    """Clients hang up in every way, also before their first token."""

    async def client(generator: ExLlamaV2DynamicGeneratorAsync) -> None:
        one = job(generator, "abc", ENDLESS)
        if how == "close unbegun":
            await one.__aiter__().aclose()  # type: ignore[attr-defined]
            return
        async for result in one:
            if "text" in result:
                if how == "break":
                    break
                if how == "return":
                    return
                if how == "raise":
                    raise ZeroDivisionError

    async def main() -> None:
        async with make(2 * ENDLESS) as generator:
            task = asyncio.create_task(client(generator))
            if how == "task":
                await asyncio.sleep(0.02)
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            del task
            async with asyncio.timeout(250):
                while generator.generator.num_remaining_jobs():
                    await asyncio.sleep(0.01)
            check_pages(generator.generator)
            assert (await collect(job(generator, "abc", 3)))[-1]["new_tokens"] == 3

    play(main())


@pytest.mark.covers("generators: failing-jobs")
@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError])
def test_no_exception_of_user_code_ends_the_engine(error: type[BaseException]) -> None:
    """A hook that raises what is no Exception fails its own job; the others go on, and new ones are served."""

    def hook(result: Any) -> None:
        raise error("from a hook")

    async def main() -> None:
        async with make() as generator:
            settings = ExLlamaV2Sampler.Settings()
            settings.post_sampling_hooks = [hook]
            other = asyncio.create_task(collect(job(generator, "abc", 30)))
            broken = asyncio.create_task(collect(job(generator, "ab", 30, gen_settings=settings)))
            async with asyncio.timeout(250):
                assert (await broken)[-1]["eos_reason"] == "error"
                assert (await other)[-1]["new_tokens"] == 30
                assert (await collect(job(generator, "abc", 3)))[-1]["new_tokens"] == 3

    play(main())


@pytest.mark.covers("generators: async")
def test_close_ends_every_consumer_and_refuses_new_jobs() -> None:
    async def main() -> None:
        generator = make(2 * ENDLESS)
        consumers = [asyncio.create_task(collect(job(generator, "abc", ENDLESS))) for _ in range(3)]
        await asyncio.sleep(0.01)
        await generator.close()
        assert [(await c)[-1]["eos_reason"] for c in consumers] == ["cancelled"] * 3
        with pytest.raises(JobStateError, match="closed"):
            job(generator, "abc")
        await generator.close()

    play(main())


@pytest.mark.covers("generators: async")
def test_close_ends_consumers_whose_jobs_were_cleared_away() -> None:
    """`clear_queue` drops jobs without results; a reader of one gets an end at the latest when the generator closes."""

    async def main() -> None:
        generator = make()
        one = job(generator, "abc", 240)
        one.job.paused = True  # so that it does not come to its end meanwhile, however long this takes
        consumer = asyncio.create_task(collect(one))
        await asyncio.sleep(0)
        generator.generator.clear_queue()
        await generator.close()
        assert (await consumer)[-1]["eos_reason"] == "cancelled"

    play(main())


@pytest.mark.covers("generators: failing-jobs", "generators: async")
def test_a_refused_or_failing_job_disturbs_no_other_job() -> None:
    async def main() -> None:
        async with make() as generator:
            poison = TOKENIZER.single_id("q")
            assert poison is not None
            generator.generator.model.faults[poison] = RuntimeError("boom")  # type: ignore[attr-defined]
            with pytest.raises(CapacityError):
                job(generator, "abc", 10_000)
            bad, good = job(generator, "aq"), job(generator, "abc", 5)
            assert (await collect(bad))[-1]["eos_reason"] == "error"
            assert (await collect(good))[-1]["new_tokens"] == 5

    play(main())


@pytest.mark.covers("generators: async")
def test_the_event_loop_and_new_jobs_do_not_wait_for_a_pass() -> None:
    async def main() -> None:
        async with make() as generator:
            forward = generator.generator.model.forward_chunk
            entered, release = threading.Event(), threading.Event()

            def slow(*args: Any, **kw: Any) -> Any:
                entered.set()
                assert release.wait(200), "the event loop was blocked while the model ran"
                return forward(*args, **kw)

            generator.generator.model.forward_chunk = slow  # type: ignore[method-assign]
            first = asyncio.create_task(collect(job(generator, "abc", 3)))
            while not entered.is_set():
                await asyncio.sleep(0.001)
            second = asyncio.create_task(collect(job(generator, "abd", 3)))
            await asyncio.sleep(0.001)
            release.set()
            assert [(await task)[-1]["new_tokens"] for task in (first, second)] == [3, 3]

    play(main())


@pytest.mark.covers("generators: async")
def test_jobs_from_several_event_loops() -> None:
    generator = make()
    texts: list[str] = []

    def own_loop() -> None:
        async def main() -> None:
            texts.extend(await asyncio.gather(*(read(job(generator, "abc")) for _ in range(4))))

        asyncio.run(main())

    threads = [threading.Thread(target=own_loop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(250)
    assert len(texts) == 16
    assert len(set(texts)) == 1
    play(generator.close())


@pytest.mark.covers("generators: async")
def test_two_consumers_of_one_job_both_end() -> None:
    """Each result goes to one of them, and the end to both, also to one who comes later."""

    async def main() -> None:
        async with make() as generator:
            want = generator.generator.generate("abc", 12, gen_settings=GREEDY, completion_only=True)
            one = job(generator, "abc")
            shares = await asyncio.gather(collect(one), collect(one))
            assert "".join(sorted(r.get("text", "") for share in shares for r in share)) == "".join(sorted(want))
            assert sum(r["eos"] for share in shares for r in share) == 1
            assert await collect(one) == []

    play(main())


@pytest.mark.covers("generators: failing-jobs", "generators: async")
def test_iterations_that_keep_failing_end_all_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure that is of no job in particular is tried again, but not for ever."""

    async def main() -> None:
        async with make() as generator:
            tries = 0

            def broken() -> None:
                nonlocal tries
                tries += 1
                raise ZeroDivisionError("in the engine")

            with monkeypatch.context() as patch:
                patch.setattr(engine_of(generator.generator), "step", broken)
                ends = [(await collect(job(generator, "abc")))[-1] for _ in range(2)]
            assert [(end["eos_reason"], type(end["exception"])) for end in ends] == [("error", ZeroDivisionError)] * 2
            assert tries == 6
            assert (await collect(job(generator, "abc", 3)))[-1]["new_tokens"] == 3
            check_pages(generator.generator)

    play(main())


@pytest.mark.covers("generators: async")
def test_discard_ends_a_job_without_a_result() -> None:
    async def main() -> None:
        async with make(2 * ENDLESS) as generator:
            one = job(generator, "abc", ENDLESS)
            async for result in one:
                if "text" in result:
                    break
            generator.discard(one)
            assert generator.generator.num_remaining_jobs() == 0
            assert (await collect(job(generator, "abc", 3)))[-1]["new_tokens"] == 3
            check_pages(generator.generator)

    play(main())
