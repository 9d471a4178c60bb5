"""Text for a terminal: words wrapped at its width, notes with styles, control characters made harmless."""

from __future__ import annotations

import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Screen", "Wrapper", "silent_keys"]

try:
    import termios
except ImportError:  # not a POSIX system
    termios = None  # type: ignore[assignment]

TAB = "    "
#: Zero-width non-joiner and joiner, which scripts and emoji need.
JOINERS = "\u200c\u200d"


class Wrapper:
    """Breaks streamed text between words at `width()` columns; lines of code between ``` marks are left alone.

    Control characters but line breaks become U+FFFD, so that an answer cannot send escape sequences to the terminal. So
    do invisible format characters, for example those that reverse the order of text.
    White space before the first word is dropped.
    """

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width
        self._column = 0
        self._spaces = ""
        self._word = ""
        #: the word goes on where the output is: its beginning was too long to be held back
        self._glued = False
        self._in_code = False
        self._line_start = ""
        self._started = False

    def feed(self, text: str) -> str:
        """Return what can be shown of the text so far: all but the last word."""
        return "".join(self._character(character) for character in text)

    def flush(self) -> str:
        """The word that was held back."""
        return self._emit()

    def _character(self, character: str) -> str:
        if not self._started:
            if character.isspace():
                return ""
            self._started = True
        if character == "\n":
            return self._break()
        if character == "\t":
            character = TAB
        elif _is_control(character):
            character = "\ufffd"
        if len(self._line_start) < 3:
            self._line_start += character
        if self._in_code:
            return character
        if character.isspace():
            shown = self._emit()
            self._glued = False
            self._spaces += character
            return shown
        if _cells(character) == 2:  # between ideographs a line may break anywhere
            shown = self._emit()
            self._glued = False
            self._word = character
            return shown + self._emit()
        self._word += character
        if len(self._word) < self._width():
            return ""
        shown = self._emit()
        self._glued = True
        return shown

    def _break(self) -> str:
        shown = self._emit()
        if self._line_start == "```":
            self._in_code = not self._in_code
        self._column, self._spaces, self._glued, self._line_start = 0, "", False, ""
        return shown + "\n"

    def _emit(self) -> str:
        """The pending word, after its spaces or on a new line."""
        if not self._word:
            return ""
        spaces, word, self._spaces, self._word = self._spaces, self._word, "", ""
        size = _cells(word)
        if self._column and not self._glued and self._column + len(spaces) + size > self._width():
            self._column = size
            return "\n" + word
        if not self._column and not self._glued:  # as much indentation as leaves room for the word
            spaces = spaces[: max(0, self._width() - size)]
        self._column += len(spaces) + size
        return spaces + word


def _is_control(character: str) -> bool:
    """Whether a character must not reach the terminal. (Variation selectors are of another category.)"""
    category = unicodedata.category(character)
    return category == "Cc" or (category == "Cf" and character not in JOINERS)


def _cells(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text)


class Screen:
    """Where a chat writes: answers to standard output, everything else to standard error.

    Answers are wrapped if standard output is a terminal, notes have styles if standard error is one that shows them
    (not with TERM=dumb; NO_COLOR switches colours off).
    """

    def __init__(self) -> None:
        self._wrapper: Wrapper | None = None

    @property
    def wraps(self) -> bool:
        """Whether answers are wrapped."""
        return sys.stdout.isatty()

    def begin(self) -> None:
        """Begin an answer."""
        self._wrapper = Wrapper(_columns) if self.wraps else None

    def write(self, text: str) -> None:
        """Show a piece of the answer."""
        self._put(text if self._wrapper is None else self._wrapper.feed(text))

    def end(self, note: str = "") -> None:
        """End the answer's line with a note."""
        self._put((note if self._wrapper is None else self._wrapper.feed(note) + self._wrapper.flush()) + "\n")
        self._wrapper = None

    def message(self, role: str, content: str) -> None:
        """Show a message of the conversation."""
        if not self.wraps:
            print(f"{role}: {content}", flush=True)
            return
        self.begin()
        self.write(f"{role}: {content}")
        self.end()

    def note(self, text: str, style: str = "dim") -> None:
        """Write a line about the conversation."""
        if not sys.stderr.isatty():
            print(text, file=sys.stderr, flush=True)
            return
        from rich.console import Console
        from rich.text import Text

        Console(stderr=True).print(Text(text, style))

    def error(self, text: str) -> None:
        """Write what went wrong."""
        self.note(text, "red")

    def _put(self, text: str) -> None:
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()


@contextmanager
def silent_keys() -> Iterator[None]:
    """Do not echo keys that are pressed meanwhile: they would interrupt the text. The next prompt shows them."""
    if termios is None or not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    silent = [*before]
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _columns() -> int:
    """Columns of the terminal now."""
    return max(shutil.get_terminal_size().columns, 20)
