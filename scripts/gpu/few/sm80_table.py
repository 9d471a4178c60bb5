"""Print the table of scripts/gpu/try_sm80.sh: which parts passed, and times without and with the warp ring kernels."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

Line = dict[str, object]


def lines(path: Path) -> Iterator[Line]:
    for text in path.read_text().splitlines() if path.exists() else ():
        if text.startswith("{"):
            yield json.loads(text)


def key(line: Line) -> str | None:
    """The name of the measured case; None if the line measures neither a matmul nor a step."""
    if line.get("bench") == "gemv":
        return f"{line['shape']} {line['bits']} bits, {line['m']} rows (us)"
    if line.get("bench") == "step":
        return f"step {line['model_shape']} {line['bpw']} bpw, {line['batch']} rows (us)"
    return None


def time_of(line: Line) -> float | None:
    value = line.get("p50_us", line.get("us_plain"))
    return float(value) if isinstance(value, (int, float)) else None


def main(folder: Path) -> None:
    print(f"{'part':36} result")
    for status in sorted(folder.glob("*.status")):
        code = status.read_text().strip()
        log = (folder / f"{status.stem}.log").read_text().strip().splitlines()
        result = {"0": "passed", "124": "out of time"}.get(code, f"FAILED ({code})")
        print(f"{status.stem:36} {result}: {log[-1][:80] if log else 'no output'}")
    found: dict[str, list[float | None]] = {}
    for switch in (0, 1):
        for name in ("gemv", "step"):
            for line in lines(folder / f"{name}-{switch}.log"):
                what = key(line)
                if what is not None:
                    found.setdefault(what, [None, None])[switch] = time_of(line)
    print(f"\n{'measured':36} {'without':>9} {'with':>9} {'ratio':>6}")
    for what, (without, new) in found.items():
        shown = [f"{v:9.1f}" if v is not None else f"{'-':>9}" for v in (without, new)]
        ratio = f"{without / new:6.2f}" if without and new else f"{'-':>6}"
        print(f"{what:36} {shown[0]} {shown[1]} {ratio}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
