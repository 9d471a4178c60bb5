"""Write the tables of docs/performance.md and README.md from benchmarks/results.

    python scripts/gpu/tables.py [FILE.jsonl ...]   prints those of docs/performance.md
    python scripts/gpu/tables.py --write            writes both pages between their marks

Without files all of benchmarks/results are read, older runs first (by the date of the lines, and by their time where
they have one). Of every case on a kind of GPU the last line counts.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Any

Line = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- scripts/gpu/tables.py writes from here -->", "<!-- to here -->"
STEPS = {
    ("8b", "4.0", "fp16", 256, 1): "8B, 1 sequence",
    ("8b", "4.0", "fp16", 256, 8): "8B, 8 sequences",
    ("8b", "4.0", "fp16", 256, 32): "8B, 32 sequences",
    ("8b", "4.0", "fp16", 256, 48): "8B, 48 sequences",
    ("8b", "4.0", "fp16", 256, 64): "8B, 64 sequences",
    ("8b", "4.0-32g", "fp16", 256, 1): "8B, groups of 32, 1 sequence",
    ("8b", "4.0-32g", "fp16", 256, 8): "8B, groups of 32, 8 sequences",
    ("8b", "4.0-32g", "fp16", 256, 32): "8B, groups of 32, 32 sequences",
    ("8b", "4.0-file", "fp16", 256, 1): "8B, groups of a 4.0 bpw file, 1 sequence",
    ("8b", "4.0-file", "fp16", 256, 8): "8B, groups of a 4.0 bpw file, 8 sequences",
    ("8b", "4.0-file", "fp16", 256, 32): "8B, groups of a 4.0 bpw file, 32 sequences",
    ("8b", "3.0", "fp16", 256, 1): "8B, 3.0 bpw",
    ("8b", "gptq4", "fp16", 256, 1): "8B, GPTQ 4 bits",
    ("8b", "4.0", "fp16", 16384, 1): "8B, 16,384 keys",
    ("8b", "4.0", "q4", 16384, 1): "8B, 16,384 keys, Q4 cache",
    ("1b", "4.0", "fp16", 256, 1): "TinyLlama 1.1B",
}
PROMPTS = {
    (128, 0, "", False): "128",
    (512, 0, "", False): "512",
    (512, 0, "", True): "512, strict",
    (2048, 0, "", False): "2,048",
    (2048, 0, "", True): "2,048, strict",
    (8192, 0, "", False): "8,192",
    (256, 32768, "fp16", False): "256 after 32,768 cached, FP16 cache",
    (256, 32768, "q4", False): "256 after 32,768 cached, Q4 cache",
}
"""Prompts with a row: tokens, tokens in the cache, its format, strict mode."""
SHARES = {
    "gemma": 0.88,
    "glm": 0.90,
    **dict.fromkeys(("command-r", "olmo", "granite", "starcoder", "gpt2"), 0.85),
    "phi3": 0.75,
    "llama": 0.0,
}
"""Targets of families by the beginning of their names; 0.92 of others."""
MIXTURES = {
    **{("qwen3-30b-a3b", batch): least for batch, least in ((1, 450), (8, 1800), (32, 4000))},
    **{("mixtral-8x7b", batch): least for batch, least in ((1, 330), (8, 1050), (32, 3000))},
}
"""Targets of mixtures of experts in tokens per second, by number of sequences."""
DEVICES = {
    **{("8b", "split", 0, batch): 0.95 for batch in (1, 8, 32)},
    **{("8b", "tp", 0, batch): least for batch, least in ((1, 1.2), (8, 1.3), (32, 1.4))},
    ("8b", "tp", 2048, 1): 1.6,
    ("70b", "tp", 0, 1): 1.6,
}
"""Targets of several GPUs as a share of one: model, way, tokens of a prompt or 0, sequences."""
DATA_SHEETS = {
    "RTX 2080 Ti": 616,
    "RTX 3060": 360,
    "RTX 3090": 936,
    "RTX 4090": 1008,
    "RTX 5090": 1792,
    "L4": 300,
    "L40S": 864,
    "A100 80 GB": 2039,
}
"""Memory bandwidth of cards that were not measured, GB/s."""
H100_DATA_SHEET = 3352
STREAMED = 0.93
"""Share of the read bandwidth that kernels reach between the fixed costs of their launches."""
EXLLAMAV2_4090 = 175
"""Tokens per second of exllamav2 on an RTX 4090, from its README, for the bytes of an 8B model at 4.0 bpw."""
PREDICTED = (
    "None of these cards has run the code. The figures are for one sequence of the 8B model at 4.0 bpw and 256 keys; "
    "nothing predicts prompts, batches or long contexts. The H100 that runs the code for sm_80 ({date}, {commit}) "
    "takes {us:,.0f} us a step, reads {gigabytes:.2f} GB in {launches} launches, and reaches {read:,.0f} GB/s in a "
    "plain read, {of_data_sheet:.2f} of its data sheet. Assumed for every card: the same share of its data sheet, of "
    "which kernels use {streamed}, and {launch_us:.1f} us a launch, the rest of the H100's step. "
    "A 2080 Ti runs a slower kernel of attention than the code for sm_80 has, and a 5090 some of Hopper's kernels; the "
    "figures leave both out. exllamav2's README has 211 tok/s for Llama 2 7B at 4.0 bpw on an RTX 4090. By the bytes "
    "of this model that is about {peer} tok/s, {than} than is predicted here. "
    "`exl bench --report` measures yours."
)
HEADLINE = (
    ("8B, 1 sequence", "1 sequence"),
    ("8B, 8 sequences", "8 sequences"),
    ("8B, 32 sequences", "32 sequences"),
    ("8B, 64 sequences", "64 sequences"),
    ("8B, 16,384 keys", "1 sequence, context 16,384"),
)
"""Rows of README's table: the name that STEPS has, and README's."""
MATMULS = {"gateup": "gate+up", "head": "head", "down": "down", "qkv": "q+k+v", "o": "o"}
"""Matrices with a row, by the names of their shapes."""
UNSHOWN = ("greedy-twice", "greedy-peaked", "draft-alone", "chat")
"""Features without a row: references of others, and samplers whose logits are unlike a model's."""


def table(title: str, head: str, rows: Iterable[str], lines: Iterable[Line]) -> list[str]:
    """A heading, a Markdown table and the dates of its `lines`."""
    return [f"## {title}", "", head, "|---" * (head.count("|") - 1) + "|", *rows, "", runs(lines), ""]


def short(gpu: str) -> str:
    """The name of a card as the columns have it: `H100` for `NVIDIA H100 80GB HBM3`."""
    name = re.search(r"[A-Z]+\d+\w*", gpu.replace("NVIDIA ", ""))
    return (name.group() if name else gpu) + gpu.partition(",")[1] + gpu.partition(",")[2]


def runs(lines: Iterable[Line]) -> str:
    """Return the dates of the lines, card by card. Each line in benchmarks/results has its own, and its commit."""
    found: dict[str, list[str]] = {}
    for line in sorted(lines, key=lambda d: ("H200" not in d["gpu"], d["gpu"], d.get("date") or "")):
        found.setdefault(short(line["gpu"]), []).append(line.get("date") or "no date")
    dates = [f"{gpu} {' to '.join(dict.fromkeys((days[0], days[-1])))}" for gpu, days in found.items()]
    return f"Measured: {'; '.join(dates)}."


def cards(lines: list[Line]) -> list[str]:
    """The kinds of GPU that the lines name, the fastest memory first."""
    return sorted({line["gpu"] for line in lines}, key=lambda gpu: ("H200" not in gpu, gpu))


def last(lines: Iterable[Line], case: Callable[[Line], Any]) -> dict[Any, dict[str, Line]]:
    """The last line of every case, by the name of its GPU."""
    found: dict[Any, dict[str, Line]] = {}
    for line in lines:
        found.setdefault(case(line), {})[line["gpu"]] = line
    return found


def flat(found: dict[Any, dict[str, Line]]) -> list[Line]:
    """All lines of `last`."""
    return [line for of_case in found.values() for line in of_case.values()]


def whole_steps(lines: list[Line]) -> dict[str, dict[str, Line]]:
    """The last decode step of every row of STEPS, by the name of its GPU."""

    def case(line: Line) -> str | None:
        return STEPS.get((line["model_shape"], line["bpw"], line["cache"], line["ctx"], line["bs"]))

    found = last((d for d in lines if "memory_over_mb" in d and not d.get("apart") and case(d)), case)
    return {name: found[name] for name in STEPS.values() if name in found}


def other_engine(lines: list[Line], name: str) -> tuple[str, str]:
    """Speed and name of the fastest other engine of a row, empty where no line names one."""
    texts = [d["reference_name"] for d in lines if d.get("reference_name") and name in whole_steps([d])]
    engine, speed = texts[-1].split(", ")[:2] if texts else ("", "")
    return (f"{float(speed.split(' ')[0]):,.0f}" if speed else "", engine)


def target_of_step(line: Line) -> str:
    """Return the target that a step misses: of the bandwidth, or else tokens per second."""
    share = 100 * (line.get("target_share") or 0)
    return f"{share:.0f} %" if line["pct_of_read_roof"] < share else f"{line['target_tok_s']:,.0f} tok/s"


def missed(line: Line) -> str:
    """Return the target that a step, a matmul or a prompt misses, in brackets."""
    return f" (target: {target_of_step(line)})" if line.get("target_met") is False else ""


def steps(lines: list[Line]) -> list[str]:
    """Whole decode steps."""

    def value(line: Line | None) -> str:
        if line is None:
            return ""
        through = f"{line['generator_tok_s']:,.0f}" if line.get("generator_tok_s") is not None else "-"
        return f"{line['p50_us']:,.0f} / {through} / {line['pct_of_read_roof']:.0f} %{missed(line)}"

    found = whole_steps(lines)
    gpus = cards(flat(found))
    rows = []
    for name, of_case in found.items():
        speed, engine = other_engine(lines, name)
        cells = " | ".join(value(of_case.get(gpu)) for gpu in gpus)
        rows.append(f"| {name} | {cells} | {f'{speed} ({engine})' if engine else ''} |")
    heads = " | ".join(f"{short(gpu)}: us / tok/s / bandwidth" for gpu in gpus)
    return table("Decode steps", f"| step | {heads} | fastest other engine, tok/s |", rows, flat(found))


def matmuls(lines: list[Line]) -> list[str]:
    """One row by a matrix of 4 bits alone."""
    shown = [d for d in lines if d.get("m") == 1 and d.get("bits") == "4" and d.get("shape") in MATMULS]
    found = last((d for d in shown if d.get("pct_of_read_roof") is not None), lambda line: line["shape"])
    gpus = cards(flat(found))

    def value(line: Line | None) -> str:
        if line is None:
            return ""
        us = line.get("us_packed") or min(line["us_plain"], line["us_pdl"])
        return f"{us:.1f} / {line['pct_of_read_roof']:.0f} %{missed(line)}"

    return table(
        "Matmuls alone",
        f"| one row, 4 bits | {' | '.join(f'{short(gpu)}: us / bandwidth' for gpu in gpus)} |",
        (
            f"| {name} | {' | '.join(value(found[shape].get(gpu)) for gpu in gpus)} |"
            for shape, name in MATMULS.items()
            if shape in found
        ),
        flat(found),
    )


def predicted(lines: list[Line]) -> list[str]:
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
    speeds = {}
    for card, bandwidth in DATA_SHEETS.items():
        time = step["bytes_per_step"] / (STREAMED * of_data_sheet * bandwidth * 1e3) + fixed_us
        speeds[card] = 1e6 / time
        rows.append(f"| {card} | {bandwidth:,} | {time / 1e3:.1f} | {1e6 / time:,.0f} |")
    about = PREDICTED.format(
        date=step["date"],
        commit=step["commit"][:8],
        us=step["p50_us"],
        gigabytes=step["bytes_per_step"] / 1e9,
        launches=step["nodes"],
        read=step["roof_gb_s"],
        of_data_sheet=of_data_sheet,
        streamed=STREAMED,
        launch_us=fixed_us / step["nodes"],
        peer=EXLLAMAV2_4090,
        than="more" if speeds["RTX 4090"] < EXLLAMAV2_4090 else "less",
    )
    head = "| card | memory bandwidth, GB/s | ms a step | tok/s |"
    return ["## Predicted, not measured", "", about, "", head, "|---|---|---|---|", *rows, ""]


def headline(files: list[Path]) -> str:
    """README's table: tokens per second of decode steps."""
    lines = known(files, ["step"])
    found = whole_steps(lines)
    gpus = [gpu for gpu in cards(flat(found)) if "," not in gpu]
    heads = " | ".join(map(short, gpus))
    rows = []
    for name, as_shown in HEADLINE:
        cells = " | ".join(f"{found[name][gpu]['generator_tok_s']:,.0f}" for gpu in gpus)
        rows.append(f"| {as_shown} | {cells} | {other_engine(lines, name)[0]} |")
    head = f"| Llama 8B shape, EXL2 4.0 bpw, tokens per second | {heads} | fastest other engine (H200) |"
    return "\n".join([head, "|---" * (len(gpus) + 2) + "|", *rows]) + "\n"


def prompts(lines: list[Line]) -> list[str]:
    """The PROMPTS of 8B at 4.0 bpw. Those after cached tokens run until they are stored, as in the generator."""

    def case(line: Line) -> tuple[int, int, str, bool]:
        past = line.get("past", 0)
        return (line["tokens"], past, line["cache"] if past else "", bool(line.get("strict")))

    def speed(line: Line | None) -> str:
        if line is None:
            return ""
        speed = line["tokens"] / line["store_us"] * 1e6 if line.get("past") else line["tok_s"]
        target = f" (target: {line['target_tok_s']:,.0f})" if line.get("target_met") is False else ""
        return f"{speed:,.0f}{target}"

    found = last((line for line in lines if case(line) in PROMPTS), case)
    gpus = cards(flat(found))
    return table(
        "Prompts",
        f"| tokens | {' | '.join(f'{short(gpu)}: tok/s' for gpu in gpus)} |",
        (
            f"| {name} | {' | '.join(speed(found[shape].get(gpu)) for gpu in gpus)} |"
            for shape, name in PROMPTS.items()
            if shape in found
        ),
        flat(found),
    )


def goal(family: str) -> float:
    """The least share of its Llama's bandwidth that a family is to reach."""
    return next((least for start, least in SHARES.items() if family.startswith(start)), 0.92)


def with_goal(form: str, value: float | None, least: float | None) -> str:
    """A figure, with the target that it misses."""
    if value is None:
        return "-"
    missed = least is not None and value < least
    return f"{value:{form}}" + (f" (target: {least:{form}})" if missed else "")


def families(lines: list[Line]) -> list[str]:
    """Steps and prompts of model families on the fastest card, for families with both.

    Lines whose figures were extrapolated from fewer layers are left out.
    """
    gpu = cards(lines)[0]
    whole = [d for d in lines if d["gpu"] == gpu and not d.get("extrapolated")]
    prompt = {(d["family"], d["layers"]): d for d in whole if d.get("prompt_tok_s") is not None}
    found = {(d["family"], d["layers"], d["batch"]): d for d in whole if d.get("batch") is not None}
    shown = {key: d for key, d in found.items() if key[:2] in prompt}
    batches = sorted({batch for *_, batch in shown})

    def shares_of(name: tuple[str, int]) -> str:
        values = [shown.get((*name, batch), {}).get("share_of_twin") for batch in batches]
        if not any(values):
            return ""
        return " / ".join(with_goal(".2f", value, goal(name[0])) for value in values)

    def steps_of(name: tuple[str, int]) -> str:
        times = []
        for batch in batches:
            line, least = shown.get((*name, batch)), MIXTURES.get((name[0], batch))
            missed = least is not None and line is not None and line["tok_s"] < least
            most = f" (target: {batch / least * 1e6:,.0f})" if missed and least is not None else ""
            times.append("-" if line is None else f"{line['p50_us']:,.0f}{most}")
        return " / ".join(times)

    return table(
        "Model families",
        f"| family, layers ({short(gpu)}) | us a step of {' / '.join(map(str, batches))} sequences | "
        "share of its Llama's | prompt, tok/s |",
        (
            f"| {name[0]}, {name[1]} | {steps_of(name)} | {shares_of(name)} | {line['prompt_tok_s']:,.0f} |"
            for name, line in sorted(prompt.items())
        ),
        [*shown.values(), *prompt.values()],
    )


def features(lines: list[Line]) -> list[str]:
    """Features through the generator, as a share of the speed of what they are compared with."""
    found = {(d["gpu"], d["batch"], d["feature"]): d for d in lines if d["feature"] not in UNSHOWN}
    places = sorted({key[:2] for key in found}, key=lambda place: ("H200" not in place[0], place))
    names = sorted(dict.fromkeys(d["feature"] for d in found.values()), key=lambda name: name != "greedy")
    abouts = {d["feature"]: d["about"] for d in lines}

    def cell(place: tuple[str, int], name: str) -> str:
        line = found.get((*place, name))
        if line is None:
            return ""
        ratio = line.get("ratio_vs_reference")
        missed = f" (target: {line['target']})" if line.get("target_met") is False else ""
        return f"{line['us']:,.0f} us" if ratio is None else f"{ratio:.2f}{missed}"

    rows = []
    for name in names:
        reference = next(d for key, d in found.items() if key[2] == name).get("reference_name") or ""
        of_row = " | ".join(cell(place, name) for place in places)
        rows.append(f"| {abouts[name]} | {abouts.get(reference, reference)} | {of_row} |")
    heads = " | ".join(f"{short(gpu)}, {batch} sequence{'s' if batch > 1 else ''}" for gpu, batch in places)
    head = f"| feature, Llama 8B, 4.0 bpw | compared with | {heads} |"
    return table("Features", head, rows, found.values())


def _engine(line: Line) -> str:
    """The model of a line, and how its engine differs from the usual one."""
    wait = f", prompts wait {line['prompt_wait_ms']:g} ms" if line.get("prompt_wait_ms") else ""
    mode = "" if line.get("strict", True) else ", not strict"
    return f"{line['engine']}{mode}{wait}"


def http(lines: list[Line]) -> list[str]:
    """The same requests through the HTTP server and through the engine alone."""
    found = {(d["gpu"], _engine(d), d["streams"], d["workers"]): d for d in lines}
    return table(
        "HTTP server",
        "| card, model, streams, requests, tokens a request | tok/s | engine alone | ratio | first token, ms, p50 |",
        (
            f"| {short(gpu)}, {engine}, {streams}, {d['requests']}, {d['new_tokens']} | "
            f"{d['tok_s']:,.0f} | {d['alone_tok_s']:,.0f} | {d['ratio_median']:.2f} | {d['first_token_ms_p50']:.0f} |"
            for (gpu, engine, streams, _), d in sorted(
                found.items(), key=lambda item: ("H200" not in item[0][0], item[0])
            )
        ),
        found.values(),
    )


def devices(lines: list[Line]) -> list[str]:
    """Steps and prompts on several GPUs and on one card in the same run. A row has each way to divide a model."""
    found: dict[tuple[bool, int, int, int], dict[str, Line]] = {}
    for d in lines:
        if d["topology"] != "1":
            place = ("H200" not in d["gpu"], len(d["model_shape"]), d.get("tokens", 0), d["batch"])
            found.setdefault(place, {})[d["topology"]] = d
    ways = sorted({way for of_row in found.values() for way in of_row})
    rows = []
    for (_, _, tokens, batch), of_row in sorted(found.items()):
        any_line = next(iter(of_row.values()))
        work = f"prompt of {tokens:,}" if tokens else f"{batch} sequence" + "s" * (batch > 1)
        cells = []
        for way in ways:
            line = of_row.get(way)
            least = None if line is None else DEVICES.get((line["model_shape"], way.split()[0], tokens, batch))
            share = "" if line is None else with_goal(".2f", line["share_of_one"], least)
            cells.append("" if line is None else f"{line['tok_s']:,.0f} / {share}")
        rows.append(f"| {short(any_line['gpu'])}, {any_line['model_shape'].upper()}, {work} | {' | '.join(cells)} |")
    head = f"| card, Llama at 4.0 bpw | {' | '.join(f'{way}: tok/s / of one card' for way in ways)} |"
    return table("Several GPUs", head, rows, [d for of_row in found.values() for d in of_row.values()])


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
    "gemv": matmuls,
    "prefill": prompts,
    "families": families,
    "features": features,
    "http": http,
    "devices": devices,
}


def known(files: list[Path], kinds: Container[str]) -> list[Line]:
    """The lines of the benchmarks `kinds` on a GPU, older ones first."""
    found = [d for file in files for d in lines_of(file) if d.get("bench") in kinds and d.get("gpu")]
    return sorted(found, key=lambda d: (d.get("date") or "", d.get("time") or ""))  # UTC


def text_of(files: list[Path]) -> str:
    """All tables of the files, one section per subject."""
    lines = known(files, KINDS)
    out = []
    for kind, make in KINDS.items():
        of_kind = [d for d in lines if d["bench"] == kind]
        if of_kind:
            out += make(of_kind)
        if kind == "step":
            out += predicted(of_kind)
    return "\n".join(out)


def write(page: Path, text: str) -> None:
    """Replace the text between the two marks of a page."""
    old = page.read_text()
    if BEGIN not in old or END not in old:
        sys.exit(f"{page} has no marks {BEGIN} and {END}")
    between = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
    page.write_text(between.sub(lambda _: f"{BEGIN}\n\n{text}\n{END}", old))


def main() -> None:
    """Print the tables, or write them into the pages."""
    words = sys.argv[1:]
    files = [Path(word) for word in words if word.endswith(".jsonl")] or sorted(RESULTS.glob("*.jsonl"))
    if "--write" in words:
        write(ROOT / "docs" / "performance.md", text_of(files))
        write(ROOT / "README.md", headline(files))
    else:
        print(text_of(files))


if __name__ == "__main__":
    main()
