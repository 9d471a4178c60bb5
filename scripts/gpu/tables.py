"""Write the GPU tables of docs/performance.md from benchmarks/results.

    python scripts/gpu/tables.py [FILE.jsonl ...] [--into docs/performance.md]

Without files all of benchmarks/results are read, older runs first (by the date of the lines, and by their time where
they have one). Of every case on a kind of GPU the last line counts.
`--into` replaces the text between the two marks of a page.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Line = dict[str, Any]
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
BEGIN, END = "<!-- scripts/gpu/tables.py writes from here -->", "<!-- to here -->"
STEPS = [
    ("Llama 8B, 4.0 bpw, 1 sequence", ("8b", "4.0", "fp16", 256, 1)),
    ("Llama 8B, 3.0 bpw, 1 sequence", ("8b", "3.0", "fp16", 256, 1)),
    ("Llama 8B, GPTQ 4 bits, 1 sequence", ("8b", "gptq4", "fp16", 256, 1)),
    ("Llama 8B, 4.0 bpw, context 16,384, FP16 cache", ("8b", "4.0", "fp16", 16384, 1)),
    ("Llama 8B, 4.0 bpw, context 16,384, Q4 cache", ("8b", "4.0", "q4", 16384, 1)),
    ("Llama 8B, 4.0 bpw, 8 sequences", ("8b", "4.0", "fp16", 256, 8)),
    ("Llama 8B, 4.0 bpw, 32 sequences", ("8b", "4.0", "fp16", 256, 32)),
    ("Llama 8B, 4.0 bpw, 64 sequences", ("8b", "4.0", "fp16", 256, 64)),
    ("Qwen3 8B, 4.0 bpw, 1 sequence", ("qwen3-8b", "4.0", "fp16", 256, 1)),
    ("Qwen3 8B, 4.0 bpw, 8 sequences", ("qwen3-8b", "4.0", "fp16", 256, 8)),
    ("Qwen3 8B, 4.0 bpw, 32 sequences", ("qwen3-8b", "4.0", "fp16", 256, 32)),
    ("TinyLlama 1.1B, 4.0 bpw, 1 sequence", ("1b", "4.0", "fp16", 256, 1)),
]


def table(head: str, rows: Iterable[str]) -> list[str]:
    """A Markdown table and the empty line after it."""
    return [head, "|---" * (head.count("|") - 1) + "|", *rows, ""]


def number(line: Line, key: str, form: str) -> str:
    """A value as text, empty where the line has none."""
    return format(line[key], form) if line.get(key) is not None else ""


def source(line: Line, commits: set[str]) -> str:
    """The commit of a row, where a table has several."""
    return f" ({line['commit']})" if len(commits) > 1 else ""


def step_row(name: str, line: Line, peer: Line | None) -> str:
    """One decode step; `peer` is a line of the same case that names another engine's speed."""
    through = number(line, "generator_tok_s", ",.0f")
    other = ""
    if peer is not None:
        engine, speed = (
            peer["reference_name"].split(", ")[0],
            float(peer["reference_name"].split(", ")[1].split(" ")[0]),
        )
        other = f"{speed:,.0f} ({engine}), {line['tok_s'] / speed:.1f} x"
    return (
        f"| {name} | {line['p50_us']:,.0f} | {line['tok_s']:,.0f} | {through} | {line['pct_of_read_roof']:.0f} % | "
        f"{line['host_us']:.0f} | {line['memory_over_mb']:.0f} | {other} |"
    )


def steps(lines: list[Line]) -> list[str]:
    """Whole decode steps."""
    found: dict[tuple[Any, ...], Line] = {}
    peers: dict[tuple[Any, ...], Line] = {}
    for d in lines:
        if "memory_over_mb" not in d or d.get("apart"):
            continue
        case = (d["model_shape"], d["bpw"], d["cache"], d["ctx"], d["bs"])
        found[case] = d
        if "reference_name" in d:
            peers[case] = d
    head = (
        "| decode | us a step | tok/s | through the generator | of the bandwidth | host, us a step | "
        "MB beyond weights and cache | fastest other engine |"
    )
    shown = [(name, found[case], peers.get(case)) for name, case in STEPS if case in found]
    commits = {line["commit"] for _, line, _ in shown}
    return table(head, (step_row(name + source(line, commits), line, peer) for name, line, peer in shown))


def families(lines: list[Line]) -> list[str]:
    """Whole steps of other model families, and their prompts. Families of which only some layers ran are left out."""
    whole = [d for d in lines if d["family"] != "llama3-8b" and not d.get("extrapolated")]
    decode = {(d["family"], d["bpw"], d["cache"], d["batch"], d["ctx"]): d for d in whole if d.get("batch") is not None}
    prompt = {(d["family"], d["prompt"]): d for d in whole if d.get("prompt_tok_s") is not None}
    commits = {d["commit"] for d in [*decode.values(), *prompt.values()]}
    rows = [
        f"| {family}, {bpw} bpw, {layers(d)}, {batch} sequence{'s' if batch > 1 else ''}{source(d, commits)} | "
        f"{d['p50_us']:,.0f} | {d['tok_s']:,.0f} | {d['pct_of_read_roof']:.0f} % | "
        f"{number(d, 'share_of_llama', '.2f')} |"
        for (family, bpw, _, batch, _), d in sorted(decode.items(), key=lambda item: tuple(map(str_key, item[0])))
    ]
    rows += [
        f"| {family}, {layers(d)}, prompt of {tokens:,} tokens{source(d, commits)} | "
        f"{tokens / d['prompt_tok_s'] * 1e6:,.0f} | {d['prompt_tok_s']:,.0f} | | |"
        for (family, tokens), d in sorted(prompt.items())
    ]
    return table("| other families | us | tok/s | of the bandwidth | of a Llama's share |", rows) if rows else []


def features(lines: list[Line]) -> list[str]:
    """Features through the generator, beside greedy steps of the same run."""
    found = {(d["model_shape"], d["feature"], d["batch"]): d for d in lines}
    batches = sorted({batch for _, _, batch in found})
    commits = {d["commit"] for d in found.values()}

    def cells(line: Line | None) -> str:
        if line is None:
            return " | | |"
        ratio, must = number(line, "ratio_vs_reference", ".2f"), number(line, "must", ".2f")
        target = f" (target {must})" if must else ""
        return f" {line['us']:,.0f} | {line['share_of_greedy']:.2f} | {ratio}{target} |"

    rows = []
    names = dict.fromkeys((shape, feature) for shape, feature, _ in found)
    for shape, feature in sorted(names, key=lambda name: (name[0], name[1] != "greedy")):  # the reference first
        of_batches = [found.get((shape, feature, batch)) for batch in batches]
        first = next(d for d in of_batches if d is not None)
        reference = first.get("reference_name") or ""
        of_row = [d for d in of_batches if d is not None]
        if len({d["commit"] for d in of_row}) == 1:
            origin = source(first, commits)
        else:
            origin = " (" + ", ".join(f"{d['commit']} at {d['batch']}" for d in of_row) + ")"
        rows.append(f"| {shape}: {first['about']}{origin} | {reference} |{''.join(map(cells, of_batches))}")
    head = "| feature | beside |" + "".join(
        f" us a step, {batch} sequence{'s' if batch > 1 else ''} | of greedy | of what it is beside |"
        for batch in batches
    )
    return table(head, rows)


def layers(line: Line) -> str:
    """How many layers ran."""
    return f"{line['layers']} layers"


def str_key(value: Any) -> tuple[int, Any]:
    """Sort numbers as numbers and the rest as text."""
    return (0, value) if isinstance(value, int | float) else (1, str(value))


def prefills(lines: list[Line]) -> list[str]:
    """Prompts of 8B at 4.0 bpw."""
    found = {(d["tokens"], bool(d.get("strict"))): d for d in lines}
    rows = (
        f"| {tokens:,}{', strict' if strict else ''} | {d['p50_us'] / 1e3:,.1f} | {d['tok_s']:,.0f} | "
        f"{d['pct_product_rate']:.0f} % | {number(d, 'ratio_vs_reference', '.2f')} |"
        for (tokens, strict), d in sorted(found.items())
    )
    return table(
        "| prompt of Llama 8B, 4.0 bpw, tokens | ms | tok/s | of torch's half-precision rate | "
        "x the fastest other engine |",
        rows,
    )


def serves(lines: list[Line]) -> list[str]:
    """Many requests at once through the generator."""
    found = {(d["batch"], d["requests"], d["sampled"]): d for d in lines}
    head = (
        "| many requests, Llama 8B, 4.0 bpw | tok/s out | tok/s in | first token, ms, p50 / p99 | "
        "between tokens, ms, p50 / p99 |"
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


def http(lines: list[Line]) -> list[str]:
    """The same requests through the HTTP server and through the engine alone."""
    found = {(d["engine"], d["streams"], d["workers"]): d for d in lines}
    commits = {d["commit"] for d in found.values()}
    return table(
        "| HTTP server | tok/s | engine alone, tok/s | ratio | first token, ms, p50 |",
        (
            f"| {engine}, {streams} streams, {workers} API worker{'s' if workers > 1 else ''}{source(d, commits)} | "
            f"{d['tok_s']:,.0f} | {d['alone_tok_s']:,.0f} | {d['ratio_median']:.2f} | {d['first_token_ms_p50']:.0f} |"
            for (engine, streams, workers), d in sorted(found.items())
        ),
    )


def matmuls(lines: list[Line]) -> list[str]:
    """Quantized matmuls of one row, alone."""
    found = {(d["bits"], d["shape"]): d for d in lines if "bits" in d and d["m"] == 1}
    shapes = [s for s in ("gateup", "head", "down", "qkv", "o") if any(k[1] == s for k in found)]

    def cell(bits: Any, shape: str) -> str:
        d = found.get((bits, shape))
        if d is None:
            return ""
        return "**wrong**" if d.get("wrong") else f"{d['us_pdl']:.1f} us, {d['pct_of_read_roof']:.0f} %"

    kinds = sorted({bits for bits, _ in found}, key=str)
    return table(
        "| matmul of one row, us and share of the bandwidth | " + " | ".join(shapes) + " |",
        (f"| {bits} bits | " + " | ".join(cell(bits, shape) for shape in shapes) + " |" for bits in kinds),
    )


def attention(lines: list[Line]) -> list[str]:
    """Attention of one layer with the token's own key and value stored in the same launch."""
    found = {(d["cache"], d["bs"], d["ctx"]): d for d in lines if "us_pdl" in d and d["q_len"] == 1 and d["own"]}
    places = sorted({(bs, ctx) for _, bs, ctx in found})
    kinds = sorted({cache for cache, _, _ in found})

    def cell(cache: str, bs: int, ctx: int) -> str:
        d = found.get((cache, bs, ctx))
        return f"{d['us_pdl']:.1f} us, {d['pct_of_read_roof']:.0f} %" if d else ""

    return table(
        "| attention of one layer, sequences x keys | " + " | ".join(kinds) + " |",
        (f"| {bs} x {ctx:,} | " + " | ".join(cell(cache, bs, ctx) for cache in kinds) + " |" for bs, ctx in places),
    )


def lines_of(file: Path) -> list[Line]:
    """The JSON lines of a benchmark. The last line may be incomplete, where the process was cut off."""
    found = []
    for text in file.read_text().splitlines():
        if text.startswith("{"):
            try:
                found.append(json.loads(text))
            except json.JSONDecodeError:
                print(f"{file}: no whole line: {text[:80]}", file=sys.stderr)
    return found


KINDS = {
    "step": steps,
    "families": families,
    "features": features,
    "prefill": prefills,
    "serve": serves,
    "http": http,
    "gemv": matmuls,
    "attn": attention,
}


def text_of(files: list[Path]) -> str:
    """All tables of the files, one section per kind of GPU."""
    known = [d for file in files for d in lines_of(file) if d.get("bench") in KINDS and d.get("gpu")]
    known.sort(key=lambda d: (d.get("date") or "", d.get("time") or ""))  # UTC
    out = []
    for gpu in sorted({d["gpu"] for d in known}, key=lambda name: ("H200" not in name, name)):
        of_gpu = [d for d in known if d["gpu"] == gpu]
        about = sorted({(d.get("date") or "no date", d["commit"]) for d in of_gpu})
        out += [f"## {gpu}", "", "Runs: " + "; ".join(f"{date}, commit {commit}" for date, commit in about) + ".", ""]
        for kind, make in KINDS.items():
            of_kind = [d for d in of_gpu if d["bench"] == kind]
            if of_kind:
                out += make(of_kind)
    return "\n".join(out).rstrip() + "\n"


def main() -> None:
    """Print the tables, or write them into a page."""
    words = sys.argv[1:]
    into = Path(words[words.index("--into") + 1]) if "--into" in words else None
    files = [Path(word) for word in words if word.endswith(".jsonl")] or sorted(RESULTS.glob("*.jsonl"))
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
