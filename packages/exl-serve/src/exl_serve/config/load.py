"""Read the configuration from a TOML file, EXL_SERVE_ variables and command-line options; later sources win."""

from __future__ import annotations

import difflib
import ipaddress
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec

from exl_serve.config.model import ModelConfig, ServeConfig

__all__ = ["ConfigError", "fields_of", "keys", "load", "parse", "reloaded"]

PREFIX = "EXL_SERVE_"
RANGES: dict[str, tuple[float, float]] = {
    "server.port": (0, 65535),
    "server.workers": (1, 256),
    "server.default_max_tokens": (1, 1 << 24),
    "server.ping_seconds": (0.1, 3600),
    "server.first_byte_seconds": (0.1, 3600),
    "server.limits.body_seconds": (0.1, 86400),
    "server.limits.header_seconds": (0.1, 3600),
    "server.limits.keep_alive_seconds": (0.1, 86400),
    "auth.max_failures_per_minute": (1, 1 << 30),
    "model.cache_tokens": (256, 1 << 31),
    "model.max_seq_len": (1, 1 << 31),
    "model.max_batch_size": (1, 4096),
    "model.max_chunk_size": (1, 1 << 24),
    "model.target_itl": (0, 3600),
    "model.prompt_wait": (0, 3600),
    "model.keep_alive": (0, 1e9),
    "qos.target_ttft": (0.01, 3600),
    "qos.ageing": (0.1, 86400),
    "drain.delay": (0, 3600),
    "drain.timeout": (-1, 86400),
    "media.max_images": (0, 1024),
    "media.max_pixels": (1, 1 << 26),
    "otel.ratio": (0, 1),
    "ray.ingress_replicas": (1, 1024),
    "ray.ingress_cpus": (0, 1024),
    "ray.min_replicas": (0, 1024),
    "ray.max_replicas": (1, 1024),
    "ray.engine_cpus": (0, 1024),
    "ray.engine_gpus": (0, 64),
    "ray.health_seconds": (1, 3600),
    "ray.calm_seconds": (0, 1e9),
}
"""Ranges of numbers, both ends included. Limits that are not listed are at least 1."""


class ConfigError(ValueError):
    """The configuration cannot be used. `path` is the key, such as server.port, or empty."""

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path


def fields_of(kind: Any) -> dict[str, Any]:
    """Return the fields of a configuration struct and their types."""
    hints = get_type_hints(kind)
    return {name: hints[name] for name in kind.__struct_fields__}


def _is_group(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def keys(kind: Any = ServeConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, type) of every key but those of models."""
    for name, of in fields_of(kind).items():
        if _is_group(of):
            yield from keys(of, f"{prefix}{name}.")
        elif prefix or name != "model":
            yield prefix + name, of


def load(
    file: Path | None = None, environment: Mapping[str, str] | None = None, options: Mapping[str, Any] | None = None
) -> ServeConfig:
    """Load the configuration.

    Args:
        file: A TOML file, or None.
        environment: Environment variables; those that begin with EXL_SERVE_ are read.
        options: Values by path, as text or as they are. "model" maps to a sequence of model tables, which replace the
            file's.

    Raises:
        ConfigError: a key is unknown, or a value is not valid.
    """
    data: dict[str, Any] = {}
    if file is not None:
        try:
            data = tomllib.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"the configuration file cannot be read: {error}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file} is not TOML: {error}") from error
    known = dict(keys())
    for path, text in _from_environment(environment or {}, known):
        _put(data, path, _value(path, text, known[path]))
    for path, value in (options or {}).items():
        if path == "model":
            data["model"] = list(value)
            continue
        if path not in known:
            raise ConfigError(f"{path} is no key of the configuration{_nearest(path, known)}", path)
        _put(data, path, _value(path, value, known[path]) if isinstance(value, str) else value)
    return parse(data)


#: Origins that browsers send: in ASCII and without the default port; `file://` comes from Android's WebView.
_ORIGIN = re.compile(r"null|file://|(?!http:.*:80$|https:.*:443$)[a-z][a-z0-9+.-]*://(?:(?![A-Z/?#@*])[!-~])+")


def _choices(path: str) -> tuple[str, ...]:
    """Return the values that a key may have, such as `model[0].cache`."""
    of: Any = ServeConfig
    for part in path.split("."):
        name, bracket, _ = part.partition("[")
        of = fields_of(of)[name]
        if bracket:
            of = get_args(of)[0]
    return get_args(of)


def parse(data: Mapping[str, Any]) -> ServeConfig:
    """Build a configuration from its tables. Raises ConfigError that names the key."""
    _check_keys(data, ServeConfig, "")
    try:
        config = msgspec.convert(data, ServeConfig)
    except msgspec.ValidationError as error:
        said, _, at = str(error).partition(" - at ")
        path = at.strip("`").removeprefix("$").removeprefix(".")
        if said.startswith("Invalid enum value"):
            said += f"; it must be one of {', '.join(_choices(path))}"
        raise ConfigError(f"{path or 'the configuration'}: {said}", path) from error
    _check_ranges(config, "")
    _check_models(config)
    server = config.server
    if (server.tls_cert is None) != (server.tls_key is None):
        raise ConfigError("server.tls_cert and server.tls_key go together: give both or neither", "server.tls_cert")
    _check_proxies(server.trusted_proxies)
    for origin in server.cors_origins:
        if not _ORIGIN.fullmatch(origin):
            text = f"server.cors_origins has {origin[:64]!r}: name the origins, as http://HOST:PORT or https://HOST"
            raise ConfigError(text, "server.cors_origins")
    return config


def reloaded(old: ServeConfig, new: ServeConfig) -> tuple[ServeConfig, list[str]]:
    """Return the configuration that a running server uses after a reload, and the paths that need a restart.

    A running server takes over keys, limits, the log level, and models that were added or removed.
    """
    server = msgspec.structs.replace(old.server, limits=new.server.limits)
    before = {model.id: model for model in old.model}
    models = tuple(before.get(model.id, model) for model in new.model)
    log = msgspec.structs.replace(old.log, level=new.log.level)
    taken = msgspec.structs.replace(old, server=server, auth=new.auth, log=log, model=models)
    return taken, [path for path, one, other in _differences(taken, new, "") if one != other]


def _differences(one: Any, other: Any, prefix: str) -> Iterator[tuple[str, Any, Any]]:
    for name in one.__struct_fields__:
        a, b = getattr(one, name), getattr(other, name)
        if isinstance(a, msgspec.Struct):
            yield from _differences(a, b, f"{prefix}{name}.")
        elif name == "model" and not prefix:
            for x, y in zip(a, b, strict=True):
                yield f"model.{x.id}", x, y
        else:
            yield prefix + name, a, b


def _from_environment(environment: Mapping[str, str], known: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    names = {PREFIX + path.replace(".", "_").upper(): path for path in known}
    for name, text in environment.items():
        if not name.startswith(PREFIX):
            continue
        if name not in names:
            raise ConfigError(f"{name} sets no key of the configuration{_nearest(name, names)}", name)
        yield names[name], text


def _value(path: str, text: str, kind: Any) -> Any:
    """Parse a value from its text: JSON where the key is not a string; a list also with commas."""
    hint = str(kind)
    if "tuple" in hint and not text.lstrip().startswith("["):
        return [part.strip() for part in text.split(",") if part.strip()]
    if kind is str or ("str" in hint and "dict" not in hint and "tuple" not in hint) or "Literal" in hint:
        return text
    try:
        value = json.loads(text)
    except ValueError:
        raise ConfigError(f"{path} is {text[:100]!r}; give a number, true, false, or JSON", path) from None
    return value


def _put(data: dict[str, Any], path: str, value: Any) -> None:
    *groups, name = path.split(".")
    for group in groups:
        inner = data.setdefault(group, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{group} is a table of the configuration, not a value", group)
        data = inner
    data[name] = value


def _nearest(name: str, known: Any) -> str:
    found = difflib.get_close_matches(name, list(known), 1, 0.5)
    return f"; the nearest is {found[0]}" if found else ""


def _check_keys(data: Any, kind: Any, prefix: str) -> None:
    if not isinstance(data, Mapping):
        return
    known = fields_of(kind)
    for name, value in data.items():
        if name not in known:
            raise ConfigError(f"{prefix}{name} is no key of the configuration{_nearest(name, known)}", prefix + name)
        if _is_group(known[name]):
            _check_keys(value, known[name], f"{prefix}{name}.")
        elif not prefix and name == "model" and isinstance(value, list):
            for i, one in enumerate(value):
                _check_keys(one, ModelConfig, f"model[{i}].")


def _check_ranges(value: Any, prefix: str) -> None:
    for name in value.__struct_fields__:
        found, path = getattr(value, name), prefix + name
        if isinstance(found, msgspec.Struct):
            _check_ranges(found, path + ".")
        elif isinstance(found, tuple) and path == "model":
            for model in found:
                _check_ranges(model, "model.")
        elif isinstance(found, int | float) and not isinstance(found, bool):
            low, high = RANGES.get(path, (1, float("inf")))
            if not low <= found <= high:
                raise ConfigError(f"{path} is {found}; allowed are {low} to {high}", path)


_MAPPED = ipaddress.IPv6Network("::ffff:0:0/96")


def _check_proxies(given: tuple[str, ...]) -> None:
    path = "server.trusted_proxies"
    for one in given:
        if one == "unix":
            continue
        try:
            network = ipaddress.ip_network(one)
        except ValueError as error:
            text = f"{path}: {error}; give addresses, networks such as 10.0.0.0/8, or unix"
            raise ConfigError(text, path) from None
        if network.is_link_local or (network.version == 6 and network.subnet_of(_MAPPED)):
            text = f"{path}: {one} matches no client; give IPv4 addresses as such, and no link-local ones"
            raise ConfigError(text, path)
        if network.prefixlen == 0:
            raise ConfigError(f"{path}: {one} trusts every client; name the proxies' addresses", path)


def _check_models(config: ServeConfig) -> None:
    seen: dict[str, str] = {}
    for model in config.model:
        for name in (model.id, *model.aliases):
            if not name or len(name) > 256 or ":" in name or not name.isprintable():
                raise ConfigError(f"model id {name[:100]!r}: 1 to 256 printable characters, no colon", "model.id")
            if name in seen:
                raise ConfigError(f"two models are called {name!r}: {seen[name]} and {model.id}", "model.id")
            seen[name] = model.id
        if "\0" in model.path:
            raise ConfigError(f"model.path of {model.id} holds a null character", "model.path")
    for device, most in config.memory.budget.items():
        if most < 1:
            raise ConfigError(f"memory.budget of {device} is {most} bytes; give at least 1", "memory.budget")
