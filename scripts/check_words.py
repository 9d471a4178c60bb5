"""Check the tracked text files against the word list in scripts/words.txt.

scripts/words_allowed.txt lists the findings that each file still has. A file may not have more, and a file that is not
listed may have none. A file that was moved keeps its allowance. `--update` lowers the allowances to what is found.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
WORDS = ROOT / "scripts" / "words.txt"
ALLOWED = ROOT / "scripts" / "words_allowed.txt"
SUFFIXES = {".py", ".pyi", ".rs", ".cu", ".cuh", ".toml", ".md", ".yml", ".yaml", ".sh", ".html", ".js", ""}
# Stories, recorded data, and the word list's own files.
EXCLUDED = re.compile(
    r"^(tests/docs/test_check_words\.py$|tests/(golden/data|[^/]+/(data|corpus))/|bundled-model/corpus/|benchmarks/results/|LICENSE$)"
)
CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


class Rule(NamedTuple):
    """A pattern, and what to write in its place."""

    pattern: re.Pattern[str]
    instead: str


def rules(text: str) -> list[Rule]:
    """Parse the word list."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [
        Rule(re.compile(pattern, re.IGNORECASE), instead)
        for pattern, _, instead in (x.rpartition(" -> ") for x in lines)
    ]


def findings(text: str, listed: list[Rule]) -> Iterator[tuple[int, str, str]]:
    """(line, words found, what to write instead), for every place in a text."""
    for number, line in enumerate(text.splitlines(), start=1):
        # Identifiers read as the words that they are made of.
        words = CAMEL.sub(" ", line.replace("_", " "))
        for rule in listed:
            for match in rule.pattern.finditer(words):
                yield number, match.group().strip(), rule.instead


def tracked() -> list[str]:
    """Names of the text files that git knows, relative to the root."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [
        name
        for name in listed.split("\0")
        if Path(name).suffix in SUFFIXES and not EXCLUDED.match(name) and (ROOT / name).is_file()
    ]


def allowances(text: str, present: set[str]) -> dict[str, int]:
    """The number of findings that each file may have; an entry of a file that is gone counts for its new place."""
    entries = {name: int(count) for count, name in (line.split() for line in text.splitlines() if line.strip())}
    moved: dict[str, int] = {}
    for name, count in entries.items():
        if name not in present:
            base = Path(name).name
            moved[base] = moved.get(base, 0) + count
    return {name: entries.get(name, moved.get(Path(name).name, 0)) for name in present}


def main(arguments: list[str]) -> int:
    """Print what is wrong; with `--update`, lower the allowances first."""
    listed = rules(WORDS.read_text(encoding="utf-8"))
    found = {
        name: list(findings((ROOT / name).read_text(encoding="utf-8", errors="replace"), listed)) for name in tracked()
    }
    allowed = allowances(ALLOWED.read_text(encoding="utf-8") if ALLOWED.exists() else "", set(found))
    failed = False
    for name, places in sorted(found.items()):
        if len(places) > allowed[name]:
            failed = True
            for line, words, instead in places:
                print(f"error: {name}:{line}: {words!r}: write {instead}")
            print(f"error: {name}: {len(places)} places, {allowed[name]} allowed (scripts/words_allowed.txt)")
    if "--update" in arguments:
        left = {name: min(len(places), allowed[name]) for name, places in found.items()}
        ALLOWED.write_text("".join(f"{count} {name}\n" for name, count in sorted(left.items()) if count))
        print(f"{sum(left.values())} places are allowed in {sum(map(bool, left.values()))} files")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
