"""The supervisor: starts an engine process for each model and the API workers, watches them, drains them.

It loads no model and answers no request, so it rarely fails. All its processes end with it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import shutil
import signal
import socket
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq

from exl_serve.config.load import ConfigError, reloaded
from exl_serve.config.model import ServeConfig
from exl_serve.errors import ServeError
from exl_serve.sockets import bind_for_own_user
from exl_serve.super import link
from exl_serve.super.engines import Engines
from exl_serve.super.models import CRASH_SECONDS, MAX_BACKOFF, Entry
from exl_serve.super.notify import Notifier
from exl_serve.super.registry import Metrics
from exl_serve.super.spawn import Child, describe
from exl_serve.super.stall import Patience

__all__ = ["Supervisor"]

log = logging.getLogger(__name__)

STOP_SECONDS = 10.0
TURN_MS, IDLE_MS = 200, 1000
"""Milliseconds between looks at the engines: the second while none has anything to do."""
ANSWER_SECONDS = 25.0
"""Seconds that a call which loads a model waits for the outcome."""
SHOWN = {"planning": "loading", "warming": "loading", "unloading": "draining"}


@dataclass(eq=False)
class _Worker:
    child: Child | None = None
    crashes: deque[float] = field(default_factory=deque)
    start_at: float = 0.0


@dataclass(frozen=True)
class _Waiting:
    worker: bytes
    tag: int
    id: str
    until: float


class Supervisor:
    """Serve by `run` until SIGTERM or SIGINT.

    Args:
        config: The configuration.
        announce: Called once a model is ready and the API workers know it and have read all tokenizers, so that
            requests are answered.
        reload: Reads the configuration again after SIGHUP; may raise ConfigError.
        patience: Limits after which an engine without progress is ended.

    Raises:
        ServeError: nothing can listen at the address.
    """

    def __init__(
        self,
        config: ServeConfig,
        announce: Callable[[Supervisor], None] | None = None,
        *,
        reload: Callable[[], ServeConfig] | None = None,
        patience: Patience | None = None,
    ) -> None:
        """Raises ServeError where nothing can listen at the address."""
        self._config = config
        self._announce, self._reload = announce, reload
        self._listener = listen(config)
        self._folder = Path(tempfile.mkdtemp(prefix="exl-serve-"))  # 0700
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._metrics = Metrics(config.metrics_alias == "vllm")
        self._engines = Engines(
            config, self._folder, self._metrics, time.monotonic, self._wake_write, patience or Patience()
        )
        self._workers = [_Worker() for _ in range(config.server.workers)]
        self._context: zmq.Context[Any] = zmq.Context()
        self._address = f"ipc://{self._folder}/super"
        self._known: set[bytes] = set()
        #: workers that answer requests for some model
        self._ready: set[bytes] = set()
        self._waiting: list[_Waiting] = []
        self._phase = "serving"
        self._phase_at = 0.0
        self._forced = self._announced = self._hung_up = self._told_end = False
        self._broadcast_due = True
        #: processes whose memory the metrics show
        self._sizes: set[str] = set()
        self._notifier = Notifier()
        self._notified = self._measured = 0.0

    @property
    def address(self) -> str:
        """The server's address, for people."""
        server = self._config.server
        if server.uds is not None:
            return f"unix:{server.uds}"
        host, port = self._listener.getsockname()[:2]
        scheme = "https" if server.tls_cert else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    def run(self) -> int:
        """Serve, and return the exit code: 1 if no model could be loaded at the start, else 0."""
        _check_descriptors(self._config)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        bind_for_own_user(self._socket, self._address)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        # A signal ends the wait even if it comes just before it. So does the end of a child.
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        for model in self._config.model:
            if model.preload:
                self._engines.registry.load(model.id)
        code = 0
        try:
            while not self._ended():
                for source, _ in poller.poll(self._pause()):
                    if source == self._wake_read:
                        with contextlib.suppress(BlockingIOError):
                            os.read(self._wake_read, 4096)
                    else:
                        self._receive()
                self._step(time.monotonic())
                if self._is_hopeless():
                    code = 1
                    break
        finally:
            signal.set_wakeup_fd(-1)
            self._close()
        return code

    def _pause(self) -> int:
        """Return the milliseconds after which the next turn comes, unless something happens before."""
        settled = self._phase == "serving" and not self._waiting and self._announced
        if not settled or any(worker.child is None for worker in self._workers) or not self._engines.idle:
            return TURN_MS
        interval = self._notifier.interval
        return IDLE_MS if interval is None else min(IDLE_MS, round(interval * 500))

    # ---- one turn --------------------------------------------------------------------------------------------------

    def _step(self, now: float) -> None:
        if self._hung_up:
            self._hung_up = False
            self._take_over()
        if self._phase != "serving" and not self._told_end:
            self._told_end = True
            timeout = self._config.drain.timeout
            most = "take as long as they need" if timeout < 0 else f"take {timeout:g} seconds more"
            log.info("stopping: running requests may %s; another signal (Ctrl-C) ends them at once", most)
        if self._phase != "stopping":
            for index, worker in enumerate(self._workers):
                self._watch_worker(index, worker, now)
        elif self._broadcast_due is False:
            self._reap_workers()
        self._engines.step()  # after the workers: at the start, these need the cores for a shorter time
        if self._phase == "draining" and now - self._phase_at >= self._config.drain.delay:
            self._phase, self._phase_at, self._broadcast_due = "stopping", now, True
        if self._engines.changed or self._broadcast_due:
            self._engines.changed = self._broadcast_due = False
            self._broadcast()
        self._answer_waiting(now)
        if now - self._measured >= 1.0:
            self._measured = now
            self._measure()
        self._notify(now)

    def _watch_worker(self, index: int, worker: _Worker, now: float) -> None:
        if worker.child is not None and (status := worker.child.poll()) is not None:
            log.error("API worker %d has ended with %s; its requests are cut off", index, describe(status))
            worker.child = None
            self._ready.clear()
            self._broadcast_due = True  # those that live report again
            worker.crashes.append(now)
            while worker.crashes[0] < now - CRASH_SECONDS:
                worker.crashes.popleft()
            worker.start_at = now + min(MAX_BACKOFF, 2.0 ** (len(worker.crashes) - 1))
            self._metrics.count("exl_worker_restarts_total")
        if worker.child is None and now >= worker.start_at:
            number = self._listener.fileno()
            start = link.WorkerStart(
                config=self._config,
                listener=number,
                address=self._address,
                parent=os.getpid(),
                others=bool(worker.crashes) and len(self._workers) > 1,
            )
            worker.child = Child(
                "exl_serve.api",
                msgspec.json.encode(start),
                f"worker.{index}",
                wake=self._wake_write,
                sockets=(number,),
                read_output=False,
                inherit_log=True,
            )

    def _reap_workers(self) -> None:
        for worker in self._workers:
            if worker.child is not None and worker.child.poll() is not None:
                worker.child = None

    def _measure(self) -> None:
        self._metrics.set("exl_ready", float(self._is_ready()))
        running = {f"worker {i}": w.child.rss() for i, w in enumerate(self._workers) if w.child is not None}
        sizes = running | self._engines.rss()
        for name, size in sizes.items():
            self._metrics.set("exl_process_rss_bytes", float(size), process=name)
        for name in self._sizes - sizes.keys():
            self._metrics.forget("exl_process_rss_bytes", process=name)
        self._sizes = set(sizes)

    def _is_ready(self) -> bool:
        return self._phase == "serving" and any(
            e.state == "ready" and not self._engines.is_stalled(e.config.id) for e in self._engines.entries()
        )

    def _is_hopeless(self) -> bool:
        """Whether no model was ever ready, and none will be."""
        entries = [e for e in self._engines.entries() if e.config.preload]
        if self._announced or not entries or any(e.boot > 1 and e.ready_at for e in entries):
            return False
        hopeless = all(e.state in ("failed", "unloaded") and e.error is not None and not e.retry_at for e in entries)
        if hopeless:
            for entry in entries:
                log.error("model %s cannot be served: %s", entry.config.id, entry.reason)
        return hopeless

    def _notify(self, now: float) -> None:
        started = sum(worker.child is not None for worker in self._workers)
        if not self._announced and self._ready and len(self._ready) >= started:
            self._announced = True
            self._notifier.tell(f"READY=1\nSTATUS=serving at {self.address}")
            if self._announce is not None:
                self._announce(self)
        interval = self._notifier.interval
        if interval is not None and self._announced and now - self._notified >= interval:
            self._notified = now
            if not any(self._engines.is_stalled(e.config.id) for e in self._engines.entries()):
                self._notifier.tell("WATCHDOG=1")

    # ---- signals, the end ------------------------------------------------------------------------------------------

    def _on_signal(self, number: int, _: Any) -> None:
        """Handle a signal: SIGTERM drains, SIGINT drains without delay, a second one ends at once; SIGHUP reloads."""
        if number == signal.SIGHUP:
            self._hung_up = True
        elif self._phase == "serving":
            self._phase = "draining" if number == signal.SIGTERM else "stopping"
            self._phase_at = time.monotonic()
            self._notifier.tell("STOPPING=1")
        else:
            self._forced = True
        self._broadcast_due = True
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"\0")

    def _take_over(self) -> None:
        """Apply the changes that a running server accepts; the log names the others."""
        if self._reload is None:
            log.warning("there is no configuration file to read again")
            return
        try:
            taken, restart = reloaded(self._config, self._reload())
        except ConfigError as error:
            log.error("the configuration was not read again: %s", error)
            return
        for path in restart:
            log.warning("%s has changed: that needs a restart", path)
        self._config = taken
        logging.getLogger().setLevel(taken.log.level.upper())
        self._engines.step()  # a model that has just got a request is drained, not stopped
        self._engines.replace(taken)
        self._broadcast_due = True
        log.info("the configuration was read again")

    def _ended(self) -> bool:
        if self._forced:
            return True
        return (
            self._phase == "stopping"
            and not self._broadcast_due
            and all(worker.child is None for worker in self._workers)
        )

    def _close(self) -> None:
        seconds = 0.5 if self._forced else STOP_SECONDS
        children = [worker.child for worker in self._workers if worker.child is not None]
        for child in children:
            child.terminate()
        until = time.monotonic() + seconds
        for child in children:
            child.end(until - time.monotonic())
        self._engines.stop(seconds)
        self._socket.close()
        self._context.term()
        self._listener.close()
        if self._config.server.uds is not None:
            Path(self._config.server.uds).unlink(missing_ok=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    # ---- workers' messages -----------------------------------------------------------------------------------------

    def _state(self) -> bytes:
        models = []
        for entry in self._engines.entries():
            shown = SHOWN.get(entry.state, entry.state)
            if entry.state == "failed" and entry.retry_at is not None:
                shown = "loading"
            id = entry.config.id
            if shown == "ready" and self._engines.is_stalled(id):
                shown = "stalled"
            models.append(
                link.ModelState(
                    config=entry.config,
                    state=shown,
                    address=self._engines.address(id),
                    epoch=entry.boot,
                    reason=entry.reason,
                )
            )
        return link.encode(link.State(models, self._phase, self._config))

    def _broadcast(self) -> None:
        state = self._state()
        for worker in self._known:
            self._socket.send_multipart([worker, state])

    def _receive(self) -> None:
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 2:
                continue
            worker, data = frames
            try:
                message = link.decode_report(data)
            except msgspec.MsgspecError:
                log.error("a worker sent an invalid message")
                continue
            if worker not in self._known:
                self._known.add(worker)
                self._socket.send_multipart([worker, self._state()])
            if isinstance(message, link.Report):
                self._metrics.take(message.metrics)
                self._metrics.spread(message.spreads)
                if message.ready:
                    self._ready.add(worker)
            else:
                self._call(worker, message)

    def _call(self, worker: bytes, call: link.Operator) -> None:
        try:
            found = self._operate(worker, call)
            answer = None if found is None else link.Told(call.tag, found)
        except ServeError as error:
            answer = link.Told.failed(call.tag, error)
        if answer is not None:
            self._socket.send_multipart([worker, link.encode(answer)])

    def _operate(self, worker: bytes, call: link.Operator) -> dict[str, Any] | None:
        """Return the answer of a call, or None if it comes later. Raises ServeError."""
        parameters = call.parameters
        self._engines.step()  # a model with requests is not free, not even if they came since the last turn
        if call.name == "metrics":
            return {"text": self._metrics.text()}
        registry, id = self._engines.registry, str(parameters.get("model"))
        if call.name == "load":
            # `wanted`: by a request, which unloads no recently used model.
            registry.load(id, urgent=not parameters.get("wanted"))
            self._waiting.append(_Waiting(worker, call.tag, id, time.monotonic() + ANSWER_SECONDS))
            return None
        if call.name == "unload":
            return _described(registry.unload(id, force=bool(parameters.get("force"))))
        raise ServeError.invalid(f"the supervisor knows no call {call.name!r}")

    def _answer_waiting(self, now: float) -> None:
        left = []
        for one in self._waiting:
            entry = self._engines.registry.entries.get(one.id)
            if entry is not None and now < one.until and (entry.state not in ("ready", "failed", "unloaded")):
                left.append(one)
                continue
            told = link.Told(one.tag, {} if entry is None else _described(entry))
            if entry is not None and entry.state != "ready" and entry.error is not None:
                told = link.Told.failed(one.tag, entry.error)
            self._socket.send_multipart([one.worker, link.encode(told)])
        self._waiting = left


def _described(entry: Entry) -> dict[str, Any]:
    found: dict[str, Any] = {"id": entry.config.id, "state": entry.state}
    if entry.total:
        found |= {"done": entry.done, "total": entry.total}
    return found


def _check_descriptors(config: ServeConfig) -> None:
    """Raise the limit of open files to what the connections need, or log that it is lower."""
    needed = config.server.limits.max_connections + 256
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= needed:
        return
    most = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    if most < needed:
        log.warning("%d open files are allowed (ulimit -n), %d connections need %d", most, needed - 256, needed)


def listen(config: ServeConfig) -> socket.socket:
    """Return the listening socket. Raises ServeError where nothing can listen.

    All workers share one socket. With one each (SO_REUSEPORT), the kernel would give connections to a worker that has
    ended and is not started again yet.
    """
    server = config.server
    try:
        if server.uds is not None:
            _remove_dead_socket(Path(server.uds))
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            before = os.umask(0o177)
            try:
                listener.bind(server.uds)
            finally:
                os.umask(before)
        else:
            family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted sockets have it too
            listener.bind((server.host, server.port))
        listener.listen(2048)
    except OSError as error:
        if server.uds is not None:
            place, option, param = server.uds, "--set server.uds=PATH", "uds"
        elif isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            place, option, param = f"{server.host}:{server.port}", "--host", "host"
        else:
            place, option, param = f"{server.host}:{server.port}", "--port", "port"
        reason = error.strerror or error  # that of a path that is too long has no number
        raise ServeError.invalid(f"cannot listen on {place}: {reason}; choose another with {option}", param) from error
    listener.set_inheritable(True)
    return listener


def _remove_dead_socket(path: Path) -> None:
    """Remove a socket that a server left behind and that no process listens on."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
