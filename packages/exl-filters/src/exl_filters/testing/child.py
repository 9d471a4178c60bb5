"""Another process with another hash seed, for LAW-06: answers must not depend on the order of a set.

The process receives the pickled factory (functions and classes of importable modules), else the pickled filter (by its
`spec`). Anything else is not sent: a lambda without a spec is compared inside one process only.
"""

from __future__ import annotations

import atexit
import os
import pickle
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO, Any

from exl_filters.context import FilterContext
from exl_filters.errors import FilterError

__all__ = ["answers_elsewhere", "serve", "traveller"]

Answers = list[tuple[list[int] | None, list[int]]]
_lock = threading.Lock()
_child: subprocess.Popen[bytes] | None = None


def traveller(factory: Any, vocabulary: Any, sample: Any) -> bytes | None:
    """Return bytes from which another process can make the filter; None when neither can be pickled."""
    # The class before the sample: importing its module may register the name that the sample is pickled by.
    for way in ((factory, vocabulary), [type(sample), sample], [None, sample]):
        try:
            packed = pickle.dumps(way)
            if b"__main__" not in packed:
                return packed
        except Exception:
            continue
    return None


def answers_elsewhere(packed: bytes, context: FilterContext, path: Sequence[int]) -> Answers | None:
    """Return the filter's answers along `path` in the other process; None if it cannot make the filter there."""
    with _lock:
        child = _started()
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            _write(child.stdin, (packed, context, list(path)))
            kind, result = _read(child.stdout)
        except (OSError, EOFError) as error:
            _stop()
            raise FilterError(f"the process for LAW-06 has ended: {error}") from error
    return result if kind == "answers" else None


def _started() -> subprocess.Popen[bytes]:
    global _child
    if _child is None or _child.poll() is not None:
        seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
        places = os.pathsep.join(p or os.getcwd() for p in sys.path)
        _child = subprocess.Popen(
            [sys.executable, "-c", "from exl_filters.testing.child import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": places},
        )
        atexit.register(_stop)
    return _child


def _stop() -> None:
    global _child
    if _child is not None:
        _child.kill()
        _child.wait()
        _child = None


def _write(stream: IO[bytes], message: Any) -> None:
    raw = pickle.dumps(message)
    stream.write(struct.pack("<Q", len(raw)) + raw)
    stream.flush()


def _read(stream: IO[bytes]) -> Any:
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError("no answer")
    return pickle.loads(stream.read(struct.unpack("<Q", head)[0]))


def serve() -> None:
    """Answer requests until the pipe is closed. Output that filters print must not get between the answers."""
    answers = sys.stdout.buffer
    sys.stdout = sys.stderr
    while True:
        try:
            packed, context, path = _read(sys.stdin.buffer)
        except EOFError:
            return
        try:
            way = pickle.loads(packed)
            f = way[0](way[1]) if isinstance(way, tuple) else way[1]
        except Exception as error:
            _write(answers, ("cannot be made", str(error)))
            continue
        try:
            _write(answers, ("answers", _walk(f, context, path)))
        except Exception as error:
            _write(answers, ("answers", f"{type(error).__name__}: {error}"))


def _walk(f: Any, context: FilterContext, path: list[int]) -> Answers:
    if callable(getattr(f, "attach", None)):
        f.attach(context)
    f.begin("")
    found = [_plain(f.next())]
    for token in path:
        f.feed(token)
        found.append(_plain(f.next()))
    return found


def _plain(answer: Any) -> tuple[list[int] | None, list[int]]:
    allowed, ends = answer
    return (None if allowed is None else sorted(allowed)), sorted(ends)
