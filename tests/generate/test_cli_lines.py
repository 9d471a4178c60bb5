"""Input of `exl chat`: what is a command; the file of the input history, its mode and length."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from exl_generate.cli import lines
from exl_generate.cli.lines import Line, PlainLines, TypedLines, history_file


@contextmanager
def typed(monkeypatch: pytest.MonkeyPatch, keys: str) -> Iterator[None]:
    """A terminal in which these keys are typed. Machines that only collect this file may lack prompt_toolkit."""
    from prompt_toolkit.application import create_app_session
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    monkeypatch.setattr(lines, "terminal_output", DummyOutput)
    with create_pipe_input() as pipe, create_app_session(input=pipe):
        pipe.send_text(keys)
        yield


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, str], tuple[str | None, list[str]]]:
    """Type keys into a new session with this history file; returns the message and the notes."""

    def send(file: Path, keys: str) -> tuple[str | None, list[str]]:
        notes: list[str] = []
        with typed(monkeypatch, keys):
            line = TypedLines(lambda _: [], file, notes.append).read()
        return None if line is None else line.text, notes

    return send


@pytest.mark.parametrize(
    ("keys", "text", "is_command"),
    [
        (" /retry", "/retry", True),
        ("hello /retry", "hello /retry", False),
        ("//etc is what?", "/etc is what?", False),
        ("///", "//", False),
        ('"""/quit"""', "/quit", False),
        ('"""//quit"""', "//quit", False),
        ("/quit\x1b\r/help", "/quit\n/help", False),
        ("// a comment\x1b\rx = 1", "// a comment\nx = 1", False),
        ('""""""', "", False),
    ],
)
def test_lines_that_are_commands(monkeypatch: pytest.MonkeyPatch, keys: str, text: str, is_command: bool) -> None:
    with typed(monkeypatch, f"{keys}\r"):
        assert TypedLines(lambda _: [], None, print).read() == Line(text, is_command)
    if '"' not in keys and "\r" not in keys:  # a pipe has no quotes and no messages of several lines
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{keys}\n"))
        assert PlainLines().read() == Line(text, is_command)


def mode(file: Path) -> int:
    return file.stat().st_mode & 0o777


def test_a_history_of_this_user_becomes_private(sent, tmp_path: Path) -> None:
    file = tmp_path / "chat_history"
    file.touch(mode=0o644)
    assert sent(file, "hello\r") == ("hello", [])
    assert mode(file) == 0o600
    assert b"+hello\n" in file.read_bytes()


def test_a_link_is_followed_and_its_target_keeps_its_mode(sent, tmp_path: Path) -> None:
    target, file = tmp_path / "target", tmp_path / "chat_history"
    target.touch()
    target.chmod(0o640)
    file.symlink_to(target)
    assert sent(file, "hello\r") == ("hello", [])
    assert file.is_symlink()
    assert mode(target) == 0o640
    assert b"+hello\n" in target.read_bytes()


@pytest.mark.parametrize("kind", ["pipe", "linked pipe", "device"])
def test_a_history_that_is_no_regular_file_is_not_used(sent, tmp_path: Path, kind: str) -> None:
    target, file = tmp_path / "pipe", tmp_path / "chat_history"
    if kind == "pipe":
        os.mkfifo(file, 0o644)
    else:
        os.mkfifo(target, 0o644)
        file.symlink_to(target if kind == "linked pipe" else os.devnull)
    before = mode(file)
    message, notes = sent(file, "hello\r")
    assert message == "hello"
    assert notes == [f"{file}: the input history is not kept (not a regular file)"]
    assert mode(file) == before


def test_a_long_history_loses_its_oldest_entries(sent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prompt_toolkit.history import FileHistory

    monkeypatch.setattr(lines, "HISTORY_LIMIT", 3)
    file = tmp_path / "chat_history"
    texts = ["one", "# two\n# lines", "three", "\n# four", "five"]
    for text in texts:
        FileHistory(str(file)).store_string(text)
    assert sent(file, "\x1b[A" * 4 + "\r") == ("three", [])
    assert list(FileHistory(str(file)).load_history_strings()) == ["three", *reversed(texts[2:])]
    assert mode(file) == 0o600
    assert [found.name for found in tmp_path.iterdir()] == ["chat_history"]


def test_without_a_home_folder_there_is_no_history(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert history_file() is None
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert history_file() == Path("/state/exl/chat_history")
