"""A short run of benchmarks/soak_serve.py: whatever clients cut off, the server holds nothing of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from preloaded import run

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "soak_serve.py"


@pytest.mark.full  # tests/serve/test_cycles.py cuts requests off, tests/serve/engine/test_conformance.py drops clients
def test_requests_and_disconnects_leave_nothing() -> None:
    requests = 300
    given = ["--requests", str(requests), "--streams", "32", "--idle", "0", "--disconnects", "0.3", "--slope", "inf"]
    done = run([str(SCRIPT), *given])
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["answered"] + found["cut"] == found["requests"] == requests // 2
    assert found["cut"] > requests // 15
    assert not any(found["left"].values())
