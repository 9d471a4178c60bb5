"""Check the tracked text files against the word list in scripts/words.txt."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
WORDS = ROOT / "scripts" / "words.txt"
SUFFIXES = {".py", ".pyi", ".rs", ".cu", ".cuh", ".toml", ".md", ".yml", ".yaml", ".sh", ".html", ".js", ""}
# Stories, recorded data, and the word list's own files.
EXCLUDED = re.compile(
    r"^(tests/docs/test_check_words\.py$|tests/(golden/data|[^/]+/(data|corpus))/|bundled-model/corpus/|benchmarks/results/|LICENSE$)"
)
STRING_END, STRING_BEGIN = re.compile(r"[^\"'][\"']$"), re.compile(r"\s*[fr]{0,2}[\"'](?![\"'])")
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
    lines = text.splitlines()
    for number, (line, following) in enumerate(zip_longest(lines, lines[1:], fillvalue=""), start=1):
        first = _words(line)
        joined = _joined(line, following)
        for rule in listed:
            for match in rule.pattern.finditer(first):
                yield number, match.group().strip(), rule.instead
            for match in rule.pattern.finditer(joined):
                if match.start() < len(first) - 1 < match.end():
                    yield number, match.group().strip(), rule.instead


def _words(text: str) -> str:
    """Split identifiers into the words that they are made of."""
    return CAMEL.sub(" ", text.replace("_", " "))


def _joined(line: str, following: str) -> str:
    """Join two lines where one string goes over both; empty elsewhere."""
    begin = STRING_BEGIN.match(following)
    return _words(line)[:-1] + _words(following[begin.end() :]) if begin and STRING_END.search(line) else ""


def tracked() -> list[str]:
    """Names of the text files that git knows, relative to the root."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [
        name
        for name in listed.split("\0")
        if Path(name).suffix in SUFFIXES and not EXCLUDED.match(name) and (ROOT / name).is_file()
    ]


def main() -> int:
    """Print every place of a listed word; 1 if there is one."""
    listed = rules(WORDS.read_text(encoding="utf-8"))
    failed = False
    for name in tracked():
        for line, words, instead in findings((ROOT / name).read_text(encoding="utf-8", errors="replace"), listed):
            failed = True
            print(f"error: {name}:{line}: {words!r}: write {instead}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
