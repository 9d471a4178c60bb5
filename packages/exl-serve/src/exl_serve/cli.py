"""`exl serve`: the command."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from exl_serve.config.model import ServeConfig
    from exl_serve.super.supervisor import Supervisor

__all__ = ["app"]

app = typer.Typer(help="Serve models over HTTP: OpenAI's API.", pretty_exceptions_enable=False)
key = typer.Typer(help="Keys of clients.", no_args_is_help=True)
app.add_typer(key, name="key")


@app.callback(invoke_without_command=True)
def serve(
    ctx: typer.Context,
    model: Annotated[
        list[Path] | None,
        typer.Option("-m", "--model", help="Model folder; repeatable. Default: the bundled model.", show_default=False),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file with all of this and more.", show_default=False)
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on. Default: 127.0.0.1.", show_default=False)
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port; 0: any that is free. Default: 8000.", show_default=False)
    ] = None,
    workers: Annotated[int | None, typer.Option(help="API processes. Default: 1.", show_default=False)] = None,
    cache: Annotated[
        str | None, typer.Option(help="Number format of the K/V cache: fp16, fp8, q8, q6, q4.", show_default=False)
    ] = None,
    cache_tokens: Annotated[
        int | None, typer.Option(help="Tokens in the K/V cache. Default: what fits.", show_default=False)
    ] = None,
    max_seq_len: Annotated[
        int | None, typer.Option(help="Longest context of a request. Default: the model's.", show_default=False)
    ] = None,
    max_batch: Annotated[int | None, typer.Option(help="Requests at once. Default: 16.", show_default=False)] = None,
    prompt_wait: Annotated[
        float | None, typer.Option(help="Seconds that new prompts may wait for others. Default: 0.", show_default=False)
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:0, ...", show_default=False)] = None,
    draft: Annotated[
        str | None, typer.Option(help='Folder of a draft model, or "bundled".', show_default=False)
    ] = None,
    lora: Annotated[
        list[str] | None, typer.Option(help="NAME=DIR of an adapter; repeatable.", show_default=False)
    ] = None,
    key_file: Annotated[
        Path | None, typer.Option(help="File of clients' keys (exl serve key new).", show_default=False)
    ] = None,
    no_auth: Annotated[bool, typer.Option("--no-auth-i-know", help="Listen beyond this machine without keys.")] = False,
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option(
            help="Address or network of a proxy whose X-Forwarded-For is believed; repeatable.", show_default=False
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="PATH=VALUE of any key but those of models; repeatable.", show_default=False),
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(help="debug, info, warning, error. Default: info.", show_default=False)
    ] = None,
) -> None:
    """Serve models over HTTP with OpenAI's API, until Ctrl-C. `check FILE` checks a configuration without serving."""
    if ctx.invoked_subcommand is not None:
        return
    options: dict[str, Any] = {
        "server.host": host,
        "server.port": port,
        "server.workers": workers,
        "server.no_auth": no_auth or None,
        "server.trusted_proxies": trusted_proxy or None,
        "auth.key_file": None if key_file is None else str(key_file),
        "log.level": log_level,
    }
    given = {
        "cache": cache,
        "cache_tokens": cache_tokens,
        "max_seq_len": max_seq_len,
        "max_batch_size": max_batch,
        "prompt_wait": prompt_wait,
        "device": device,
        "draft": _draft(draft),
        "adapters": _adapters(lora or []) or None,
    }
    with _told():
        options |= _models_and_settings(model, config, given, set_ or [])
        reload = None if config is None else lambda: _load(config, options)
        raise typer.Exit(_run(_load_checked(config, options), reload))


@app.command()
def check(file: Annotated[Path, typer.Argument(help="TOML file.")]) -> None:
    """Check a configuration and its model folders; nothing is loaded."""
    with _told():
        made = _load_checked(file, {})
        from exl_core.config.model_folder import check_model_folder
        from exl_serve.super.plans import plans

        for one in made.model:
            check_model_folder(one.path)
        names = ", ".join(one.id for one in made.model) or "no models"
        typer.echo(f"{file}: {names}; listens on {made.server.uds or f'{made.server.host}:{made.server.port}'}")
        found = plans(made.model)
        for plan in found:
            typer.echo(f"\n{plan['id']}, {plan['cache_tokens']} tokens of cache\n{plan['table']}")
    if not all(plan["fits"] for plan in found):
        raise typer.Exit(1)


@app.command()
def top(
    url: Annotated[str, typer.Argument(help="Address of the server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None,
        typer.Option("--key", envvar="EXL_KEY", help="Key with the scope metrics.", show_default=False),
    ] = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once.")] = False,
) -> None:
    """Show the load of a running server."""
    import time

    import click

    from exl_serve.super.top import fetch, table

    with _told():
        while True:
            typer.echo(table(fetch(url, api_key)))
            if once:
                return
            time.sleep(interval)
            click.clear()


@app.command()
def ray(
    file: Annotated[Path, typer.Argument(help="TOML file; its section \\[ray] says how many replicas there are.")],
    address: Annotated[
        str | None, typer.Option(help="A running cluster. Default: a new one on this machine.", show_default=False)
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Take the place of the server that runs on the cluster, then end.")
    ] = False,
    check_only: Annotated[bool, typer.Option("--check", help="Check the configuration and end.")] = False,
    as_yaml: Annotated[
        bool, typer.Option("--yaml", help="Print the configuration for `serve deploy` and KubeRay, and end.")
    ] = False,
) -> None:
    """Serve on a Ray cluster, until Ctrl-C. Needs the extra "ray" of exl-serve."""
    with _told():
        if as_yaml:
            from exl_serve.ray.deploy import serve_file

            typer.echo(serve_file(_without_files(file, {})), nl=False)
            return
        made = _load_checked(file, {})
        from exl_serve.ray.app import check, run

        check(made, address)
        if not check_only:
            run(made, address, replace=replace)


@key.command("new")
def new(
    name: Annotated[str, typer.Argument(help="Name of the client.")],
    scope: Annotated[list[str] | None, typer.Option(help="infer, admin, metrics; repeatable.")] = None,
) -> None:
    """Make a key: prints it once, and the entry for the key file, which holds only its hash."""
    import hashlib

    from exl_serve.api.keys import SCOPES, new_key
    from exl_serve.config.load import ConfigError

    with _told():
        scopes = scope or ["infer"]
        if not set(scopes) <= SCOPES:
            raise ConfigError(f"--scope is one of {', '.join(sorted(SCOPES))}")
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
            raise ConfigError("a name has 1 to 64 letters, digits, dots, dashes and underscores")
    made = new_key()
    listed = ", ".join(f'"{one}"' for one in scopes)
    typer.echo(f"key: {made}", err=True)
    digest = hashlib.sha256(made.encode()).hexdigest()
    typer.echo(f'[[key]]\nname = "{name}"\nsha256 = "{digest}"\nscopes = [{listed}]')


def _models_and_settings(
    model: list[Path] | None, config: Path | None, given: dict[str, Any], settings: list[str]
) -> dict[str, Any]:
    """Return the options for models, and those of `--set`. Values of `given` that are None were not given.

    Raises ConfigError.
    """
    from exl_serve.config.load import ConfigError

    given = {name: value for name, value in given.items() if value is not None}
    options: dict[str, Any] = {}
    if model or config is None:
        options["model"] = _models(model or [_bundled()], given)
    elif given:
        raise ConfigError(f"{', '.join(given)}: set it in the file's [[model]], or name the folder with -m", "model")
    for one in settings:
        path, sign, value = one.partition("=")
        if not sign:
            raise ConfigError(f"--set {one}: give PATH=VALUE")
        options[path] = value
    return options


def _without_files(file: Path | None, options: dict[str, Any]) -> ServeConfig:
    """Read the configuration; the files that it names may be on other machines. Raises ConfigError."""
    import os

    from exl_serve.api.auth import check_bind
    from exl_serve.config.load import load

    made = load(file, os.environ, {name: value for name, value in options.items() if value is not None})
    check_bind(made)
    return made


def _load(file: Path | None, options: dict[str, Any]) -> ServeConfig:
    from exl_serve.api.auth import Authenticator
    from exl_serve.api.tracing import check_tracing

    made = _without_files(file, options)
    Authenticator(made.auth)  # the key file can be read
    check_tracing(made.otel)
    return made


def _load_checked(file: Path | None, options: dict[str, Any]) -> ServeConfig:
    """Read the configuration and check the content log's file. Raises ConfigError.

    A reload does not check the file: one that has become unsafe gets no lines, and the server goes on.
    """
    made = _load(file, options)
    if made.log.content is not None:
        from exl_serve.api.content import check_content_file

        check_content_file(Path(made.log.content))
    return made


def _run(config: ServeConfig, reload: Callable[[], ServeConfig] | None) -> int:
    from exl_serve.super.logs import set_up
    from exl_serve.super.supervisor import Supervisor

    set_up(config.log, "exl: %(message)s")
    if config.log.content is not None:
        logging.getLogger("exl_serve").warning("prompts and answers are written to %s", config.log.content)
    return Supervisor(config, _announce, reload=reload).run()


def _announce(supervisor: Supervisor) -> None:
    address = supervisor.address
    print(
        f"exl: serving at {address}\n"
        f"exl: try: curl {address}/v1/chat/completions -H 'content-type: application/json' "
        """-d '{"messages": [{"role": "user", "content": "Tell me a story."}]}'""",
        file=sys.stderr,
        flush=True,
    )


def _bundled() -> Path:
    from exl_generate import bundled

    place = Path(bundled.default_model_dir())
    print(f"exl: no model folder given (-m DIR): serving the bundled model {place.name}", file=sys.stderr)
    return place


def _models(folders: list[Path], given: dict[str, Any]) -> list[dict[str, Any]]:
    from exl_core.config.model_folder import check_model_folder

    return [
        {"id": check_model_folder(folder).resolve().name, "path": str(folder.resolve()), **given} for folder in folders
    ]


def _draft(name: str | None) -> str | None:
    if name != "bundled":
        return name
    from exl_generate import bundled

    return str(bundled.draft_model_dir())


def _adapters(given: list[str]) -> dict[str, str]:
    from exl_serve.config.load import ConfigError

    found = {}
    for one in given:
        name, sign, folder = one.partition("=")
        if not sign or not name or not folder:
            with _told():
                raise ConfigError(f"--lora {one}: give NAME=DIR")
        found[name] = folder
    return found


@contextmanager
def _told() -> Iterator[None]:
    """Print an intended error as one line and exit with 1."""
    from exl_kernels.errors import ExlError
    from exl_serve.config.load import ConfigError
    from exl_serve.errors import ServeError

    try:
        yield
    except (ConfigError, ServeError, ExlError) as error:
        print(f"exl: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
