"""Put the lines of a benchmark's run into benchmarks/results, in place of the older lines of the same cases.

    python scripts/gpu/keep.py FILE.jsonl ...

There is one file a benchmark and card. Lines that no table of scripts/gpu/tables.py shows are left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from tables import KINDS, RESULTS, Line, known, short

CASE = (
    *("bench", "gpu", "model_shape", "bpw", "cache", "ctx", "bs", "past", "tokens", "strict", "family", "layers"),
    *("batch", "prompt", "feature", "engine", "streams", "workers", "prompt_wait_ms", "topology"),
    *("shape", "bits", "m", "slots_window"),
)
"""The keys that tell cases apart; lines that agree in them measure the same thing."""


def last_of_each(lines: Iterable[Line]) -> list[Line]:
    """The last line of each case, in the order of `lines`."""
    found: dict[tuple[object, ...], Line] = {}
    for line in lines:
        case = tuple(line.get(key) for key in CASE)
        found.pop(case, None)
        found[case] = line
    return list(found.values())


def file_name(line: Line) -> str:
    """The file of a line, such as `step-h200.jsonl` or `step-h100-code-for-sm_80.jsonl`."""
    return f"{line['bench']}-{short(line['gpu']).lower().replace(', ', '-').replace(' ', '-')}.jsonl"


def into(results: Path, files: list[Path]) -> None:
    """Add the lines of `files` to those of the folder `results`, and write one file a benchmark and card."""
    of_file: dict[str, list[Line]] = {}
    for line in last_of_each(known([*results.glob("*.jsonl"), *files], KINDS)):
        of_file.setdefault(file_name(line), []).append(line)
    for name, lines in of_file.items():
        (results / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    into(RESULTS, [Path(name) for name in sys.argv[1:]])
