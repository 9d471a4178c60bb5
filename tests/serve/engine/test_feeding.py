"""Which requests the engine process hands to its generator, and when."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from raw_worker import RawWorker

from exl_generate import COLUMN_FLAGS, bundled
from exl_serve.config.model import ModelConfig
from exl_serve.engine import inbox, wire
from exl_serve.engine.admission import SPARE_JOBS
from exl_serve.engine.events import Failed, Finished
from exl_serve.engine.load import load
from exl_serve.request.internal import EngineRequest, Sampling
from exl_serve.testing.local import EngineThread

ROWS, PAGES = 16, 9
HANG = 120.0


def request(number: int, new: int, key: str = "", guided: bool = False, length: int = 10) -> EngineRequest:
    prompt = (np.resize(np.arange(20, 30, dtype="<i4"), length) + number).tobytes()
    return EngineRequest(
        id=f"r{number}",
        key=key,
        prompt=prompt,
        negative_prompt=prompt if guided else None,
        sampling=Sampling(temperature=0.0, cfg_scale=1.5 if guided else None),
        seeds=(number,),
        max_tokens=new,
        ignore_eos=True,
    )


class Steps:
    """An engine's thread whose first step waits for `go`. Of each step: started jobs, and jobs that go on waiting."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cache_tokens: int) -> None:
        monkeypatch.setattr(inbox, "INBOUND_SECONDS", HANG)  # all messages that are there, however slow the machine is
        config = ModelConfig(
            id="m",
            path=str(bundled.default_model_dir()),
            engine="free",
            device="cpu",
            max_batch_size=ROWS,
            cache_tokens=cache_tokens,
        )
        loaded = load(config)
        self.go = threading.Event()
        self.started: list[int] = []
        self.waiting: list[int] = []
        #: of the jobs, in the order in which the generator gets them
        self.seeds: list[int] = []
        #: seeds of jobs that the generator refuses
        self.broken: set[int] = set()
        step, enqueue = loaded.generator.iterate_columns, loaded.generator.enqueue

        def iterate_columns() -> Any:
            assert self.go.wait(HANG)
            columns = step()
            self.started.append(int((columns.flags & COLUMN_FLAGS["started"] != 0).sum()))
            self.waiting.append(loaded.generator.num_pending_jobs())
            return columns

        def noted(job: Any) -> Any:
            if job.request.seed in self.broken:
                raise RuntimeError("this job cannot start")
            self.seeds.append(job.request.seed)
            return enqueue(job)

        loaded.generator.iterate_columns, loaded.generator.enqueue = iterate_columns, noted
        self.thread = EngineThread(config, loaded=loaded)
        self.worker = RawWorker(self.thread)

    def run(
        self, requests: int, new: int, keys: Sequence[str] = ("",), guided: str | None = None, length: int = 10
    ) -> None:
        """Send a request, and the others while its first step waits; read until all have ended.

        The requests are shared equally by `keys`, those of the first key come first. Those of the key `guided` have a
        second prompt as long as the first.
        """
        for number in range(requests):
            key = keys[number * len(keys) // requests]
            self.worker.send(wire.Submit(number + 1, request(number, new, key, key == guided, length)))
            if not number:
                assert isinstance(self.worker.receive(), wire.Accepted)
        self.go.set()
        left = requests
        while left:
            message = self.worker.receive()
            self.worker.send(wire.Ping())  # on a slow machine the run takes longer than a worker may be silent
            if isinstance(message, wire.StepEvents):
                left -= sum(isinstance(event, Finished | Failed) for _, event in message.all())


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Steps]:
    steps = Steps(monkeypatch, request.param)
    yield steps
    steps.go.set()
    steps.worker.close()
    steps.thread.close()


@pytest.mark.parametrize("made", [1 << 16], indirect=True)
def test_requests_that_come_together_start_together(made: Steps) -> None:
    made.run(ROWS, 8)
    # The first may have begun before the others were there.
    assert max(made.started) >= ROWS - 1
    assert sum(made.started) == ROWS


@pytest.mark.parametrize("made", [PAGES * 256], indirect=True)
def test_requests_without_pages_wait_in_the_fair_queue(made: Steps) -> None:
    """In the generator's own queue, the order could not be changed any more."""
    made.run(3 * ROWS // 2, 10, length=250)  # two pages each
    assert max(made.waiting) <= SPARE_JOBS + 1
    assert sum(made.started) == 3 * ROWS // 2


@pytest.mark.parametrize("made", [1 << 16], indirect=True)
def test_keys_whose_requests_come_together_share_the_rows(made: Steps) -> None:
    made.run(2 * ROWS, 8, ("first", "second"))
    rows = made.seeds[:ROWS]
    assert abs(sum(seed < ROWS for seed in rows) - ROWS // 2) <= 1


@pytest.mark.parametrize("made", [1 << 16], indirect=True)
def test_requests_that_cannot_start_cost_their_key_nothing(made: Steps) -> None:
    made.broken = set(range(1, 7))
    made.run(2 * ROWS, 8, ("first", "second"))
    rows = made.seeds[:ROWS]
    assert abs(sum(seed < ROWS for seed in rows) - ROWS // 2) <= 1


@pytest.mark.parametrize("made", [1 << 16], indirect=True)
def test_guided_requests_count_as_two_rows(made: Steps) -> None:
    made.run(3 * ROWS // 2, 8, guided="")
    assert max(made.waiting) <= SPARE_JOBS + 1
    assert sum(made.started) == 3 * ROWS // 2


@pytest.mark.parametrize("made", [1 << 16], indirect=True)
def test_guided_requests_cost_their_key_both_prompts(made: Steps) -> None:
    """So a key without guidance gets two requests for one of theirs."""
    made.run(3 * ROWS, 8, ("guided", "plain"), guided="guided")
    first = made.seeds[: 3 * ROWS // 4]
    assert abs(sum(seed < 3 * ROWS // 2 for seed in first) - len(first) // 3) <= 1
