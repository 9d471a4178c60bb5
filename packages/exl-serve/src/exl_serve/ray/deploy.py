"""The application as a configuration file of Ray Serve, for `serve deploy`, `serve run` and KubeRay's RayService."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from exl_serve.api.auth import check_bind
from exl_serve.config.load import parse
from exl_serve.config.model import ServeConfig
from exl_serve.ray.app import APP, application, check

__all__ = ["build", "serve_file"]


def serve_file(config: ServeConfig) -> str:
    """Return the YAML of a file that Ray Serve deploys. The files that `config` names are those of the nodes.

    Raises ConfigError for a configuration that Ray cannot serve.
    """
    check(config, None, {})
    check_bind(config)
    import yaml  # Ray depends on it

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        """Quotes what some readers of YAML take for a number, such as 1e3."""

    def text_of(dumper: Any, value: str) -> Any:
        plain = re.fullmatch(r"[A-Za-z_/][\w./:-]*", value)
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if plain else '"')

    Dumper.add_representer(str, text_of)
    made = {
        "proxy_location": "EveryNode",
        "http_options": {"host": config.server.host, "port": config.server.port},
        "applications": [
            {
                "name": APP,
                "route_prefix": "/",
                "import_path": f"{__name__}:{build.__name__}",
                "args": _changed(config),
            }
        ],
    }
    text: str = yaml.dump(made, Dumper=Dumper, sort_keys=False, width=100)
    return text


def build(args: dict[str, Any]) -> Any:
    """Return the application of a file that `serve_file` has made; Ray Serve calls it on the cluster.

    Raises ConfigError as `exl serve ray --address` does: a cluster without token authentication serves nothing.
    """
    config = parse(args)
    check_bind(config)
    check(config, "of this file")
    return application(config)


def _changed(one: msgspec.Struct) -> dict[str, Any]:
    """Return the fields whose values are not the default, as types that YAML has."""
    made: dict[str, Any] = {}
    for field in msgspec.structs.fields(one):
        value = getattr(one, field.name)
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        if value != default:
            made[field.name] = _plain(value)
    return made


def _plain(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return _changed(value)
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return msgspec.to_builtins(value)
