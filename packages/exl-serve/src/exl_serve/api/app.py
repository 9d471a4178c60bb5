"""The ASGI application: routes, authentication, errors in OpenAI's shape, headers."""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import logging
import mimetypes
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from exl_serve.api import admin, chat, completions, health, models, openapi, probe, responses, tabby
from exl_serve.api.http import Call, Endpoint, error_response
from exl_serve.api.state import AppState
from exl_serve.errors import ServeError

__all__ = ["ROUTES", "Path", "create_app"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Path:
    """One route.

    `scope` is the scope that a key needs for it; "open" needs no key, "own" admin or infer: the latter for what belongs
    to the key.
    """

    method: str
    path: str
    scope: str
    endpoint: Endpoint


ROUTES: tuple[Path, ...] = (
    Path("POST", "/v1/chat/completions", "infer", chat.chat_completions),
    Path("POST", "/v1/completions", "infer", completions.completions),
    Path("POST", "/v1/embeddings", "infer", models.embeddings),
    Path("POST", "/v1/responses", "infer", responses.responses),
    Path("POST", "/v1/responses/input_tokens", "infer", responses.input_tokens),
    Path("GET", "/v1/responses/{id}", "infer", responses.no_response),
    Path("DELETE", "/v1/responses/{id}", "infer", responses.no_response),
    Path("POST", "/v1/responses/{id}/cancel", "infer", responses.no_response),
    Path("GET", "/v1/models", "infer", models.list_models),
    Path("GET", "/v1/models/{id:path}", "infer", models.get_model),
    Path("POST", "/tokenize", "infer", models.tokenize),
    Path("POST", "/v1/tokenize", "infer", models.tokenize),
    Path("POST", "/v1/token/encode", "infer", models.tokenize),
    Path("POST", "/detokenize", "infer", models.detokenize),
    Path("POST", "/v1/detokenize", "infer", models.detokenize),
    Path("POST", "/v1/token/decode", "infer", models.detokenize),
    Path("POST", "/apply-template", "infer", models.apply_template),
    Path("GET", "/health/live", "open", health.live),
    Path("GET", "/health/ready", "open", health.ready),
    Path("GET", "/health/generate", "infer", probe.generate),
    Path("GET", "/health", "open", health.ready),
    Path("GET", "/ping", "open", health.ready),
    Path("GET", "/version", "open", health.version),
    Path("GET", "/openapi.json", "open", openapi.openapi),
    Path("GET", "/docs", "open", openapi.routes_page),
    Path("GET", "/metrics", "metrics", health.metrics),
    Path("GET", "/load", "metrics", health.load),
    Path("POST", "/v1/load_lora_adapter", "admin", admin.load_adapter),
    Path("POST", "/v1/unload_lora_adapter", "admin", admin.unload_adapter),
    Path("GET", "/v1/lora/list", "admin", admin.list_adapters),
    Path("POST", "/reset_prefix_cache", "admin", admin.reset_cache),
    Path("GET", "/v1/requests", "own", admin.list_requests),
    Path("DELETE", "/v1/requests/{id}", "own", admin.cancel_request),
    Path("POST", "/v1/models/{id:path}/load", "admin", admin.load_model),
    Path("POST", "/v1/models/{id:path}/unload", "admin", admin.unload_model),
    Path("GET", "/v1/model", "own", tabby.current_model),
    Path("GET", "/v1/model/list", "own", tabby.list_folders),
    Path("POST", "/v1/model/load", "admin", tabby.load_model),
    Path("POST", "/v1/model/unload", "admin", tabby.unload_model),
    Path("POST", "/v1/lora/load", "admin", tabby.load_lora),
    Path("POST", "/v1/lora/unload", "admin", tabby.unload_lora),
    Path("GET", "/v1/auth/permission", "infer", tabby.permission),
)
"""Every route but those of the page."""

WITHOUT_MODELS = (health.live, health.ready, health.version, health.metrics, openapi.openapi, openapi.routes_page)
"""Endpoints that answer before the list of models has been read."""
PROBED = frozenset(path.path for path in ROUTES if path.endpoint is health.ready)
"""Paths that load balancers ask again and again while the server is not ready."""
KNOWN_SECONDS = 30.0
"""Seconds that a request waits for the list of models."""
_SLASHES = re.compile("/{2,}")
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
"""Methods that change nothing."""
SECURITY_HEADERS = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


def create_app(state: AppState) -> ASGIApp:
    """Return the ASGI application over `state`. Any ASGI server can run it, or another application mount it."""
    routes = [(Route(path.path, _unused, methods=[path.method]), path) for path in ROUTES]

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            await _handle(state, routes, scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1003})

    return app


async def _unused(*_: Any) -> None:
    """Do nothing: starlette matches the routes, and this module calls the endpoints."""


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
        elif message["type"] == "lifespan.shutdown":
            await send({"type": "lifespan.shutdown.complete"})
            return


async def _handle(
    state: AppState, routes: Sequence[tuple[Route, Path]], scope: Scope, receive: Receive, send: Send
) -> None:
    call = Call(scope, receive, send, state)
    call.headers |= SECURITY_HEADERS
    try:
        _check_host(call)
        _check_origin(call)
        if _cors(call):
            await call.start(204, {})
            await call.write(b"", more=False)
            return
        if await _page(call):
            return
        path, parameters = _find(routes, scope)
        scope["path_params"] = parameters
        if path.scope != "open":
            call.caller = state.authenticate(scope, path.scope)
        if scope["method"] not in SAFE_METHODS:
            call.check_kind()
        if path.endpoint not in WITHOUT_MODELS:
            await _models_known(state)
        await path.endpoint(call)
    except ServeError as error:
        await _refuse(call, error)
    except asyncio.CancelledError:
        raise
    except Exception:
        log.exception("request %s failed", call.id)
        await _refuse(call, ServeError.engine(f"the server failed on this request; its log has it under {call.id}"))
    finally:
        if call.ticket is not None:
            call.ticket.release()
        _record(call)


def _record(call: Call) -> None:
    """Hand a request that asked for an answer to the content log and to the traces. An error of theirs is logged."""
    state = call.state
    try:
        if state.content is not None and call.asked is not None:
            state.content.write(_content(call), call.size)
        if state.tracing is not None and call.operation:
            state.tracing.record(call)
    except Exception:
        log.exception("request %s: its end was not recorded", call.id)


def _content(call: Call) -> dict[str, Any]:
    """Return the line of the content log for a request that asked for an answer."""
    line = call.line or {"id": call.id, "key": call.caller.name, "model": call.model, "status": 499, "finish": "abort"}
    about = {name: line.get(name) for name in ("id", "key", "model", "status", "finish", "code")}
    content = {"route": call.scope["path"], "request": call.asked, "answers": call.answers}
    return {"time": round(time.time(), 3), **about, **content}


async def _models_known(state: AppState) -> None:
    """Wait until the list of models has been read. Raises ServeError 503 where that takes long or the server stops."""
    if state.known is None or (state.known.is_set() and not state.unread):
        return
    try:
        async with asyncio.timeout(KNOWN_SECONDS):
            await state.known.wait()
    except TimeoutError:
        raise health.not_known() from None
    if state.unread:
        raise ServeError.unavailable("draining", "the server stops: try again elsewhere", 5.0)


async def _refuse(call: Call, error: ServeError) -> None:
    call.state.meter.count("exl_rejected_total", code=error.code)
    _log_refusal(call, error)
    if error.status == 499 or call.started:
        return  # the client has left, or a stream has begun, which ends by itself
    try:
        await error_response(call, error)
    except OSError:  # the client left
        log.debug("request %s: the client left before its error", call.id)


def _log_refusal(call: Call, error: ServeError) -> None:
    """Log a request that ends without a line of its own; not a probe of health, which comes every few seconds."""
    path = str(call.scope["path"])
    if call.line is not None or error.status == 499 or path in PROBED:
        return
    call.log(
        {
            "id": call.id,
            "key": call.caller.name,
            "model": call.model,
            "status": error.status,
            "finish": "rejected",
            "code": error.code,
            # Not the message: a template's may hold words of the conversation.
            "param": error.param,
            "route": f"{call.scope['method']} {path[:128]}",
            "seconds": round(time.monotonic() - call.began, 4),
        }
    )


def _find(routes: Sequence[tuple[Route, Path]], scope: Scope) -> tuple[Path, dict[str, Any]]:
    """Return the route of a request and its path parameters.

    A path that only other base URLs lead to is replaced in `scope`. Raises ServeError 404 or 405.
    """
    allowed: list[str] = []
    for spelling in _spellings(scope["path"], scope.get("root_path", "")):
        for route, path in routes:
            if path.scope != "infer" and spelling != scope["path"]:
                continue  # a proxy may close these by their exact paths
            match, child = route.matches({**scope, "path": spelling})
            if match is Match.FULL:
                scope["path"] = spelling
                return path, child.get("path_params", {})
            if match is Match.PARTIAL:
                allowed.append(path.method)
    if allowed:
        error = ServeError(
            405,
            "invalid_request_error",
            "method_not_allowed",
            f"{scope['method']} is not served here: use {', '.join(sorted(set(allowed)))}",
            allow=", ".join(sorted(set(allowed))),
        )
        raise error
    raise ServeError(
        404,
        "not_found_error",
        "not_found",
        f"there is no route {scope['path'][:128]}: /openapi.json lists those that there are",
    )


def _spellings(path: str, root: str) -> Iterator[str]:
    """Yield a path below `root`, and the paths that a client means whose base URL lacks /v1, has it twice, or ends with
    a slash.
    """
    yield path
    plain = _SLASHES.sub("/", path.removeprefix(root)).rstrip("/")
    while plain.startswith("/v1/v1/"):
        plain = plain.removeprefix("/v1")
    if root + plain != path:
        yield root + plain
    if not plain.startswith("/v1/"):
        yield f"{root}/v1{plain}"


def _check_host(call: Call) -> None:
    """Reject a host name that is not allowed: a page of another origin whose name resolves to loopback (DNS
    rebinding).
    """
    server = call.state.config.server
    if not _is_loopback(server.host) or server.uds is not None:
        return
    host = (call.header("host") or "").strip()
    name = host[1 : host.find("]")] if host.startswith("[") else host.rpartition(":")[0] or host
    if name and not _is_loopback(name) and name not in server.allowed_hosts:
        raise ServeError(
            403,
            "permission_error",
            "host_not_allowed",
            f"the host {name[:128]!r} is not served here: name it in allowed_hosts",
        )


def _check_origin(call: Call) -> None:
    """Reject a page of another site that would use a visitor's browser to change anything here or to spend its work."""
    if call.scope["method"] in SAFE_METHODS:
        return
    origin = call.header("origin")
    if origin is None:
        foreign = call.header("sec-fetch-site") in ("cross-site", "same-site")
    else:
        own = origin.partition("://")[2] == (call.header("host") or "").strip()
        foreign = not own and origin not in call.state.config.server.cors_origins
    if foreign:
        raise ServeError(
            403,
            "permission_error",
            "origin_not_allowed",
            "the request comes from a page of another site: name its origin in cors_origins if it may use this server",
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _cors(call: Call) -> bool:
    """Add the headers for allowed origins. Returns True for a preflight request."""
    origin = call.header("origin")
    if origin is None or origin not in call.state.config.server.cors_origins:
        return False
    call.headers["access-control-allow-origin"] = origin
    call.headers["access-control-expose-headers"] = "*"  # such as retry-after and x-exl-ignored
    call.headers["vary"] = "origin"
    if call.scope["method"] != "OPTIONS":
        return False
    call.headers["access-control-allow-methods"] = "GET, POST, DELETE"
    # All that the page asks for: OpenAI's library in a browser sends x-stainless-lang and others.
    call.headers["access-control-allow-headers"] = call.header("access-control-request-headers") or "authorization"
    call.headers["access-control-max-age"] = "600"
    return True


async def _page(call: Call) -> bool:
    """Serve the chat page's files. Returns True if the request was for one."""
    path = call.scope["path"]
    if call.scope["method"] not in ("GET", "HEAD") or not call.state.config.server.ui:
        return False
    name = "index.html" if path == "/" else path.removeprefix("/ui/") if path.startswith("/ui/") else ""
    if name not in ("index.html", "app.js", "style.css"):
        return False
    file = files("exl_serve") / "ui" / name
    if not file.is_file():
        return False
    data = file.read_bytes()
    tag = f'"{hashlib.blake2b(data, digest_size=12).hexdigest()}"'
    headers = {"etag": tag, "cache-control": "no-cache", "content-security-policy": PAGE_POLICY}
    if call.header("if-none-match") == tag:
        await call.start(304, headers)
        await call.write(b"", more=False)
        return True
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    await call.start(200, headers | {"content-type": f"{kind}; charset=utf-8", "content-length": str(len(data))})
    await call.write(data, more=False)
    return True
