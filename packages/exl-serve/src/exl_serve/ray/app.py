"""The Ray Serve application and its start."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from exl_serve import __version__
from exl_serve.config.load import ConfigError
from exl_serve.config.model import ModelConfig, ServeConfig

__all__ = ["APP", "application", "check", "check_versions", "run", "start", "versions"]

OLDEST, NEWEST = (2, 60), (2, 70)
"""Supported versions of Ray: from the first, below the second."""
APP = "exl"
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "FORWARDED_ALLOW_IPS": ""}
"""Ray replaces a node's loopback address by one that other machines reach, except on systems where it supports one
machine only. Its processes then listen on that address alone. Ray reads this when it is imported. Its HTTP proxy is
uvicorn's, which would believe the `X-Forwarded-For` of every client on this machine.
"""
DEFAULTS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
"""Variables of Ray that keep a value that is set. With the second, a driver below `uv run` sends its working folder to
the cluster and starts workers by uv in it: in an environment that may lack Ray, for which it would wait without end.
"""
INSTALL = 'in a checkout, pip install "./packages/exl-serve[ray]" installs it'
HEAD_ROOM = 64
"""Calls to a replica beyond its requests: messages about them."""

_current: dict[str, Any] = {}


def versions() -> dict[str, str]:
    """Return the versions that must be equal on all nodes: routers and policies are sent as pickles."""
    import platform

    import ray

    return {"exl-serve": __version__, "ray": ray.__version__, "python": platform.python_version()}


def check_versions(expected: Mapping[str, str]) -> None:
    """Raise RuntimeError where this node's versions differ from those of the node that started the application."""
    if versions() != expected:
        raise RuntimeError(f"this node has {versions()}, the one that started the application {dict(expected)}")


def check(config: ServeConfig, address: str | None, environment: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError for a configuration that Ray cannot, or must not, serve."""
    if not config.model:
        raise ConfigError("no model is configured", "model")
    for name in ("uds", "tls_cert", "tls_key"):
        if getattr(config.server, name) is not None:
            raise ConfigError(
                f"server.{name} has no effect on Ray, whose proxy listens on server.host and server.port without TLS: "
                "remove it, and put a proxy that ends TLS in front where clients are on other machines",
                f"server.{name}",
            )
    limits = config.ray
    if not 0 <= limits.min_replicas <= limits.max_replicas or limits.max_replicas < 1:
        raise ConfigError("min_replicas must not be above max_replicas", "ray.min_replicas")
    if address is not None and environment.get("RAY_AUTH_MODE") != "token":
        raise ConfigError(
            f"--address {address} names a cluster that others may reach: whoever reaches a cluster without token "
            "authentication runs programs on it; set RAY_AUTH_MODE=token on all nodes"
        )
    if environment.get("RAY_AUTH_MODE", "token") != "token":
        # Ray Serve's replicas listen on all addresses; the token protects them.
        raise ConfigError("a cluster without token authentication runs programs of others: unset RAY_AUTH_MODE")
    installed = _installed()
    if not installed:
        raise ConfigError(f"Ray is not installed: {INSTALL}")
    found = tuple(int(part) for part in installed.split(".")[:2])
    if not OLDEST <= found < NEWEST:
        raise ConfigError(
            f"ray {installed} is not supported: at least {OLDEST[0]}.{OLDEST[1]}, before {NEWEST[0]}.{NEWEST[1]}"
        )


def _installed() -> str | None:
    """Return Ray's version without importing Ray, because `run` sets variables first that the import reads.

    None where Ray is not installed, or where its metadata is damaged.
    """
    try:
        return version("ray")
    except (PackageNotFoundError, TypeError):  # TypeError: Python 3.14, for metadata without its main file
        return None


def application(config: ServeConfig) -> Any:
    """Return the bound deployments: an ingress, and the engine replicas of each model."""
    from ray import serve

    data = msgspec.json.encode(config)
    engines = {one.id: _engine(config, one, data) for one in config.model}

    class Ingress:
        def __init__(self, config: bytes, handles: dict[str, Any], expected: dict[str, str]) -> None:
            from exl_serve.ray import app
            from exl_serve.ray.ingress import Application

            app.check_versions(expected)
            app._current["app"] = Application(config, handles)

    def built() -> Any:
        from exl_serve.ray import app

        return app._current["app"]

    deployment = serve.deployment(serve.ingress(built)(Ingress)).options(
        name="ingress",
        num_replicas=config.ray.ingress_replicas,
        max_ongoing_requests=config.server.limits.max_streams,
        ray_actor_options={"num_cpus": config.ray.ingress_cpus},
        graceful_shutdown_timeout_s=config.drain.timeout + 10 if config.drain.timeout >= 0 else 3600,
    )
    return deployment.bind(data, engines, versions())


def _engine(config: ServeConfig, model: ModelConfig, data: bytes) -> Any:
    from ray import serve
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

    from exl_serve.ray.autoscale import policy
    from exl_serve.ray.replica import BATCHES, EngineReplica
    from exl_serve.ray.router import PageHashRouter

    limits = config.ray
    options: dict[str, Any] = {"num_replicas": limits.max_replicas}
    if limits.min_replicas < limits.max_replicas:
        scaling = AutoscalingConfig(
            min_replicas=limits.min_replicas,
            max_replicas=limits.max_replicas,
            initial_replicas=max(1, limits.min_replicas),
            metrics_interval_s=2,
            look_back_period_s=6,
            upscale_delay_s=0,
            downscale_delay_s=0,
            policy=AutoscalingPolicy(policy_function=policy),
        )
        options = {"autoscaling_config": scaling}
    return (
        serve.deployment(EngineReplica)
        .options(
            name=f"engine-{model.id}",
            max_ongoing_requests=BATCHES * model.max_batch_size + HEAD_ROOM,
            request_router_config=RequestRouterConfig(
                request_router_class=PageHashRouter, request_routing_stats_period_s=2, request_routing_stats_timeout_s=5
            ),
            ray_actor_options={"num_cpus": limits.engine_cpus, "num_gpus": limits.engine_gpus},
            health_check_period_s=max(1.0, limits.health_seconds / 3),
            health_check_timeout_s=limits.health_seconds,
            graceful_shutdown_timeout_s=config.drain.timeout + 10 if config.drain.timeout >= 0 else 3600,
            **options,
        )
        .bind(data, model.id)
    )


def run(config: ServeConfig, address: str | None = None, *, replace: bool = False) -> None:
    """Serve until SIGTERM or Ctrl-C, on the cluster at `address`, or on a new one on this machine.

    `replace`: replace the server that runs on the cluster, replica by replica, and return when that is done. Raises
    ConfigError where Ray cannot be imported, or the cluster serves already, and then leaves that server alone.
    """
    if address is None:
        os.environ.update(LOOPBACK)
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    check(config, address)
    if replace and address is None:
        raise ConfigError("--replace needs --address: a new cluster serves nothing that could be replaced")
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise ConfigError(f"Ray or Ray Serve cannot be imported ({error}): {INSTALL}") from error

    if address is None:
        # Without an address Ray would join the cluster that RAY_ADDRESS names.
        ray.init(address="local", include_dashboard=False, _node_ip_address="127.0.0.1", configure_logging=False)
        _check_loopback(ray)
    else:
        ray.init(address=address, configure_logging=False)
    ended = threading.Event()
    if not replace:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: ended.set())
    try:
        start(config, replace=replace)
        if replace:
            return
        try:
            print(
                f"exl: serving at http://{config.server.host}:{config.server.port} on Ray", file=sys.stderr, flush=True
            )
            ended.wait()
        finally:
            serve.delete(APP)
    finally:
        if address is None:
            serve.shutdown()
        ray.shutdown()


def _check_loopback(ray: Any) -> None:
    """Raise ConfigError, and end the cluster, where other machines would reach it."""
    found = ray.util.get_node_ip_address()
    if found != "127.0.0.1":
        ray.shutdown()
        raise ConfigError(
            f"Ray listens on {found}, which other machines reach: start a cluster with RAY_AUTH_MODE=token, "
            "and name it with --address"
        )


def start(config: ServeConfig, *, replace: bool = False) -> None:
    """Deploy on the cluster that this process is connected to, and wait until it serves.

    Raises ConfigError where the cluster serves already.
    """
    from ray import serve

    if not replace and APP in serve.status().applications:
        raise ConfigError("this cluster serves exl already: stop it, replace it, or name another cluster")
    made = application(config)
    serve.start(http_options={"host": config.server.host, "port": config.server.port}, proxy_location="HeadOnly")
    try:
        serve.run(made, name=APP, route_prefix="/")
    except BaseException:
        if not replace:  # a failed application would block the next start
            serve.delete(APP)
        raise
