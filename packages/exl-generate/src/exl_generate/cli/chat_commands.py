"""The commands of a chat, which begin with a slash."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from exl_core.errors import ExlError
from exl_generate.cli.conversation import DEFAULT_TOKENS, Conversation
from exl_generate.cli.sampling import change_setting, idle_reason, setting_names
from exl_generate.cli.terminal import Screen
from exl_generate.errors import RequestError

__all__ = ["COMMANDS", "Session", "attach", "completions", "obey"]


@dataclass
class Session:
    """A conversation at a terminal or a pipe, with what the commands change."""

    talk: Conversation
    screen: Screen
    #: show statistics after each answer; None: at a terminal
    stats: bool | None
    #: texts of images that go with the next message
    attached: list[str] = field(default_factory=list)
    over: bool = False

    @property
    def shows_stats(self) -> bool:
        """Whether statistics follow each answer."""
        return (sys.stdin.isatty() and self.screen.wraps) if self.stats is None else self.stats


@dataclass(frozen=True)
class Command:
    """A command: what follows its name, its help, and a function of the session and what follows, which returns a
    message to answer, or None."""

    argument: str
    help: str
    run: Callable[[Session, str], str | None]


def obey(session: Session, line: str) -> str | None:
    """Run the command of a line; returns a message to answer, if there is one."""
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    command = COMMANDS.get(name)
    if command is None:
        session.screen.error(f"unknown command {name}; /help lists the commands")
        return None
    if command.argument and not command.argument.startswith("[") and not rest:
        session.screen.error(f"{name} needs {command.argument}: {command.help}")
        return None
    return command.run(session, rest)


def completions(typed: str) -> Sequence[str]:
    """Whole lines that a typed line may be completed to: all candidates, of which the prompt offers those that begin
    with the line. None for a message."""
    name, space, rest = typed.partition(" ")
    if not name.startswith("/"):
        return []
    if not space:
        return [n + (" " if command.argument else "") for n, command in COMMANDS.items()]
    if name == "/set":
        return [f"/set {setting} " for setting in _values_names()]
    if COMMANDS.get(name) is not None and COMMANDS[name].argument == "FILE":
        return [f"{name} {path}" for path in _paths(rest)]
    return []


def _paths(typed: str) -> list[str]:
    """Paths that begin with a typed one, folders with a slash at the end. A ~ stays as it was typed."""
    start, slash, _ = typed.partition("/")
    home = os.path.expanduser(start) if slash else start
    if home == start:  # no ~, or one of a user that there is none of
        start = home = ""
    found = sorted(glob.glob(glob.escape(home + typed[len(start) :]) + "*"))
    return [f"{start}{path[len(home) :]}{'/' if os.path.isdir(path) else ''}" for path in found]


def _help(session: Session, _: str) -> None:
    shown = {name: command for name, command in COMMANDS.items() if command.help}
    width = max(len(f"{name} {command.argument}") for name, command in shown.items())
    for name, command in shown.items():
        session.screen.note(f"{f'{name} {command.argument}':{width}}  {command.help}", "")
    session.screen.note(
        'Alt-Enter, or \\ before Enter, begins another line of a message; """ begins and ends a message of several '
        "lines, which is no command. //TEXT sends /TEXT. Ctrl-C interrupts an answer, Ctrl-D leaves.",
    )


def _history(session: Session, _: str) -> None:
    for message in session.talk.whole():
        session.screen.message(message["role"], message["content"])


def _reset(session: Session, _: str) -> None:
    session.talk.reset()
    session.attached.clear()


def _retry(session: Session, _: str) -> str | None:
    again = session.talk.retry()
    if again is None:
        session.screen.error("there is nothing to answer again")
    return again


def _save(session: Session, rest: str) -> None:
    try:
        session.talk.save(Path(rest).expanduser())
    except OSError as error:
        session.screen.error(f"{rest}: cannot write the conversation to it ({error.strerror or error})")


def _load(session: Session, rest: str) -> None:
    try:
        session.talk.load(Path(rest).expanduser())
    except RequestError as error:
        session.screen.error(str(error))
    else:
        session.attached.clear()


def _system(session: Session, rest: str) -> None:
    session.talk.reset(rest)
    session.attached.clear()


def attach(session: Session, file: Path) -> None:
    """Encode an image that goes with the next message. Raises ExlError."""
    text, description = session.talk.images.add(file)
    session.attached.append(text)
    session.screen.note(f"[{description}; goes with the next message]")


def _image(session: Session, rest: str) -> None:
    try:
        attach(session, Path(rest).expanduser())
    except ExlError as error:
        session.screen.error(str(error))
    except KeyboardInterrupt:
        session.screen.error(f"[interrupted: {rest} does not go with the next message]")


def _set(session: Session, rest: str) -> None:
    name, _, value = rest.partition(" ")
    value = value.strip()
    try:
        if not name:
            _show_all(session)
        elif name not in _values_names():
            raise RequestError(f"there is no setting {name!r}; /set lists them")
        elif not value:
            session.screen.note(f"{name} {_values(session)[name]}", "")
        else:
            _change(session, name, value)
    except RequestError as error:
        session.screen.error(str(error))
    except typer.BadParameter as error:
        session.screen.error(f"{name}: {error.message}")


def _change(session: Session, name: str, value: str) -> None:
    """Change one value. Raises RequestError, or typer.BadParameter for a number out of range."""
    talk = session.talk
    if name == "stats":
        if value not in ("on", "off", "default"):
            raise RequestError(f"stats is {value!r}; it is on or off")
        session.stats = None if value == "default" else value == "on"
    elif name == "seed":
        talk.seed = None if value in ("none", "default") else _whole(name, value, 0)
    elif name == "max_tokens" and value == "default":
        talk.max_tokens = DEFAULT_TOKENS
    elif name == "max_tokens":
        tokens = _whole(name, value, 1)
        if tokens >= talk.longest:
            raise RequestError(f"max_tokens is {tokens}; model and cache have {talk.longest} tokens, prompt included")
        talk.max_tokens = tokens
    else:
        talk.settings = change_setting(talk.settings, name, value)
        idle = idle_reason(talk.settings, name)
        if idle is not None and value != "default":
            session.screen.note(f"[{idle}]")


def _whole(name: str, value: str, least: int) -> int:
    try:
        number = int(value)
    except ValueError:
        raise RequestError(f"{name} is {value!r}; it must be a whole number of at least {least}") from None
    if number < least:
        raise RequestError(f"{name} is {number}; it must be at least {least}")
    return number


def _values_names() -> list[str]:
    return ["max_tokens", "seed", "stats", *setting_names()]


def _values(session: Session) -> dict[str, str]:
    """Every value that /set changes, as text."""
    talk = session.talk
    return {
        "max_tokens": str(talk.max_tokens),
        "seed": "none" if talk.seed is None else str(talk.seed),
        "stats": "on" if session.shows_stats else "off",
        **{name: _shown(getattr(talk.settings, name)) for name in setting_names()},
    }


def _shown(value: Any) -> str:
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(repr, value))) + "}"
    return repr(value)


def _show_all(session: Session) -> None:
    """Print every value, those that were changed in bold on a terminal."""
    values = _values(session)
    if not sys.stderr.isatty():
        for name, value in values.items():
            session.screen.note(f"{name} {value}")
        return
    from rich.columns import Columns
    from rich.console import Console
    from rich.text import Text

    changed = session.talk.settings.effective()
    cells = [
        Text(f"{name} {value}", "bold" if name in changed or name in ("max_tokens", "seed", "stats") else "dim")
        for name, value in values.items()
    ]
    Console(stderr=True).print(Columns(cells, equal=True, column_first=True, padding=(0, 3)))


def _quit(session: Session, _: str) -> None:
    session.over = True


COMMANDS: dict[str, Command] = {
    "/help": Command("", "this list", _help),
    "/history": Command("", "show the conversation", _history),
    "/reset": Command("", "forget the conversation", _reset),
    "/retry": Command("", "answer the last message again", _retry),
    "/save": Command("FILE", "write the conversation to a JSON file", _save),
    "/load": Command("FILE", "go on from a conversation in a JSON file", _load),
    "/system": Command("[TEXT]", "another system message, or none; forgets the conversation", _system),
    "/image": Command("FILE", "send an image with the next message", _image),
    "/set": Command("[NAME [VALUE]]", "show or change a setting; the value default resets it", _set),
    "/quit": Command("", "leave", _quit),
    "/exit": Command("", "", _quit),
}
