"""Check types with mypy: the packages, then benchmarks, examples, scripts and tests, folder by folder.

    python scripts/check_types.py [FOLDER ...]

Programs and tests import helpers by bare names, and several folders have a conftest.py, so one run of mypy cannot hold
them all. Tests are checked with fewer rules than the rest: functions need no annotations. Both kinds run at the same
time, each with a cache folder, because mypy keeps one set of options in a cache.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = "packages"
# Folders of modules that programs and tests import, by the folder that imports them.
PROGRAMS = {
    "bundled-model": ["bundled-model"],
    "benchmarks": ["benchmarks"],
    "examples": ["examples", "examples/exl-filters-plugin/src"],
    "scripts": ["scripts", "bundled-model"],
    "scripts/gpu": ["scripts/gpu", "benchmarks"],
}
# Recorded data, and scripts as users of exllamav2 have them.
EXCLUDED = re.compile(r"tests/(golden/data|compat/scripts|compat/scripts_vision)/")
HELPERS = [
    "tests",
    *(f"tests/{name}" for name in ("compat", "core", "emulated", "filters", "generate", "golden", "kernels", "serve")),
    "benchmarks",
    "scripts/gpu",
]
RELAXED = [
    "--allow-untyped-defs",
    "--allow-incomplete-defs",
    "--allow-untyped-calls",
    "--allow-untyped-decorators",
    "--allow-any-generics",
    "--allow-subclassing-any",
    "--implicit-reexport",
    "--no-warn-return-any",
    "--no-warn-unreachable",
    "--check-untyped-defs",
    "--cache-dir=.mypy_cache/tests",
]


class Group(NamedTuple):
    """Files that one run of mypy checks."""

    files: list[str]
    path: list[str]
    options: list[str]


def groups() -> dict[str, Group]:
    """Folder -> its group; a file belongs to the deepest folder that has one."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    tests = {"/".join(name.split("/")[:2]) for name in listed if name.startswith("tests/") and name.count("/") > 1}
    made = {PACKAGES: Group([], [], [])}
    made |= {name: Group([], path, ["--explicit-package-bases"]) for name, path in PROGRAMS.items()}
    relaxed = ["--explicit-package-bases", *RELAXED]
    made |= {name: Group([], [name, *HELPERS], relaxed) for name in ["tests", *sorted(tests)]}
    for name in listed:
        owner = max((x for x in made if name.startswith(x + "/")), key=len, default=PACKAGES)
        if owner != PACKAGES and not EXCLUDED.match(name) and (ROOT / name).exists():
            made[owner].files.append(name)
    return made


def check(name: str, group: Group) -> bool:
    """Run mypy on a group, print what it says; whether it found nothing. [tool.mypy] names the packages."""
    command = [sys.executable, "-m", "mypy", *group.options, *group.files]
    environment = {**os.environ, "MYPYPATH": ":".join(group.path)}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    print(f"{name}: {run.stdout}{run.stderr}", end="", flush=True)
    return run.returncode == 0


def main(chosen: list[str]) -> int:
    """Check all groups, or those named; the exit status."""
    found = {name: group for name, group in groups().items() if not chosen or name in chosen}
    tests = [name for name in found if name.startswith("tests")]
    others = [name for name in found if name not in tests]
    with ThreadPoolExecutor(2) as pool:
        good = pool.map(lambda names: [check(name, found[name]) for name in names], (others, tests))
        return 0 if all(part for side in good for part in side) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
