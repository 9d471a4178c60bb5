"""Jobs with draft tokens are cancelled or paused while a step with them is queued: nobody else can tell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from internals import is_prelaunched, prelaunch
from prelaunched import CONFIG, TOKENIZER, Device, Preparing

from exl_generate import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler
from exl_generate.dynamic import draft_model
from exl_generate.dynamic.draft_length import FixedDraftLength
from exl_generate.testing import ScriptedCache, check_pages, streamed_tokens
from exl_kernels import sampling as kernels

Settings = ExLlamaV2Sampler.Settings
NEW = 24
DRAFTS = 3


def onward(context: list[int]) -> int | None:
    """Mostly a cycle, which both drafters guess, and now and then another token."""
    return 3 + (int(context[-1]) - 2) % 4 if len(context) % 7 else None


@dataclass(frozen=True)
class Request:
    """A request as data, and the iterations before which it is cancelled or paused and continued.

    `stop`: strings and ids that end it, `bans`: strings that are withdrawn. With either, the host does not know by the
    sampled tokens alone what the job accepts.
    """

    prompt: tuple[int, ...]
    seed: int
    greedy: bool
    cancelled_at: int = -1
    paused_at: int = -1
    pause: int = 1
    stop: tuple[str | int, ...] = ()
    bans: tuple[str, ...] = ()

    def job(self) -> ExLlamaV2DynamicJob:
        style = Settings.greedy() if self.greedy else Settings(temperature=0.4, top_k=0, top_p=0)
        return ExLlamaV2DynamicJob(
            torch.tensor([self.prompt]),
            NEW,
            gen_settings=style,
            seed=self.seed,
            stop_conditions=list(self.stop),
            banned_strings=list(self.bans),
        )

    @property
    def alone(self) -> Request:
        """The request that nobody cancels or pauses."""
        return replace(self, cancelled_at=-1, paused_at=-1)


def generator_of(drafter: str) -> ExLlamaV2DynamicGenerator:
    model = Preparing(CONFIG)
    model.script = onward
    more: dict[str, Any] = {}
    if drafter == "ngram":
        more = {"use_ngram_draft": True, "num_draft_tokens": DRAFTS}
    if drafter == "model":
        draft = Preparing(CONFIG)
        draft.script = onward
        cache = ScriptedCache(draft, max_seq_len=256)
        more = {"draft_model": draft, "draft_cache": cache, "num_draft_tokens": DRAFTS}
    made = ExLlamaV2DynamicGenerator(
        model, ScriptedCache(model, max_seq_len=256), TOKENIZER, page_size=8, max_chunk_size=16, **more
    )
    if drafter != "none":
        made.drafter.length = FixedDraftLength(DRAFTS)
        prelaunch(made, True)
    return made


def play(
    requests: list[Request], drafter: str, seen: Callable[[ExLlamaV2DynamicGenerator, int], None] | None = None
) -> tuple[list[list[int]], list[ExLlamaV2DynamicJob]]:
    """Return the tokens of every job, and the jobs. `seen` is called before an iteration that changes a job."""
    generator, jobs = generator_of(drafter), [request.job() for request in requests]
    results: list[list[dict[str, Any]]] = [[] for _ in jobs]
    generator.enqueue(jobs)
    for at in range(200):
        for job, request in zip(jobs, requests, strict=True):
            if seen is not None and at in (request.cancelled_at, request.paused_at):
                seen(generator, at)
            if at == request.cancelled_at and not job.is_finished:
                generator.cancel(job)
            if at == request.paused_at:
                job.pause()
            if at == request.paused_at + request.pause:
                job.unpause()
        for result in generator.iterate():
            results[jobs.index(result["job"])].append(result)
        check_pages(generator)
        if not generator.num_remaining_jobs():
            break
    table = generator.page_table
    assert not generator.num_remaining_jobs(), "the jobs do not end"
    assert (table.unreferenced, table.reserved) == (len(table.pages), 0), "pages are left"
    return [streamed_tokens(own) for own in results], jobs


requests = st.lists(
    st.builds(
        Request,
        prompt=st.lists(st.integers(3, 8), min_size=1, max_size=12).map(tuple),
        seed=st.integers(0, 3),
        greedy=st.booleans(),
        cancelled_at=st.sampled_from([-1, -1, 2, 3, 5, 8]),
        paused_at=st.sampled_from([-1, -1, 2, 4, 6]),
        pause=st.integers(1, 5),
        stop=st.sampled_from([(), (), (), ("cabab",), ("cabbc", 8), (6,)]),
        bans=st.sampled_from([(), (), (), ("cabab",), ("bcab", "é")]),
    ),
    min_size=2,
    max_size=4,
)


@examples(100, 5)
@given(requests, st.sampled_from(["ngram", "model"]), st.booleans())
def test_drafts_do_not_change_tokens(asked: list[Request], drafter: str, on_device: bool) -> None:
    """Each job has the tokens that it has alone and without drafts; one that is cancelled has the first of them."""
    alone = [play([one.alone], "none")[0][0] for one in asked]
    with pytest.MonkeyPatch.context() as patch:
        if on_device:
            device = Device([])
            patch.setattr(kernels, "launch", device.launch)
            patch.setattr(draft_model, "launch", device.launch)
        found, _ = play(asked, drafter)
    for one, tokens, expected in zip(asked, found, alone, strict=True):
        assert tokens == (expected if one.cancelled_at < 0 else expected[: len(tokens)])


@pytest.mark.parametrize("how", ["cancelled", "paused"])
@pytest.mark.parametrize("drafter", ["ngram", "model"])
def test_a_job_of_a_queued_step_with_drafts(drafter: str, how: str) -> None:
    """The step was queued with the rows of all jobs, so those of the one that leaves are unused."""
    asked = [Request((3, 4, 5, 6) * 3, seed, True) for seed in range(2)]
    cancelled, paused = (4, -1) if how == "cancelled" else (-1, 4)
    leaving = Request((3, 4, 5, 6) * 2, 2, True, cancelled_at=cancelled, paused_at=paused, pause=2)
    alone = [play([one.alone], "none")[0][0] for one in (*asked, leaving)]
    queued: list[bool] = []
    found, jobs = play([*asked, leaving], drafter, lambda generator, at: queued.append(is_prelaunched(generator)))
    assert queued == [True]
    assert found[:2] == alone[:2]
    assert all(job.accepted_draft_tokens > 6 for job in jobs[:2])
    assert found[2] == (alone[2] if how == "paused" else alone[2][: len(found[2])])
    assert 0 < len(found[2]) < NEW or how == "paused"
