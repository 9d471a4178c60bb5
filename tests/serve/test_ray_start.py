"""Starting the server on Ray, with a stand-in for Ray: refusals, addresses, and what a failed start leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from exl_generate import bundled
from exl_serve.config.load import ConfigError
from exl_serve.config.model import ModelConfig, ServeConfig, ServerConfig
from exl_serve.ray import app


class FakeRay:
    """The calls of Ray that starting makes, on a cluster that may serve already."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, serving: bool) -> None:
        self.calls: list[tuple[str, Any]] = []
        status = SimpleNamespace(applications={"exl": "RUNNING"} if serving else {})

        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError("the application failed")

        serve = SimpleNamespace(
            status=lambda: status,
            start=self.note("serve.start"),
            run=fail,
            delete=self.note("serve.delete"),
            shutdown=self.note("serve.shutdown"),
        )
        self.address = "127.0.0.1"
        ray = SimpleNamespace(
            __version__="2.60.0",
            serve=serve,
            init=self.note("init"),
            shutdown=self.note("shutdown"),
            util=SimpleNamespace(get_node_ip_address=lambda: self.address),
        )
        monkeypatch.setitem(sys.modules, "ray", ray)
        monkeypatch.setattr("exl_serve.ray.app.version", lambda name: "2.60.0")
        monkeypatch.setattr(app, "application", lambda config: None)
        monkeypatch.setattr(app.signal, "signal", lambda *_: None)
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        for name in (*app.LOOPBACK, *app.DEFAULTS):
            monkeypatch.setenv(name, "1")

    def note(self, name: str) -> Any:
        return lambda *given, **named: self.calls.append((name, named.get("address", given[0] if given else None)))


CONFIG = ServeConfig(model=(ModelConfig(id="m", path="m"),))


def test_a_refused_start_leaves_the_server_of_the_cluster_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay(monkeypatch, serving=True)
    with pytest.raises(ConfigError, match="serves exl already"):
        app.run(CONFIG, "10.0.0.5:6379")
    assert ray.calls == [("init", "10.0.0.5:6379"), ("shutdown", None)]


def test_a_failed_start_removes_its_application_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay(monkeypatch, serving=False)
    with pytest.raises(RuntimeError, match="failed"):
        app.run(CONFIG, "10.0.0.5:6379")
    assert ray.calls[1:] == [("serve.start", None), ("serve.delete", "exl"), ("shutdown", None)]


def test_without_an_address_a_new_cluster_is_started_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay(monkeypatch, serving=False)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.5:6379")
    with pytest.raises(RuntimeError, match="failed"):
        app.run(CONFIG)
    assert ray.calls[0] == ("init", "local")
    assert ray.calls[-2:] == [("serve.shutdown", None), ("shutdown", None)]


def test_a_new_cluster_uses_the_loopback_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray replaces the loopback address by another one, unless a variable forbids it before it is imported."""
    ray = FakeRay(monkeypatch, serving=False)
    monkeypatch.delenv("RAY_AUTH_MODE")
    ray.address = "10.0.0.5"
    with pytest.raises(ConfigError, match=r"Ray listens on 10\.0\.0\.5, which other machines reach"):
        app.run(CONFIG)
    assert ray.calls == [("init", "local"), ("shutdown", None)]
    assert {name: os.environ[name] for name in app.LOOPBACK} == app.LOOPBACK
    assert os.environ["RAY_AUTH_MODE"] == "token"


@pytest.mark.parametrize("address", [None, "10.0.0.5:6379"])
def test_workers_are_not_started_by_uv_unless_a_variable_says_so(
    monkeypatch: pytest.MonkeyPatch, address: str | None
) -> None:
    """Below `uv run` Ray would send the working folder to the cluster and start workers by uv in it."""
    name = "RAY_ENABLE_UV_RUN_RUNTIME_ENV"
    FakeRay(monkeypatch, serving=False)
    monkeypatch.setenv(name, "1")
    for used in ("1", "0"):
        with pytest.raises(RuntimeError, match="failed"):
            app.run(CONFIG, address)
        assert os.environ.get(name) == used
        monkeypatch.delenv(name)


@pytest.mark.parametrize("address", ["auto", "127.0.0.1:6379", "ray://head.example:10001"])
def test_an_address_needs_a_token(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    FakeRay(monkeypatch, serving=False)
    with pytest.raises(ConfigError, match="RAY_AUTH_MODE=token"):
        app.check(CONFIG, address, {})
    app.check(CONFIG, address, {"RAY_AUTH_MODE": "token"})
    app.check(CONFIG, None, {})
    with pytest.raises(ConfigError, match="unset RAY_AUTH_MODE"):
        app.check(CONFIG, None, {"RAY_AUTH_MODE": "disabled"})


@pytest.mark.parametrize("name", ["uds", "tls_cert", "tls_key"])
def test_options_that_ray_would_ignore_are_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    FakeRay(monkeypatch, serving=False)
    made = msgspec.structs.replace(CONFIG, server=msgspec.convert({name: "file"}, ServerConfig))
    with pytest.raises(ConfigError, match=f"server.{name} has no effect on Ray"):
        app.check(made, None, {})


@pytest.mark.parametrize(
    ("metadata", "error"),
    [
        ("Metadata-Version: 2.1\nName: ray\nVersion: 2.60.0\n", "Ray or Ray Serve cannot be imported (0 0 token): "),
        (None, "Ray is not installed: "),
    ],
    ids=["module", "metadata"],
)
def test_a_damaged_installation_of_ray_is_refused(tmp_path: Path, metadata: str | None, error: str) -> None:
    """The stand-in also shows that Ray is imported only once its variables are set."""
    names = ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "RAY_ENABLE_UV_RUN_RUNTIME_ENV", "RAY_AUTH_MODE")
    (tmp_path / "ray.py").write_text(f"import os\nraise ImportError(' '.join(map(os.environ.get, {names})))\n")
    (tmp_path / "ray-2.60.0.dist-info").mkdir()
    if metadata is not None:
        (tmp_path / "ray-2.60.0.dist-info" / "METADATA").write_text(metadata)
    file = tmp_path / "server.toml"
    file.write_text(f"[[model]]\nid = 'm'\npath = '{bundled.default_model_dir()}'\n")
    env = {name: value for name, value in os.environ.items() if name not in names}
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-m", "exl_serve", "ray", str(file)], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"exl: {error}in a checkout, pip install"), done.stderr


def test_the_server_imports_no_ray() -> None:
    """And the parts of the ingress import no torch."""
    code = (
        "import sys, exl_serve.cli, exl_serve.api.app, exl_serve.ray.client, exl_serve.ray.ingress, exl_serve.ray.app\n"
        "assert not {'torch', 'ray'} & set(sys.modules), sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
