"""The registry of models: what is loaded when, who makes room, what happens after a crash. No process is started."""

from __future__ import annotations

import pytest
from effort import trials
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from exl_serve.config.model import ModelConfig
from exl_serve.errors import ServeError
from exl_serve.super.models import HOLDING, MARGIN, Registry

GIB = 1 << 30
IDS = ["a", "b", "c", "d"]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def model(id: str, **fields: object) -> ModelConfig:
    return ModelConfig(id=id, path="p", **fields)  # type: ignore[arg-type]


class Harness:
    """A registry whose actions are done as soon as they are wanted, if `work` is called."""

    def __init__(self, *configs: ModelConfig, budget: int = 10, needs: int = 4) -> None:
        self.clock = Clock()
        self.registry = Registry(self.clock, {"cpu": budget * GIB})
        self.needs = needs
        for config in configs:
            self.registry.add(config)

    def work(self, ready: bool = True) -> list[tuple[str, str]]:
        done: list[tuple[str, str]] = []
        while self.drained():
            what, id = self.registry.actions.popleft()
            done.append((what, id))
            if what == "plan":
                self.registry.planned(id, {"cpu": self.needs * GIB}, {"cpu": 100 * GIB})
            elif what == "stop":
                self.registry.exited(id, "status 0")
            elif ready:
                self.registry.reported(id, "loading", done=1, total=2)
                self.registry.reported(id, "ready")
        return done

    def drained(self) -> bool:
        """Report the open requests of draining models: the workers know that they are. Whether that has an effect."""
        for id, entry in list(self.registry.entries.items()):
            if entry.state == "draining":
                self.registry.used(id, entry.open, False)
        return bool(self.registry.actions)

    def states(self) -> dict[str, str]:
        return {id: entry.state for id, entry in self.registry.entries.items()}


def test_loading_is_done_once() -> None:
    h = Harness(model("a"))
    for _ in range(3):
        h.registry.load("a")
    assert h.work() == [("plan", "a"), ("start", "a")]
    h.registry.load("a")
    assert h.work() == []
    assert h.states() == {"a": "ready"}


def test_the_one_that_was_not_used_for_longest_makes_room() -> None:
    h = Harness(model("a"), model("b"), model("c"))
    for id in ("a", "b"):
        h.registry.load(id)
        h.work()
        h.clock.now += 100
    h.clock.now += 400
    h.registry.used("a", 0, True)
    h.registry.load("c", urgent=True)
    h.work()
    assert h.states() == {"a": "ready", "b": "unloaded", "c": "ready"}


def test_busy_pinned_and_recently_used_models_stay() -> None:
    h = Harness(model("a", pinned=True), model("b"), model("c"))
    for id in ("a", "b"):
        h.registry.load(id)
        h.work()
    h.registry.load("c")
    h.work()
    assert h.states()["c"] == "unloaded"
    error = h.registry.entries["c"].error
    assert error is not None
    assert (error.status, error.code) == (409, "memory_budget")
    assert "a 4.20, b 4.20" in error.message
    h.registry.used("b", 1, False)
    h.registry.load("c", urgent=True)
    h.work()
    assert h.states()["c"] == "unloaded"
    h.registry.used("b", 0, False)
    h.clock.now += 301
    h.registry.load("c")
    h.work()
    assert h.states() == {"a": "ready", "b": "unloaded", "c": "ready"}


def test_unloading_waits_for_what_is_open() -> None:
    h = Harness(model("a"))
    h.registry.load("a")
    h.work()
    h.registry.used("a", 2, True)
    h.registry.unload("a")
    assert h.work() == []
    assert h.states() == {"a": "draining"}
    h.registry.load("a")  # once it is unloaded
    h.registry.used("a", 0, False)
    assert h.work() == [("stop", "a"), ("start", "a")]
    h.registry.used("a", 1, True)
    h.registry.unload("a", force=True)
    assert h.work() == [("stop", "a")]
    assert h.states() == {"a": "unloaded"}


def test_requests_on_their_way_to_a_model_that_is_unloaded_are_answered() -> None:
    """Workers that do not know it yet send them."""
    h = Harness(model("a"))
    h.registry.load("a")
    h.work()
    h.registry.unload("a")
    assert not h.registry.actions
    h.registry.used("a", 1, True)
    assert h.work() == []
    h.registry.used("a", 0, False)
    assert h.work() == [("stop", "a")]


def test_crashes_are_followed_by_longer_waits_and_then_by_none() -> None:
    h = Harness(model("a"))
    h.registry.load("a")
    h.work()
    waits = []
    while True:
        h.registry.exited("a", "signal SIGKILL")
        retry = h.registry.entries["a"].retry_at
        if retry is None:
            break
        waits.append(retry - h.clock.now)
        h.clock.now = retry - 0.01
        h.registry.tick()
        assert h.work() == []
        h.clock.now = retry
        h.registry.tick()
        assert h.work() == [("start", "a")]
    assert waits == [1, 2, 4, 8]
    assert h.states() == {"a": "failed"}
    h.registry.load("a", urgent=True)
    h.work()
    assert h.states() == {"a": "ready"}


def test_one_that_says_why_it_cannot_start_is_not_started_again() -> None:
    h = Harness(model("a"))
    h.registry.load("a")
    h.work(ready=False)
    h.registry.reported("a", "failed", reason="no such file")
    h.registry.exited("a", "status 1")
    entry = h.registry.entries["a"]
    assert (entry.state, entry.reason, entry.retry_at) == ("failed", "no such file", None)


def test_a_removed_model_is_forgotten_once_it_is_unloaded() -> None:
    h = Harness(model("a"), model("b"))
    h.registry.load("a")
    h.work()
    h.registry.used("a", 1, True)
    h.registry.remove("a")
    h.registry.remove("b")
    with pytest.raises(ServeError, match="no model 'a'"):
        h.registry.get("a")
    h.registry.used("a", 0, False)
    h.work()
    assert h.states() == {}


class Models(RuleBasedStateMachine):
    """In any order: no more memory than there is, no model twice, no busy model is ended by another's load."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.registry = Registry(self.clock, {"cpu": 10 * GIB})
        self.sizes = dict(zip(IDS, (2, 4, 5, 9), strict=True))
        for id in IDS:
            self.registry.add(model(id, pinned=id == "a"))
        self.planning: set[str] = set()
        self.processes: set[str] = set()
        self.stopping: set[str] = set()
        self.asked: set[str] = set()

    def act(self) -> None:
        while self.registry.actions:
            what, id = self.registry.actions.popleft()
            if what == "plan":
                self.planning.add(id)
            elif what == "start":
                assert id not in self.processes
                self.processes.add(id)
            else:
                assert id in self.processes
                entry = self.registry.entries[id]
                assert id in self.asked or (entry.open == 0 and not entry.config.pinned)
                self.stopping.add(id)

    @rule(id=st.sampled_from(IDS), urgent=st.booleans())
    def load(self, id: str, urgent: bool) -> None:
        self.registry.load(id, urgent=urgent)
        self.act()

    @rule(id=st.sampled_from(IDS), force=st.booleans())
    def unload(self, id: str, force: bool) -> None:
        self.asked.add(id)
        self.registry.unload(id, force=force)
        self.act()

    @precondition(lambda self: self.planning)
    @rule(data=st.data())
    def plan(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.planning)))
        self.planning.discard(id)
        self.registry.planned(id, {"cpu": self.sizes[id] * GIB}, {"cpu": 20 * GIB})
        self.act()

    @precondition(lambda self: self.processes)
    @rule(data=st.data(), ready=st.booleans())
    def tell(self, data: st.DataObject, ready: bool) -> None:
        id = data.draw(st.sampled_from(sorted(self.processes)))
        self.registry.reported(id, "ready" if ready else "loading", done=1, total=3)
        self.act()

    @precondition(lambda self: self.processes)
    @rule(data=st.data())
    def exit(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.processes)))
        self.processes.discard(id)
        self.stopping.discard(id)
        self.asked.discard(id)
        self.registry.exited(id, "status 0")
        self.act()

    @rule(id=st.sampled_from(IDS), open=st.integers(0, 2))
    def use(self, id: str, open: int) -> None:
        if self.registry.entries[id].state in ("ready", "draining"):
            self.registry.used(id, open, open > 0)
            self.act()

    @rule(seconds=st.sampled_from([1.0, 40.0, 400.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        self.registry.tick()
        self.act()

    @invariant()
    def memory_is_kept(self) -> None:
        held = {id for id, entry in self.registry.entries.items() if entry.state in HOLDING}
        assert held == self.processes
        assert sum(self.sizes[id] for id in held) * MARGIN <= 10

    @invariant()
    def whoever_is_planned_knows_why_it_waits(self) -> None:
        for id, entry in self.registry.entries.items():
            if entry.state == "planning" and entry.needs is not None:
                assert self.stopping or any(e.state == "draining" for e in self.registry.entries.values()), id
            assert (entry.retry_at is None) or entry.state == "failed"


Models.TestCase.settings = settings(max_examples=trials(60, 15), stateful_step_count=40, deadline=None)
TestModels = Models.TestCase
