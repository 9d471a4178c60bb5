"""Continue a job after ids that an earlier run of it has handed out."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

from exl_filters import FilterRejected
from exl_generate.dynamic.output import Record, Released
from exl_generate.errors import ResumeError

if TYPE_CHECKING:
    from exl_generate.dynamic.decoder import Decoder, Outcome

__all__ = ["Replay", "advance"]


def advance(decoder: Decoder, ids: SequenceOf[int], width: int) -> Outcome | None:
    """Advance filters, stop strings and decoded text over `ids`, all of which count as handed out.

    Returns the end of the job with the last id, or None if the job continues. `width` is the size of the model's
    vocabulary. Raises `ResumeError` for an id that the job would not have produced at its position.
    """
    outcome: Outcome | None = None
    for at, token in enumerate(ids):
        if outcome is not None:
            raise ResumeError(f"resume_from holds {len(ids)} ids, but the job ended with id {at - 1}: {outcome.reason}")
        _check(decoder, at, token, width)
        try:
            outcome = decoder.take(Record(token), at + 1)
        except FilterRejected as error:
            raise ResumeError(f"resume_from[{at}] is {token}, which the filters do not allow: {error}") from error
        if outcome is not None and outcome.reason == "banned":
            assert outcome.match is not None
            raise ResumeError(f"resume_from[{at}] is {token}, which ends the banned string {outcome.match.string!r}")
    decoder.output.hand_out(ended=outcome is not None and outcome.match is None)
    return outcome


def _check(decoder: Decoder, at: int, token: int, width: int) -> None:
    if token >= width:
        raise ResumeError(f"resume_from[{at}] is {token}; the vocabulary has ids 0 to {width - 1}")
    if not decoder.constraints.heals(at, token):
        raise ResumeError(f"resume_from[{at}] is {token}, which does not begin with the text of the healed token")


class Replay:
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
            raise ResumeError(f"resume_from holds {len(self._left)} ids behind the end of the job")
        text = released.text[again[-1].end - start :] if again else released.text
        return Released(text, released.records[len(again) :])
