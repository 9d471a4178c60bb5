"""A host program written for exllamav2 loads, serves, is left by its clients, unloads and reloads without a fault."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import subprocess
import sys
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
import torch
from effort import trials
from host_program import ModelContainer, as_person

from exl_generate.bundled import default_model_dir, draft_model_dir
from exl_generate.testing import check_pages
from exl_kernels.errors import ExlError

STORY = "Once upon a time, a small fox lived in a dark forest with an old bear and a young girl who loved to sing. "
PROMPTS = [
    *("Once upon a time,", "One day, a cat", "The little fox", "A girl named Ruby", "The old bear said", "At night"),
    *(STORY + end for end in ("The fox", "The bear", "The girl", "Nobody", "One morning, the", "They")),
    *("In the village", "My toy rocket", "The baker", "It was raining"),
]


def play(main: Callable[[ModelContainer], Coroutine[Any, Any, Any]], draft: bool = False) -> Any:
    """Run a host's life on a loaded container: no exception is left to the loop's handler, no client is unhappy."""
    unhandled: list[dict[str, Any]] = []

    async def life() -> Any:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        host = ModelContainer(str(default_model_dir()), str(draft_model_dir()) if draft else None)
        await load(host)
        result = await main(host)
        assert host.active_jobs == {}
        await host.unload()
        gc.collect()
        await asyncio.sleep(0)
        return result

    result = asyncio.run(asyncio.wait_for(life(), 280))
    assert not unhandled, unhandled
    return result


async def load(host: ModelContainer) -> None:
    """Load, and see that progress is reported to the last module of each model."""
    seen = [progress async for progress in host.load()]
    loaded = [model for model in (host.draft_model, host.model) if model is not None]
    assert [done for done, total in seen if done == total] == [len(model.modules) for model in loaded]


async def idle(host: ModelContainer) -> None:
    """Wait until nothing is left of any request: no job and no page."""
    generator = host.generator.generator
    gc.collect()
    while host.generator.jobs or generator.has_work:
        await asyncio.sleep(0.001)
    assert generator.num_remaining_jobs() == 0
    check_pages(generator)
    assert generator.page_table.available == generator.max_pages


@pytest.mark.parametrize("draft", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_session(draft: bool) -> None:
    """Several choices, shared prompts, grammars: as a user of the server sees them."""

    async def main(host: ModelContainer) -> None:
        choices = await host.complete(PROMPTS[0], "a", n=4, seed=7, max_tokens=24)
        assert len({choice["text"] for choice in choices}) == 4
        assert [choice["usage"][1] for choice in choices if choice["finish_reason"] == "length"] == [24] * sum(
            choice["finish_reason"] == "length" for choice in choices
        )
        again = await host.complete(PROMPTS[0], "b", n=4, seed=7, max_tokens=24)
        assert [choice["text"] for choice in again] == [choice["text"] for choice in choices]

        first, second = [await host.complete(STORY + end, end, seed=1) for end in ("The fox", "The bear")]
        assert second[0]["cached_tokens"] > 15
        await idle(host)
        host.forget_prompts()
        fresh = await host.complete(STORY + "The bear", "c", seed=1)
        assert fresh[0]["cached_tokens"] == 0
        assert fresh[0]["text"] == second[0]["text"] != first[0]["text"]

        people = await asyncio.gather(
            *(
                host.complete("The girl as JSON: ", f"{kind}{number}", grammar=kind, seed=number, max_tokens=80)
                for number in range(3)
                for kind in ("formatron", "lmfe")
            ),
            host.complete(PROMPTS[1], "d", n=2, seed=3),
        )
        assert len([as_person(choice["text"]) for choices in people[:-1] for choice in choices]) == 6
        assert not host.unhealthy
        await idle(host)

    play(main, draft)


def test_sixteen_streams_are_those_of_single_requests() -> None:
    async def main(host: ModelContainer) -> None:
        requests = [
            {"prompt": prompt, "seed": 100 + i, "temperature": 0.5 + 0.1 * (i % 8), "top_p": 1 - 0.03 * i}
            for i, prompt in enumerate(PROMPTS)
        ]
        assert len(requests) == 16

        async def read(request: dict[str, Any], name: str) -> list[dict[str, Any]]:
            chunks = [chunk async for chunk in host.generate(**request, request_id=name, max_tokens=trials(32, 8))]
            chunks[-1].pop("cached_tokens")  # who came first differs
            return chunks

        alone = []
        for i, request in enumerate(requests):
            alone.append(await read(request, f"alone {i}"))
            host.forget_prompts()
        together = await asyncio.gather(*(read(request, f"{i}") for i, request in enumerate(requests)))
        assert together == alone
        await idle(host)

    play(main)


def test_settings_that_change_during_a_job_have_their_effect() -> None:
    """A range of penalties that grows with the text, as servers do it, and a ban that is lifted half way."""

    async def main(host: ModelContainer) -> None:
        eos = host.tokenizer.eos_token_id
        banned, forced = (torch.zeros(-(-host.config.vocab_size // 32) * 32) for _ in range(2))
        banned[eos], forced[eos] = -torch.inf, 1000.0
        seen: list[int] = []

        def steer(settings: Any, generated: int) -> None:
            settings.token_repetition_range = generated
            seen.append(generated)
            if generated >= 8:
                settings.token_bias = forced

        request: dict[str, Any] = {"max_tokens": 900, "token_bias": banned, "token_repetition_penalty": 1.05, "seed": 1}
        choice = (await host.complete(PROMPTS[1], "steered", steer=steer, **request))[0]
        assert choice["finish_reason"] == "stop"
        assert 8 <= choice["usage"][1] < 900
        assert seen == sorted(seen)
        await idle(host)

    play(main)


async def leave(host: ModelContainer, number: int, rng: random.Random) -> None:
    """One client that hangs up, in one of the ways in which a server finds out."""
    how = rng.choice(["event", "close", "task", "unbegun", "drop"])
    after = rng.randrange(3)
    disconnected = asyncio.Event()
    stream: AsyncIterator[dict[str, Any]] = host.generate(
        rng.choice(PROMPTS), f"{number}", max_tokens=300, disconnected=disconnected, seed=number
    )

    async def read() -> None:
        seen = 0
        async for _ in stream:
            if (seen := seen + 1) > after:
                if how == "event":
                    disconnected.set()
                elif how == "drop":
                    return

    if how in ("event", "drop"):
        await read()
    elif how == "task":
        task = asyncio.create_task(read())
        await asyncio.sleep(rng.random() * 0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    elif how == "close":
        for _ in range(after):
            await anext(stream, None)
    await stream.aclose()  # type: ignore[attr-defined]


@pytest.mark.full
def test_five_hundred_disconnects_leave_no_job_and_no_page() -> None:
    """Meanwhile other clients' streams are what they are alone, and health stays good."""

    async def main(host: ModelContainer) -> None:
        rng = random.Random(5)
        request: dict[str, Any] = {"prompt": PROMPTS[0], "seed": 1, "max_tokens": 120}
        want = await host.complete(**request, request_id="alone")
        left = list(range(500))

        async def clients() -> None:
            while left:
                await leave(host, left.pop(), rng)

        async def others() -> None:
            number = 0
            while left:
                number += 1
                found = await host.complete(**request, request_id=f"other {number}")
                assert found[0]["text"] == want[0]["text"]

        await asyncio.gather(*(clients() for _ in range(12)), others())
        assert host.active_jobs == {}
        assert not host.unhealthy
        await idle(host)
        assert (await host.complete(**request, request_id="last"))[0]["text"] == want[0]["text"]

    play(main)


async def ended(streams: list[asyncio.Task[Any]]) -> None:
    """Each stream has ended, by itself or with a typed error that its client sees."""
    for found in await asyncio.gather(*streams, return_exceptions=True):
        assert not isinstance(found, BaseException) or isinstance(found, ExlError), repr(found)


@pytest.mark.parametrize("how", ["wait", "skip_wait", "shutdown"])
def test_unload_while_streams_run_and_reload(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with choices that wait in the queue; nothing of the old model stays in memory."""
    # pytest keeps what is logged, and with an error the frames that it went through and all they refer to.
    monkeypatch.setattr(logging.getLogger("exllamav2.generator.dynamic_async"), "disabled", True)

    async def main(host: ModelContainer) -> None:
        host.max_batch_size = 4
        texts = set()
        for turn in range(trials(3, 2)):
            await host.create_generator()
            texts.add((await host.complete(PROMPTS[0], "probe", seed=1))[0]["text"])
            new = 30 if how == "wait" else 900
            streams = [
                asyncio.create_task(host.complete(prompt, f"{turn} {i}", n=2, max_tokens=new))
                for i, prompt in enumerate(PROMPTS[: trials(6, 4)])
            ]
            while host.generator.generator.num_active_jobs() < 4:
                await asyncio.sleep(0.001)
            kept = [weakref.ref(host.model), weakref.ref(host.cache), weakref.ref(host.generator.generator)]
            await host.unload(skip_wait=how == "skip_wait", shutdown=how == "shutdown")
            await ended(streams)
            assert host.active_jobs == {}
            host.unhealthy.clear()
            del streams
            for _ in range(200):  # where one choice of a request failed, the other one may be on its way out
                gc.collect()
                if not any(reference() for reference in kept):
                    break
                await asyncio.sleep(0.001)
            assert [reference() for reference in kept] == [None] * 3
            await load(host)
        assert len(texts) == 1

    play(main)


ENDS_EARLY = """
import atexit, threading

# Handlers run in the reverse order, so this one sees what the packages' own leave.
atexit.register(lambda: print([t.name for t in threading.enumerate() if t is not threading.main_thread()]))

import asyncio

from exl_generate.bundled import default_model_dir
from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exllamav2.generator import ExLlamaV2DynamicGeneratorAsync, ExLlamaV2DynamicJobAsync

config = ExLlamaV2Config(str(default_model_dir()))
model, tokenizer = ExLlamaV2(config), ExLlamaV2Tokenizer(config)
cache = ExLlamaV2Cache(model, lazy=True)
model.load_autosplit(cache)


async def main():
    generator = ExLlamaV2DynamicGeneratorAsync(model=model, cache=cache, tokenizer=tokenizer)
    ids = tokenizer.encode("Once upon a time,", add_bos=True)
    job = ExLlamaV2DynamicJobAsync(generator, input_ids=ids, max_new_tokens=900)
    async for result in job:
        if result["stage"] == "streaming":
            return job


kept = asyncio.run(main())
"""


def test_a_program_may_end_while_streams_run() -> None:
    """The thread of the generator ends before the interpreter, which would end it inside native code and abort."""
    done = subprocess.run([sys.executable, "-c", ENDS_EARLY], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["[]"]), done.stderr
