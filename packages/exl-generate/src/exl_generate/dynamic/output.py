"""Turn accepted tokens into text that may be shown: hold back, release, withdraw.

Text, ids, probabilities and logits of a token are kept in one record, so they are released, held and withdrawn
together. A record is released when all its characters are complete and none of them can become part of a stop string or
banned string.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from exl_generate.dynamic.detokenize import PieceTable, decode_incremental
from exl_generate.dynamic.stopping import Automaton

__all__ = ["Match", "Record", "Released", "TextStream"]


@dataclass(slots=True, unsafe_hash=True)
class _Scan:
    """The state of the stream without the held records. Restoring it undoes a token exactly; it is never changed in
    place.
    """

    pending: bytes = b""
    length: int = 0
    stop: int = 0
    ban: int = 0
    #: bytes of the healed prefix that the prompt shows already
    skip: bytes = b""


_START = _Scan()


@dataclass(slots=True)
class Record:
    """One accepted token and the requested reports."""

    token: int
    probability: float = 1.0
    top_tokens: NDArray[np.int64] | None = None
    top_probabilities: NDArray[np.float32] | None = None
    logits: torch.Tensor | None = None
    state: torch.Tensor | None = None
    #: what was sampled before hooks replaced it
    drawn: int = -1
    #: whether the filters have seen it
    fed: bool = True
    #: the token as int64 [1, 1], if that tensor exists already
    ids: torch.Tensor | None = None
    #: characters of the whole output up to the end of this token; one more while its last character is incomplete
    end: int = 0
    #: the token's last character is incomplete
    open: bool = False
    before: _Scan = _START


@dataclass(slots=True)
class Released:
    """Text and the tokens it belongs to."""

    text: str
    records: list[Record]


@dataclass(frozen=True, slots=True)
class Match:
    """A completed stop string or banned string; `start` is the position of its first character in the whole output."""

    kind: str
    string: str
    start: int


class TextStream:
    """The output of one job, between its sampler and its reader."""

    def __init__(self, pieces: PieceTable, stops: Automaton, bans: Automaton, skip: bytes = b"") -> None:
        self._pieces = pieces
        self._stops = stops
        self._bans = bans
        self._banning = bool(bans)
        self._watching = bool(stops) or self._banning
        self._scan = _Scan(skip=skip)
        #: tokens that have not been released
        self.held: list[Record] = []
        self._text = ""
        self.full_text = ""

    @property
    def held_tokens(self) -> int:
        """Number of tokens that may still be withdrawn."""
        return len(self.held) if self._banning else 0

    def push(self, record: Record) -> Match | None:
        """Add a token's text to the held text. Returns the first string that it completes, a ban before a stop."""
        record.before = self._scan
        self.held.append(record)
        if not (self._scan.pending or self._scan.skip) and (whole := self._pieces.text_of(record.token)) is not None:
            return self._append(record, whole, b"")
        data = self._pieces[record.token]
        data = data[len(self._scan.skip) :]  # the first token begins with the prefix: it was chosen so
        text, pending = decode_incremental(self._scan.pending, data)
        return self._append(record, text, pending)

    def release(self) -> Released:
        """Release every leading token whose text is safe to show.

        Tokens are released only up to a point where no banned string has begun. A token after that point may still be
        withdrawn, and its replacement may continue the banned string from there. For the same reason, the first bytes
        of a character wait for the token that completes it.
        """
        if len(self.held) == 1 and not (self._scan.stop or self._scan.ban or self.held[0].open):
            return self._take(1, self._scan.length)
        safe = self._scan.length - self._stops.depth[self._scan.stop]
        count = 0
        for i, record in enumerate(self.held, 1):
            after = self.held[i].before if i < len(self.held) else self._scan
            if record.end > safe:
                break
            if not record.open and after.ban == 0:
                count = i
        return self._take(count, self.held[count - 1].end if count else self._start)

    def flush(self) -> Released:
        """Release everything that is held: the output ends here, so an incomplete character becomes U+FFFD."""
        text, _ = decode_incremental(self._scan.pending, b"", final=True)
        self._text += text
        self._scan = _Scan(length=self._scan.length + len(text))
        return self._take(len(self.held), self._scan.length)

    def flush_held(self) -> Released:
        """Return everything that is still held, without adding it to the full text."""
        text, _ = decode_incremental(self._scan.pending, b"", final=True)
        return Released(self._text + text, list(self.held))

    def hand_out(self, *, ended: bool) -> None:
        """Treat all tokens so far as handed out, with their text: an earlier run of the job has done so.

        `ended`: the output ended with them, so the U+FFFD of an incomplete character was handed out too.
        """
        if ended:
            self.flush()
        else:
            self._take(len(self.held), self._scan.length)

    def stop_at(self, match: Match) -> tuple[Released, str]:
        """Hand out the text before a stop string with all tokens; also returns the text that is kept back, from the
        string on. (After `hand_out` the string may begin in text that was handed out.)"""
        held = (self.full_text + self._text)[match.start :]
        released = self._take(len(self.held), max(match.start, self._start))
        self.full_text, self._text = self.full_text[: match.start], ""
        return released, held

    def withdraw(self, match: Match) -> tuple[list[Record], str]:
        """Remove the tokens that spelled a banned string, from the token with its first character on. Returns them and
        their text.
        """
        first = next(i for i, record in enumerate(self.held) if record.end > match.start)
        gone = self.held[first:]
        del self.held[first:]
        self._scan = gone[0].before
        keep = self._scan.length - self._start
        text, self._text = self._text[keep:], self._text[:keep]
        return gone, text

    @property
    def _start(self) -> int:
        """Position of the held text's first character in the whole output."""
        return len(self.full_text)

    def _append(self, record: Record, text: str, pending: bytes) -> Match | None:
        before = self._scan
        stop, ban = before.stop, before.ban
        self._text += text
        match: Match | None = None
        if self._watching and (stop or ban or self._stops.sees(text) or (self._banning and self._bans.sees(text))):
            at = before.length
            for character in text:
                at += 1
                stop = self._stops.step(stop, character)
                ban = self._bans.step(ban, character) if self._banning else 0
                if match is None:
                    match = self._completed(stop, ban, at)
        length = before.length + len(text)
        record.open = bool(pending)
        record.end = length + record.open
        self._scan = _Scan(pending, length, stop, ban)
        return match

    def _completed(self, stop: int, ban: int, length: int) -> Match | None:
        if size := self._bans.match_length(ban):
            return Match("ban", self._bans.matched(ban), length - size)
        if size := self._stops.match_length(stop):
            return Match("stop", self._stops.matched(stop), length - size)
        return None

    def _take(self, count: int, end: int) -> Released:
        size = end - len(self.full_text)
        released = Released(self._text[:size], self.held[:count])
        del self.held[:count]
        self.full_text += released.text
        self._text = self._text[size:]
        return released
