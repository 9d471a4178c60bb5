"""Run the tests in forks of the process that has collected them: imports and collection happen once.

Each process of pytest-xdist would import torch and collect every test for itself. Here a process gets a file at a time,
so that fixtures of a module are made once; those of the session are made once a process.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import traceback
import warnings
from collections import deque
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from preloaded import leave

__all__ = ["Forked"]

PATIENCE = 10.0  # seconds in which a process that is interrupted ends its fixtures


class Forked:
    """A plugin that runs the collected tests in several processes.

    Args:
        processes: How many run at a time.
    """

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._ahead: deque[list[int]] = deque()
        self._running: dict[Connection, Process] = {}
        self._session: pytest.Session

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run all tests; pytest's own loop reports errors that prevent it."""
        if session.testsfailed or session.config.option.collectonly or not session.items:
            return None
        _check_threads()
        self._session = session
        places = groupby(range(len(session.items)), lambda number: session.items[number].path)
        self._ahead.extend(list(numbers) for _, numbers in places)
        base = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # noqa: SLF001
        gc.collect()
        gc.freeze()  # collections in a process would visit, and so copy, every page of objects
        try:
            for number in range(min(self._processes, len(self._ahead))):
                self._start(base / f"process-{number}")
            while self._running:
                for connection in wait(list(self._running)):
                    assert isinstance(connection, Connection)
                    self._receive(connection)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
        finally:
            self._end()
        return True

    def _start(self, folder: Path) -> None:
        """Fork a process; `folder` is for its temporary files."""
        ours, its = Pipe()
        pid = os.fork()
        if pid == 0:
            ours.close()
            for other in self._running:
                other.close()
            Worker(self._session, its, folder).run()
        its.close()
        self._running[ours] = Process(pid, folder)
        self._give(ours)

    def _give(self, connection: Connection) -> None:
        """Send the next file's tests to a process, or nothing where all are given out."""
        process = self._running[connection]
        process.left = deque(self._ahead.popleft() if self._ahead else ())
        connection.send(list(process.left))

    def _receive(self, connection: Connection) -> None:
        """Take one message of a process."""
        process = self._running[connection]
        try:
            kind, *content = connection.recv()
        except (EOFError, ConnectionError):
            kind = "ended"
        if kind == "ended":
            self._ended(connection)
        elif kind == "file":
            self._give(connection)
        elif kind == "reports":
            process.last = process.left.popleft()
            self._report(*content)
        elif kind == "warning":
            self._warn(*content)
        elif kind == "error":
            (process.error,) = content
        elif kind == "end":
            process.finished = True

    def _report(self, nodeid: str, location: tuple[str, int | None, str], reports: list[dict[str, Any]]) -> None:
        """Tell the reporters of a test that has run."""
        config = self._session.config
        config.hook.pytest_runtest_logstart(nodeid=nodeid, location=location)
        for data in reports:
            report = config.hook.pytest_report_from_serializable(config=config, data=data)
            config.hook.pytest_runtest_logreport(report=report)
        config.hook.pytest_runtest_logfinish(nodeid=nodeid, location=location)

    def _fail(self, number: int, text: str) -> None:
        """Report that a test has failed which could not report it itself."""
        item = self._session.items[number]
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
        self._session.config.hook.pytest_runtest_logreport(report=report)

    def _warn(self, category: str, text: str, place: tuple[str, int], when: str, nodeid: str) -> None:
        """Pass a warning on."""
        kind = type(category, (Warning,), {})
        message = warnings.WarningMessage(kind(text), kind, *place)
        self._session.config.hook.pytest_warning_recorded.call_historic(
            kwargs={"warning_message": message, "when": when, "nodeid": nodeid, "location": None}
        )

    def _ended(self, connection: Connection) -> None:
        """Note the end of a process. If it died in a test, the test has failed and another process does the rest."""
        process = self._running.pop(connection)
        connection.close()
        code = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
        if process.finished:
            return
        number = process.left.popleft() if process.left else process.last
        self._fail(number, process.error or f"the process of this test ended with exit code {code}")
        if process.left:
            self._ahead.appendleft(list(process.left))
        if self._ahead:
            self._start(process.folder.with_name(f"{process.folder.name}-again"))

    def _end(self) -> None:
        """Interrupt the processes that still run, and kill those that do not end."""
        for process in self._running.values():
            os.kill(process.pid, signal.SIGINT)
        for connection, process in self._running.items():
            while connection.poll(PATIENCE):
                try:
                    connection.recv()
                except (EOFError, ConnectionError):
                    break
            os.kill(process.pid, signal.SIGKILL)
            os.waitpid(process.pid, 0)
        self._running.clear()


class Process:
    """The state of a process, as the first one knows it.

    Args:
        pid: Its number.
        folder: Where its temporary files are.
    """

    def __init__(self, pid: int, folder: Path) -> None:
        self.pid, self.folder = pid, folder
        self.left: deque[int] = deque()  # numbers of its tests that have not been reported
        self.last = 0  # the test that was reported last
        self.error = ""  # why it ends early
        self.finished = False  # whether it has run all tests and ended all fixtures


class Worker:
    """The part of a fork: runs the tests that it is sent.

    Args:
        session: The session with all collected tests.
        connection: To the first process.
        folder: For temporary files.
    """

    def __init__(self, session: pytest.Session, connection: Connection, folder: Path) -> None:
        self._session, self._connection = session, connection
        folder.mkdir()
        session.config._tmp_path_factory._basetemp = folder  # type: ignore[attr-defined]  # noqa: SLF001
        # The file that holds captured output is shared with the first process.
        capture = session.config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()
        capture.start_global_capturing()
        # Only the first process reports; its plugins get no reports here.
        self._ready = False
        session.config.pluginmanager.register(self)
        self._ready = True  # a new plugin hears of past warnings first

    def _end_fixtures(self) -> None:
        """Tear down the fixtures of the session."""
        self._session._setupstate.teardown_exact(None)  # noqa: SLF001

    def run(self) -> None:
        """Run tests until there are none left; never returns."""
        code = 0
        try:
            self._run_files()
            self._end_fixtures()
            self._session.config._ensure_unconfigure()  # noqa: SLF001
            self._connection.send(("end",))
        except KeyboardInterrupt:
            code = 2
            self._end_fixtures()
        except BaseException:
            code = 1
            self._connection.send(("error", traceback.format_exc()))
        finally:
            leave(code)

    def _run_files(self) -> None:
        """Run files of tests until an empty one comes. Fixtures of the session stay until the end."""
        items = self._session.items
        another_file = AnotherFile.from_parent(self._session, name="another file")
        while numbers := self._connection.recv():
            run = [items[number] for number in numbers]
            for item, following in zip(run, [*run[1:], another_file], strict=True):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            self._connection.send(("file",))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        """Run a test and send its reports."""
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        config = item.config
        told = [config.hook.pytest_report_to_serializable(config=config, report=report) for report in reports]
        self._connection.send(("reports", item.nodeid, item.location, told))
        return True

    @pytest.hookimpl
    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str, nodeid: str) -> None:
        """Send a warning."""
        if not self._ready:
            return
        place = (warning_message.filename, warning_message.lineno)
        category, text = warning_message.category.__name__, str(warning_message.message)
        self._connection.send(("warning", category, text, place, when, nodeid))


class AnotherFile(pytest.Item):
    """A test of another file, which is never run: fixtures of the session are kept for it."""

    def runtest(self) -> None:
        """Do nothing."""


def _check_threads() -> None:
    """Reject threads that imports have started: a fork has only the thread that made it.

    The threads of OpenBLAS, which numpy starts, end before a fork and start again when they are needed.
    """
    if others := [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]:
        raise pytest.UsageError(
            f"tests cannot run in forks: importing their files has started the threads {', '.join(others)}; "
            "start them in a test, or run in one process by `-n 0`"
        )
