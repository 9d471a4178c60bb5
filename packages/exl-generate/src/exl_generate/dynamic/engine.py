"""One round of the generator: schedule, run, sample, settle."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from exl_generate.dynamic.events import Events
from exl_generate.dynamic.next_step import NextStep, attempt, predictable
from exl_generate.dynamic.prompts import Prompts
from exl_generate.dynamic.runner import Runner, Window
from exl_generate.dynamic.scheduler import Scheduler
from exl_generate.dynamic.snapshot import Counters
from exl_generate.dynamic.speculation import Drafter
from exl_generate.interrupts import as_job_error
from exl_generate.sampling import Draw, Sample, launch_batch

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from exl_generate.dynamic.job import ExLlamaV2DynamicJob

__all__ = ["Engine"]


class Turn:
    """One job's part of a round: the windows its sequences evaluate, then the tokens it takes from their logits."""

    __slots__ = ("_before", "events", "guesses", "job", "taken", "windows")

    def __init__(self, job: ExLlamaV2DynamicJob, guesses: list[int]) -> None:
        self.job = job
        self.windows = [Window(sequence, guesses, job.request.return_hidden_state) for sequence in job.sequences]
        self.events: Events = []
        self.guesses = guesses
        #: tokens sampled so far
        self.taken = 0
        self._before = job.drafts.accepted

    def begin(self) -> bool:
        """After the forward pass. False if it failed for this job."""
        for window in self.windows:
            if window.error is not None:
                return self.fail(window.error)
        self.job.drafts.drafted += len(self.guesses)
        return True

    def ask(self, at: int) -> Draw | None:
        """What the sampler needs for position `at` of the windows; None if the job fails over it, in a filter for
        example."""
        try:
            return self.job.draw(self.windows, at)
        except BaseException as error:
            self.fail(as_job_error(error))
            return None

    def take(self, at: int, sample: Sample | Exception) -> bool:
        """Accept a sample; True if the next position of the windows is worth something: the guess held."""
        if isinstance(sample, Exception):
            return self.fail(sample)
        guess = self.guesses[at] if at < len(self.guesses) else None
        self.taken += 1
        try:
            event, held = self.job.accept(sample, guess, self.windows[0], at)
        except BaseException as error:
            return self.fail(as_job_error(error))
        self.events.append(event)
        return held and not self.job.is_finished

    @property
    def held(self) -> int:
        """Guesses that held."""
        return self.job.drafts.accepted - self._before

    def settle(self) -> None:
        """The round is over for this job."""
        if self.guesses:
            held = self.held
            if held == len(self.guesses) or not self.job.is_finished:  # else guesses went unused, not wrong
                self.job.drafts.acceptance.learn(len(self.guesses), held)
        if not self.job.has_failed:
            try:
                self.job.settle()
            except BaseException as error:
                self.fail(as_job_error(error))

    def fail(self, error: Exception) -> bool:
        self.events.append(self.job.fail(error))
        return False


class Engine:
    """Moves every running job one step on. `deliver` gets all events, those of a job together, jobs in the order they
    started. `pool` runs filters while the model runs. A model on a GPU begins the next step before the host has made
    text of the last (`next_step.py`)."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        drafter: Drafter,
        max_chunk_size: int,
        deliver: Callable[[Events], None],
        pool: Callable[[], Executor] | None = None,
    ) -> None:
        self.counters = Counters()
        self._scheduler = scheduler
        self._runner = runner
        self._drafter = drafter
        self._prompts = Prompts(scheduler, runner, drafter, max_chunk_size, deliver, self.counters)
        self._deliver = deliver
        self._pool = pool
        #: the step that the last one prepared and launched
        self._next: NextStep | None = None
        #: whether no prompts are computed beside this round's step
        self._alone = True

    def forget_next_step(self) -> None:
        """The model is another: the step that was launched early is of no use."""
        self._next = None

    def step(self) -> None:
        """Schedule, run, sample, settle. If something breaks in, what was reached is kept: what a job has said is
        delivered, what has not been sampled is computed again, and finished jobs are taken out."""
        current, self._next = self._next, None
        self.counters.rounds += 1
        try:
            for job in self._scheduler.admit():
                if not job.resumed:
                    self.counters.prompt_tokens += sum(sequence.prefill_end for sequence in job.sequences)
                self._deliver(job.start())
            self._alone = not self._drafter.most or all(job.pages.prefilled for job in self._scheduler.active)
            self._prompts.step()
            self._decode(self._turns(), current)
        finally:
            self._scheduler.retire()

    def _decode(self, turns: list[Turn], current: NextStep | None) -> None:
        """One step of all these jobs; `current` is what the last step launched of it."""
        if not turns:
            return
        windows = [window for turn in turns for window in turn.windows]
        began = self._drafter.length.clock()
        try:
            if current is not None:
                windows = current.serve(windows, keep=not all(turn.job.reads_logits_once for turn in turns))
            self._runner.decode(windows)
            if not self._runner.asynchronous:
                self._measure(turns, began)
            self._sample(turns, began)
        finally:
            for turn in turns:
                turn.settle()
                self._count(turn)
                self._deliver(turn.events)

    def _count(self, turn: Turn) -> None:
        self.counters.generated_tokens += turn.taken
        if turn.guesses:
            self.counters.drafted_tokens += len(turn.guesses)
            self.counters.accepted_draft_tokens += turn.held

    def _turns(self) -> list[Turn]:
        """The jobs that are past their prompt, with what each evaluates in this round."""
        ready: list[ExLlamaV2DynamicJob] = []
        for job in list(self._scheduler.active):
            if job.is_finished or job.paused or not job.pages.prefilled:
                continue
            if not self._scheduler.extend(job):
                self._scheduler.requeue(job)
                continue
            job.times.mark_decode()
            if self._prepared(job):
                ready.append(job)
        # A hook that looks along the rows of a step may see how many there are: that must not depend on a clock.
        drafts = self._drafter.propose(ready, fixed=self._runner.hooked)
        return [Turn(job, drafts.get(job, [])) for job in ready]

    def _prepared(self, job: ExLlamaV2DynamicJob) -> bool:
        """Bring the job's settings up to date and let its filters work while the model runs; False if the job fails
        over it."""
        try:
            job.refresh()
            if self._pool is not None:
                job.prefetch(self._pool)
            return True
        except BaseException as error:
            self._deliver([job.fail(as_job_error(error))])
            return False

    def _measure(self, turns: list[Turn], began: float) -> None:
        """Tell the drafter what the step cost: until its logits were there."""
        if self._drafter.most and self._alone:
            longest = max(len(turn.guesses) for turn in turns)
            took = self._drafter.seconds + self._drafter.length.clock() - began
            self._drafter.length.record(len(turns), longest, took)

    def _sample(self, turns: list[Turn], began: float) -> None:
        """Turn logits into accepted tokens, one position of all windows after the other, while the guesses hold."""
        live = [turn for turn in turns if turn.begin()]
        expected = self._prepare_next(live)
        at = 0
        while live:
            asked = [(turn, draw) for turn in live if (draw := turn.ask(at)) is not None]
            # The tokens go straight into the next step where they are those of just its jobs.
            taken = self._next if expected and [turn for turn, _ in asked] == expected else None
            launched = launch_batch([draw for _, draw in asked], None if taken is None else taken.inputs())
            if taken is not None and launched.written:
                taken.launch()
            samples = launched.collect()
            if at == 0 and self._runner.asynchronous:
                self._measure(turns, began)  # the sampler has waited for the logits
            if expected:
                found = {turn: sample for (turn, _), sample in zip(asked, samples, strict=True)}
                self._settle_next(expected, found, launched.written)
                expected = []
            live = [turn for (turn, _), sample in zip(asked, samples, strict=True) if turn.take(at, sample)]
            at += 1

    def _prepare_next(self, turns: list[Turn]) -> list[Turn]:
        """Prepare the next step of the jobs that are not known to finish in this one, while the GPU is busy; returns
        their turns, none if there is no next step yet."""
        if not self._runner.asynchronous or not self._drafter.length.next_is_plain:
            return []
        found = [turn for turn in turns if predictable(turn.job)]
        if found:
            self._next = attempt(lambda: NextStep(self._runner, [turn.job.sequence for turn in found]))
        return found if self._next else []

    def _settle_next(self, expected: list[Turn], samples: dict[Turn, Sample | Exception], written: bool) -> None:
        """Tell the next step its tokens. Unless it was launched on them already (`written`), launch it now if a job
        needs it. A job that a stop token ends leaves its row unused."""
        assert self._next is not None
        drawn = [samples.get(turn) for turn in expected]
        tokens = [sample.token if isinstance(sample, Sample) else 0 for sample in drawn]
        self._next.know(tokens)
        if not written:
            self._next.withdraw()
        if not self._next.launched and any(
            isinstance(sample, Sample) and sample.token not in turn.job.request.stop_tokens
            for turn, sample in zip(expected, drawn, strict=True)
        ):
            self._next.run(tokens)
