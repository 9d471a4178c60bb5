"""Translate errors of the libraries to errors for an HTTP client."""

from __future__ import annotations

import re

from exl_serve.errors import ServeError

__all__ = ["BY_CODE", "has_lost_the_gpu", "serve_error"]

_INVALID = (400, "invalid_request_error")
_ENGINE = (500, "server_error")

BY_CODE: dict[str, tuple[int, str, str]] = {
    # A request that can never run.
    "request": (*_INVALID, "invalid_value"),
    "input": (*_INVALID, "invalid_value"),
    "token_id": (*_INVALID, "token_id"),
    "capacity": (*_INVALID, "context_length_exceeded"),
    "sequence_too_long": (*_INVALID, "context_length_exceeded"),
    "chat_template": (*_INVALID, "chat_template"),
    "tokenizer": (*_INVALID, "invalid_value"),
    "adapter": (*_INVALID, "adapter"),
    "filter_compile": (*_INVALID, "invalid_grammar"),
    "filter_usage": (*_INVALID, "invalid_grammar"),
    "unknown_filter": (*_INVALID, "invalid_grammar"),
    "ambiguous_plugin": (*_INVALID, "invalid_grammar"),
    "plugin": (*_INVALID, "invalid_grammar"),
    "no_candidates": (*_INVALID, "no_candidates"),
    # Another run of it has produced other tokens, or filters that differ.
    "resume": (409, "conflict", "resume_refused"),
    # A feature that this installation or model does not offer.
    "unsupported": (501, "not_implemented", "unsupported"),
    "missing_extra": (501, "not_implemented", "unsupported"),
    "architecture": (501, "not_implemented", "unsupported"),
    # The engine failed.
    "filter_dead_end": (*_ENGINE, "filter_dead_end"),
}
"""By an error's `code`; every other code is (500, server_error, engine_error)."""


def serve_error(error: BaseException, param: str | None = None) -> ServeError:
    """Return an error for the client. An unexpected error reports only its type: its text may hold paths or a
    prompt.
    """
    if isinstance(error, ServeError):
        return error
    code = getattr(error, "code", None)
    if not isinstance(code, str):
        return ServeError.engine(f"the engine failed on this request ({type(error).__name__}); see its log for more")
    status, kind, name = BY_CODE.get(code, (*_ENGINE, "engine_error"))
    if status == 500 and name == "engine_error":
        return ServeError.engine(f"the engine failed on this request ({code}); see its log for more")
    return ServeError(status, kind, name, str(error), param=param)


_LOST = re.compile(
    "context is lost|CUDA error: (?!out of memory)|CUDA_ERROR_(ILLEGAL|LAUNCH_FAILED|LAUNCH_TIMEOUT|MISALIGNED|ASSERT|"
    "HARDWARE|INVALID_PC|INVALID_ADDRESS_SPACE|INVALID_CONTEXT|CONTEXT_IS_DESTROYED|ECC)"
)
"""Errors after which every further call of the process to the GPU fails."""


def has_lost_the_gpu(error: BaseException | None) -> bool:
    """Whether an error, or one that caused it, means that this process cannot use its GPU any more."""
    while error is not None:
        if _LOST.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False
