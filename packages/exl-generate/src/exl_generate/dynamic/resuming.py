"""Continue a job after ids that an earlier run of it has handed out."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

from exl_filters import FilterRejected
from exl_generate.dynamic.output import Record, Released
from exl_generate.errors import ResumeError

if TYPE_CHECKING:
    from exl_generate.dynamic.decoder import Decoder, Outcome

__all__ = ["Advance", "Rerun"]


class Advance:
    """Advance a job's filters, stop strings and decoded text over ids that count as handed out, in parts.

    `width` is the size of the model's vocabulary.
    """

    __slots__ = ("_at", "_ids", "_width", "decoder", "is_done", "outcome")

    def __init__(self, decoder: Decoder, ids: SequenceOf[int], width: int) -> None:
        self.decoder = decoder
        self._ids, self._width, self._at = ids, width, 0
        self.is_done = False
        #: the end of the job with the last id; None if the job continues
        self.outcome: Outcome | None = None

    def step(self, most: int | None = None) -> bool:
        """Advance over `most` further ids, by default all. Returns whether none is left.

        Raises `ResumeError` for an id that the job would not have produced at its position.
        """
        end = len(self._ids) if most is None else min(len(self._ids), self._at + most)
        while self._at < end:
            self._take(self._at, self._ids[self._at])
            self._at += 1
        if self._at == len(self._ids) and not self.is_done:
            self.is_done = True
            self.decoder.output.hand_out(ended=self.outcome is not None and self.outcome.match is None)
        return self.is_done

    def _take(self, at: int, token: int) -> None:
        before, decoder = self.outcome, self.decoder
        if before is not None:
            raise ResumeError(
                f"resume_from holds {len(self._ids)} ids, but the job ended with id {at - 1}: {before.reason}"
            )
        if token >= self._width:
            raise ResumeError(f"resume_from[{at}] is {token}; the vocabulary has ids 0 to {self._width - 1}")
        if not decoder.constraints.heals(at, token):
            raise ResumeError(f"resume_from[{at}] is {token}, which does not begin with the text of the healed token")
        try:
            outcome = decoder.take(Record(token), at + 1)
        except FilterRejected as error:
            raise ResumeError(f"resume_from[{at}] is {token}, which the filters do not allow: {error}") from error
        if outcome is not None and outcome.reason == "banned":
            assert outcome.match is not None
            raise ResumeError(f"resume_from[{at}] is {token}, which ends the banned string {outcome.match.string!r}")
        self.outcome = outcome


class Rerun:
    """Run a job again from its prompt, and leave out what an earlier run has handed out.

    For samplers whose state is more than the ids so far: mirostat's depends on the probabilities of past tokens.
    """

    __slots__ = ("_end", "_left")

    def __init__(self, ids: SequenceOf[int]) -> None:
        self._left = list(ids)
        #: characters released so far, handed out before or not
        self._end = 0

    def strip(self, released: Released, *, ended: bool) -> Released:
        """Return the new part of the next released text and tokens. `ended`: nothing more is released.

        Raises `ResumeError` if the tokens differ from those of the earlier run.
        """
        start, self._end = self._end, self._end + len(released.text)
        if not self._left:
            return released
        again = released.records[: len(self._left)]
        for record, token in zip(again, self._left, strict=False):
            if record.token != token:
                raise ResumeError(f"resume_from holds {token} where this run of the job has sampled {record.token}")
        del self._left[: len(again)]
        if ended and self._left:
            raise ResumeError(f"resume_from holds {len(self._left)} ids after the end of the job: leave them out")
        text = released.text[again[-1].end - start :] if again else released.text
        return Released(text, released.records[len(again) :])
