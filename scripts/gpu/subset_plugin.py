"""pytest plugin: a few cases of every test function, as many as a time allows; for runs that are slow by nature.

    EXL_SUBSET_SECONDS=70 python3 -m pytest -p subset_plugin -m cuda tests/kernels

Every function's first case runs, whatever it takes, then every function's second one, and so on until the time is
up. Cases of one function come in a fixed mixed order, so that the first few differ in more than their last parameter.
EXL_SUBSET_CASES is a file of lines `seconds case`: these cases run first, whatever they take, in place of the first of
their functions, and those that take longest before others. (kernels_covered.py writes such files.) With
EXL_SUBSET_FUNCTIONS=0 only they run whatever they take, and the first ones of other functions as time allows.
What was left out is counted at the end: it is neither passed nor skipped. EXL_SUBSET_WITHOUT is words with commas
between: cases with one of them in their function's source or in their name are left out; EXL_SUBSET_WITH: those
without any of these words. EXL_SUBSET_QUEUE is a folder that processes side by side share: a case is run by the first
of them that comes to it. EXL_SUBSET_LOG is a file for a line a case: outcome, seconds, name.
"""

from __future__ import annotations

import inspect
import os
import random
import time
from collections import defaultdict
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

UNKNOWN = 10.0  # seconds, of a case that EXL_SUBSET_CASES does not name


class Subset:
    """The order of the cases, and when it is enough."""

    def __init__(
        self,
        seconds: float,
        words: tuple[list[str], list[str]],
        chosen: dict[str, float],
        queue: str | None,
        log: str | None,
        functions_too: bool,
    ) -> None:
        self.seconds = seconds
        self.functions_too = functions_too
        self.having, self.without = words
        self.chosen = chosen
        self.queue = None if queue is None else Path(queue)
        self.log = log
        self.began = time.monotonic()
        self.all: set[str] = set()
        self.functions: dict[str, list[pytest.Item]] = defaultdict(list)
        self.round_of: dict[str, int] = {}
        self.number_of: dict[str, int] = {}
        self.run: dict[str, int] = defaultdict(int)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.all = {item.nodeid for item in items}
        for item in items:
            if item.get_closest_marker("cuda") is None:
                continue
            source = inspect.getsource(getattr(item, "function", type(item)))
            left_out = any(word in source or word in item.nodeid for word in self.without)
            asked = not self.having or any(word in source or word in item.nodeid for word in self.having)
            if asked and not left_out:
                self.functions[item.nodeid.split("[")[0]].append(item)
        for name, cases in self.functions.items():
            random.Random(name).shuffle(cases)
            cases.sort(key=lambda item: item.nodeid not in self.chosen)
            known = sum(item.nodeid in self.chosen for item in cases)
            first = known or int(self.functions_too)
            self.round_of.update({item.nodeid: max(0, i + 1 - first) for i, item in enumerate(cases)})
        every = [item for cases in self.functions.values() for item in cases]
        items[:] = sorted(every, key=lambda item: (self.round_of[item.nodeid], -self.chosen.get(item.nodeid, UNKNOWN)))
        self.number_of = {item.nodeid: i for i, item in enumerate(items)}
        self.began = time.monotonic()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool:
        if self.round_of[item.nodeid] and time.monotonic() - self.began > self.seconds:
            return True  # left out
        if not self._claim(self.number_of[item.nodeid]):
            return True  # another process's
        self.run[item.nodeid.split("[")[0]] += 1
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        # Which case comes next is not known: everything is torn down.
        runtestprotocol(item, nextitem=None)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _claim(self, number: int) -> bool:
        if self.queue is None:
            return True
        self.queue.mkdir(parents=True, exist_ok=True)
        try:
            (self.queue / str(number)).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.log is not None and (report.when == "call" or report.outcome != "passed"):
            with open(self.log, "a") as file:
                file.write(f"{report.outcome} {report.duration:.1f} {report.nodeid}\n")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        cases = sum(len(found) for found in self.functions.values())
        terminalreporter.write_line(
            f"subset: {sum(self.run.values())} of {cases} cases, {len(self.run)} of {len(self.functions)} functions, "
            f"{time.monotonic() - self.began:.0f} s"
        )
        if gone := len(self.chosen) - len(self.chosen.keys() & self.all):
            terminalreporter.write_line(f"subset: {gone} chosen cases are no tests any more")


def pytest_configure(config: pytest.Config) -> None:
    seconds = float(os.environ.get("EXL_SUBSET_SECONDS", "60"))
    having, without = (
        [word for word in os.environ.get(name, "").split(",") if word]
        for name in ("EXL_SUBSET_WITH", "EXL_SUBSET_WITHOUT")
    )
    chosen = {}
    if "EXL_SUBSET_CASES" in os.environ:
        lines = Path(os.environ["EXL_SUBSET_CASES"]).read_text().splitlines()
        chosen = {name: float(cost) for cost, name in (line.split(" ", 1) for line in lines if line[:1].isdigit())}
    queue, log = os.environ.get("EXL_SUBSET_QUEUE"), os.environ.get("EXL_SUBSET_LOG")
    functions_too = os.environ.get("EXL_SUBSET_FUNCTIONS", "1") != "0"
    subset = Subset(seconds, (having, without), chosen, queue, log, functions_too)
    config.pluginmanager.register(subset, "exl-subset")
