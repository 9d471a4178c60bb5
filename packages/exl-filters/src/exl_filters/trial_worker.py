"""The process in which grammars are tried: `python -I -S trial_worker.py DIRECTORY STACK`, spoken to in JSON frames.

Standard library and llguidance only: it starts quickly and brings nothing of its parent's along. The memory and CPU
time it may take are set here, for each request, and hold when the parent is gone.
"""

from __future__ import annotations

import json
import struct
import sys
import threading
from typing import IO, Any

HEADROOM = 256 << 20  # interpreter, libraries and stacks, in address space


class _Bytes:
    """A tokenizer of the 256 bytes and the control tokens a grammar may name: compiling asks for no more.

    control: texts of control tokens by id. width: ids there are; those that are neither have no text.
    """

    is_tokenizer_wrapper = True

    def __init__(self, width: int, control: dict[int, str]) -> None:
        free = [i for i in range(width + 257 + len(control)) if i not in control]
        size = max(width, free[256] + 1)
        named = {i: (control.get(i) or f"<|special_{i}|>").encode() for i in range(size)}
        self.bytes_at = dict(enumerate(free[:256]))
        named.update({i: bytes([byte]) for byte, i in self.bytes_at.items()})
        texts = set(self.bytes_at.values())
        self.tokens = [named[i] for i in range(size)]
        self.special_token_ids = [i for i in range(size) if i in control or i not in texts]
        self.eos_token_id = free[256]
        self.bos_token_id = None

    def __call__(self, text: bytes | str) -> list[int]:
        raw = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
        return [self.bytes_at[byte] for byte in raw]


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """`{"lark": text}` for an EBNF text; `{"error": reason, "warnings": [...]}` for a grammar; what raises:
    `{"refused": reason}`.
    """
    try:
        if "ebnf" in request:
            from llguidance.gbnf_to_lark import any_to_lark

            return {"lark": any_to_lark(request["ebnf"])}
        from llguidance import LLMatcher, LLParserLimits, LLTokenizer

        words = _Bytes(request["width"], {int(i): text for i, text in request["control"].items()})
        tokenizer = LLTokenizer(words, n_vocab=len(words.tokens), eos_token=words.eos_token_id)  # type: ignore[arg-type]
        limits = LLParserLimits(**request["limits"])
        matcher = LLMatcher(tokenizer, request["grammar"], log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        return {"error": matcher.get_error().strip(), "warnings": list(matcher.get_grammar_warnings())}
    except MemoryError:
        raise
    except BaseException as error:  # a Rust panic is no Exception
        return {"refused": str(error)}


def restrict(megabytes: int, seconds: float) -> None:
    """Address space and CPU time of this process from here on, where the system knows such limits."""
    try:
        import resource
    except ImportError:
        return
    usage = resource.getrusage(resource.RUSAGE_SELF)
    for what, soft in (
        (resource.RLIMIT_AS, (megabytes << 20) + HEADROOM),
        (resource.RLIMIT_CPU, int(usage.ru_utime + usage.ru_stime + seconds) + 2),
    ):
        _, hard = resource.getrlimit(what)
        if hard == resource.RLIM_INFINITY or soft <= hard:
            resource.setrlimit(what, (soft, hard))


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answer until the pipe is closed. The first frame, sent unasked, says that the libraries are here."""
    send(answers, {"ready": True})
    while (request := receive(requests)) is not None:
        restrict(request["megabytes"], request["seconds"])
        send(answers, answer(request))


def send(stream: IO[bytes], message: dict[str, Any]) -> None:
    """One frame: its length as a little-endian u32, then JSON."""
    raw = json.dumps(message).encode()
    stream.write(struct.pack("<I", len(raw)) + raw)
    stream.flush()


def receive(stream: IO[bytes]) -> dict[str, Any] | None:
    """The next frame, or None at the end of the stream."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    raw = stream.read(struct.unpack("<I", head)[0])
    message: dict[str, Any] = json.loads(raw)
    return message


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    import llguidance  # noqa: F401 - before the limits, and before anything is asked

    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr
    threading.stack_size(int(sys.argv[2]))
    worker = threading.Thread(target=serve, args=(requests, answers))
    worker.start()
    worker.join()
