"""Render chat templates in a separate process, run as a script without imports of this project.

The worker reads length-prefixed JSON requests on standard input, answers in the same form, and ends with its input. It
sets the memory limit before it reads the first template, and its first answer confirms the limit. The reader of an
answer ends the process when it takes too long.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import IO, Any

PREFIX = 8  # bytes of the length before a message


def read_message(stream: IO[bytes]) -> Any:
    """Return the next message, None at the end of the stream."""
    head = stream.read(PREFIX)
    if len(head) < PREFIX:
        return None
    return json.loads(stream.read(int.from_bytes(head, "little")))


def write_message(stream: IO[bytes], message: Any) -> None:
    """Write one message and flush."""
    raw = json.dumps(message).encode()
    stream.write(len(raw).to_bytes(PREFIX, "little") + raw)
    stream.flush()


def limit_memory(extra_bytes: int) -> None:
    """Allow this process `extra_bytes` beyond what it has now, where the system can limit it."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + extra_bytes, now + extra_bytes))


def make_environment() -> Any:
    """jinja2's immutable sandbox with the extensions that chat templates use."""
    from datetime import datetime

    from jinja2 import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """`{% generation %}` marks training spans in some templates; its body is plain output."""

        tags = {"generation"}  # noqa: RUF012, jinja2 declares it as an instance variable

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def fail(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = fail
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as transformers' tojson does: no HTML escaping, and non-ASCII text stays readable."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def answer(environment: Any, request: dict[str, Any]) -> dict[str, str]:
    """Return {"text": prompt} or {"error": message}."""
    from jinja2 import TemplateError

    try:
        text = environment.from_string(request["source"]).render(**request["values"])
    except TemplateError as e:
        return {"error": f"the chat template failed: {e}"}
    except MemoryError:
        return {"error": "the chat template needs more memory than a template may have"}
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError) as e:
        return {"error": f"the chat template failed on these messages: {type(e).__name__}: {e}"}
    if len(text) > request["most"]:
        return {"error": f"the chat template made {len(text)} characters; at most {request['most']} are accepted"}
    return {"text": text}


def main() -> None:
    """Serve until standard input ends."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    setup = read_message(requests)
    if setup is None:
        return
    sys.path[:] = setup["path"]
    environment = make_environment()
    limit_memory(setup["memory"])
    write_message(answers, {"ready": True})
    while (request := read_message(requests)) is not None:
        write_message(answers, answer(environment, request))


if __name__ == "__main__":
    main()
