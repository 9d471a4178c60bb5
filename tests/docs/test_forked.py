"""tests/forked.py: the tests of a run in several processes (`pytest --processes`)."""

from __future__ import annotations

from pathlib import Path

import preloaded
import pytest

CONFTEST = """
from forked import Forked

def pytest_configure(config):
    config.pluginmanager.register(Forked(2), "forked")
"""
FIRST = """
import os, signal, warnings
import pytest

@pytest.fixture(scope="session")
def shared():
    yield os.getpid()
    print("ended")

def test_passes(shared, tmp_path):
    (tmp_path / "pid").write_text(str(shared))

def test_fails(shared):
    print("what it wrote")
    assert shared == 0

def test_warns():
    warnings.warn("of the test", stacklevel=1)

@pytest.mark.skip(reason="no reason")
def test_skipped():
    pass

def test_dies():
    os.kill(os.getpid(), signal.SIGKILL)

def test_runs_after_the_death():
    pass
"""
SECOND = """
import pytest

@pytest.fixture(scope="session")
def unsound():
    yield
    raise RuntimeError("of a session's fixture")

def test_uses_it(unsound):
    pass

def test_exits():
    pytest.exit("from a test")
"""


def run(folder: Path, *arguments: str) -> str:
    """Write a folder of tests and run them; return what pytest prints."""
    for name, text in {"conftest": CONFTEST, "test_first": FIRST, "test_second": SECOND}.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    env = {"PYTHONPATH": str(Path(__file__).parents[1]), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ended = preloaded.run(words, env=env, folder=folder)
    return ended.stdout + ended.stderr


def test_every_outcome_of_a_fork_is_reported(tmp_path: Path) -> None:
    out = run(tmp_path, "test_first.py")
    assert "2 failed, 3 passed, 1 skipped, 1 warning" in out
    assert "what it wrote" in out
    assert "UserWarning: of the test" in out
    assert "the process of this test ended with exit code -9" in out


def test_the_cause_of_a_forks_death_is_reported(tmp_path: Path) -> None:
    out = run(tmp_path, "test_second.py", "-k", "uses_it")
    assert "1 failed, 1 passed" in out
    assert "RuntimeError: of a session's fixture" in out
    out = run(tmp_path, "test_second.py", "-k", "exits")
    assert "from a test" in out


@pytest.mark.parametrize("file", ["test_first.py", pytest.param("test_second.py", marks=pytest.mark.full)])
def test_the_first_failure_can_end_the_run(tmp_path: Path, file: str) -> None:
    assert "stopping after 1 failures" in run(tmp_path, "-x", file)


def test_names_a_thread_that_an_import_has_started(tmp_path: Path) -> None:
    source = "import threading\ntimer = threading.Timer(60, print)\ntimer.daemon = True\ntimer.start()\n"
    source += "def test_it(): pass\n"
    (tmp_path / "test_thread.py").write_text(source)
    assert "has started the threads Thread-" in run(tmp_path, "test_thread.py")
