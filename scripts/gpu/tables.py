"""Tables of what bench_all.sh measured, for docs/performance.md.

    python scripts/gpu/tables.py FILE.jsonl ... [--into docs/performance.md]

Of every case on a kind of GPU the last line counts, so that older files go first; an H200's tables come first, as the
bars are for it. `--into` replaces what stands between the two marks.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Line = dict[str, Any]
BEGIN, END = "<!-- scripts/gpu/tables.py writes from here -->", "<!-- to here -->"
STEPS = [
    ("8B, 4.0 bpw, 1 sequence", ("8b", "4.0", "fp16", 256, 1)),
    ("8B, 3.0 bpw, 1 sequence", ("8b", "3.0", "fp16", 256, 1)),
    ("8B, GPTQ 4 bits, 1 sequence", ("8b", "gptq4", "fp16", 256, 1)),
    ("8B, 4.0 bpw, context 16,384, FP16 cache", ("8b", "4.0", "fp16", 16384, 1)),
    ("8B, 4.0 bpw, context 16,384, Q4 cache", ("8b", "4.0", "q4", 16384, 1)),
    ("8B, 4.0 bpw, 8 sequences", ("8b", "4.0", "fp16", 256, 8)),
    ("8B, 4.0 bpw, 32 sequences", ("8b", "4.0", "fp16", 256, 32)),
    ("8B, 4.0 bpw, 64 sequences", ("8b", "4.0", "fp16", 256, 64)),
    ("1.1B, 4.0 bpw, 1 sequence", ("1b", "4.0", "fp16", 256, 1)),
]
MUST_SHARE = {"H200": {"gateup": 75, "head": 75, "down": 68}, "H100": {"gateup": 90, "head": 90, "down": 90}}


def table(head: str, rows: Iterable[str]) -> list[str]:
    return [head, "|---" * (head.count("|") - 1) + "|", *rows, ""]


def mark(line: Line, key: str = "must_tok_s") -> str:
    if "must_met" not in line:
        return ""
    bars = [f"{line['must_share']:.2f}"] if "must_share" in line else []
    bars += [f"{line[key]:,g}"] if key in line else []
    return f"{', '.join(bars)}: {'met' if line['must_met'] else '**missed**'}"


def number(line: Line, key: str, form: str) -> str:
    return format(line[key], form) if key in line else ""


def step_row(name: str, line: Line, commits: set[str]) -> str:
    """`commits`: all of the table's; a row says which is its own where there are several."""
    name += f" ({line['commit']})" if len(commits) > 1 else ""
    through = f"{line['generator_tok_s']:,.0f}" if "generator_tok_s" in line else ""
    beyond = f"{max(0.0, line['generator_host_us']):.0f}" if "generator_host_us" in line else ""
    peer = ""
    if "reference_name" in line:
        who, speed = line["reference_name"].split(",")[0], line["reference_name"].split(", ")[1].split(" ")[0]
        peer = f"{float(speed):,.0f} ({who}), {line['ratio_vs_reference']:.1f} x"
    aim = f"{line['aim_tok_s']:,g}" if line.get("aim_tok_s") else ""
    return (
        f"| {name} | {line['p50_us']:,.0f} | {line['tok_s']:,.0f} | {through} | {line['pct_of_read_roof']:.0f} % | "
        f"{mark(line)} | {aim} | {peer} | {line['host_us']:.0f} | {beyond} | {line['memory_over_mb']:.0f} |"
    )


def steps(lines: list[Line]) -> list[str]:
    found = {(d["model_shape"], d["bpw"], d["cache"], d["ctx"], d["bs"]): d for d in lines if "memory_over_mb" in d}
    head = (
        "| decode | us a step | tok/s | through the generator | of the read roof | must | aim | best peer | "
        "host, us a step | us a round beyond the graph | MB beyond weights and cache |"
    )
    shown = [(name, found[case]) for name, case in STEPS if case in found]
    commits = {line["commit"] for _, line in shown}
    return table(head, (step_row(name, line, commits) for name, line in shown))


def prefills(lines: list[Line]) -> list[str]:
    found = {(d["tokens"], bool(d.get("strict"))): d for d in lines}
    rows = (
        f"| {tokens:,}{', strict' if strict else ''} | {d['p50_us'] / 1e3:,.1f} | {d['tok_s']:,.0f} | "
        f"{d['pct_product_rate']:.0f} % | {mark(d)} | {number(d, 'aim_tok_s', ',.0f')} | "
        f"{number(d, 'ratio_vs_reference', '.2f')} |"
        for (tokens, strict), d in sorted(found.items())
    )
    return table(
        "| prompt of 8B at 4.0 bpw, tokens | ms | tok/s | of torch's half-precision rate | must | aim | x the peer |",
        rows,
    )


def serves(lines: list[Line]) -> list[str]:
    found = {(d["batch"], d["requests"], d["sampled"]): d for d in lines}
    head = (
        "| served at once, 8B at 4.0 bpw | tok/s out | tok/s in | first token, ms, half / 99 of 100 | "
        "between tokens, ms, half / 99 of 100 |"
    )
    return table(
        head,
        (
            f"| {requests} requests, {batch} at a time{', sampled' if sampled else ', greedy'} | "
            f"{d['tok_s_out']:,.0f} | {d['tok_s_in']:,.0f} | "
            f"{d['first_token_ms_p50']:,.0f} / {d['first_token_ms_p99']:,.0f} | "
            f"{d['between_ms_p50']:.1f} / {d['between_ms_p99']:.1f} |"
            for (batch, requests, sampled), d in sorted(found.items())
        ),
    )


def products(lines: list[Line]) -> list[str]:
    found = {(d["bits"], d["shape"]): d for d in lines if "bits" in d and d["m"] == 1}
    shapes = [s for s in ("gateup", "head", "down", "qkv", "o") if any(k[1] == s for k in found)]

    def cell(bits: Any, shape: str) -> str:
        d = found.get((bits, shape))
        if d is None:
            return ""
        if d.get("wrong"):
            return "**wrong**"
        share = d["pct_of_read_roof"]
        bars = next((bars for kind, bars in MUST_SHARE.items() if kind in d["gpu"]), {})
        bar = bars.get(shape) if str(bits) in ("4", "4.0") else None
        met = "" if bar is None else f" (must {bar}: {'met' if share >= bar else '**missed**'})"
        return f"{d['us_pdl']:.1f} us, {share:.0f} %{met}"

    kinds = sorted({bits for bits, _ in found}, key=str)
    return table(
        "| products alone, one row, PDL | " + " | ".join(shapes) + " |",
        (f"| {bits} bits | " + " | ".join(cell(bits, shape) for shape in shapes) + " |" for bits in kinds),
    )


def attention(lines: list[Line]) -> list[str]:
    found = {(d["cache"], d["bs"], d["ctx"], d["q_len"], d["own"]): d for d in lines if "us_pdl" in d}
    own = sorted((cache, bs, ctx) for cache, bs, ctx, q_len, o in found if q_len == 1 and o)
    return table(
        "| attention of one layer, own keys stored in the same launch, PDL | us | of the read roof |",
        (
            f"| {cache}, {bs} x {ctx:,} | {d['us_pdl']:.1f} | {d['pct_of_read_roof']:.0f} % |"
            for cache, bs, ctx in own
            for d in [found[cache, bs, ctx, 1, True]]
        ),
    )


def lines_of(file: Path) -> list[Line]:
    """A benchmark's JSON lines. The last may be half a one, where its process was cut off."""
    found = []
    for text in file.read_text().splitlines():
        if text.startswith("{"):
            try:
                found.append(json.loads(text))
            except json.JSONDecodeError:
                print(f"{file}: no whole line: {text[:80]}", file=sys.stderr)
    return found


KINDS = {"step": steps, "prefill": prefills, "serve": serves, "gemv": products, "attn": attention}


def text_of(files: list[Path]) -> str:
    known = [d for file in files for d in lines_of(file) if d.get("bench") in KINDS]
    out = []
    for gpu in sorted({d["gpu"] for d in known}, key=lambda name: ("H200" not in name, name)):
        of_gpu = [d for d in known if d["gpu"] == gpu]
        about = sorted({(d.get("date", "2026-11-21"), d["commit"]) for d in of_gpu})
        out += [f"{gpu}, " + "; ".join(f"{date}, commit {commit}" for date, commit in about) + ".", ""]
        for kind, make in KINDS.items():
            of_kind = [d for d in of_gpu if d["bench"] == kind]
            if of_kind:
                out += make(of_kind)
    return "\n".join(out).rstrip() + "\n"


def main() -> None:
    words = sys.argv[1:]
    into = Path(words[words.index("--into") + 1]) if "--into" in words else None
    files = [Path(word) for word in words if word.endswith(".jsonl")]
    text = text_of(files)
    if into is None:
        print(text)
        return
    page = into.read_text()
    if BEGIN not in page or END not in page:
        sys.exit(f"{into} has no marks {BEGIN} and {END}")
    between = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
    into.write_text(between.sub(lambda _: f"{BEGIN}\n\n{text}\n{END}", page))


if __name__ == "__main__":
    main()
