"""Prints what the JSON lines of bench_all.sh say, one short line a measurement: usage: summary.py FOLDER"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tables import lines_of


def step(line: dict[str, Any]) -> str:
    case = f"{line['model_shape']} {line['bpw']} {line['cache']} ctx {line['ctx']} bs {line['bs']}"
    share = line["pct_of_read_roof"]
    text = (
        f"{case}: {line['p50_us']:.0f} us, {line['tok_s']:.0f} tok/s, {share:.1f} % of the roof, {line['nodes']} nodes"
    )
    if "generator_tok_s" in line:
        host = line.get("generator_host_us", float("nan"))
        text += f"; generator {line['generator_tok_s']:.0f} tok/s, {host:.0f} us a round beyond the graph"
    if "target_tok_s" in line:
        met = "met" if line["target_met"] else "MISSED"
        peer = line["reference_name"].split(",")[0]
        text += f"; target {line['target_tok_s']:g} {met}, {line['ratio_vs_reference']:.2f} x {peer}"
    elif "target_share" in line:
        text += f"; target {line['target_share']:g} of the roof {'met' if line['target_met'] else 'MISSED'}"
    return f"{text}; host {line['host_us']:.0f} us; {line['memory_over_mb']:.0f} MB over weights and cache"


def other(line: dict[str, Any]) -> str:
    names = (
        "shape",
        "format",
        "bits",
        "m",
        "cache",
        "batch",
        "ctx",
        "tokens",
        "p50_us",
        "tok_s",
        "tok_s_out",
        "tok_s_in",
    )
    more = (
        "wrong",
        "what",
        "gbps",
        "us",
        "us_pdl",
        "pct_of_read_roof",
        "pct_roof",
        "first_token_ms_p50",
        "between_ms_p50",
        "between_ms_p99",
        "target_met",
        "pct_product_rate",
    )
    return ", ".join(f"{key} {line[key]}" for key in (*names, *more) if key in line)


def main() -> None:
    for path in sorted(Path(sys.argv[1]).glob("*.jsonl")):
        for line in lines_of(path):
            print(f"{line.get('bench', path.stem)}: {step(line) if line.get('bench') == 'step' else other(line)}")


if __name__ == "__main__":
    main()
