"""docs/coverage.md says what the tests claim, and every claim names a row that exists."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_coverage_table_is_current() -> None:
    script = ROOT / "scripts" / "coverage_table.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
