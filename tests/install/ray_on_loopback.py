"""`exl serve ray` on loopback, in an environment that has Ray: see ray_cluster.py for the tests themselves."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Processes on a busy machine with two cores take their time: only a hang takes these seconds. No workers are started
#: that nobody has asked for.
PATIENT = {
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_health_check_timeout_ms": "60000",
    "RAY_gcs_server_port_wait_time_s": "300",
    "RAY_gcs_server_request_timeout_seconds": "300",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    # Ray's own 15 would let replicas and engines wait for the tests' clients, and leases run out.
    "RAY_worker_niceness": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "120",
    "RAY_USAGE_STATS_ENABLED": "0",
    # As app.LOOPBACK: also the cluster that the tests start themselves is reached from this machine alone.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    # `uv run` started this test: Ray would start its workers by it as well, in the environment without Ray.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "OMP_NUM_THREADS": "1",
    "EXL_CPU_THREADS": "1",
}
#: What is installed: the newest supported version, or EXL_RAY_VERSION, such as 2.60.*.
VERSION = os.environ.get("EXL_RAY_VERSION")
RAY = f"ray[serve]=={VERSION}" if VERSION else "ray[serve]>=2.60,<2.70"
pytestmark = [pytest.mark.install, pytest.mark.timeout(7200)]


def test_a_cluster_on_loopback(tmp_path: Path) -> None:
    """Ray comes with 380 MB of packages, which the workspace's environment does not have: Ray is installed here, and
    everything else is taken from the environment of this test."""
    uv, python = shutil.which("uv") or "uv", tmp_path / "env" / "bin" / "python"
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, str(tmp_path / "env")], check=True)
    subprocess.run([uv, "pip", "install", "-q", "--python", str(python), RAY], check=True)
    done = subprocess.run(
        [
            str(python),
            "-m",
            "pytest",
            "-q",
            "-m",
            "",
            "-p",
            "no:cacheprovider",
            "-W",
            "ignore",
            "tests/install/ray_cluster.py",
        ],
        cwd=ROOT,
        env=os.environ
        | PATIENT
        | {"RAY_AUTH_TOKEN": secrets.token_hex(32), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
