"""The files for deployment agree with the server: times, limits, metrics, options."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from preloaded import run
from typer.testing import CliRunner

from exl_serve.cli import app
from exl_serve.config.load import ConfigError, parse
from exl_serve.config.model import ServeConfig
from exl_serve.ray.deploy import build, serve_file
from exl_serve.super.registry import Metrics

FILES = Path(__file__).resolve().parents[3] / "packages" / "exl-serve" / "deploy"
DEFAULTS = ServeConfig()
GRACE = DEFAULTS.drain.delay + DEFAULTS.drain.timeout + 10
FUNCTIONS = {"sum", "by", "rate", "increase", "histogram_quantile", "label_values"}
LABELS = re.compile(r"\{[^}]*\}|\[[^\]]*\]|by \([^)]*\)|, [a-z_]+\)$")


def text(name: str) -> str:
    return (FILES / name).read_text()


def names(expression: str) -> set[str]:
    """The metrics in an expression."""
    return set(re.findall(r"[a-zA-Z_:][a-zA-Z0-9_:]*", LABELS.sub("", expression))) - FUNCTIONS


def served() -> set[str]:
    """Every series that /metrics can have."""
    found = set()
    for line in Metrics().text().splitlines():
        if line.startswith("# TYPE "):
            name, kind = line.split()[2:]
            found |= {name, *([f"{name}_{end}" for end in ("bucket", "sum", "count")] if kind == "histogram" else [])}
            found |= {f"{name}_total"} if kind == "counter" else set()
    return found


def test_every_metric_of_the_dashboard_and_the_alerts_is_served() -> None:
    board = json.loads(text("grafana.json"))
    used = {name for panel in board["panels"] for target in panel["targets"] for name in names(target["expr"])}
    used |= {name for v in board["templating"]["list"] if v["type"] == "query" for name in names(v["query"])}
    for group in yaml.safe_load(text("alerts.yaml"))["groups"]:
        used |= {name for rule in group["rules"] for name in names(rule["expr"])}
    assert len(used) > 15
    assert used - served() == set()


def test_stopping_may_take_as_long_as_a_drain() -> None:
    compose = yaml.safe_load(text("compose.yaml"))["services"]["exl-serve"]
    assert compose["stop_grace_period"] == f"{GRACE:g}s"
    assert unit()["Service"]["TimeoutStopSec"] == f"{GRACE:g}"


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(text("exl-serve.service"))
    return parser


def test_the_unit_is_hardened_and_notified() -> None:
    service = unit()["Service"]
    assert (service["Type"], service["KillMode"], service["NoNewPrivileges"]) == ("notify", "mixed", "yes")
    assert int(service["LimitNOFILE"]) > DEFAULTS.server.limits.max_connections
    if shutil.which("systemd-analyze"):
        file = str(FILES / "exl-serve.service")
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", file], capture_output=True, text=True, check=False
        )
        wrong = [
            line for line in done.stderr.splitlines() if "exl-serve.service:" in line and "not executable" not in line
        ]
        assert wrong == []


def test_the_container_has_no_privileges() -> None:
    docker, compose = text("Dockerfile"), yaml.safe_load(text("compose.yaml"))["services"]["exl-serve"]
    assert "FROM ubuntu" in docker.split("AS build")[1]
    assert re.search(r"^USER 10001$", docker, re.MULTILINE)
    assert "/health/live" in docker
    assert not re.search(r"^ADD |:latest|sudo", docker, re.MULTILINE)
    assert compose["read_only"] is True
    assert compose["cap_drop"] == ["ALL"]
    assert compose["secrets"] == ["exl-keys"]
    assert all(volume.endswith(":ro") for volume in compose["volumes"])


def test_every_package_of_the_lock_file_has_a_hash() -> None:
    lock = tomllib.loads((FILES.parents[2] / "uv.lock").read_text(encoding="utf-8"))
    names = {package["name"] for package in lock["package"]}
    assert {"starlette", "uvicorn", "pyzmq"} <= names
    assert "litellm" not in names, (
        "its versions 1.82.7 and 1.82.8 were malicious: clients have environments of their own"
    )
    for package in lock["package"]:
        if "registry" in package["source"]:
            archives = [*package.get("wheels", ()), *([package["sdist"]] if "sdist" in package else ())]
            assert archives, package["name"]
            assert all(one["hash"].startswith("sha256:") for one in archives), package["name"]


def test_wheels_come_with_a_bill_of_materials() -> None:
    steps = yaml.safe_load((FILES.parents[2] / ".github" / "workflows" / "wheels.yml").read_text())["jobs"]
    runs = [step.get("run", "") for job in steps.values() for step in job["steps"]]
    (export,) = (run for run in runs if run.startswith("uv export"))
    assert {"--locked", "--no-dev", "--all-packages", "--all-extras", "cyclonedx1.5"} <= set(export.split())


def test_the_options_in_the_files_exist() -> None:
    shown = run(["-m", "exl_serve", "--help"], env={"COLUMNS": "200", "PATH": "/usr/bin:/bin"}).stdout
    for name in ("Dockerfile", "compose.yaml", "exl-serve.service"):
        lines = [line for line in text(name).splitlines() if re.match(r"CMD \[\"--|\s+command:|ExecStart", line)]
        for option in re.findall(r"--[a-z-]+", " ".join(lines)):
            assert option in shown, (name, option)


def test_the_manifest_of_kuberay_is_what_the_command_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exl_serve.ray.app.version", lambda name: "2.60.0")
    manifest = text("kuberay.yaml")
    toml = re.findall(r"^#   (\[.*|[a-z_]+ = .*)$", manifest, re.MULTILINE)
    spec = yaml.safe_load(manifest)["spec"]
    config = parse(tomllib.loads("\n".join(toml)))
    assert spec["serveConfigV2"] == serve_file(config)
    made = yaml.safe_load(spec["serveConfigV2"])["applications"][0]
    assert parse(made["args"]) == config
    assert made["import_path"] == f"{build.__module__}:{build.__name__}"
    cluster = spec["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    pods = [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    for pod in pods:
        assert pod["securityContext"]["runAsUser"] == 10001
        mounted = {one["mountPath"] for one in pod["containers"][0]["volumeMounts"]}
        assert {"/keys", "/models", "/dev/shm"} <= mounted
        assert pod["terminationGracePeriodSeconds"] > config.drain.delay + config.drain.timeout + 10
    assert "wget" in text("Dockerfile")


def test_a_serve_file_names_every_option_that_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exl_serve.ray.app.version", lambda name: "2.60.0")
    tables = {
        "server": {"cors_origins": ["https://a.example"], "limits": {"max_streams": 9}},
        "model": [
            {"id": "a", "path": "/a", "adapters": {"fr": "/fr"}},
            {"id": "b", "path": "/b", "aliases": ["1e3", "no"]},
        ],
        "ray": {"resume": False},
        "metrics_alias": "none",
    }
    (made,) = yaml.safe_load(serve_file(parse(tables)))["applications"]
    assert made["args"] == tables
    assert '"1e3"' in serve_file(parse(tables))
    with pytest.raises(ConfigError, match="min_replicas"):
        serve_file(parse({"model": [{"id": "a", "path": "/a"}], "ray": {"min_replicas": 3}}))
    file = tmp_path / "serve.toml"
    file.write_text('[auth]\nkey_file = "/of/the/nodes"\n[[model]]\nid = "a"\npath = "/a"\n')
    done = CliRunner().invoke(app, ["ray", str(file), "--yaml"])
    assert done.exit_code == 0, done.output
    assert yaml.safe_load(done.output)["applications"][0]["args"]["auth"] == {"key_file": "/of/the/nodes"}
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ConfigError, match="RAY_AUTH_MODE=token"):
        build({"model": [{"id": "a", "path": "/a"}]})
    beyond = {"server": {"host": "0.0.0.0"}, "model": [{"id": "a", "path": "/a"}]}
    with pytest.raises(ConfigError, match="no keys"):
        serve_file(parse(beyond))
    with pytest.raises(ConfigError, match="no keys"):
        build(beyond)


def test_proxies_pass_streams_on() -> None:
    nginx = text("nginx.conf")
    assert "proxy_buffering off;" in nginx
    assert "proxy_http_version 1.1;" in nginx
    assert f"client_max_body_size {DEFAULTS.server.limits.max_body_bytes >> 20}m;" in nginx
    idle = re.search(r"keepalive_timeout (\d+)s", nginx)
    assert idle
    assert int(idle[1]) < DEFAULTS.server.limits.keep_alive_seconds
    haproxy = text("haproxy.cfg")
    assert "retry-on conn-failure 503" in haproxy
    assert "GET /health/ready" in haproxy
    # A server on loopback rejects other hosts.
    assert "proxy_set_header Host localhost;" in nginx
    assert "http-request set-header host localhost" in haproxy
    # Then the proxy must reject them: other sites' names could lead here.
    assert "http-request deny unless { hdr(host),field(1,:) -i models.example.com }" in haproxy
    assert "server_name models.example.com;" in nginx
    assert "if { path /metrics }" in haproxy
    # Limits by address hold for the clients.
    assert "proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;" in nginx
    assert "option forwardfor\n" in haproxy


@pytest.mark.skipif(shutil.which("haproxy") is None, reason="haproxy is not installed")
def test_haproxy_reads_its_file() -> None:
    subprocess.run(["haproxy", "-c", "-f", str(FILES / "haproxy.cfg")], check=True)
