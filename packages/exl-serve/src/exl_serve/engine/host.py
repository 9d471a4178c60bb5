"""The engine process: one thread that runs steps of the generator and exchanges messages with workers between them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from exl_serve.config.model import Limits, ModelConfig, Qos
from exl_serve.engine import wire
from exl_serve.engine.adapters import Adapters
from exl_serve.engine.admission import SPARE_JOBS, Admission, Entry, Rates, queue_limit
from exl_serve.engine.client import ModelCard
from exl_serve.engine.compiling import Compiling
from exl_serve.engine.events import EngineEvent, Failed, Finished
from exl_serve.engine.failures import has_lost_the_gpu, serve_error
from exl_serve.engine.groups import Group, Running
from exl_serve.engine.inbox import GoneError, Inbox
from exl_serve.engine.jobs import END, FIRST, STARTED, Reader, make_job
from exl_serve.engine.operator import Operator
from exl_serve.engine.outgoing import Entry as StepEntry
from exl_serve.engine.outgoing import Outgoing
from exl_serve.engine.prompts import Prompts, prompt_tokens_of
from exl_serve.engine.resuming import Resuming
from exl_serve.engine.status import StatusWriter
from exl_serve.engine.vision import Vision
from exl_serve.errors import ServeError

if TYPE_CHECKING:
    from exl_generate import ExLlamaV2DynamicJob, StepColumns

__all__ = ["Host"]

log = logging.getLogger(__name__)

TOO_LATE = "the request's deadline has passed: allow more time, or ask for fewer tokens"
IDLE_SECONDS, BUSY_WAIT = 1.0, 0.02
STATUS_SECONDS, GREET_SECONDS = 0.1, 1.0


class Host:
    """Serve one generator at `address` until `stop`. `wake` ends a wait from another thread."""

    def __init__(
        self,
        generator: Any,
        card: ModelCard,
        address: str,
        status: StatusWriter,
        *,
        config: ModelConfig,
        limits: Limits | None = None,
        qos: Qos | None = None,
        context: zmq.Context[Any] | None = None,
        step_floor: Callable[[int], float] | None = None,
        vision: Vision | None = None,
    ) -> None:
        limits, qos = limits or Limits(), qos or Qos()
        self._generator = generator
        self._takes_images = vision is not None
        self._card = card
        self._status = status
        status.page_size = generator.page_size
        self._adapters = Adapters(generator.model, config)
        self._admission = Admission(
            queue_limit(limits.max_queued_requests, generator.max_batch_size),
            limits.max_queued_prompt_tokens,
            qos.target_ttft,
            qos.ageing,
        )
        #: least seconds of a step, by its number of jobs: for test engines
        self.step_floor = step_floor
        self._workers: dict[bytes, float] = {}
        self._groups: dict[tuple[bytes, int], Group] = {}
        self._paused: set[Group] = set()
        #: by serial number as in columns
        self._running: dict[int, Running] = {}
        #: of all of them
        self._rows = 0
        self._prompts = Prompts(generator.page_size)
        self._resuming = Resuming(generator, self._run_job)
        self._outgoing = Outgoing()
        #: no request's deadline passes before this time
        self._soonest = math.inf
        self._rates = Rates()
        self._stopping = False
        self._draining = False
        #: an error has shown that every further request would fail, so that this process has to be replaced
        self.broken = False
        self._written = self._greeted = 0.0
        self._inbox = Inbox(address, context)
        self._operator = Operator(generator, self._adapters, self._groups, self._end_cancelled, self.drain)
        self._compiling = Compiling(generator, vision, self._compiled, self.wake)

    # ---- life ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until `stop`, or until drained."""
        self._status.state = "ready"
        self._status.write()
        try:
            while not self._stopping:
                self._run_once()
        finally:
            self._close()

    def stop(self) -> None:
        """End `run`; running requests are cancelled. May be called from another thread or a signal handler."""
        self._stopping = True
        self.wake()

    def drain(self) -> None:
        """Accept no new requests; end when all are done."""
        self._draining = True
        self._status.state = "draining"
        self.wake()

    def wake(self) -> None:
        """End a wait of `run`, from any thread or a signal handler."""
        self._inbox.wake()

    def _close(self) -> None:
        for group in list(self._groups.values()):
            self._drop(group)
        self._compiling.close()
        self._inbox.close()
        self._status.close()

    def _run_once(self) -> None:
        now = time.monotonic()
        running = bool(self._running or self._resuming.waiting)
        if running and self._paused:
            running = bool(self._resuming.waiting) or any(not one.group.paused for one in self._running.values())
        # Conditions are here and not in the functions: the generator's work pushes this code out of the processor's
        # caches, so that even a call that does nothing takes time in each step.
        if not running or self._inbox.has_messages():
            for worker, data in self._inbox.receive(0.0 if running else BUSY_WAIT if self._groups else IDLE_SECONDS):
                self._take(worker, data)
        if self._compiling.made:
            self._compiling.deliver()
        if now - self._greeted >= GREET_SECONDS:
            self._forget_silent(now)
        if self._soonest != math.inf:
            self._expire(now)
        if self._admission.count:
            self._feed()
        if self._resuming.waiting:
            self._resuming.advance()
        if self._running:
            self._step()
        self._send()
        if now - self._written >= STATUS_SECONDS or not self._running:
            self._write_status(now)
        if self._draining and not self._groups:
            self._stopping = True

    # ---- messages --------------------------------------------------------------------------------------------------

    def _take(self, worker: bytes, data: bytes) -> None:
        try:
            message = wire.decode_to_engine(data)
        except wire.WireError as error:
            log.warning("a worker sent %s; its requests are cancelled", error)
            self._leave(worker)
            return
        if isinstance(message, wire.Hello):
            self._hello(worker, message)
            return
        if worker not in self._workers:
            if isinstance(message, wire.Submit | wire.Call | wire.Ping):
                refusal = ServeError.unavailable("engine_restarting", "the engine has restarted: try again")
                tag = wire.NO_REQUEST if isinstance(message, wire.Ping) else message.tag
                self._tell(worker, wire.Rejected.of(tag, refusal))
            return
        self._workers[worker] = time.monotonic()
        match message:
            case wire.Submit():
                self._submit(worker, message)
            case wire.Cancel():
                group = self._groups.get((worker, message.tag))
                if group is not None:
                    self._drop(group)
            case wire.Pause() | wire.Resume():
                self._set_paused(worker, message.tag, isinstance(message, wire.Pause))
            case wire.Call():
                self._call(worker, message)
            case wire.Goodbye():
                self._leave(worker)

    def _hello(self, worker: bytes, message: wire.Hello) -> None:
        if message.version != wire.VERSION:
            log.warning("a worker speaks version %s of the protocol, this is %s", message.version, wire.VERSION)
        else:
            self._workers[worker] = time.monotonic()
        card = wire.card_bytes(self._described())
        self._tell(worker, wire.Welcome(wire.VERSION, self._status.boot, card, str(self._status.path)))

    def _described(self) -> ModelCard:
        return msgspec.structs.replace(self._card, adapters=tuple(self._adapters.names()))

    def _leave(self, worker: bytes) -> None:
        self._workers.pop(worker, None)
        for group in [group for group in self._groups.values() if group.worker == worker]:
            self._drop(group)

    def _forget_silent(self, now: float) -> None:
        self._greeted = now
        for worker in [w for w, heard in self._workers.items() if now - heard > wire.SILENCE]:
            log.warning("a worker has been silent for %s seconds; its requests are cancelled", wire.SILENCE)
            self._leave(worker)
        # A worker whose requests are all queued or paused gets no messages, so its death would not be noticed.
        for worker in {group.worker for group in self._groups.values()}:
            self._tell(worker, wire.StepEvents([]))

    def _tell(self, worker: bytes, message: wire.ToWorker) -> None:
        try:
            self._inbox.send(worker, message)
        except wire.WireError as error:
            log.error("a message to a worker cannot be sent: %s; its requests are cancelled", error)
            self._leave(worker)
        except GoneError:
            if worker in self._workers:
                log.warning("a worker has gone; its requests are cancelled")
            self._leave(worker)

    def _send(self) -> None:
        for worker, message in self._outgoing.take():
            self._tell(worker, message)

    def _emit(self, group: Group, events: Sequence[EngineEvent]) -> None:
        self._outgoing.add(group.worker, group.tag, events)

    # ---- requests --------------------------------------------------------------------------------------------------

    def _submit(self, worker: bytes, message: wire.Submit) -> None:
        if (worker, message.tag) in self._groups:
            log.warning("a worker has used the tag of a running request again; its requests are cancelled")
            self._leave(worker)
            return
        group = Group.of(worker, message.tag, message.request)
        try:
            if self._draining:
                raise ServeError.unavailable("draining", "this engine is about to stop: try again elsewhere", 5.0)
            if not group.waiting:
                raise ServeError.invalid("a request needs at least one seed, and one completion that is not over", "n")
            group.loras = self._adapters.find(message.request.adapter)
            self._groups[worker, message.tag] = group
            if message.request.deadline is not None:
                self._soonest = min(self._soonest, message.request.deadline)
            if message.request.media and not self._takes_images:
                raise ServeError(501, "not_implemented", "unsupported", "this engine takes no images", param="messages")
            if message.request.constraints or message.request.media:
                if not group.request.again:
                    self._admission.check_room(len(self._compiling), self._rates)
                self._compiling.add(group)
            else:
                self._enter(group)
        except Exception as error:
            self._refuse(group, error)

    def _compiled(self, group: Group, error: Exception | None) -> None:
        """Queue a request whose constraints and images are ready; refuse it if they raised an error."""
        try:
            if error is not None:
                raise error
            self._enter(group)
        except Exception as found:
            self._refuse(group, found)

    def _enter(self, group: Group) -> None:
        """Put a request into the queue, once it is known that it can run. Raises ServeError."""
        request = group.request
        job = self._job(group, group.first_choice)
        self._generator.check(job)
        wall = request.deadline
        now = time.monotonic()
        entry = Entry(
            request.key,
            request.weight,
            request.priority,
            prompt_tokens_of(job),
            job.max_new_tokens * len(group.waiting),
            now,
            None if wall is None else now + wall - time.time(),
            group,
            again=request.again,
        )
        self._charge_all()
        self._admission.add(entry, now, self._rates, self._prompts.tokens)
        group.entry = entry
        group.first, group.rows = job, len(job.sequences)
        self._tell(group.worker, wire.Accepted(group.tag))

    def _job(self, group: Group, choice: int) -> ExLlamaV2DynamicJob:
        return make_job(
            group.request,
            choice,
            vocab_size=self._card.vocab_size,
            eos_ids=self._card.eos_ids,
            filters=[made.clone() for made in group.filters],
            loras=group.loras,
            embeddings=group.embeddings,
            max_seq_len=self._card.max_seq_len,
        )

    def _refuse(self, group: Group, error: Exception) -> None:
        if group.cancelled:
            return
        found = serve_error(error)
        if found.status >= 500:
            log.error("request %s failed", group.request.id, exc_info=error)
        self._drop(group)
        self._tell(group.worker, wire.Rejected.of(group.tag, found))

    def _feed(self) -> None:
        """Give the generator the requests that can start soon: all that it has rows and pages for, so that the prompts
        of requests that come together share passes.
        """
        generator = self._generator
        room: int | None = None
        while self._admission.count:
            if self._rows + len(self._resuming.waiting) >= generator.max_batch_size + SPARE_JOBS:
                return
            if (pending := generator.num_pending_jobs()) >= SPARE_JOBS:
                if pending > self._prompts.unstarted:
                    return  # jobs went back to the queue: they wait for pages
                if room is None:
                    found = generator.snapshot()
                    room = found.free_pages + found.cached_pages
                if self._prompts.pages > room:
                    return
            self._charge_all()
            entry = self._admission.pop(time.monotonic())
            if entry is None:
                return
            self._reserve(entry)
            self._start(entry.payload, entry.payload.first_choice)

    def _reserve(self, entry: Entry) -> None:
        """Charge a key for the prompt of a request that leaves the queue: the next choice has to see its cost."""
        entry.payload.reserved = entry.prompt_tokens
        self._admission.charge(entry.key, entry.weight, prompt=entry.prompt_tokens)

    def _refund(self, group: Group) -> None:
        """Take back the charge for a prompt that was not started."""
        if group.reserved:
            self._admission.charge(group.request.key, group.request.weight, prompt=-group.reserved)
            group.reserved = 0

    def _start(self, group: Group, choice: int) -> None:
        """Queue a job in the generator; first advance it over the ids of an earlier run, if there are any."""
        group.waiting.remove(choice)
        try:
            job, group.first = group.first if choice == group.first_choice else None, None
            job = self._job(group, choice) if job is None else job
            if group.request.resume and group.request.resume[choice]:
                self._resuming.add(group, choice, job)
                return
        except Exception as error:
            self._cannot_start(group, choice, error)
            return
        self._run_job(group, choice, job)

    def _run_job(self, group: Group, choice: int, job: ExLlamaV2DynamicJob, error: Exception | None = None) -> None:
        """Queue a job in the generator; or end its completion with `error`, which its preparation has raised."""
        try:
            if error is not None:
                raise error
            self._generator.enqueue(job)
        except Exception as found:
            self._generator.discard(job)
            self._cannot_start(group, choice, found)
            return
        if group.paused:
            job.pause()
        one = Running(group, choice, job, Reader(group.request, choice, self._card.vocab_size))
        group.running[choice] = self._running[one.serial] = one
        self._rows += one.rows
        self._prompts.add(one.serial, job, cached=not one.leads)

    def _cannot_start(self, group: Group, choice: int, error: Exception) -> None:
        found = serve_error(error)
        # The text of the client's own errors, such as ResumeError, holds token ids and strings of the request.
        ours = error if found.status >= 500 else None
        log.error("request %s failed: %s", group.request.id, type(error).__name__, exc_info=ours)
        self._emit(group, [Failed(choice, found.status, found.type, found.code, found.message)])
        self._ended_one(group)

    def _set_paused(self, worker: bytes, tag: int, paused: bool) -> None:
        group = self._groups.get((worker, tag))
        if group is not None:
            group.pause(paused)
            if paused:
                self._paused.add(group)
            else:
                self._paused.discard(group)

    def _drop(self, group: Group, *, forget: bool = True) -> None:
        """Cancel the rest of a request; `forget`: also its events that were not sent."""
        group.cancelled = True
        self._paused.discard(group)
        self._groups.pop((group.worker, group.tag), None)
        if group.entry is not None:
            if not self._admission.remove(group.entry):
                self._charge(group)
                self._refund(group)
                self._admission.done(group.request.key)
            group.entry = None
        self._compiling.drop(group)
        for one in list(group.running.values()):
            self._end_running(one)
            self._generator.discard(one.job)
        self._resuming.drop(group)
        group.first = None
        if forget:
            self._outgoing.forget(group.worker, group.tag)

    def _end_running(self, one: Running) -> None:
        """Forget a completion that has ended, or is to end."""
        self._outgoing.forget_running()
        self._prompts.forget(one.serial)
        self._rows -= one.rows
        del self._running[one.serial], one.group.running[one.choice]

    def _expire(self, now: float) -> None:
        """End requests whose deadline has passed."""
        for entry in self._admission.expired(now):
            entry.payload.entry = None
            self._end_late(entry.payload)
        wall = time.time()
        if wall <= self._soonest:
            return
        for group in [g for g in self._groups.values() if g.request.deadline is not None and wall > g.request.deadline]:
            if group.compiling:
                self._refuse(group, ServeError(408, "timeout", "deadline_exceeded", TOO_LATE))
            elif group.running or group.resuming:
                self._end_late(group)
        left = (group.request.deadline for group in self._groups.values())
        self._soonest = min((deadline for deadline in left if deadline is not None), default=math.inf)

    def _end_late(self, group: Group) -> None:
        for choice in group.unfinished:
            self._emit(group, [Failed(choice, 408, "timeout", "deadline_exceeded", TOO_LATE)])
        self._drop(group, forget=False)

    # ---- steps -----------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        began, status = time.monotonic(), self._status
        status.begin_step(began)
        columns: StepColumns | None = None
        try:
            columns = self._generator.iterate_columns()
        except Exception as error:
            log.exception("a step failed; its jobs are ended")
            self._fail_all()
            self._give_up_if_broken(error)
        if self.step_floor is not None:
            rest = began + self.step_floor(len(self._running)) - time.monotonic()
            if rest > 0:
                time.sleep(rest)
        status.ended = ended = time.monotonic()
        status.step_seconds += ended - began
        tokens = 0
        if columns is not None:
            tokens, others = self._outgoing.add_step(columns, self._running)
            for entry in others:
                self._deliver_more(entry)
        self._rates.steps.append((tokens, ended - began))

    def _deliver_more(self, entry: StepEntry) -> None:
        """Send an entry that holds more than tokens."""
        one, ids, text, flags, extra = entry
        group, job = one.group, one.job
        events = one.reader.read(job, ids, text, flags, extra)
        self._emit(group, events)
        if flags & STARTED:
            request, cached = group.request, job.cached_tokens * one.rows
            left = prompt_tokens_of(job) - cached
            self._prompts.computed(one.serial, left)
            prompt = left - group.reserved
            group.reserved = 0
            self._admission.charge(request.key, request.weight, prompt=prompt, cached=cached)
        if extra is not None and extra.progress is not None:
            done, total = extra.progress
            self._prompts.computed(one.serial, total - done)
        if flags & FIRST:
            self._prompts.forget(one.serial)
            self._measure_prompt(job)
        if group.waiting and one.leads and flags & (FIRST | END):
            # The prompt's pages are cached now, so the other completions find them.
            for other in list(group.waiting):
                self._start(group, other)
        if flags & END:
            self._status.preemptions += job.requeues
        if events and isinstance(last := events[-1], Finished | Failed):
            if isinstance(last, Failed) and last.status >= 500:
                error = None if extra is None or extra.end is None else extra.end.error
                log.error("request %s failed", group.request.id, exc_info=error)
                self._give_up_if_broken(error)
            self._end_running(one)
            self._ended_one(group)

    def _give_up_if_broken(self, error: BaseException | None) -> None:
        """End `run` after an error that no later request survives: health would tell of an engine that answers none."""
        if has_lost_the_gpu(error):
            log.error("the GPU can no longer be used by this process: the engine ends")
            self.broken = self._stopping = True

    def _charge(self, group: Group) -> None:
        """Charge a request's key for the tokens that it was not charged for yet."""
        self._outgoing.count()
        new, group.charged = group.generated - group.charged, group.generated
        if new:
            self._admission.charge(group.request.key, group.request.weight, generated=new * group.rows)

    def _charge_all(self) -> None:
        """Charge all keys for their tokens, before the queue compares keys: in most steps it does not."""
        for one in self._running.values():
            self._charge(one.group)

    def _ended_one(self, group: Group) -> None:
        self._charge(group)
        self._refund(group)
        if group.running or group.resuming:
            return
        if group.waiting and not group.cancelled:
            # The first has failed before its prompt was computed: start the others without it.
            self._start(group, group.waiting[0])
        elif not group.waiting:
            self._groups.pop((group.worker, group.tag), None)
            self._paused.discard(group)
            if group.entry is not None:
                self._admission.done(group.request.key)
                group.entry = None

    def _measure_prompt(self, job: ExLlamaV2DynamicJob) -> None:
        if job.time_first_prefill and job.time_first_token:
            new = prompt_tokens_of(job) - job.cached_tokens * len(job.sequences)
            self._rates.measured_prompt(new, job.time_first_token - job.time_first_prefill)

    def _fail_all(self) -> None:
        text = "the engine failed in the middle of this request; see its log for more"
        for one in list(self._running.values()):
            self._emit(one.group, [Failed(one.choice, 500, "server_error", "engine_error", text)])
            self._end_running(one)
            self._generator.discard(one.job)
            self._ended_one(one.group)

    # ---- the operator ----------------------------------------------------------------------------------------------

    def _call(self, worker: bytes, message: wire.Call) -> None:
        try:
            self._tell(worker, wire.Reply(message.tag, self._operator.answer(message.name, message.parameters)))
        except Exception as error:
            self._tell(worker, wire.Rejected.of(message.tag, serve_error(error)))

    def _end_cancelled(self, group: Group) -> None:
        """End a request that the operator cancels; its client gets an error."""
        for choice in group.unfinished:
            self._emit(group, [Failed(choice, 409, "conflict", "cancelled", "the request was cancelled")])
        self._drop(group, forget=False)

    def requests(self) -> list[dict[str, Any]]:
        """Return id, key, numbers of tokens and state of every request that the engine holds; from any thread."""
        return self._operator.requests()

    def _write_status(self, now: float) -> None:
        self._outgoing.count()
        status, found = self._status, self._generator.snapshot()
        status.counts = (
            max(0, len(self._running) - found.prefilling_jobs - found.queued_jobs),
            found.prefilling_jobs,
            self._admission.count + len(self._compiling) + found.queued_jobs,
            self._admission.queued_tokens + self._prompts.tokens,
            found.pinned_pages,
            found.cached_pages,
            found.free_pages,
        )
        status.rates = (self._rates.prefill, self._rates.decode)
        status.write()
        self._written = now
