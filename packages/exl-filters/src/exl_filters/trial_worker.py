"""Process in which grammars are tried: `python -I -S trial_worker.py LIBRARY DIRECTORY STACK`, JSON over pipes.

It uses the standard library, llguidance or xgrammar, imported from DIRECTORY, and the modules of this package that need
nothing else. It sets its limits of memory and CPU time for each request; they hold also when the parent is gone. Its
priority is low, because a large grammar occupies a core for seconds.
"""

from __future__ import annotations

import importlib
import json
import os
import struct
import sys
import threading
import time
from types import ModuleType
from typing import IO, Any

# Address space beyond the use at the start, for arenas of threads and buffers.
HEADROOM = 128 << 20
# xgrammar's compilers by vocabulary.
_compilers: dict[str, Any] = {}


class _Bytes:
    """A tokenizer of the 256 bytes and the control tokens that a grammar may name, which is enough to compile.

    Args:
        width: Number of ids; ids that are neither bytes nor control tokens have no text.
        control: Texts of control tokens by id.
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
    """Answer one request.

    Returns `{"error": reason, "warnings": [...], "grammar": text}` for a source of llguidance; `{"compiled": text}` for
    a grammar of xgrammar, or `{"unknown": True}` where its vocabulary has not arrived; `{"broken": reason}` where a
    module cannot be imported or a file cannot be read; `{"refused": reason}` for other exceptions.
    """
    try:
        if "call" in request:
            return compiled_by_xgrammar(request)
        return tried_by_llguidance(request)
    except (ImportError, OSError) as error:
        return {"broken": str(error)}
    except BaseException as error:  # a Rust panic is a BaseException
        if isinstance(error, MemoryError) or "bad_alloc" in str(error):
            sys.exit("out of memory")
        return {"refused": str(error)}


def tried_by_llguidance(request: dict[str, Any]) -> dict[str, Any]:
    """Translate a source to llguidance's grammar and compile it."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    from exl_filters.errors import FilterCompileError
    from exl_filters.grammar_source import grammar_text, plain_source
    from exl_filters.reasons import source_reason

    try:
        source = plain_source(request["source"])
        grammar = grammar_text(source, **request["options"])
    except FilterCompileError as error:
        return {"error": str(error), "warnings": [], "grammar": ""}
    words = _Bytes(request["width"], {int(i): text for i, text in request["control"].items()})
    tokenizer = LLTokenizer(words, n_vocab=len(words.tokens), eos_token=words.eos_token_id)  # type: ignore[arg-type]
    limits = LLParserLimits(**request["limits"])
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    ((kind, value),) = source.items()
    message = matcher.get_error().strip()
    return {
        "error": source_reason(kind, value, message) if message else "",
        "warnings": list(matcher.get_grammar_warnings()),
        "grammar": grammar,
    }


def compiled_by_xgrammar(request: dict[str, Any]) -> dict[str, Any]:
    """Compile and serialize a grammar. tokens: the vocabulary as Latin-1, the stop token last."""
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
    """Limit address space and CPU time of this process from here on, where the system supports such limits."""
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
        most = sys.maxsize if hard == resource.RLIM_INFINITY else hard
        resource.setrlimit(what, (min(soft, most), hard))


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answer requests until the pipe is closed.

    The first frame, sent unasked, says that all modules are loaded. Each answer follows a frame that says that the
    request has been read.
    """
    send(answers, {"ready": True})
    while (request := receive(requests)) is not None:
        send(answers, {"begun": True})
        restrict(request["megabytes"], request["seconds"])
        start = time.monotonic()
        send(answers, {**answer(request), "took": time.monotonic() - start})


def load(library: str) -> None:
    """Import all modules that answers need, before the limits are set and before the budget of a grammar begins."""
    modules = [library, "exl_filters.cores"]
    if library == "llguidance":
        modules += ["llguidance.gbnf_to_lark", "exl_filters.grammar_source", "exl_filters.reasons"]
    for name in modules:
        importlib.import_module(name)


def address_space() -> int:
    """Return the bytes of address space in use; a guess where the system does not report them."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * 4096
    except OSError:
        return 1 << 30


def send(stream: IO[bytes], message: dict[str, Any]) -> None:
    """Write one frame: its length as a little-endian u32, then JSON."""
    raw = json.dumps(message).encode()
    stream.write(struct.pack("<I", len(raw)) + raw)
    stream.flush()


def receive(stream: IO[bytes]) -> dict[str, Any] | None:
    """Return the next frame; None at the end of the stream, also inside a frame whose writer was ended."""
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
    # The package without its own `__init__`, which imports numpy.
    sys.modules["exl_filters"] = package = ModuleType("exl_filters")
    package.__path__ = [os.path.dirname(os.path.abspath(__file__))]
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr
    try:
        load(library)
    except Exception as error:
        send(answers, {"broken": f"{type(error).__name__}: {error}"})
        sys.exit(1)
    from exl_filters.cores import yield_cores

    yield_cores()
    _base = HEADROOM + address_space()

    threading.stack_size(int(stack))
    worker = threading.Thread(target=serve, args=(requests, answers))
    worker.start()
    worker.join()
