"""The table of all keys, rendered from the structs and the comments above their fields."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import msgspec

from exl_serve.config import model as source
from exl_serve.config.load import fields_of
from exl_serve.config.model import ModelConfig, ServeConfig

__all__ = ["reference"]

HEAD = """# Configuration of exl serve

`exl serve --config FILE` reads TOML. Every key but those of models is also a variable, `EXL_SERVE_` and the path with
underscores (`EXL_SERVE_SERVER_PORT=9000`), and an option, `--set PATH=VALUE`. Options go over variables, variables over
the file. A key that does not exist is an error. `exl serve check FILE` checks a file and prints what the models take.

```toml
[server]
host = "0.0.0.0"
port = 9000

[auth]
key_file = "keys.toml"

[[model]]
id = "llama"
path = "models/llama-8b-4.0bpw"
cache = "q8"
cache_tokens = 65536
```

The default `none` is what a key means that the file leaves out; TOML has no such value.

After SIGHUP a running server takes over keys, limits, the log level and models that were added or removed, and logs
what else has changed and needs a restart.
"""


def reference() -> str:
    """Return the page as Markdown."""
    parts = [HEAD]
    for name, kind in _groups():
        title = "[[model]]" if kind is ModelConfig else f"[{name}]" if name else "Top level"
        parts += [f"\n## {title}\n", "| key | type | default | |", "|---|---|---|---|"]
        notes = _comments(kind)
        defaults = {f.name: f for f in msgspec.structs.fields(kind)}
        for key, of in fields_of(kind).items():
            if _struct(of) or (not name and key == "model"):
                continue
            default = "" if defaults[key].required else f"`{_shown(defaults[key])}`"
            parts.append(f"| `{key}` | {_type(of)} | {default} | {notes.get(key, '')} |")
    return "\n".join(parts) + "\n"


def _groups(kind: Any = ServeConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    yield prefix, kind
    for name, of in fields_of(kind).items():
        if _struct(of):
            yield from _groups(of, f"{prefix}.{name}" if prefix else name)
        elif not prefix and name == "model":
            yield "model", ModelConfig


def _struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _shown(field: msgspec.structs.FieldInfo) -> str:
    value = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    if value is None:
        return "none"
    return msgspec.json.encode(value).decode()


def _type(kind: Any) -> str:
    """Return a type by the words of TOML."""
    names = {str: "string", int: "integer", float: "float", bool: "boolean"}
    if kind in names:
        return names[kind]
    of = get_args(kind)
    if get_origin(kind) is Literal:
        return ", ".join(f'`"{value}"`' for value in of)
    if get_origin(kind) is tuple:
        return f"list of {_type(of[0])}s"
    if get_origin(kind) is dict:
        return "table" if of[1] is Any else f"table of {_type(of[1])}s"
    return " or ".join(_type(one) for one in of if one is not type(None))


def _comments(kind: Any) -> dict[str, str]:
    """Return the `#:` comment above each field."""
    found, pending = {}, []
    for line in inspect.getsource(getattr(source, kind.__name__)).splitlines():
        comment, field = re.match(r"\s+#: (.*)", line), re.match(r"    (\w+):", line)
        if comment:
            pending.append(comment.group(1))
        elif field:
            found[field.group(1)] = " ".join(pending).replace("|", "or")
            pending = []
    return found


if __name__ == "__main__":
    print(reference(), end="")
