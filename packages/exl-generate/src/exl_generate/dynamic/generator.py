"""`ExLlamaV2DynamicGenerator`: continuous batching over a paged cache."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from exl_generate.contracts import TokenizerOf
from exl_generate.dynamic.cache_owner import OtherWrites, owning
from exl_generate.dynamic.columns import StepColumns, check_columns, columns_of
from exl_generate.dynamic.completion import Completions, build_jobs, reusable
from exl_generate.dynamic.context import JobContext
from exl_generate.dynamic.draft_length import FixedDraftLength
from exl_generate.dynamic.draft_model import ModelDrafter
from exl_generate.dynamic.engine import Engine
from exl_generate.dynamic.events import Events
from exl_generate.dynamic.job import ExLlamaV2DynamicJob
from exl_generate.dynamic.limits import (
    Limits,
    check_drafting,
    check_history,
    check_pace,
    check_part,
    check_tokens,
    check_wait,
)
from exl_generate.dynamic.outbox import Outbox
from exl_generate.dynamic.page_views import PageViews
from exl_generate.dynamic.pages import PAGED_PAGE_SIZE, PageTable
from exl_generate.dynamic.parameters import adapters_of, check_abort_event, count_of
from exl_generate.dynamic.prompt_pace import PromptPace
from exl_generate.dynamic.results import Result, dict_of, dicts_of
from exl_generate.dynamic.runner import Runner
from exl_generate.dynamic.scheduler import Scheduler
from exl_generate.dynamic.snapshot import GeneratorSnapshot, snapshot_of
from exl_generate.dynamic.speculation import Drafter
from exl_generate.dynamic.text_drafter import TextDrafter
from exl_generate.dynamic.workers import filter_pool
from exl_generate.errors import JobStateError, RequestError
from exl_generate.interrupts import defer_sigint
from exl_generate.sampling import Settings

if TYPE_CHECKING:
    from exl_generate.contracts import Cache, Model, OwnModel, OwnTokenizer, RequestAdapter, Tokenizer

__all__ = ["ExLlamaV2DynamicGenerator"]

T = TypeVar("T")

#: Longest wait, in seconds, for the end of a step whose jobs have all been discarded.
LAST_ITERATION = 120.0


class ExLlamaV2DynamicGenerator(PageViews):
    """Run any number of jobs over one model and one cache, whose length all jobs share.

    A job's tokens depend on model, prompt, settings and seed alone: not on other jobs, chunk sizes or cached content.
    (On CUDA, prompts of more than `model.invariant_tokens()` tokens share passes that may change their last bits.) A
    job that fails ends with its own last result (`eos_reason` "error", "filter_error" or "filter_dead_end", with
    `exception`) and disturbs no other. `enqueue`, `cancel`, `iterate` and `generate` may be called from any thread; one
    call works at a time.

    The generator owns its caches while its jobs are queued or running: until they have ended, `enqueue` of another
    generator on the same cache raises `JobStateError`. Generators may take turns, but each change of owner drops the
    cached prefixes. So does a `model.forward` of your own that writes into a cache; it ends running jobs with
    `JobStateError`. Call `reset_page_table` after a paged pass of your own.

    A Ctrl-C is raised at the end of the step. No token is lost or doubled, however many arrive: the next call resumes.
    From the second one on they also interrupt a filter or hook, which ends its job, and a forward pass on the CPU,
    which the next call repeats.

    Args:
        model: a loaded model.
        cache: a cache of the model with `batch_size` 1. Its `max_seq_len`, the tokens that all jobs share, is a
            multiple of 256.
        tokenizer: the model's tokenizer.
        max_batch_size: most sequences in a step; None means `config.max_input_len // max_q_size`.
        max_seq_len: most tokens of a sequence; None means the model's `config.max_seq_len`.
        max_chunk_size: most prompt tokens computed in a step, for all jobs together; a multiple of 256. None means
            `config.max_input_len`.
        max_q_size: most positions of a sequence in a decode step: its last token and its draft tokens.
        draft_model: a smaller model with the same vocabulary, for speculative decoding; needs `draft_cache`.
        draft_cache: a cache of the draft model with the size of `cache`.
        num_draft_tokens: most draft tokens of a sequence in a step, below `max_q_size`.
        use_ngram_draft: draft from n-grams of the sequence itself; excludes `draft_model`.
        max_ngram: longest n-gram, at least 2: a guess depends on at most `max_ngram` - 1 tokens before it.
        max_sampling_threads: accepted for exllamav2's sake, without effect: one native call samples all tokens of a
            step.
        min_sampling_threads: as `max_sampling_threads`.
        paged: False means one page for the whole cache and one sequence at a time.
        filter_background_eval: let slow filters compute in threads while the model runs.
        page_size: tokens of a page, for tests and tuning.
        shared_ngram_tokens: with `use_ngram_draft`, draft also from so many tokens of the answers to earlier jobs,
            about 100 bytes each. It changes speed only. Jobs with a `cache_salt` are left out.
        target_step_seconds: while jobs decode, a step computes only as many prompt tokens as keep it this short,
            judged by the time of earlier steps: whole pages or, if it helps, a half or a quarter of one, at most
            `max_chunk_size` tokens. Not while hooks of the caller read hidden states: they see how a prompt is cut.
            None means `max_chunk_size` tokens always; a model in lockstep (`load_tp` with a process for each device)
            takes nothing else.
        prompt_wait_seconds: while jobs decode, a new prompt waits up to so long for others, so that one pass computes
            them together. It goes earlier with a full pass, or when waiting gains nothing. First tokens come later by
            at most this time, and running jobs stall less often. 0 lets no prompt wait; a model in lockstep takes
            nothing else.

    Raises:
        RequestError: a parameter is out of its range, or parts do not belong together.
        CapacityError: the cache's length is no multiple of the page size.
    """

    #: whether `iterate` raises the error of a job that failed instead of returning it in the job's last result
    raises_job_errors = False

    def __init__(
        self,
        model: Model,
        cache: Cache,
        tokenizer: Tokenizer,
        max_batch_size: int | None = None,
        max_seq_len: int | None = None,
        max_chunk_size: int | None = None,
        max_q_size: int = 8,
        draft_model: Model | None = None,
        draft_cache: Cache | None = None,
        num_draft_tokens: int = 4,
        use_ngram_draft: bool = False,
        max_ngram: int = 4,
        max_sampling_threads: int = 16,
        min_sampling_threads: int = 3,
        paged: bool = True,
        filter_background_eval: bool = True,
        *,
        page_size: int = PAGED_PAGE_SIZE,
        shared_ngram_tokens: int = 0,
        target_step_seconds: float | None = None,
        prompt_wait_seconds: float = 0.0,
    ) -> None:
        check_part("tokenizer", tokenizer, TokenizerOf)
        count_of("max_sampling_threads", max_sampling_threads)
        count_of("min_sampling_threads", min_sampling_threads)
        limits = Limits.resolve(
            model,
            cache,
            max_batch_size=max_batch_size,
            max_seq_len=max_seq_len,
            max_chunk_size=max_chunk_size,
            max_q_size=max_q_size,
            paged=paged,
            page_size=page_size,
        )
        drafts = num_draft_tokens if draft_model is not None or use_ngram_draft else 0
        check_drafting(
            model,
            cache,
            draft_model=draft_model,
            draft_cache=draft_cache,
            use_ngram=use_ngram_draft,
            num_draft_tokens=drafts,
            max_ngram=max_ngram,
            max_q_size=max_q_size,
        )
        check_history(shared_ngram_tokens, use_ngram_draft)
        check_pace(model, target_step_seconds)
        check_wait(model, prompt_wait_seconds)
        # The parts belong together, as the caller says; model and tokenizer check what they are given.
        self.model, self.cache, self.tokenizer = cast("OwnModel", model), cache, cast("OwnTokenizer", tokenizer)
        self.draft_model, self.draft_cache = cast("OwnModel | None", draft_model), draft_cache
        self.page_size, self.max_pages = limits.page_size, limits.num_pages
        self.max_total_tokens = limits.num_pages * limits.page_size
        self.max_batch_size, self.max_seq_len = limits.max_batch_size, limits.max_seq_len
        self.max_chunk_size, self.max_q_size = limits.max_chunk_size, max_q_size
        self.num_draft_tokens, self.use_ngram_draft, self.max_ngram = drafts, use_ngram_draft, max_ngram
        self.max_sampling_threads, self.min_sampling_threads = max_sampling_threads, min_sampling_threads
        self.paged, self.filter_background_eval = paged, filter_background_eval
        #: whether another generator that takes the cache ends this one's jobs; otherwise it is rejected
        self.yields_cache = False
        self.page_table = PageTable(limits.num_pages, limits.page_size)
        self.drafter = drafter = self._make_drafter(shared_ngram_tokens)
        self.job_serial = 0
        # None of these may refer to this object: an unused generator must be freed at once.
        self._context = JobContext(model, cache, tokenizer, self.page_table, drafts, drafter.new_acceptance)
        self._scheduler = Scheduler(self._context, limits.max_batch_size, limits.max_seq_len)
        self._outbox = Outbox()
        self._caches = [cache] if draft_cache is None else [cache, draft_cache]
        self._other_writes = OtherWrites(self._caches)
        runner, pool = Runner(self.model, cache, limits.page_size), filter_pool if filter_background_eval else None
        pace = PromptPace(target_step_seconds, limits.max_chunk_size, limits.page_size)
        deliver = self._outbox.deliver
        self._engine = Engine(self._scheduler, runner, drafter, pace, prompt_wait_seconds, deliver, pool)
        self._in_step = self._by_columns = False
        #: jobs that `discard` has marked and that are still to be taken out; appended to without the lock
        self._discards: deque[ExLlamaV2DynamicJob] = deque()
        self._lock, self._submitting = threading.RLock(), threading.Lock()

    def __repr__(self) -> str:
        used = self.max_pages - self.page_table.unreferenced
        drafts = f", up to {self.num_draft_tokens} draft tokens" if self.num_draft_tokens else ""
        return (
            f"{type(self).__name__}({self.num_active_jobs()} active and {self.num_pending_jobs()} pending jobs, "
            f"{used} of {self.max_pages} pages of {self.page_size} tokens in use{drafts})"
        )

    # ---- jobs ------------------------------------------------------------------------------------------------------

    def enqueue(self, job: ExLlamaV2DynamicJob | Sequence[ExLlamaV2DynamicJob]) -> int | list[int]:
        """Queue one job or several; returns the serial number(s).

        Either all jobs are queued or, if one is rejected, none. A job that has a `serial_number` is queued, also when a
        Ctrl-C interrupts this call. Raises `RequestError`, `CapacityError` or `JobStateError`.
        """
        if isinstance(job, ExLlamaV2DynamicJob):
            return self._enqueue([job])[0]
        if not isinstance(job, Iterable):
            raise RequestError(f"enqueue takes jobs, not {type(job).__name__}; build an ExLlamaV2DynamicJob")
        return self._enqueue(list(job))

    def check(self, job: ExLlamaV2DynamicJob) -> None:
        """Raise the error of `enqueue` for a job that can never run here; queues nothing.

        May be called from any thread.
        """
        self._check(job)
        self._scheduler.check(job)

    def prepare(self, job: ExLlamaV2DynamicJob, ids: int = 64) -> bool:
        """Do part of the work of `enqueue` beforehand: advance filters and text over `ids` further ids of
        `resume_from`.

        Returns whether `enqueue` has no such work left. For callers whose running jobs must not wait for a long
        `resume_from`: `enqueue` alone advances over all of it. A job that is prepared and then given up must be
        discarded. Raises `RequestError`, `JobStateError`, `FilterError`, or `ResumeError` for an id that the job would
        not have produced.
        """
        with self._submitting:
            if not job.is_prepared:
                self._check(job)
            return job.prepare(self._context, ids)

    def cancel(self, job: ExLlamaV2DynamicJob) -> None:
        """End a job in any phase. A job that is unknown or finished is ignored.

        Its last result (`eos_reason` "cancelled") comes with the next `iterate()`.
        Raises RequestError if `job` is no job.
        """
        if not isinstance(job, ExLlamaV2DynamicJob):
            raise RequestError(f"cancel takes a job, not {type(job).__name__}")
        with defer_sigint() as section, section.holding(self._lock):
            owned = job in self._scheduler.active or self._scheduler.holds(job)
            if job.serial_number is not None and not job.is_finished and owned:
                self._outbox.deliver([job.cancelled()])
                self._drop(job)

    def discard(self, job: ExLlamaV2DynamicJob) -> None:
        """End a job without any further result, and without waiting for an iteration in another thread.

        The job counts as gone at once. Its pages are free when this returns or, if an iteration is running, before the
        next job is admitted. A job that was only prepared drops its work. One that is unknown or finished is ignored.
        Raises RequestError if `job` is no job.
        """
        if not isinstance(job, ExLlamaV2DynamicJob):
            raise RequestError(f"discard takes a job, not {type(job).__name__}")
        with defer_sigint():
            if job.is_prepared:
                job.undo_attach()
            if job.serial_number is not None and not job.is_finished:
                job.discarded = True
            self.discard_soon(job)
            if self._lock.acquire(blocking=False):
                try:
                    self._drop_discarded()
                finally:
                    self._lock.release()

    def discard_soon(self, job: ExLlamaV2DynamicJob) -> None:
        """Discard a job as `discard` does, but count it until the next iteration removes it. Takes no lock: for
        finalizers.
        """
        if job.serial_number is not None and not job.is_finished:
            self._discards.append(job)

    def clear_queue(self) -> None:
        """Drop every job, queued or running, without results.

        A `generate()` in another thread then raises `JobStateError`.
        """
        with defer_sigint() as section, section.holding(self._lock):
            for job in [*self._scheduler.pending, *self._scheduler.active]:
                self._drop(job)
            self._outbox.clear()
            self._discards.clear()

    def num_remaining_jobs(self) -> int:
        """Return the number of jobs that are queued or running, or whose last result is still to be returned.

        A result waits after a Ctrl-C in the last step, or after `cancel`.
        """
        waiting = self.num_pending_jobs()
        active = set(self._scheduler.active)  # before the outbox: what ends meanwhile is found there
        ended = {event.job for event in tuple(self._outbox.events) if event.job.is_finished}
        return waiting + sum(not job.discarded for job in active | ended)

    @property
    def has_work(self) -> bool:
        """Whether `iterate` has anything to do: jobs, results to return, or discarded jobs to take out."""
        return bool(self._discards or self._scheduler.num_pending or self._scheduler.active or self._outbox.events)

    def num_pending_jobs(self) -> int:
        """Return the number of jobs that wait in the queue."""
        # Counted, not gone through, where nothing is discarded: loops ask every step.
        return len(self.pending_jobs) if self._discards else self._scheduler.num_pending

    def num_active_jobs(self) -> int:
        """Return the number of jobs that have started and not ended."""
        return len(self.active_jobs)

    def snapshot(self) -> GeneratorSnapshot:
        """Return counts of jobs, pages and tokens, for health checks and schedulers.

        Takes no lock and reads no page; may be called from any thread, also while a step runs.
        """
        return snapshot_of(self._scheduler, self._engine.counters)

    @property
    def pending_jobs(self) -> list[ExLlamaV2DynamicJob]:
        """A copy of the jobs that wait in the queue, in order."""
        return [job for job in self._scheduler.pending if not job.discarded]

    @property
    def active_jobs(self) -> list[ExLlamaV2DynamicJob]:
        """A copy of the jobs that have started and not ended."""
        return [job for job in self._scheduler.active if not job.discarded]

    def iterate(self) -> list[Result]:
        """Run one step: start jobs, prefill, decode. Returns all results since the last call; [] if idle.

        `ExLlamaV2DynamicJob` documents the results. A Ctrl-C during the step is raised at its end, and the results come
        with the next call. Any other failure ends the job that it belongs to. With `raises_job_errors` the error of
        such a job is raised, one a call; the results of other jobs come with the next call.
        """
        self._by_columns = False
        return self._run_step(dicts_of)

    def iterate_columns(self) -> StepColumns:
        """Run one step as `iterate` does, and return the results as parallel arrays.

        For servers, which pass on ids and text of many jobs. Errors of jobs are in `StepColumns.extra`. Calls of
        `iterate` and `iterate_columns` may alternate.

        Raises `RequestError`, before anything happens, if a queued or running job has asked for hidden states, which
        columns do not hold. From the first call on, `enqueue` rejects such jobs.
        """
        if not self._by_columns:
            with self._submitting, self._lock:
                for job in [
                    *self._scheduler.pending,
                    *self._scheduler.active,
                    *(event.job for event in self._outbox.events),
                ]:
                    if not self._outbox.is_redirected(job):
                        check_columns(job)
                self._by_columns = True
        return self._run_step(columns_of)

    def _run_step(self, write: Callable[[Events], T]) -> T:
        """Run one step and return all events since the last one, as `write` writes them."""
        taken: Events = []
        try:
            with defer_sigint() as section:
                with section.holding(self._lock):
                    self._step()
                section.deliver()
                with section.holding(self._lock):
                    taken = self._outbox.take(self.raises_job_errors and not self._by_columns)
                return write(taken)
        except BaseException:
            # A Ctrl-C at the section's end loses nothing: Python checks for signals at calls, jumps back and entries
            # only. None of them is between here and the list, or between the section and the caller.
            self._outbox.events[:0] = taken
            raise

    def generate(
        self,
        prompt: str | tuple[str, str] | list[str] | list[tuple[str, str]],
        max_new_tokens: int,
        min_new_tokens: int = 0,
        seed: int | None = None,
        gen_settings: Settings | list[Settings] | None = None,
        token_healing: bool = False,
        encode_special_tokens: bool = False,
        decode_special_tokens: bool = False,
        stop_conditions: Iterable[int | str] | None = None,
        add_bos: bool = False,
        abort_event: threading.Event | None = None,
        completion_only: bool = False,
        filters: list[Any] | None = None,
        filter_prefer_eos: bool = False,
        return_last_results: bool = False,
        embeddings: list[Any] | None = None,
        banned_strings: Iterable[str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Complete one prompt (str) or several (list). Returns str or list of str, in the order of the prompts.

        Other jobs in the queue run along and keep their results for `iterate()`. A job's own error is raised once all
        prompts are done; with `return_last_results` it is in that prompt's result.

        Args:
            prompt: A text, a pair of texts (positive, negative) for CFG, or a list of these.
            max_new_tokens: Most tokens of each completion.
            min_new_tokens: Stop tokens are avoided until so many tokens were sampled.
            seed: Prompt i uses `seed` + i. None draws a seed from the operating system.
            gen_settings: Sampler settings, or a list with one entry per prompt.
            token_healing: Sample the last token of the prompt again, among tokens that begin with its text.
            encode_special_tokens: Special tokens in a prompt's text become their ids.
            decode_special_tokens: Special tokens have their text in the completion.
            stop_conditions: Token ids and strings that end a completion. None: only the limit ends it.
            add_bos: Put the BOS token in front of each prompt.
            abort_event: When it is set, the jobs are cancelled and None is returned.
            completion_only: Leave the prompt out of the returned text.
            filters: Filters of all prompts (one prompt: a list of filters), or one list of filters per prompt.
            filter_prefer_eos: Choose a stop token as soon as the filters allow one.
            return_last_results: Return (completions, last result dicts).
            embeddings: `ExLlamaV2MMEmbedding` objects whose `text_alias` the prompts hold, or one list per prompt.
            banned_strings: Strings that must not be generated.
            **kwargs: Further parameters of the jobs (`max_skips`, `return_probs`, ...).

        Raises:
            RequestError: a parameter is not valid.
            CapacityError: a prompt does not fit.
        """
        check_abort_event(abort_event)
        jobs = build_jobs(
            self.tokenizer,
            prompt,
            gen_settings=gen_settings,
            filters=filters,
            embeddings=embeddings,
            seed=seed,
            encode_special_tokens=encode_special_tokens,
            add_bos=add_bos,
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens,
            token_healing=token_healing,
            decode_special_tokens=decode_special_tokens,
            stop_conditions=reusable("stop_conditions", stop_conditions),
            filter_prefer_eos=filter_prefer_eos,
            banned_strings=reusable("banned_strings", banned_strings),
            **kwargs,
        )
        completions = Completions(prompt, jobs, completion_only)
        if not self._run_to_end(jobs, completions.take, abort_event):
            return None
        return completions.answer(return_last_results)

    # ---- upkeep ----------------------------------------------------------------------------------------------------

    def warmup(self) -> None:
        """Generate 32 tokens, so that lazily built state exists, and forget them."""
        limit = min(32, self.max_seq_len // 2, self.max_total_tokens // 2)
        self.generate("Once upon a time,", max_new_tokens=limit, add_bos=True)
        self.reset_page_table()

    def reset_page_table(self) -> None:
        """Forget all cached content. Raises `JobStateError` while jobs are running."""
        with defer_sigint() as section, section.holding(self._lock):
            self._drop_discarded()
            if self._scheduler.active:
                raise JobStateError(f"{len(self._scheduler.active)} jobs are running; finish or cancel them first")
            self.page_table.reset()

    def set_loras(self, loras: object) -> None:
        """Set the adapters of all jobs enqueued from now on that name none. `loras` is None, one adapter, or a list.

        Jobs that are queued or running keep theirs, so the generator need not be idle.
        """
        self._context.current_loras = list(adapters_of(loras) or ())

    def defrag_cache(self) -> None:
        """Do nothing: attention reads pages in any order at the same speed, and no result depends on the order."""

    def namespace_of(self, loras: Sequence[RequestAdapter]) -> bytes:
        """Return the digest of everything but the tokens that decides the content of cached pages, 16 bytes.

        `loras` are the job's adapters. The digest is equal in every process with the same model, settings, adapters,
        cache format and kind of device.
        """
        return self._context.namespace_of(loras)

    @property
    def padded_vocab_size(self) -> int:
        """Columns of the logits: the vocabulary rounded up to a multiple of 32."""
        return self._context.padded_vocab_size

    @property
    def current_loras(self) -> list[RequestAdapter]:
        """Adapters of jobs that name none of their own; `set_loras` sets them."""
        return self._context.current_loras

    @property
    def arrangements(self) -> int:
        """Number of replacements of the model's modules, `Intervention`s included, since this generator was made."""
        return self._context.arrangements

    def leave_caches(self) -> None:
        """Release the caches, for `cache_owner`: another generator queues jobs on one of them.

        Raises `JobStateError` if this generator has jobs.
        """
        if not self._lock.acquire(timeout=0 if self.num_remaining_jobs() else LAST_ITERATION):
            raise JobStateError("another generator works in this cache just now, in another thread; wait for it")
        try:
            self._drop_discarded()
            jobs = [*self._scheduler.pending, *self._scheduler.active]
            if jobs and (self._in_step or not self.yields_cache):
                raise JobStateError(
                    f"another generator has {len(jobs)} jobs in this cache; let them end or cancel them first, or make "
                    "a cache for each generator"
                )
            self._fail_all(jobs, "another generator has taken the cache; begin again")
        finally:
            self._lock.release()

    def forget_pages(self) -> None:
        """Forget all pages, for `cache_owner`: another generator has written into a cache while this one had no
        jobs.
        """
        with self._lock:
            self.page_table.reset()

    # ---- internals -------------------------------------------------------------------------------------------------

    def _make_drafter(self, history: int) -> Drafter:
        made = self._chosen_drafter(history)
        if self.model.in_lockstep:  # each process would measure other times
            made.length = FixedDraftLength(made.most)
        return made

    def _chosen_drafter(self, history: int) -> Drafter:
        if self.use_ngram_draft:
            device, capacity = self.model.device, 2 * self.max_seq_len
            return TextDrafter(self.num_draft_tokens, self.max_ngram, capacity, device, history)
        if self.draft_model is None or self.draft_cache is None:
            return Drafter()
        runner = Runner(self.draft_model, self.draft_cache, self.page_size, draft=True)
        vocab_size, budget = self.model.config.vocab_size, min(512, self.max_chunk_size)
        return ModelDrafter(runner, self.page_table, self.num_draft_tokens, vocab_size, budget)

    def _enqueue(self, jobs: list[ExLlamaV2DynamicJob], sink: Events | None = None) -> list[int]:
        """Check and queue; does not wait for a step that runs in another thread."""
        with defer_sigint() as section, section.holding(self._submitting):
            for job in jobs:
                self._check(job)
                if self._by_columns and sink is None:
                    check_columns(job)
            if len(set(jobs)) != len(jobs):
                raise JobStateError("the list holds the same job twice; a job is used once, so build a second one")
            attached: list[ExLlamaV2DynamicJob] = []
            try:
                for serial, job in enumerate(jobs, self.job_serial):
                    attached.append(job)
                    job.attach(self._context, serial)
                    self._scheduler.check(job)
                section.deliver()
                with owning(self, self._caches):
                    self.job_serial += len(jobs)
                    if sink is not None:
                        self._outbox.redirect(jobs, sink)
                    self._scheduler.add(jobs)
            except BaseException:
                for job in attached:
                    job.undo_attach()
                raise
            return [job.serial_number for job in jobs if job.serial_number is not None]

    def _check(self, job: ExLlamaV2DynamicJob) -> None:
        if not isinstance(job, ExLlamaV2DynamicJob):
            raise RequestError(f"enqueue takes jobs, not {type(job).__name__}; build an ExLlamaV2DynamicJob")
        if job.serial_number is not None:
            raise JobStateError(
                f"job {job.serial_number} has been enqueued before; a job is used once, so build a new one"
            )
        check_tokens(job, self.model, self.tokenizer)

    def _step(self) -> None:
        if self._discards:
            self._drop_discarded()
        if not self._in_step and self._other_writes.any_new():
            self._lose_pages()
        was, self._in_step = self._in_step, True
        try:
            if self._context.update_arrangement():
                self._engine.drop_prelaunched()
                for job in self._scheduler.active:
                    job.pages.make_private(self._context, job.serial_number)
            self._engine.makes_ids = not self._by_columns
            self._engine.step()
        finally:
            self._in_step = was
            if self._discards:
                self._drop_discarded()

    def _lose_pages(self) -> None:
        """End the running jobs and forget all pages: a pass of the caller has written into a cache."""
        self._engine.drop_prelaunched()
        self._fail_all(
            [*self._scheduler.active],
            "a pass outside the generator, such as model.forward, has written into its cache while the job ran; "
            "enqueue a new job, and give such passes a cache of their own",
        )
        self.page_table.reset()

    def _fail_all(self, jobs: Iterable[ExLlamaV2DynamicJob], why: str) -> None:
        """End jobs with a `JobStateError` each."""
        for job in jobs:
            self._outbox.deliver([job.fail(JobStateError(why))])
            self._drop(job)

    def _drop_discarded(self) -> None:
        """Remove the jobs that `discard` has marked. A running step does so at its end."""
        while self._discards and not self._in_step:
            self._drop(self._discards[0])
            self._discards.popleft()

    def _drop(self, job: ExLlamaV2DynamicJob) -> None:
        job.is_finished = True
        if job in self._scheduler.active:
            self._scheduler.retire()
        elif self._scheduler.remove(job):
            job.detach()

    def _run_to_end(
        self,
        jobs: list[ExLlamaV2DynamicJob],
        take: Callable[[Result], None],
        abort_event: threading.Event | None,
    ) -> bool:
        """Run until these jobs are done, and pass their last results to `take`. Returns False if aborted.

        Afterwards none of the jobs is in the queue, whatever happened.
        """
        sink: Events = []
        # From the first to the last, so that nothing comes between a failure and the end.
        with defer_sigint() as section:
            try:
                self._enqueue(jobs, sink)
                while not all(job.is_finished for job in jobs):
                    if abort_event is not None and abort_event.is_set():
                        return False  # an event that is set when the last token is there already takes nothing away
                    with section.holding(self._lock):
                        self._step()
                        self._hand_over(sink, take)
                    section.deliver()
                with section.holding(self._lock):  # a step of another thread may have ended the last of them
                    self._hand_over(sink, take)
                return True
            finally:
                with self._lock:
                    for job in jobs:
                        queued = self._outbox.end_redirect(job)
                        if queued and not job.is_finished:
                            self._drop(job)

    def _hand_over(self, sink: Events, take: Callable[[Result], None]) -> None:
        for event in sink:
            if event.ending is not None:
                take(dict_of(event))
        sink.clear()
