"""The models of a server as a state machine: loading, making room for others, restarting.

It does nothing itself: `actions` lists what the supervisor must do, and methods report what was done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from exl_serve.config.model import ModelConfig
from exl_serve.errors import ServeError

__all__ = ["Action", "Entry", "Registry", "State"]

State = Literal["unloaded", "planning", "loading", "warming", "ready", "draining", "unloading", "failed"]
HOLDING: frozenset[State] = frozenset({"loading", "warming", "ready", "draining", "unloading"})
"""States in which a model has a process and memory."""
MIN_RESIDENCY = 30.0
CRASHES, CRASH_SECONDS, MAX_BACKOFF = 5, 600.0, 60.0
MARGIN, SHARE = 1.05, 0.9
GIB = 1 << 30


class Action(NamedTuple):
    """An action for the supervisor.

    plan: compute the memory of a model, then call `planned` or `failed`. start: start its process. stop: end it, then
    call `exited`; a draining model has no open requests any more.
    """

    what: Literal["plan", "start", "stop"]
    id: str


@dataclass(eq=False)
class Entry:
    """One model."""

    config: ModelConfig
    state: State = "unloaded"
    #: time at which it entered this state
    since: float = 0.0
    #: bytes a device; None: not planned yet
    needs: dict[str, int] | None = None
    done: int = 0
    total: int = 0
    #: starts so far
    boot: int = 0
    #: requests that are open
    open: int = 0
    last_used: float = 0.0
    ready_at: float = 0.0
    crashes: deque[float] = field(default_factory=deque)
    #: when it is started again after a crash
    retry_at: float | None = None
    reason: str = ""
    #: reason that the last load failed
    error: ServeError | None = None
    #: load it again once it is unloaded
    again: bool = False
    #: an operator asked for the load: recently used models make room, too
    urgent: bool = False
    removed: bool = False


class Registry:
    """All models. `changed` is called with an entry after each change of its state."""

    def __init__(
        self,
        clock: Callable[[], float],
        budget: Mapping[str, int] | None = None,
        changed: Callable[[Entry], None] = lambda entry: None,
    ) -> None:
        self._clock, self._changed = clock, changed
        self._configured = dict(budget or {})
        self._budget: dict[str, int] = {}
        self.entries: dict[str, Entry] = {}
        self.actions: deque[Action] = deque()

    def add(self, config: ModelConfig) -> None:
        """Add a model."""
        found = self.entries.get(config.id)
        if found is not None and found.removed:
            found.removed, found.config = False, config
        elif found is None:
            self.entries[config.id] = Entry(config, since=self._clock())

    def remove(self, id: str) -> None:
        """Unload a model once no request is open, and forget it."""
        entry = self.get(id)
        entry.removed, entry.again = True, False
        if entry.state in HOLDING:
            self._unload(entry)
        else:
            del self.entries[id]

    def get(self, id: str) -> Entry:
        """Return the entry of a model. Raises ServeError 404."""
        entry = self.entries.get(id)
        if entry is None or entry.removed:
            raise ServeError(
                404, "not_found_error", "model_not_found", f"there is no model {id[:128]!r}", param="model"
            )
        return entry

    # ---- what others ask for -----------------------------------------------------------------------------------------

    def load(self, id: str, *, urgent: bool = False) -> Entry:
        """Begin to load a model, unless it is loaded or loading; the outcome is in `state` and `error`. Raises
        ServeError.
        """
        entry = self.get(id)
        entry.urgent |= urgent
        if entry.state in ("draining", "unloading"):
            entry.again = True
        elif entry.state in ("unloaded", "failed"):
            if entry.retry_at is not None and not urgent:
                return entry  # it is about to be started again
            if urgent:
                entry.crashes.clear()
            self._begin(entry)
        return entry

    def unload(self, id: str, *, force: bool = False) -> Entry:
        """Let open requests end, or with `force` end them, then unload. Raises ServeError 404."""
        entry = self.get(id)
        entry.again = False
        if entry.state == "planning" or (entry.state == "failed" and entry.retry_at is not None):
            self._set(entry, "unloaded")
        elif entry.state in HOLDING:
            self._unload(entry)
            if force and entry.state == "draining":
                self._stop(entry)
        return entry

    def used(self, id: str, open: int, touched: bool) -> None:
        """Record a model's open requests, and whether there was a new one."""
        entry = self.entries.get(id)
        if entry is None:
            return
        entry.open = open
        if open or touched:
            entry.last_used = self._clock()
        if entry.state == "draining" and not open:
            self._stop(entry)

    # ---- what was done -----------------------------------------------------------------------------------------------

    def planned(self, id: str, needs: Mapping[str, int], free: Mapping[str, int | None]) -> None:
        """Record a model's memory on each device, and the free memory there."""
        entry = self.entries.get(id)
        if entry is None or entry.state != "planning":
            return
        entry.needs = dict(needs)
        held = self._held()
        for device, left in free.items():
            if left is not None and device not in self._budget:
                self._budget[device] = int(SHARE * (left + held.get(device, 0)))
        self._budget |= self._configured
        self._make_room(entry)

    def reported(self, id: str, state: str, *, done: int = 0, total: int = 0, reason: str = "") -> None:
        """Record the state that the model's process has reported: loading, warming, ready or failed."""
        entry = self.entries.get(id)
        if entry is None or entry.state not in ("loading", "warming"):
            return
        if state == "loading":
            entry.done, entry.total = done, total
            self._changed(entry)
        elif state == "warming":
            self._set(entry, "warming")
        elif state == "ready":
            entry.ready_at = entry.last_used = self._clock()
            entry.error = None
            self._set(entry, "ready")
        elif state == "failed":
            entry.reason = reason

    def failed(self, id: str, error: ServeError) -> None:
        """Record that the model cannot be loaded; it is not tried again automatically."""
        entry = self.entries.get(id)
        if entry is not None and entry.state not in HOLDING:
            entry.error, entry.reason, entry.retry_at = error, error.message, None
            self._set(entry, "failed")

    def exited(self, id: str, how: str) -> None:
        """Record that its process has ended; `how` is for the log, such as "signal 9"."""
        entry = self.entries.get(id)
        if entry is None or entry.state not in HOLDING:
            return
        entry.open = 0
        before = entry.state
        if before in ("draining", "unloading"):
            self._set(entry, "unloaded")
            if entry.removed:
                del self.entries[id]
            elif entry.again:
                self._begin(entry)
        else:
            self._crashed(entry, how)
        self._retry_waiting()

    def tick(self) -> None:
        """Start models that are due for a restart or wait for memory. Call it regularly."""
        now = self._clock()
        for entry in list(self.entries.values()):
            if entry.state == "failed" and entry.retry_at is not None and now >= entry.retry_at:
                self._begin(entry)
        self._retry_waiting()

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _set(self, entry: Entry, state: State) -> None:
        entry.state, entry.since = state, self._clock()
        if state != "failed":
            entry.retry_at = None
        self._changed(entry)

    def _begin(self, entry: Entry) -> None:
        entry.again, entry.error, entry.reason = False, None, ""
        entry.done = entry.total = 0
        self._set(entry, "planning")
        if entry.needs is None:
            self.actions.append(Action("plan", entry.config.id))
        else:
            self._make_room(entry)

    def _crashed(self, entry: Entry, how: str) -> None:
        now = self._clock()
        entry.crashes.append(now)
        while entry.crashes[0] < now - CRASH_SECONDS:
            entry.crashes.popleft()
        said, entry.reason = entry.reason, entry.reason or f"its process ended with {how}"
        entry.error = ServeError.unavailable("model_failed", f"the model {entry.config.id} could not be loaded", 30.0)
        again = len(entry.crashes) < CRASHES and not (said and not entry.ready_at) and not entry.removed
        self._set(entry, "failed")
        if again:
            entry.retry_at = now + min(MAX_BACKOFF, 2.0 ** (len(entry.crashes) - 1))
            self._changed(entry)
        elif entry.removed:
            del self.entries[entry.config.id]

    def _unload(self, entry: Entry) -> None:
        if entry.state == "ready":
            self._set(entry, "draining")  # `used` stops it: workers that do not know yet send it further requests
        elif entry.state in ("loading", "warming"):
            self._stop(entry)

    def _stop(self, entry: Entry) -> None:
        self._set(entry, "unloading")
        self.actions.append(Action("stop", entry.config.id))

    def _held(self, without: frozenset[str] = frozenset()) -> dict[str, int]:
        held: dict[str, int] = {}
        for entry in self.entries.values():
            if entry.state in HOLDING and entry.config.id not in without:
                for device, size in (entry.needs or {}).items():
                    held[device] = held.get(device, 0) + int(size * MARGIN)
        return held

    def _fits(self, entry: Entry, held: Mapping[str, int]) -> bool:
        for device, size in (entry.needs or {}).items():
            most = self._budget.get(device)
            if most is not None and held.get(device, 0) + int(size * MARGIN) > most:
                return False
        return True

    def _retry_waiting(self) -> None:
        for entry in sorted(self.entries.values(), key=lambda e: e.since):
            if entry.state == "planning" and entry.needs is not None:
                self._make_room(entry)

    def _make_room(self, entry: Entry) -> None:
        """Start the model, let idle models make room for it, or fail."""
        if self._fits(entry, self._held()):
            entry.boot += 1
            entry.urgent = False
            self._set(entry, "loading")
            self.actions.append(Action("start", entry.config.id))
            return
        leaving = {e.config.id for e in self.entries.values() if e.state in ("draining", "unloading")}
        if leaving and self._fits(entry, self._held(frozenset(leaving))):
            return  # room is on its way
        victims = sorted((e for e in self.entries.values() if self._may_go(e, entry.urgent)), key=lambda e: e.last_used)
        chosen: list[Entry] = []
        for victim in victims:
            chosen.append(victim)
            if self._fits(entry, self._held(frozenset(leaving | {e.config.id for e in chosen}))):
                for one in chosen:
                    self._unload(one)
                return
        entry.error = self._no_room(entry)
        entry.reason, entry.urgent = entry.error.message, False
        self._set(entry, "unloaded")

    def _may_go(self, entry: Entry, urgent: bool) -> bool:
        if entry.state != "ready" or entry.config.pinned or entry.open:
            return False
        now = self._clock()
        idle, resident = now - entry.last_used, now - entry.ready_at
        return urgent or (idle >= entry.config.keep_alive and resident >= MIN_RESIDENCY)

    def _no_room(self, entry: Entry) -> ServeError:
        parts = []
        for device, size in (entry.needs or {}).items():
            most = self._budget.get(device)
            holders = ", ".join(
                f"{e.config.id} {(e.needs or {}).get(device, 0) * MARGIN / GIB:.2f}"
                for e in self.entries.values()
                if e.state in HOLDING and (e.needs or {}).get(device)
            )
            if most is not None:
                needed = f"{size * MARGIN / GIB:.2f} GiB of {most / GIB:.2f}"
                parts.append(f"{device}: needs {needed}; held by {holders or 'no model'}")
        text = f"no room for the model {entry.config.id}: {'; '.join(parts)}; unload one, or give it a smaller cache"
        return ServeError(409, "conflict", "memory_budget", text)
