"""Where a chat reads its messages: a prompt with editing and history on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from exl_generate.cli.progress import is_dumb

if TYPE_CHECKING:
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.output import Output

__all__ = ["Line", "Lines", "PlainLines", "TypedLines", "history_file", "open_lines"]

PROMPT = "> "
CONTINUED = "  "
QUOTES = '"""'
#: Entries of the input history that a new session keeps.
HISTORY_LIMIT = 10_000
#: What begins each entry in a file of prompt_toolkit's FileHistory; the lines of a message begin with "+".
ENTRY = b"\n# "


@dataclass(frozen=True)
class Line:
    """A message, or a command, which begins with a slash. The text has no white space around it."""

    text: str
    is_command: bool


class Lines(Protocol):
    """A source of messages and commands."""

    def read(self) -> Line | None:
        """The next message or command; None at the end of the input, or for Ctrl-C."""


def open_lines(completions: Callable[[str], Sequence[str]], keep_history: bool, note: Callable[[str], None]) -> Lines:
    """The source of messages for standard input.

    completions: gives whole lines that a line may be completed to. keep_history: keep typed messages for later
    sessions. note: shows a line about files that cannot be used.
    """
    if not sys.stdin.isatty() or not (sys.stdout.isatty() or sys.stderr.isatty()):
        return PlainLines()
    history = history_file() if keep_history else None
    if keep_history and history is None:
        note("the input history is not kept: there is no home folder (HOME is not set)")
    return TypedLines(completions, history, note)


class PlainLines:
    """Each line of standard input is a message or a command."""

    def read(self) -> Line | None:
        """The next line."""
        try:
            return _line(input())
        except (EOFError, KeyboardInterrupt):
            return None


class TypedLines:
    """Messages from a terminal, edited with prompt_toolkit.

    Enter sends a message. Alt-Enter, a backslash before Enter, or an open `\"""` begin another line of it. Ctrl-C drops
    what was typed, and ends the chat if nothing was.
    """

    def __init__(
        self, completions: Callable[[str], Sequence[str]], history: Path | None, note: Callable[[str], None]
    ) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.application import create_app_session
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.history import InMemoryHistory
        from prompt_toolkit.shortcuts import CompleteStyle
        from prompt_toolkit.styles import Style

        self._note = note
        self._store = None if history is None else _open_history(history, note)
        earlier = [] if self._store is None else list(islice(self._store.load_history_strings(), HISTORY_LIMIT))
        with create_app_session(output=terminal_output()):
            session: PromptSession[str] = PromptSession(
                [("class:prompt", PROMPT)],
                style=Style.from_dict({"prompt": "bold ansicyan"}),
                multiline=True,
                prompt_continuation=CONTINUED,
                key_bindings=_bindings(),
                history=InMemoryHistory(earlier[::-1]),
                completer=WordCompleter(lambda: list(completions(session.default_buffer.text)), sentence=True),
                complete_style=CompleteStyle.READLINE_LIKE,
                complete_while_typing=False,
                enable_open_in_editor=True,
            )
        self._session = session

    def read(self) -> Line | None:
        """The next message or command, which is also kept in the history."""
        try:
            text = self._session.prompt()
        except (EOFError, KeyboardInterrupt):
            return None
        line = _unquoted(text)
        if line.text and self._store is not None:
            try:
                self._store.store_string(text)
            except OSError as error:
                self._note(f"the input history is not kept from here on ({error.strerror or error})")
                self._store = None
        return line


def _line(text: str) -> Line:
    """A line that begins with one slash is a command; two slashes begin a message with one. Text of several lines is
    a message as it is."""
    text = text.strip()
    if "\n" in text or not text.startswith("/"):
        return Line(text, is_command=False)
    return Line(text[1:], is_command=False) if text.startswith("//") else Line(text, is_command=True)


def _unquoted(text: str) -> Line:
    """A typed line. Text between `\"""` is a message, without these marks."""
    text = text.strip()
    if text.startswith(QUOTES):
        return Line(text[len(QUOTES) :].removesuffix(QUOTES).strip("\n"), is_command=False)
    return _line(text)


def history_file() -> Path | None:
    """The file of typed messages, in the XDG state directory; None for a user without a home folder."""
    state = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(state):  # the XDG specification ignores relative paths
        return Path(state) / "exl" / "chat_history"
    try:
        return Path.home() / ".local" / "state" / "exl" / "chat_history"
    except RuntimeError:
        return None


def _open_history(file: Path, note: Callable[[str], None]) -> FileHistory | None:
    """The history in a regular file; None, with a note, if it cannot be kept there.

    A file of this user becomes readable for this user only and loses its oldest entries beyond `HISTORY_LIMIT`. A file
    that is reached through a link, or is another user's, keeps its mode and its entries.
    """
    from prompt_toolkit.history import FileHistory

    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        linked = file.is_symlink()
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | (0 if linked else os.O_NOFOLLOW)
        with open(os.open(file, flags, 0o600), "rb") as opened:
            found = os.fstat(opened.fileno())
            if not stat.S_ISREG(found.st_mode):
                note(f"{file}: the input history is not kept (not a regular file)")
                return None
            if not linked and found.st_uid == os.geteuid():
                os.fchmod(opened.fileno(), 0o600)
                _shorten(file, opened.read())
    except OSError as error:
        note(f"{file}: the input history is not kept ({error.strerror or error})")
        return None
    return FileHistory(str(file))


def _shorten(file: Path, content: bytes) -> None:
    """Drop the oldest entries of a history beyond the limit. `content`: what the file holds."""
    entries = content.split(ENTRY)[1:]
    if len(entries) <= HISTORY_LIMIT:
        return
    partial = file.with_name(f"{file.name}.{os.getpid()}.new")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as new:
            new.writelines(ENTRY + entry for entry in entries[-HISTORY_LIMIT:])
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def _bindings() -> KeyBindings:
    from prompt_toolkit.application import get_app
    from prompt_toolkit.enums import DEFAULT_BUFFER
    from prompt_toolkit.filters import Condition, has_focus
    from prompt_toolkit.key_binding import KeyBindings

    bindings = KeyBindings()
    typing = has_focus(DEFAULT_BUFFER)
    bindings.add("enter", filter=typing)(_enter)
    bindings.add("escape", "enter", filter=typing)(_new_line)
    typed = Condition(lambda: bool(get_app().current_buffer.text))
    bindings.add("c-c", filter=typing & typed)(_discard)
    return bindings


def _enter(event: KeyPressEvent) -> None:
    """Send the message, or begin another line of it."""
    buffer = event.current_buffer
    text = buffer.text
    if buffer.document.is_cursor_at_the_end and text.endswith("\\"):
        buffer.delete_before_cursor(1)
        buffer.insert_text("\n")
    elif text.lstrip().startswith(QUOTES) and not text.strip()[len(QUOTES) :].endswith(QUOTES):
        buffer.insert_text("\n")
    else:
        buffer.validate_and_handle()


def _new_line(event: KeyPressEvent) -> None:
    event.current_buffer.insert_text("\n")


def _discard(event: KeyPressEvent) -> None:
    """Ctrl-C: drop what was typed. Without any text, prompt_toolkit's own binding ends the prompt."""
    event.current_buffer.reset()


def terminal_output() -> Output:
    """The terminal of standard output, or else of standard error; no escape sequences if it is a dumb one."""
    from prompt_toolkit.output import create_output
    from prompt_toolkit.output.plain_text import PlainTextOutput

    stream = sys.stdout if sys.stdout.isatty() else sys.stderr
    return PlainTextOutput(stream) if is_dumb() else create_output(stdout=stream)
