"""Errors of the generation layer: each names the value, the limit it broke and the remedy."""

from __future__ import annotations

from typing import ClassVar

from exl_kernels.errors import ExlError

__all__ = [
    "CapacityError",
    "JobStateError",
    "NoCandidatesError",
    "NonFiniteLogitsError",
    "RequestError",
    "ResumeError",
    "UserCodeError",
]


class RequestError(ExlError, ValueError):
    """A parameter of a generator, job or sampler setting is out of its range or of the wrong form."""

    code: ClassVar[str] = "request"


class ResumeError(RequestError):
    """A job cannot resume from the given ids: it would not have produced them, or has ended before the last one."""

    code: ClassVar[str] = "resume"


class CapacityError(ExlError, ValueError):
    """A job can never fit: its prompt and `max_new_tokens` exceed the cache, the model length or the batch."""

    code: ClassVar[str] = "capacity"


class JobStateError(ExlError, RuntimeError):
    """An operation does not fit the state of the job or generator, for example enqueueing a job twice."""

    code: ClassVar[str] = "job_state"


class NoCandidatesError(ExlError, RuntimeError):
    """Bans, bias, filters and healing together leave no token that may be sampled, or the logits hold NaN."""

    code: ClassVar[str] = "no_candidates"


class NonFiniteLogitsError(NoCandidatesError):
    """The logits hold NaN or infinity."""


class UserCodeError(ExlError, RuntimeError):
    """A hook or filter raised an exception that is not an `Exception` (SystemExit, CancelledError, ...): see
    `__cause__`.
    """

    code: ClassVar[str] = "user_code"
