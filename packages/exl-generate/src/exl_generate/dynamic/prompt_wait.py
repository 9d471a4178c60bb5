"""Choose which new prompts wait for others while jobs decode, so that one pass computes several of them."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from exl_generate.dynamic.runner import Chunk, Runner

if TYPE_CHECKING:
    from exl_generate.dynamic.job import ExLlamaV2DynamicJob

__all__ = ["PromptWait"]

#: a prompt waits only while more sequences decode than this number for each one that waits
CROWD = 4


@dataclass(slots=True)
class _Share:
    """Tokens that a job would add to a pass."""

    #: chunks of one kind may share a pass
    kind: object
    #: most tokens of such a pass
    most: int
    tokens: int


@dataclass(slots=True)
class _Prompt:
    """A job whose prompt is not computed."""

    #: when the job got its place in the batch
    since: float
    shares: list[_Share]
    #: whether nothing is gained by waiting
    goes: bool


class PromptWait:
    """Hold new prompts back while other jobs decode, at most `seconds` each, until they fill a pass.

    A pass over prompts stalls every job that decodes, and a pass over several prompts takes little longer than one over
    a single short prompt. Only prompts of one kind (`Runner.kind_of`) share a pass, so a prompt waits for others of its
    kind. A job's prompt is computed

    - once the prompts of its kind fill a pass, if it is among the first that fit into it. A pass that takes all tokens
      of a step is full with so many, and one that takes fewer with half of its tokens: another prompt of the same
      length may not fit, and the time of so short a pass depends mostly on its tokens;
    - with a prompt of its kind that does not wait, if it fits: that pass runs anyway;
    - when it has waited for `seconds`.

    These prompts never wait: one that has begun, one of a job that has run before, and one whose beginning is in the
    cache, with at most `worth` tokens after it. No prompt waits while no job decodes, or while one sequence waits for
    every `CROWD` that decode: the places in the batch that stay idle then cost more than a pass.

    Waiting changes the order and the company in which prompts are computed, never how: `Runner.kind_of` keeps apart
    prompts whose results could depend on others.

    Args:
        seconds: 0 holds nothing back.
        runner: tells which chunks may share a pass.
        worth: most tokens of a prompt with a cached beginning that does not wait.
    """

    def __init__(self, seconds: float, runner: Runner, worth: int) -> None:
        self._seconds, self._runner, self._worth = seconds, runner, worth
        #: whether prompts may wait
        self.holds = seconds > 0
        #: jobs whose prompts were not computed at the last step; jobs may end outside steps
        self._prompts: WeakKeyDictionary[ExLlamaV2DynamicJob, _Prompt] = WeakKeyDictionary()
        #: most tokens of the last step
        self._budget = 0
        #: whether the last step has computed prompts, after which others may find more in the cache
        self._stale = False

    def ready(self, jobs: list[ExLlamaV2DynamicJob], budget: int, decoding: int) -> list[ExLlamaV2DynamicJob]:
        """Return those of `jobs` whose prompts this step computes, in the same order.

        Args:
            jobs: all jobs whose prompts are not computed, in the order they started.
            budget: most prompt tokens of this step.
            decoding: number of sequences that decode in this step.
        """
        if not self.holds:
            return jobs
        if self._stale or budget != self._budget:
            since = {job: prompt.since for job, prompt in self._prompts.items()}
            known: dict[ExLlamaV2DynamicJob, _Prompt] = {}
        else:
            since, known = {}, dict(self._prompts)
        now, self._budget = monotonic(), budget
        self._prompts = WeakKeyDictionary(
            {job: known.get(job) or self._looked_at(job, since.get(job, now), budget) for job in jobs}
        )
        found = jobs if self._all_go(jobs, decoding) else self._chosen(jobs, now)
        self._stale = bool(found)
        return found

    def _all_go(self, jobs: list[ExLlamaV2DynamicJob], decoding: int) -> bool:
        waiting = sum(len(job.sequences) for job in jobs if not self._prompts[job].goes)
        return CROWD * waiting >= decoding

    def _chosen(self, jobs: list[ExLlamaV2DynamicJob], now: float) -> list[ExLlamaV2DynamicJob]:
        going: set[ExLlamaV2DynamicJob] = set()
        kinds: dict[object, list[tuple[ExLlamaV2DynamicJob, _Share]]] = {}
        for job in jobs:
            prompt = self._prompts[job]
            if prompt.goes or now - prompt.since >= self._seconds:
                going.add(job)
            for share in prompt.shares:
                kinds.setdefault(share.kind, []).append((job, share))
        chosen = set(going)
        for shares in kinds.values():
            chosen.update(_fitting(shares, going, self._budget))
        return [job for job in jobs if job in chosen]

    def _looked_at(self, job: ExLlamaV2DynamicJob, since: float, budget: int) -> _Prompt:
        begun = job.times.first_prefill is not None
        shares: list[_Share] = []
        left = total = 0
        try:
            for sequence in job.sequences:
                start = sequence.kv_position if begun else sequence.head_elsewhere().end
                total += sequence.prefill_end
                left += sequence.prefill_end - start
                chunk = Chunk(sequence, start, min(start + budget, sequence.prefill_end))
                if len(chunk) > 0:
                    kind, most = self._runner.kind_of(chunk)
                    shares.append(_Share(kind, most, len(chunk)))
        except Exception:
            return _Prompt(since, [], True)  # planning its chunk raises the same error, which ends the job
        return _Prompt(since, shares, begun or not left or (left <= self._worth and left < total))


def _fitting(
    shares: list[tuple[ExLlamaV2DynamicJob, _Share]], going: set[ExLlamaV2DynamicJob], budget: int
) -> list[ExLlamaV2DynamicJob]:
    """Return the jobs of one kind that go because a pass of this kind is full or runs anyway."""
    takes = shares[0][1].most
    most, enough = min(takes, budget), budget if takes >= budget else -(-takes // 2)
    runs = any(job in going for job, _ in shares)
    if not runs and sum(share.tokens for _, share in shares) < enough:
        return []
    left = most - sum(share.tokens for job, share in shares if job in going)
    found: list[ExLlamaV2DynamicJob] = []
    for job, share in shares:
        if job in going:
            continue
        if share.tokens > left and (runs or found):
            break
        found.append(job)
        left -= share.tokens
    return found
