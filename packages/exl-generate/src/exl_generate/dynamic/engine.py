"""One step of the generator: start jobs, compute prompts, decode, sample, settle."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING

from exl_filters import prefetch_together
from exl_generate.dynamic.events import Events
from exl_generate.dynamic.prelaunched_step import PrelaunchedStep, attempt, predictable
from exl_generate.dynamic.prompt_pace import PromptPace
from exl_generate.dynamic.prompts import Prompts
from exl_generate.dynamic.runner import Runner, Window
from exl_generate.dynamic.scheduler import Scheduler
from exl_generate.dynamic.snapshot import Counters
from exl_generate.dynamic.speculation import Drafter, Drafts
from exl_generate.errors import NonFiniteLogitsError
from exl_generate.interrupts import as_job_error
from exl_generate.sampling import Draw, LaunchedDraws, Sample, launch_draws
from exl_kernels.errors import DeviceError
from exl_kernels.selection import FILLED_ROWS, STEP_ROWS, is_decode_step

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from exl_generate.dynamic.job import ExLlamaV2DynamicJob

__all__ = ["Engine"]


def _filled(job: ExLlamaV2DynamicJob, guesses: list[int], length: int) -> list[int]:
    """Return the ids of a window after its first one: the guesses, then the last token up to `length` ids in all."""
    missing = length - 1 - len(guesses)
    return [*guesses, *[int(job.sequence.ids[-1])] * missing] if missing > 0 else guesses


class JobStep:
    """One job in one step: the windows that its sequences evaluate, then the tokens sampled from their logits."""

    __slots__ = ("_before", "decoder", "events", "guesses", "job", "taken", "windows")

    def __init__(self, job: ExLlamaV2DynamicJob, guesses: list[int], length: int = 0) -> None:
        """`length`: tokens that the windows are filled up to; the logits of more than the guesses are not used."""
        self.job = job
        self.decoder = job.decoder
        filled = _filled(job, guesses, length) if length else guesses
        self.windows = [Window(sequence, filled, job.request.return_hidden_state) for sequence in job.sequences]
        self.events: Events = []
        self.guesses = guesses
        #: tokens sampled so far
        self.taken = 0
        self._before = job.drafts.accepted

    def begin(self) -> bool:
        """Count the draft tokens after the forward pass. Returns False if the pass failed for this job."""
        for window in self.windows:
            if window.error is not None:
                return self.fail(window.error)
        if self.guesses:
            self.job.drafts.drafted += len(self.guesses)
        return True

    def draws(self, ahead: bool) -> list[Draw]:
        """Return the sampler's inputs for the next position of the windows and, with `ahead`, for later ones that
        need no earlier token. Empty if the job fails, for example in a filter.
        """
        try:
            guesses = self.guesses[self.taken :] if ahead else []
            return self.decoder.draws(self.windows, self.taken, self.job.sequence, guesses)
        except BaseException as error:
            self.fail(as_job_error(error))
            return []

    def accept(self, sample: Sample | Exception) -> bool:
        """Accept a sample. Returns True if the draft token held, so that the logits of the next position are valid."""
        if isinstance(sample, Exception):
            # With a DeviceError devices lost one another in the step, which is why its logits are NaN.
            return self.fail(sample, broken=isinstance(sample, NonFiniteLogitsError | DeviceError))
        at = self.taken
        guess = self.guesses[at] if at < len(self.guesses) else None
        self.taken += 1
        try:
            event, held = self.job.accept(self.decoder, sample, guess, self.windows[0], at)
        except BaseException as error:
            return self.fail(as_job_error(error))
        self.events.append(event)
        return held and not self.job.is_finished

    def predicted(self, drawn: list[int | None]) -> list[int] | None:
        """Return the tokens that the job will accept if only its stop tokens and its length can end it.

        Args:
            drawn: The tokens of its positions; None for one that could not be drawn.

        Returns:
            The tokens; [] if the job ends with them; None if that is not known.
        """
        tokens: list[int] = []
        for token, guess in zip_longest(drawn, self.guesses[: len(drawn)]):
            if token is None:
                return None
            tokens.append(token)
            if token in self.job.request.stop_tokens or len(tokens) >= self.job.remaining_tokens:
                return []
            if token != guess:
                return tokens
        return None

    @property
    def held(self) -> int:
        """Draft tokens that held."""
        return self.job.drafts.accepted - self._before

    @property
    def positions(self) -> int:
        """Positions that may be drawn: one for each draft token that is not decided, and one after them."""
        return 1 + len(self.guesses) - self.taken

    def settle(self) -> None:
        """Finish the step for this job: learn from its draft tokens and share its full pages."""
        if self.guesses:
            held = self.held
            if held == len(self.guesses) or not self.job.is_finished:  # otherwise draft tokens were unused, not wrong
                self.job.drafts.acceptance.learn(len(self.guesses), held)
        if not self.job.has_failed:
            try:
                self.job.pages.publish(self.decoder.output.held_tokens)  # no rewind can change these ids
            except BaseException as error:
                self.fail(as_job_error(error))

    def fail(self, error: Exception, *, broken: bool = False) -> bool:
        """End the job with an error, its K/V `broken` or not; returns False."""
        self.events.append(self.job.fail(error, broken=broken))
        return False


def _accepted(
    runner: Runner, launched: LaunchedDraws, places: dict[JobStep, range], samples: list[Sample | Exception]
) -> list[JobStep]:
    """Accept the samples of consecutive positions while the draft tokens of a job hold.

    Returns the jobs for which all held, so that the logits of the next position are valid. `samples` are those of the
    first positions. Most jobs need no others: only the samples that are needed are made.
    """
    held: set[JobStep] = set()
    going = list(places)
    for number in range(max(map(len, places.values()), default=0)):
        if number:
            going = [step for step in going if number < len(places[step])]
            samples = runner.explained(launched.samples([places[step][number] for step in going], with_ids=False))
        going = [step for step, sample in zip(going, samples, strict=True) if step.accept(sample)]
        if not going:
            break
        held.update(step for step in going if number + 1 == len(places[step]))
    return [step for step in places if step in held] if held else []


class Engine:
    """Run all jobs step by step.

    On a GPU the next step is launched before the host has made text of the last tokens (`prelaunched_step.py`). Three
    places launch it, which differ in when its tokens are known, and to whom:

    - `_sample`: right after the sampling, whose kernel writes the tokens into the step's inputs on the GPU. The host
      knows neither them nor whether a job ends.
    - `_prelaunch_known`: once the host has read the tokens, for a step without a captured graph, or with a row that the
      GPU did not sample after all. No step is launched for jobs that all end.
    - `_prelaunch_drafts`: once the host has read the tokens, since draft tokens follow them, but before the jobs accept
      them and make text of them. It launches after acceptance where the samples alone do not tell what jobs accept.

    Args:
        scheduler: Chooses the running jobs.
        runner: Runs the model over the cache.
        drafter: Drafts tokens.
        pace: Limits the prompt tokens of a step.
        prompt_wait: Longest time, in seconds, that a new prompt waits for others while jobs decode.
        deliver: Receives all events: those of a job together, jobs in the order they started.
        pool: Returns the executor in which filters run while the model runs.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        drafter: Drafter,
        pace: PromptPace,
        prompt_wait: float,
        deliver: Callable[[Events], None],
        pool: Callable[[], Executor] | None = None,
    ) -> None:
        self.counters = Counters()
        self._scheduler = scheduler
        self._runner = runner
        self._drafter = drafter
        self._prompts = Prompts(scheduler, runner, drafter, pace, prompt_wait, deliver, self.counters)
        self._deliver = deliver
        self._pool = pool
        self._pace = pace
        #: the next step, if the last one has prepared or launched it
        self._prelaunched: PrelaunchedStep | None = None
        #: the draft tokens of the next step and the length of its windows, if the last one has looked them up
        self._drafts: tuple[Drafts, int] | None = None
        #: when the first samples of the last step came, by the clock that measures steps
        self._collected = 0.0
        #: whether this step computes no prompts
        self._alone = True
        #: whether a step makes the tensors of its tokens, for results as dicts: one call for all jobs is cheapest
        self.makes_ids = True

    def drop_prelaunched(self) -> None:
        """Drop the prelaunched step: a module of the model was replaced.

        Its draft tokens, too: a hook that now reads hidden states must see none that a clock chose.
        """
        self._prelaunched = self._drafts = None

    def step(self) -> None:
        """Run one step. After an interrupt the next call continues.

        Events of sampled tokens are then delivered, logits that were not sampled are computed again, and finished jobs
        are removed.
        """
        current, self._prelaunched = self._prelaunched, None
        self.counters.steps += 1
        try:
            for job in self._scheduler.admit():
                if self._pool is not None:
                    attempt(partial(job.compile_ahead, self._pool))
                if not job.resumed:
                    self.counters.prompt_tokens += sum(sequence.prefill_end for sequence in job.sequences)
                self._deliver(job.start())
            active = self._scheduler.active
            waiting = [job for job in active if not (job.is_finished or job.pages.prefilled)]
            self._alone = not self._prompts.step(waiting)
            self._decode(self._job_steps(waiting, prelaunched=current is not None), current)
        finally:
            self._prompts.closed.clear()  # of jobs that do not decode in this step
            self._scheduler.retire()
            if self._pace.limited:
                self._pace.end()

    def _decode(self, steps: list[JobStep], current: PrelaunchedStep | None) -> None:
        """Decode one step of all these jobs; `current` is the prelaunched part of it."""
        if not steps:
            return
        windows = [window for step in steps for window in step.windows]
        began = self._drafter.length.clock() if self._drafter.most else 0.0
        try:
            windows = self._prompts.serve(windows)
            if current is not None:
                windows = current.serve(windows, keep=not all(step.decoder.reads_logits_once for step in steps))
            self._runner.decode(windows)
            if not self._runner.asynchronous:
                self._measure(steps, began)
            self._sample(steps, began if current is None or current.began is None else current.began)
        except BaseException:
            self._settle(steps)
            raise
        self._settle(steps, self._go_on)

    def _settle(self, steps: list[JobStep], go_on: Callable[[list[JobStep]], None] | None = None) -> None:
        """Finish the step for all jobs; `go_on` is called before the events are delivered."""
        try:
            for step in steps:
                step.settle()
            if go_on is not None:
                go_on(steps)
        finally:
            events: Events = []
            counters = self.counters
            for step in steps:
                events += step.events
                counters.generated_tokens += step.taken
                if step.guesses:
                    counters.drafted_tokens += len(step.guesses)
                    counters.accepted_draft_tokens += step.held
            self._deliver(events)

    def _job_steps(self, waiting: list[ExLlamaV2DynamicJob], prelaunched: bool) -> list[JobStep]:
        """Return the jobs whose prompts are computed, each with its draft tokens.

        `waiting`: jobs whose prompts were not computed before this step.
        """
        ready: list[ExLlamaV2DynamicJob] = []
        for job in list(self._scheduler.active):
            if job.is_finished or job.paused or (waiting and not job.pages.prefilled):
                continue
            if not self._scheduler.extend(job):
                self._scheduler.requeue(job)
                continue
            if job.times.first_token is None:
                job.times.mark_decode()
            if self._prepared(job):
                ready.append(job)
        known, self._drafts = self._drafts, None
        if known is not None:
            drafts, length = known
            return [JobStep(job, drafts.get(job, []), length if job in drafts else 0) for job in ready]
        passing = [job for job in ready if not self._prompts.has_closed(job)]  # a draft would cost the others a pass
        drafts = self._propose(passing, prelaunched)
        length = self._length(passing, drafts) if drafts else 0
        lengths = dict.fromkeys(passing, length)
        return [JobStep(job, drafts.get(job, []), lengths.get(job, 0)) for job in ready]

    def _length(self, jobs: list[ExLlamaV2DynamicJob], drafts: Drafts) -> int:
        """Return the length that the windows of these jobs are filled up to; 0 to leave them as they are.

        A hook sees no rows that were filled in. Positions of filled rows lie within the job's pages and its tokens.
        """
        if not self._runner.asynchronous or self._runner.hooked:
            return 0
        lengths = {job: 1 + len(drafts.get(job, [])) for job in jobs}
        longest = max(lengths.values())
        if longest == 1 or not is_decode_step(longest):
            return 0
        sequences = sum(len(job.sequences) for job in jobs)
        filled = longest * sequences - sum(length * len(job.sequences) for job, length in lengths.items())
        passes = len(set(lengths.values()))
        if longest * sequences > STEP_ROWS or filled > FILLED_ROWS * (passes - 1):
            return 0
        fits = all(min(job.pages.room, job.remaining_tokens - 1) >= longest - 1 for job in jobs)
        return longest if fits else 0

    def _propose(self, jobs: list[ExLlamaV2DynamicJob], prelaunched: bool = False) -> Drafts:
        if not self._drafter.most:
            return {}
        # A hook may see how many rows a step has: that must not depend on a clock.
        return self._drafter.propose(jobs, self._runner.hooked, prelaunched)

    def _prepared(self, job: ExLlamaV2DynamicJob) -> bool:
        """Refresh the job's settings and start its filters in the pool; False if the job fails."""
        try:
            decoder = job.decoder
            decoder.refresh()
            if self._pool is not None and decoder.constraints.begun_filters is not None:
                decoder.constraints.prefetch(self._pool)
            return True
        except BaseException as error:
            self._deliver([job.fail(as_job_error(error))])
            return False

    def _measure(self, steps: list[JobStep], began: float) -> None:
        """Report to the drafter how long the step took until its logits were ready."""
        if self._drafter.most and self._alone:
            each = -(-sum(len(step.guesses) for step in steps) // len(steps))
            took = self._drafter.seconds + self._drafter.length.clock() - began
            self._drafter.length.record(len(steps), each, took)

    def _sample(self, steps: list[JobStep], began: float) -> None:
        """Sample tokens from the logits, position by position over all windows, as long as the draft tokens hold."""
        live = [step for step in steps if step.begin()]
        expected = self._prepare_prelaunched(live)
        first = True
        while live:
            # On a CPU a sample costs more than asking again. The sampler's memory is planned for STEP_ROWS rows: it
            # grows with the rows of a call.
            ahead = self._runner.asynchronous and sum(step.positions for step in live) <= STEP_ROWS
            drawn: list[Draw] = []
            places: dict[JobStep, range] = {}
            for step in live:
                start = len(drawn)
                drawn += step.draws(ahead)
                if len(drawn) > start:  # otherwise the job has failed
                    places[step] = range(start, len(drawn))
            # The sampler writes the tokens into the next step if that has exactly these jobs.
            prelaunched = self._prelaunched if expected and list(places) == expected else None
            launched = launch_draws(drawn, None if prelaunched is None else prelaunched.inputs())
            if prelaunched is not None and launched.written:
                prelaunched.launch()
            launched.collect()
            if first and self._runner.asynchronous:
                self._measure(steps, began)  # the sampler has waited for the logits
            if first and self._drafter.most:
                self._collected = self._drafter.length.clock()
                if self._prelaunched is None:
                    self._prelaunch_predicted(launched, places)
                else:
                    self._prelaunched.began = self._collected
            # With draft tokens the GPU waits for the host: results then make their tensors of ids.
            with_ids = self.makes_ids and len(drawn) == len(places)
            samples = self._runner.explained(launched.samples([own[0] for own in places.values()], with_ids))
            if expected:
                self._prelaunch_known(expected, dict(zip(places, samples, strict=True)), launched.written)
            expected, first = [], False
            live = _accepted(self._runner, launched, places, samples)

    def _prepare_prelaunched(self, steps: list[JobStep]) -> list[JobStep]:
        """Prepare the next step of the jobs that are not known to finish in this step, while the GPU is busy.

        Returns those jobs; an empty list if no next step could be prepared.
        """
        if not self._runner.asynchronous or not self._drafter.length.next_is_plain:
            return []
        if any(step.guesses for step in steps):
            return []  # the number of tokens is not known: `_prelaunch_drafts` launches the next step
        found = [step for step in steps if predictable(step.job)]
        if found:
            self._prelaunched = attempt(lambda: self._prelaunched_step([step.job for step in found]))
        return found if self._prelaunched else []

    def _prelaunched_step(
        self, jobs: list[ExLlamaV2DynamicJob], windows: list[list[int]] | None = None
    ) -> PrelaunchedStep | None:
        """Prepare the next step of these jobs; None where they need several passes."""
        sequences = [sequence for job in jobs for sequence in job.sequences]
        if not self._runner.may_share_a_pass(sequences, len(sequences) * (1 if windows is None else len(windows[0]))):
            return None
        return PrelaunchedStep(self._runner, [job.sequences for job in jobs], windows)

    def _prelaunch_known(
        self, expected: list[JobStep], samples: dict[JobStep, Sample | Exception], written: bool
    ) -> None:
        """Give the prelaunched step the tokens that the host has read.

        Unless it was launched with them already (`written`), launch it now if any job needs it. The row of a job that a
        stop token ends stays unused.
        """
        assert self._prelaunched is not None
        drawn = [samples.get(step) for step in expected]
        tokens = [sample.token if isinstance(sample, Sample) else 0 for sample in drawn]
        self._prelaunched.set_tokens(tokens)
        if not written:
            self._prelaunched.withdraw()
        if not self._prelaunched.launched and any(
            isinstance(sample, Sample) and sample.token not in step.job.request.stop_tokens
            for step, sample in zip(expected, drawn, strict=True)
        ):
            self._prelaunched.launch_known()

    def _go_on(self, steps: list[JobStep]) -> None:
        """Begin the work of the next step that needs no results of other jobs."""
        if self._pool is not None:
            pool = self._pool
            stacks = [
                stack
                for step in steps
                if (stack := step.decoder.constraints.begun_filters) is not None and not step.job.is_finished
            ]
            if stacks:
                attempt(lambda: prefetch_together(stacks, pool()))
        if self._prelaunched is None and self._drafts is None and self._drafter.most:
            self._prelaunch_drafts([step.job for step in steps if not step.job.is_finished])

    def _prelaunch_predicted(self, launched: LaunchedDraws, places: dict[JobStep, range]) -> None:
        """Launch the next step for the tokens that jobs will most likely accept, as `_prelaunch_drafts`.

        What else may happen to a job, such as a stop string, leaves its row unused: `PrelaunchedStep.serve` compares.
        """
        if not self._runner.asynchronous:
            return
        predicted: Drafts = {}
        for step, own in places.items():
            tokens = step.predicted([launched.token(at) for at in own])
            if tokens is None:
                return
            if tokens:
                predicted[step.job] = tokens
        extended: Drafts = {}
        try:
            for job, tokens in predicted.items():
                extended[job] = tokens
                job.pages.extend(tokens)
            self._prelaunch_drafts(list(predicted))
        finally:
            for job, tokens in extended.items():
                job.pages.shorten(len(tokens))

    def _prelaunch_drafts(self, jobs: list[ExLlamaV2DynamicJob]) -> None:
        """Look up draft tokens for these jobs and launch the next step, before results of this one are delivered."""
        if not jobs or not self._runner.asynchronous:
            return
        if not all(not job.paused and predictable(job, missing=0) for job in jobs):
            return
        found = attempt(lambda: self._propose(jobs))
        if found is None:
            return
        drafts = {job: found.get(job, []) for job in jobs}
        length = self._length(jobs, drafts)
        self._drafts = drafts, length
        windows = [[int(job.sequence.ids[-1]), *_filled(job, drafts[job], length)] for job in jobs]
        if len({len(window) for window in windows}) == 1:
            self._prelaunched = attempt(lambda: self._prelaunched_step(jobs, windows))
            if self._prelaunched is not None:
                self._prelaunched.began = self._collected + self._drafter.seconds  # `_measure` adds them
                self._prelaunched.launch_known()
