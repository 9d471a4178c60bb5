"""Failed captures of decode steps, and the pauses before the next try."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .step_inputs import Bucket

__all__ = ["FIRST_PAUSE", "LONGEST_PAUSE", "CaptureFailure"]

FIRST_PAUSE, LONGEST_PAUSE = 64, 4096
"""Number of eager steps of a bucket between its first failed capture and the next try, which doubles with every
failure, and its upper limit."""


@dataclass(frozen=True, slots=True)
class CaptureFailure:
    """The reason why steps of one bucket run eagerly for now, and for how many steps."""

    bucket: Bucket
    kind: type[Exception]  # class of the error: torch.OutOfMemoryError, DeviceError, ...
    text: str
    tries: int
    pause: int  # eager steps of this bucket until the next try

    @classmethod
    def of(cls, bucket: Bucket, error: Exception, previous: CaptureFailure | None) -> CaptureFailure:
        """Return the failure that follows `previous`, with twice its pause."""
        tries = 1 if previous is None else previous.tries + 1
        pause = min(FIRST_PAUSE << (tries - 1), LONGEST_PAUSE)
        # Not the error itself, whose frames keep the memory allocated for the capture alive.
        return cls(bucket, type(error), str(error), tries, pause)

    def waited(self) -> CaptureFailure:
        """Return the failure after another eager step."""
        return replace(self, pause=self.pause - 1)

    def __str__(self) -> str:
        return (
            f"the step could not be captured: {self.text} (try {self.tries}; the next one in {self.pause} such steps)"
        )
