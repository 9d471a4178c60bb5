"""Which kernels of the native module a run launched and which never; and cases that launch them all.

    python3 scripts/gpu/kernels_covered.py FOLDER ...                 what kernels_plugin.py logged there
    python3 scripts/gpu/kernels_covered.py FOLDER ... --choose FILE [--costs LOG ...]

--choose writes lines `seconds case` for EXL_SUBSET_CASES (subset_plugin.py): of passed cases a small and cheap set that
launches every kernel that any of them launched. --costs names logs of EXL_SUBSET_LOG (`outcome seconds case`) with what
cases took under the tool; of others that is guessed.

Exit code 1 if a kernel was never launched (not with --choose).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def lines_of(folders: Iterable[Path]) -> tuple[set[str], list[Line]]:
    """Names of the module's kernels, and the tests that launched some. Who is killed may leave half a line."""
    module: set[str] = set()
    cases: list[Line] = []
    for folder in folders:
        for path in sorted(folder.rglob("kernels-*.jsonl")):
            for text in path.read_text().splitlines(keepends=True):
                if not text.endswith("\n"):
                    continue
                line = json.loads(text)
                if "module" in line:
                    module.update(line["module"])
                else:
                    cases.append(line)
    return module, cases


def measured(logs: Iterable[Path]) -> dict[str, float]:
    words = (text.split(" ", 2) for log in logs for text in log.read_text().splitlines())
    return {name: max(0.1, float(seconds)) for _, seconds, name in words}


def choose(cases: list[Line], costs: dict[str, float]) -> list[tuple[float, str]]:
    """Greedily, most that is new for a second first; then without those that others have made superfluous."""
    price = {c["case"]: costs.get(c["case"], 1 + 5 * c["seconds"] + 0.03 * sum(c["launches"].values())) for c in cases}
    gives = {c["case"]: set(c["launches"]) for c in cases if c["outcome"] == "passed"}
    missing = set().union(*gives.values())
    found: list[str] = []
    while missing:
        best = max(gives, key=lambda name: (len(gives[name] & missing) / price[name], name))
        missing -= gives[best]
        found.append(best)
    found.sort(key=lambda name: (-price[name], name))
    for name in list(found):
        others = set().union(*(gives[other] for other in found if other != name))
        if gives[name] <= others:
            found.remove(name)
    return [(price[name], name) for name in found]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--choose", type=Path)
    parser.add_argument("--costs", nargs="*", type=Path, default=[])
    options = parser.parse_args()
    module, cases = lines_of(options.folders)
    ran = {name for case in cases for name in case["launches"]}
    never = sorted(module - ran)
    print(f"{len(ran)} of {len(module)} kernels launched by {len(cases)} tests")
    if never:
        print("never launched:", *never)
    if options.choose:
        chosen = choose(cases, measured(options.costs))
        options.choose.write_text("".join(f"{seconds:.1f} {name}\n" for seconds, name in chosen))
        print(f"{len(chosen)} cases chosen, {sum(seconds for seconds, _ in chosen):.0f} s")
        return 0
    return 1 if never or not module else 0


if __name__ == "__main__":
    raise SystemExit(main())
