"""Run the engine processes of a supervisor, as the registry of models requests."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from exl_serve.config.model import ModelConfig, ServeConfig
from exl_serve.engine.client import EngineStatus
from exl_serve.engine.status import HalfWrittenError, StatusReader, status_path
from exl_serve.errors import ServeError
from exl_serve.super.models import Action, Entry, Registry
from exl_serve.super.registry import Metrics
from exl_serve.super.spawn import Child, describe
from exl_serve.super.stall import Patience, Watch

__all__ = ["STATES", "Engines"]

log = logging.getLogger(__name__)

STATES = ("unloaded", "planning", "loading", "warming", "ready", "draining", "unloading", "failed")
SETTLED = ("unloaded", "ready", "failed")
DRAIN_SECONDS = 1.0
"""Seconds that a draining engine must have been idle; the workers know its state by then."""
STOP_SECONDS = 10.0


@dataclass(eq=False)
class _Process:
    child: Child
    watch: Watch
    #: it has said that it serves, so there is a status page
    serves: bool = False
    reader: StatusReader | None = None
    #: as last read
    status: EngineStatus | None = None
    stalled: bool = False
    #: until when it must have ended by itself
    until: float | None = None
    idle_since: float | None = None
    plan: bytes = field(default=b"")

    @property
    def idle(self) -> bool:
        """Whether it serves and has no requests."""
        return self.reader is not None and self.idle_since is not None and self.until is None and not self.stalled


class Engines:
    """The engine processes. Call `step` regularly, and when `wake` was written to; `changed` is set when states
    change.
    """

    def __init__(
        self,
        config: ServeConfig,
        folder: Path,
        metrics: Metrics,
        clock: Callable[[], float],
        wake: int,
        patience: Patience,
    ) -> None:
        self.config = config
        self._folder, self._metrics, self._clock, self._wake, self._patience = folder, metrics, clock, wake, patience
        self.registry = Registry(clock, config.memory.budget, self._on_change)
        self.changed = True
        #: whether processes are started and restarted
        self.running = True
        self._processes: dict[str, _Process] = {}
        self._planning: dict[str, Child] = {}
        self._numbers: dict[str, int] = {}
        #: by model: what the log has said last
        self._said: dict[str, tuple[str, int, str]] = {}
        for model in config.model:
            self.registry.add(model)

    def address(self, id: str) -> str:
        """Return the address of a model's engine."""
        return f"ipc://{self._folder}/engine-{self._numbers.setdefault(id, len(self._numbers))}"

    def entries(self) -> list[Entry]:
        """Return all models of the registry."""
        return list(self.registry.entries.values())

    def is_stalled(self, id: str) -> bool:
        """Whether a model's engine makes no progress."""
        process = self._processes.get(id)
        return process is not None and process.stalled

    @property
    def idle(self) -> bool:
        """Whether no model changes its state, and no engine has requests or stalls."""
        states = all(entry.state in SETTLED and entry.retry_at is None for entry in self.registry.entries.values())
        return states and not self._planning and all(process.idle for process in self._processes.values())

    def replace(self, config: ServeConfig) -> None:
        """Use another list of models: new ones are added, missing ones unloaded."""
        self.config = config
        wanted = {model.id for model in config.model}
        for id in [id for id in self.registry.entries if id not in wanted]:
            self.registry.remove(id)
        for model in config.model:
            known = model.id in self.registry.entries
            self.registry.add(model)
            if not known and model.preload:
                self.registry.load(model.id)
        self.changed = True

    def step(self) -> None:
        """Read the processes' messages and states, and run the registry's actions."""
        now = self._clock()
        for id, process in list(self._processes.items()):
            self._watch(id, process, now)
        for id, child in list(self._planning.items()):
            self._watch_plan(id, child)
        if self.running:
            self.registry.tick()
        while self.registry.actions:
            self._act(self.registry.actions.popleft())

    def stop(self, seconds: float) -> None:
        """End all processes."""
        self.running = False
        children = [process.child for process in self._processes.values()] + list(self._planning.values())
        for child in children:
            child.terminate()
        until = self._clock() + seconds
        for child in children:
            child.end(until - self._clock())

    # ---- what the registry wants -------------------------------------------------------------------------------------

    def _act(self, action: Action) -> None:
        entry = self.registry.entries.get(action.id)
        process = self._processes.get(action.id)
        if action.what == "stop":
            if process is not None:
                process.child.terminate()
                process.until = self._clock() + STOP_SECONDS
        elif entry is None or not self.running:
            return
        elif action.what == "plan":
            if entry.config.engine != "model" or len(self.registry.entries) == 1:
                self.registry.planned(action.id, {}, {})  # nothing else could be in its way
            else:
                data = msgspec.json.encode(entry.config)
                self._planning[action.id] = Child("exl_serve.engine.plan", data, f"plan.{action.id}", wake=self._wake)
        else:
            self._start(entry)

    def _start(self, entry: Entry) -> None:
        start = {
            "model": entry.config,
            "folder": str(self._folder),
            "address": self.address(entry.config.id),
            "parent": os.getpid(),
            "limits": self.config.server.limits,
            "qos": self.config.qos,
            "log_level": self.config.log.level,
        }
        child = Child("exl_serve.engine", msgspec.json.encode(start), f"engine.{entry.config.id}", wake=self._wake)
        self._processes[entry.config.id] = _Process(child, Watch(self._patience))
        if entry.crashes:
            self._metrics.count("exl_engine_restarts_total", model_name=entry.config.id)

    # ---- what the processes do ---------------------------------------------------------------------------------------

    def _watch_plan(self, id: str, child: Child) -> None:
        status = child.poll()
        if status is None:
            return
        found: dict[str, Any] = {}
        with contextlib.suppress(ValueError, IndexError):
            found = json.loads(child.lines[0])
        del self._planning[id]
        if "needs" in found:
            self.registry.planned(id, found["needs"], found["free"])
        else:
            reason = str(found.get("problem") or f"the plan ended with {describe(status)}")
            log.error("model %s: %s", id, reason)
            self.registry.failed(id, ServeError.unavailable("model_failed", f"the model {id} cannot be loaded", None))

    def _watch(self, id: str, process: _Process, now: float) -> None:
        child = process.child
        while child.lines:
            self._hear(id, process, child.lines.popleft())
        status = child.poll()
        if status is not None:
            del self._processes[id]
            if process.reader is not None:
                process.reader.close()
            entry = self.registry.entries.get(id)
            if entry is not None and entry.state not in ("draining", "unloading") and self.running:
                log.error("the engine of %s has ended with %s", id, describe(status))
            self.registry.exited(id, describe(status))
            return
        if process.until is not None and now >= process.until:
            child.kill()
        if process.serves:
            if process.reader is None:
                with contextlib.suppress(OSError):  # it has removed its page, and ends; or somebody else has
                    process.reader = StatusReader(status_path(self._folder, id))
            self._look(id, process, now)

    def _hear(self, id: str, process: _Process, line: bytes) -> None:
        try:
            said = msgspec.json.decode(line)
            state = said["state"]
        except (msgspec.DecodeError, KeyError, TypeError):
            log.info("engine of %s: %s", id, line.decode("utf-8", "replace").rstrip())
            return
        if state == "ready":
            process.serves = True
        self.registry.reported(
            id,
            state,
            done=int(said.get("done", 0)),
            total=int(said.get("total", 0)),
            reason=str(said.get("reason", "")),
        )

    def _look(self, id: str, process: _Process, now: float) -> None:
        """Watch an engine's progress: one without a status page makes none."""
        reader, before = process.reader, process.status
        if reader is not None:
            with contextlib.suppress(HalfWrittenError):  # stopped or killed in the middle of a write
                process.status = reader.read()
        if process.status is not None:
            # A short request may begin and end between two looks.
            stepped = before is not None and process.status.step != before.step
            self._use(id, process, process.status, now, stepped)
        found = process.watch.look(process.status, 0 if reader is None else reader.writes, now)
        if (found != "ok") != process.stalled:
            process.stalled = found != "ok"
            self.changed = True
            log.error("the engine of %s makes no progress", id) if process.stalled else log.info("%s goes on", id)
        if found == "kill" and process.until is None:
            log.error("the engine of %s is ended: it makes no progress", id)
            process.until = now + STOP_SECONDS
            child = process.child
            child.kill(stacks=True)

    def _use(self, id: str, process: _Process, status: EngineStatus, now: float, stepped: bool) -> None:
        """Tell the metrics and the registry what an engine does, and whether it made steps since the last look."""
        self._metrics.engine(id, status)
        open = status.decoding + status.prefilling + status.queued
        entry = self.registry.entries.get(id)
        if open or entry is None:
            process.idle_since = None
        elif process.idle_since is None:
            process.idle_since = now
        if entry is not None:
            # A draining engine counts as free once it has been idle since the workers know.
            free = process.idle_since is not None and now - max(process.idle_since, entry.since) >= DRAIN_SECONDS
            self.registry.used(id, open if open or free or entry.state != "draining" else 1, stepped)

    def _on_change(self, entry: Entry) -> None:
        self.changed = True
        id = entry.config.id
        said = (entry.state, entry.boot, entry.reason)
        if self._said.get(id) != said:
            self._said[id] = said
            log.info("model %s: %s%s", id, entry.state, f", {entry.reason}" if entry.reason else "")
        for one in STATES:
            self._metrics.set("exl_model_state", float(one == entry.state), model_name=id, state=one)
        held: dict[str, int] = {}
        for other in self.registry.entries.values():
            for device, size in (other.needs or {}).items():
                loaded = other.state in ("loading", "warming", "ready", "draining", "unloading")
                held[device] = held.get(device, 0) + (size if loaded else 0)
        for device, size in held.items():
            self._metrics.set("exl_device_bytes", float(size), device=device)

    def rss(self) -> dict[str, int]:
        """Return the resident memory of each engine process in bytes."""
        return {f"engine {id}": process.child.rss() for id, process in self._processes.items()}

    def models(self) -> list[ModelConfig]:
        """Return the configurations of all models."""
        return [entry.config for entry in self.registry.entries.values()]
