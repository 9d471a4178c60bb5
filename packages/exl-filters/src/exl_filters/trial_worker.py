"""The process in which grammars are tried: `python -I -S trial_worker.py LIBRARY DIRECTORY STACK`, spoken to in JSON.

The standard library and one other, llguidance or xgrammar, which lies in DIRECTORY: it brings nothing of its parent's
along. The memory and CPU time it may take are set here, for each request, and hold when the parent is gone.
"""

from __future__ import annotations

import importlib
import json
import struct
import sys
import threading
import time
from typing import IO, Any

# Address space beside what is there at the start: arenas of threads, buffers.
HEADROOM = 128 << 20
# xgrammar's compilers by vocabulary.
_compilers: dict[str, Any] = {}


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
    """`{"lark": text}` for an EBNF text; `{"error": reason, "warnings": [...]}` for a grammar; for one of xgrammar's
    `{"compiled": text}`, or `{"unknown": True}` where its vocabulary is not here yet; `{"refused": reason}` for what
    raises.
    """
    try:
        if "call" in request:
            return compiled_by_xgrammar(request)
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
    except BaseException as error:  # a Rust panic is no Exception
        if isinstance(error, MemoryError) or "bad_alloc" in str(error):
            sys.exit("out of memory")
        return {"refused": str(error)}


def compiled_by_xgrammar(request: dict[str, Any]) -> dict[str, Any]:
    """The grammar compiled and written out. tokens: the vocabulary as Latin-1, the stop token last."""
    import xgrammar

    key = request["vocabulary"]
    if key not in _compilers and "tokens" not in request:
        return {"unknown": True}
    if key not in _compilers:
        tokens = [token.encode("latin-1") for token in request["tokens"]]
        info = xgrammar.TokenizerInfo(tokens, vocab_size=len(tokens), stop_token_ids=[len(tokens) - 1])
        _compilers.clear()
        _compilers[key] = xgrammar.GrammarCompiler(info, max_threads=2, cache_enabled=False)
    compiled = getattr(_compilers[key], request["call"])(request["text"], **request["options"])
    return {"compiled": compiled.serialize_json()}


def restrict(megabytes: int, seconds: float) -> None:
    """Address space and CPU time of this process from here on, where the system knows such limits."""
    try:
        import resource
    except ImportError:
        return
    usage = resource.getrusage(resource.RUSAGE_SELF)
    for what, soft in (
        (resource.RLIMIT_AS, (megabytes << 20) + _base),
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
        start = time.monotonic()
        send(answers, {**answer(request), "took": time.monotonic() - start})


def address_space() -> int:
    """Bytes of address space in use; a guess where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * 4096
    except OSError:
        return 1 << 30


def send(stream: IO[bytes], message: dict[str, Any]) -> None:
    """One frame: its length as a little-endian u32, then JSON."""
    raw = json.dumps(message).encode()
    stream.write(struct.pack("<I", len(raw)) + raw)
    stream.flush()


def receive(stream: IO[bytes]) -> dict[str, Any] | None:
    """The next frame, or None at the end of the stream, also in the middle of a frame: its writer was ended there."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    (size,) = struct.unpack("<I", head)
    raw = stream.read(size)
    if len(raw) < size:
        return None
    message: dict[str, Any] = json.loads(raw)
    return message


_base = HEADROOM

if __name__ == "__main__":
    library, directory, stack = sys.argv[1:]
    sys.path.insert(0, directory)
    # Before the limits, and before anything is asked.
    importlib.import_module(library)
    _base = HEADROOM + address_space()

    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr
    threading.stack_size(int(stack))
    worker = threading.Thread(target=serve, args=(requests, answers))
    worker.start()
    worker.join()
