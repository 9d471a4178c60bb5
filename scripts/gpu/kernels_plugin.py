"""pytest plugin: which kernels of the native module each test launched, a line of JSON a test.

    EXL_KERNELS_LOG=FOLDER python3 -m pytest -p kernels_plugin -m cuda tests/kernels

Every process writes FOLDER/kernels-PROCESS.jsonl: first the names of all kernels of the module, then for every test
that launched any its name, outcome, seconds and launches of each kernel (one that was captured into a graph counts
once). kernels_covered.py reads them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from exl_kernels import _native


class Kernels:
    """The launches so far, and the file that records them."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"kernels-{os.getpid()}.jsonl"
        self.before: dict[str, int] = {}
        self.call: tuple[str, float] = ("", 0.0)

    def write(self, line: dict[str, Any]) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "teardown":  # of one that ends in its setup that is all there is
            self.call = (report.outcome, report.duration)
            return
        now: dict[str, int] = _native.cuda_launches()
        launched = {name: count - self.before.get(name, 0) for name, count in now.items()}
        launched = {name: count for name, count in launched.items() if count}
        if launched:  # never in a process that only collects what others ran
            if not self.before:
                self.write({"module": sorted(now)})
            outcome, seconds = self.call
            self.write({"case": report.nodeid, "outcome": outcome, "seconds": seconds, "launches": launched})
            self.before = now


def pytest_configure(config: pytest.Config) -> None:
    if folder := os.environ.get("EXL_KERNELS_LOG"):
        config.pluginmanager.register(Kernels(Path(folder)), "exl-kernels-log")
