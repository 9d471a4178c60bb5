"""`exl serve ray` on loopback, in an environment that has Ray: see ray_cluster.py for the tests themselves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.install, pytest.mark.timeout(7200)]


def test_a_cluster_on_loopback(tmp_path: Path) -> None:
    """Ray comes with 380 MB of packages, which the workspace's environment does not have: Ray is installed here, and
    everything else is taken from the environment of this test."""
    uv, python = shutil.which("uv") or "uv", tmp_path / "env" / "bin" / "python"
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, str(tmp_path / "env")], check=True)
    subprocess.run([uv, "pip", "install", "-q", "--python", str(python), "ray[serve]>=2.57,<2.70"], check=True)
    done = subprocess.run(
        [str(python), "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider", "tests/install/ray_cluster.py"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
