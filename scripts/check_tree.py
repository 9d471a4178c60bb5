"""Facts about the tree that no linter knows: lock hygiene, host names, machine paths, file sizes.

Prints every finding and exits 1 if one of them is an error. Long files are listed as a question, not as an error.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = {"uv.lock", "rust/Cargo.lock"}
# Written in pieces, so that this file does not find itself.
HOSTS = re.compile(
    "|".join(
        ["py" + r"pi\.org", "python" + r"hosted\.org", "crates" + r"\.io", "deb" + r"ian\.org", "npm" + r"js\.org"]
    )
)
PATHS = re.compile("|".join(["/wo" + "rk/", "/ro" + "ot/", "/opt/whe" + "els", "/ho" + r"me/\w"]))
TEXT = {".py", ".rs", ".cu", ".cuh", ".toml", ".md", ".yml", ".yaml", ".json", ".sh", ".txt", ".lock", ".jinja", ""}
LONG = 600


def tracked() -> list[Path]:
    """Files git knows."""
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    return [ROOT / name for name in names if name]


def findings() -> tuple[list[str], list[str]]:
    """(errors, questions) about the tracked files."""
    errors, questions = [], []
    for path in tracked():
        name = path.relative_to(ROOT).as_posix()
        if path.suffix not in TEXT or not path.is_file() or name.startswith("tests/golden/data/"):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if name in LOCKS:
            if re.search(r'"file:|source = \{ (registry|path) = "(/|file:)', text):
                errors.append(f"{name}: names a local path; lock again without a find-links variable")
            continue
        errors += [f"{name}: names a registry's host ({m.group()})" for m in [HOSTS.search(text)] if m]
        errors += [f"{name}: holds a path of some machine ({m.group()})" for m in [PATHS.search(text)] if m]
        if path.suffix in {".py", ".rs", ".cu", ".cuh"} and (lines := text.count("\n")) > LONG:
            questions.append(f"{name}: {lines} lines; is it still about one thing?")
    return errors, questions


if __name__ == "__main__":
    found, asked = findings()
    for line in asked:
        print(f"note: {line}")
    for line in found:
        print(f"error: {line}")
    sys.exit(1 if found else 0)
