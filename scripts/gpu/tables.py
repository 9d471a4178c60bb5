"""Write the tables of docs/performance.md from benchmarks/results.

    python scripts/gpu/tables.py [FILE.jsonl ...] [--into docs/performance.md]

Without files all of benchmarks/results are read, older runs first (by the date of the lines, and by their time where
they have one). Of every case on a kind of GPU the last line counts.
`--into` replaces the text between the two marks of a page.
"""

from __future__ import annotations

import json
import re
import string
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Line = dict[str, Any]
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
BEGIN, END = "<!-- scripts/gpu/tables.py writes from here -->", "<!-- to here -->"
STEPS = {
    ("8b", "4.0", "fp16", 256, 1): "8B, 1 sequence",
    ("8b", "4.0", "fp16", 256, 8): "8B, 8 sequences",
    ("8b", "4.0", "fp16", 256, 32): "8B, 32 sequences",
    ("8b", "4.0", "fp16", 256, 48): "8B, 48 sequences",
    ("8b", "4.0", "fp16", 256, 64): "8B, 64 sequences",
    ("8b", "3.0", "fp16", 256, 1): "8B, 3.0 bpw",
    ("8b", "gptq4", "fp16", 256, 1): "8B, GPTQ 4 bits",
    ("8b", "4.0", "fp16", 16384, 1): "8B, 16,384 keys",
    ("8b", "4.0", "q4", 16384, 1): "8B, 16,384 keys, Q4 cache",
    ("1b", "4.0", "fp16", 256, 1): "TinyLlama 1.1B",
}
DATA_SHEETS = {
    "RTX 3060": 360,
    "RTX 3090": 936,
    "RTX 4090": 1008,
    "L4": 300,
    "L40S": 864,
    "A100 80 GB": 2039,
}
"""Memory bandwidth of cards that were not measured, GB/s."""
H100_DATA_SHEET = 3352
STREAMED = 0.93
"""Share of the read bandwidth that kernels reach between the fixed costs of their launches."""
PREDICTED = (
    "None of these cards has run the code. The figures are for one sequence of the 8B model at 4.0 bpw and 256 keys; "
    "there are none for prompts, batches or long contexts. They are computed from the H100 that runs the code for "
    "sm_80 ({run}): its step takes {us:,.0f} us and reads {gigabytes:.2f} GB in {launches} launches; the card reads "
    "{read:,.0f} GB/s, {of_data_sheet:.2f} of its data sheet. Assumed for every card: it reads the same share of its "
    "data sheet, kernels use {streamed} of that, and a launch costs {launch_us:.1f} us, which is the rest of the "
    "H100's step. `exl bench --report` measures yours."
)
REFERENCES = ("greedy-twice", "greedy-peaked", "draft-alone")
"""Features that only serve as references of others, and so have no row."""


def table(title: str, head: str, rows: Iterable[str]) -> list[str]:
    """A heading, a Markdown table and the empty line after it."""
    return [f"## {title}", "", head, "|---" * (head.count("|") - 1) + "|", *rows, ""]


def short(gpu: str) -> str:
    """The name of a card as the columns have it: `H100` for `NVIDIA H100 80GB HBM3`."""
    name = re.search(r"[A-Z]+\d+\w*", gpu.replace("NVIDIA ", ""))
    return (name.group() if name else gpu) + gpu.partition(",")[1] + gpu.partition(",")[2]


class Runs:
    """Letters for the runs (card, commit, date) that the rows of a page come from."""

    def __init__(self) -> None:
        self._letters: dict[tuple[str, str, str], str] = {}

    def letter(self, line: Line) -> str:
        """The letter of the line's run, a new one for a run that has none yet."""
        run = (short(line["gpu"]), line["commit"][:8], line.get("date") or "no date")
        return self._letters.setdefault(run, string.ascii_letters[len(self._letters)])

    def column(self, lines: Iterable[Line | None]) -> tuple[str, Callable[[Line], str]]:
        """Name the runs of a column: one letter after its head if all `lines` come from one run, else one in each cell.

        Returns what to add to the head, and what to add to the cell of a line.
        """
        letters = dict.fromkeys(self.letter(line) for line in lines if line is not None)
        if len(letters) == 1:
            return f" ({next(iter(letters))})", lambda _: ""
        return "", lambda line: f" ({self.letter(line)})"

    def text(self) -> str:
        """One paragraph that says what the letters stand for."""
        runs = "; ".join(f"{letter}: {gpu}, {date}, {commit}" for (gpu, commit, date), letter in self._letters.items())
        return f"Runs by card, date and commit: {runs}."


def cards(lines: list[Line]) -> list[str]:
    """The kinds of GPU that the lines name, the fastest memory first."""
    return sorted({line["gpu"] for line in lines}, key=lambda gpu: ("H200" not in gpu, gpu))


def by_card(
    lines: list[Line], case: Callable[[Line], Any], value: Callable[[Line], str], head: str, runs: Runs
) -> tuple[list[str], dict[Any, list[str]]]:
    """The columns of a table that has one column for each kind of GPU.

    Returns their heads and the cells of every case, empty where a card has no line of it.
    """
    heads, cells = [], {case(line): list[str]() for line in lines}
    for gpu in cards(lines):
        found = {case(line): line for line in lines if line["gpu"] == gpu}
        of_head, of_cell = runs.column(found.values())
        heads.append(f"{short(gpu)}: {head}{of_head}")
        for key, row in cells.items():
            row.append(value(found[key]) + of_cell(found[key]) if key in found else "")
    return heads, cells


def steps(lines: list[Line], runs: Runs) -> list[str]:
    """Whole decode steps."""

    def case(line: Line) -> tuple[Any, ...]:
        return (line["model_shape"], line["bpw"], line["cache"], line["ctx"], line["bs"])

    def value(line: Line) -> str:
        through = f"{line['generator_tok_s']:,.0f}" if line.get("generator_tok_s") is not None else "-"
        return f"{line['p50_us']:,.0f} / {through} / {line['pct_of_read_roof']:.0f} %"

    whole = [d for d in lines if "memory_over_mb" in d and not d.get("apart") and case(d) in STEPS]
    others = {case(d): d["reference_name"].split(", ") for d in whole if d.get("reference_name")}
    heads, cells = by_card(whole, case, value, "us / tok/s / bandwidth", runs)
    rows = []
    for key, name in STEPS.items():
        if key in cells:
            engine, speed = others.get(key, ("", ""))[:2]
            of_other = f"{float(speed.split(' ')[0]):,.0f} ({engine})" if engine else ""
            rows.append(f"| {name} | {' | '.join(cells[key])} | {of_other} |")
    return table("Decode steps", f"| step | {' | '.join(heads)} | fastest other engine, tok/s |", rows)


def predicted(lines: list[Line], runs: Runs) -> list[str]:
    """Steps of one sequence on cards that were not measured, from the last step of an H100 with the code for sm_80."""
    case = ("8b", "4.0", "fp16", 256, 1)
    keys = ("model_shape", "bpw", "cache", "ctx", "bs")
    found = [
        d
        for d in lines
        if d["gpu"].endswith(", code for sm_80") and "memory_over_mb" in d and tuple(d[key] for key in keys) == case
    ]
    if not found:
        return []
    step = found[-1]
    read_us = step["bytes_per_step"] / (STREAMED * step["roof_gb_s"] * 1e3)
    fixed_us = step["p50_us"] - read_us
    of_data_sheet = step["roof_gb_s"] / H100_DATA_SHEET
    rows = []
    for card, bandwidth in DATA_SHEETS.items():
        time = step["bytes_per_step"] / (STREAMED * of_data_sheet * bandwidth * 1e3) + fixed_us
        rows.append(f"| {card} | {bandwidth:,} | {time / 1e3:.1f} | {1e6 / time:,.0f} |")
    about = PREDICTED.format(
        run=runs.letter(step),
        us=step["p50_us"],
        gigabytes=step["bytes_per_step"] / 1e9,
        launches=step["nodes"],
        read=step["roof_gb_s"],
        of_data_sheet=of_data_sheet,
        streamed=STREAMED,
        launch_us=fixed_us / step["nodes"],
    )
    title, empty, *rest = table(
        "Predicted, not measured", "| card | memory bandwidth, GB/s | ms a step | tok/s |", rows
    )
    return [title, empty, about, empty, *rest]


def prompts(lines: list[Line], runs: Runs) -> list[str]:
    """Prompts of 8B at 4.0 bpw; those behind cached tokens until they are stored, as the generator runs them."""

    def case(line: Line) -> tuple[int, int, str, bool]:
        past = line.get("past", 0)
        return (line["tokens"], past, line["cache"] if past else "", bool(line.get("strict")))

    def speed(line: Line) -> str:
        return f"{line['tokens'] / line['store_us'] * 1e6 if line.get('past') else line['tok_s']:,.0f}"

    heads, cells = by_card(lines, case, speed, "tok/s", runs)
    return table(
        "Prompts",
        f"| tokens, Llama 8B, 4.0 bpw | {' | '.join(heads)} |",
        (
            f"| {tokens:,}"
            f"{f' behind {past:,}, {cache} cache' if past else ''}{', strict' if strict else ''} | {' | '.join(row)} |"
            for (tokens, past, cache, strict), row in sorted(cells.items())
        ),
    )


def families(lines: list[Line], runs: Runs) -> list[str]:
    """Steps and prompts of model families. Lines whose figures were extrapolated from fewer layers are left out."""
    whole = [d for d in lines if not d.get("extrapolated")]
    batches = sorted({d["batch"] for d in whole if d.get("batch") is not None})
    names = sorted({(d["family"], d["layers"]) for d in whole})
    heads, columns = [], []
    for gpu in cards(whole):
        found = {(d["family"], d["layers"], d.get("batch")): d for d in whole if d["gpu"] == gpu}
        prompt = {(d["family"], d["layers"]): d for d in whole if d["gpu"] == gpu and d.get("prompt_tok_s") is not None}
        of_head, of_cell = runs.column([*found.values(), *prompt.values()])
        heads += [f"{short(gpu)}: us a step{of_head}", "prompt, tok/s"]
        twins = any(d.get("share_of_twin") for d in found.values())
        if twins:
            heads.append("share of its Llama's")
        column = []
        for name in names:
            of_row = [found.get((*name, batch)) for batch in batches]
            of_steps = [f"{d['p50_us']:,.0f}{of_cell(d)}" if d is not None else "-" for d in of_row]
            text = " / ".join(of_steps) if any(of_row) else ""
            speed = f"{prompt[name]['prompt_tok_s']:,.0f}{of_cell(prompt[name])}" if name in prompt else ""
            shares = [d.get("share_of_twin") if d is not None else None for d in of_row]
            of_twin = " / ".join("-" if share is None else f"{share:.2f}" for share in shares) if any(shares) else ""
            column.append(" | ".join([text, speed, *([of_twin] if twins else [])]))
        columns.append(column)
    sequences = " / ".join(map(str, batches))
    return table(
        "Model families",
        f"| family, layers, steps of {sequences} sequences | {' | '.join(heads)} |",
        (
            f"| {family}, {layers} | {' | '.join(cells)} |"
            for (family, layers), *cells in zip(names, *columns, strict=True)
        ),
    )


def features(lines: list[Line], runs: Runs) -> list[str]:
    """Features through the generator, as a share of the speed of what they are compared with."""
    found = {(d["gpu"], d["batch"], d["feature"]): d for d in lines if d["feature"] not in REFERENCES}
    places = sorted({key[:2] for key in found}, key=lambda place: ("H200" not in place[0], place))
    names = sorted(dict.fromkeys(d["feature"] for d in found.values()), key=lambda name: name != "greedy")
    abouts = {d["feature"]: d["about"] for d in lines}
    columns = {place: runs.column(d for key, d in found.items() if key[:2] == place) for place in places}

    def cell(place: tuple[str, int], name: str) -> str:
        line = found.get((*place, name))
        if line is None:
            return ""
        ratio = line.get("ratio_vs_reference")
        return (f"{line['us']:,.0f} us" if ratio is None else f"{ratio:.2f}") + columns[place][1](line)

    rows = []
    for name in names:
        reference = next(d for key, d in found.items() if key[2] == name).get("reference_name") or ""
        of_row = " | ".join(cell(place, name) for place in places)
        rows.append(f"| {abouts[name]} | {abouts.get(reference, reference)} | {of_row} |")
    heads = [
        f"{short(gpu)}, {batch} sequence{'s' if batch > 1 else ''}{columns[gpu, batch][0]}" for gpu, batch in places
    ]
    return table("Features", f"| feature, Llama 8B, 4.0 bpw | compared with | {' | '.join(heads)} |", rows)


def http(lines: list[Line], runs: Runs) -> list[str]:
    """The same requests through the HTTP server and through the engine alone."""
    found = {(d["gpu"], d["engine"], d["streams"], d["workers"]): d for d in lines}
    return table(
        "HTTP server",
        "| card, model, streams, requests, tokens a request | tok/s | engine alone | ratio | first token, ms, p50 |",
        (
            f"| {short(gpu)}, {engine}, {streams}, {d['requests']}, {d['new_tokens']} ({runs.letter(d)}) | "
            f"{d['tok_s']:,.0f} | {d['alone_tok_s']:,.0f} | {d['ratio_median']:.2f} | {d['first_token_ms_p50']:.0f} |"
            for (gpu, engine, streams, _), d in sorted(
                found.items(), key=lambda item: ("H200" not in item[0][0], item[0])
            )
        ),
    )


def devices(lines: list[Line], runs: Runs) -> list[str]:
    """Steps and prompts on several GPUs, each beside one card in the same run."""
    found = {
        ("H200" not in d["gpu"], len(d["model_shape"]), d["topology"], d.get("tokens", 0), d["batch"]): d
        for d in lines
        if d["topology"] != "1"
    }
    return table(
        "Several GPUs",
        "| Llama, 4.0 bpw | tok/s | of one card |",
        (
            f"| {d['model_shape'].upper()}, {d['topology']}, "
            f"{f'prompt of {tokens:,}' if tokens else f'{batch} sequence' + 's' * (batch > 1)}, "
            f"{short(d['gpu'])} ({runs.letter(d)}) | {d['tok_s']:,.0f} | {d['share_of_one']:.2f} |"
            for (_, _, _, tokens, batch), d in sorted(found.items(), key=lambda item: item[0])
        ),
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
    "prefill": prompts,
    "families": families,
    "features": features,
    "http": http,
    "devices": devices,
}


def text_of(files: list[Path]) -> str:
    """All tables of the files, one section per subject, and the runs that they come from."""
    known = [d for file in files for d in lines_of(file) if d.get("bench") in KINDS and d.get("gpu")]
    known.sort(key=lambda d: (d.get("date") or "", d.get("time") or ""))  # UTC
    runs = Runs()
    out = []
    for kind, make in KINDS.items():
        of_kind = [d for d in known if d["bench"] == kind]
        if of_kind:
            out += make(of_kind, runs)
        if kind == "step":
            out += predicted(of_kind, runs)
    return "\n".join([*out, runs.text()]) + "\n"


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
