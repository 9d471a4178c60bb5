"""Write docs/reference/jobs.md: parameters and results of a job, and sampler settings, from docstrings and signatures.

    python scripts/job_tables.py [--check]

`--check` writes nothing and exits 1 if the page is not current.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from pathlib import Path

from exl_generate import ExLlamaV2DynamicJob, ExLlamaV2Sampler

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "jobs.md"
HEAD = """# Jobs, results and settings

The parameters of a job, the keys of its results and the sampler's settings. `python scripts/job_tables.py` writes this
page from the docstrings and signatures of exl-generate; [exl-generate](generate.md) has methods and errors.
[Batching](../guides/batching.md) has an example and says when a job ends for which `eos_reason`.
"""
RESULTS = """
Each result is a dict. A key is present only where it has content: read `result.get("text", "")`. A job has one
"started" result, a "prefill" result for each part of its prompt, and then "streaming" results; the last one has `eos`
true.
"""
SETTINGS = """
`ExLlamaV2Sampler.Settings(...)` takes these fields as keyword arguments, `ExLlamaV2Sampler.Settings.greedy(...)`
too. `settings.validate()` and a job raise `RequestError` for a value out of range.
"""


def entries(docstring: str, section: str) -> dict[str, str]:
    """Name -> meaning of a docstring's section of indented `name: meaning` entries, such as "Args"."""
    match = re.search(rf"^{section}:\n((?:    .*\n|\n)+)", f"{docstring}\n", re.MULTILINE)
    if match is None:
        raise ValueError(f"the docstring has no section {section}")
    return {
        name: " ".join(meaning.split())
        for name, meaning in re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", match[1], re.MULTILINE)
    }


def kinds(docstring: str) -> dict[str, dict[str, str]]:
    """Heading ("Keys of ...") -> key -> meaning, of the lists of keys in a docstring."""
    found = {}
    for heading, items in re.findall(r"^(Keys of [^:]*):\n\n((?:[- ] .*\n)+)", f"{docstring}\n", re.MULTILINE):
        rows = re.findall(r"^- `(\w+)`: (.*(?:\n  .*)*)", items, re.MULTILINE)
        found[" ".join(heading.split())] = {key: " ".join(meaning.split()) for key, meaning in rows}
    return found


def shown_type(annotation: str) -> str:
    """An annotation without the names of modules, and without `|`, which separates the cells of a table."""
    plain = annotation.replace("SequenceOf", "Sequence").replace("deque[Any]", "deque")
    return f"`{plain.replace(' | ', ' or ')}`"


def parameters(cls: type) -> list[tuple[str, str, str]]:
    """(name, type, default) of the parameters of a class."""
    shown = []
    made = {f.name: f.default_factory for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {}
    for name, parameter in inspect.signature(cls).parameters.items():
        default = f"`{parameter.default!r}`" if parameter.default is not parameter.empty else "required"
        if made.get(name, dataclasses.MISSING) is not dataclasses.MISSING:
            default = "empty"
        shown.append((name, shown_type(parameter.annotation), default))
    return shown


def table(cls: type) -> list[str]:
    """The rows of a class's parameters; raises KeyError for one without a meaning."""
    meanings = entries(inspect.getdoc(cls) or "", "Args")
    rows = ["| name | type | default | meaning |", "|---|---|---|---|"]
    rows += [f"| `{name}` | {kind} | {default} | {meanings.pop(name)} |" for name, kind, default in parameters(cls)]
    if meanings:
        raise ValueError(f"{cls.__name__} has no parameters {', '.join(meanings)}")
    return rows


def page() -> str:
    """The whole page."""
    lines = [HEAD, "## Parameters of a job", "", *table(ExLlamaV2DynamicJob), "", "## Results", RESULTS]
    for heading, keys in kinds(inspect.getdoc(ExLlamaV2DynamicJob) or "").items():
        lines += [f"### {heading.partition(',')[0]}", ""]
        lines += ["| key | value |", "|---|---|", *(f"| `{key}` | {meaning} |" for key, meaning in keys.items()), ""]
    order = re.search(r"^Transforms apply (?:.+\n)+", inspect.getdoc(ExLlamaV2Sampler.Settings) or "", re.MULTILINE)
    if order is None:
        raise ValueError("the docstring of the settings does not say in which order transforms apply")
    lines += ["## Sampler settings", SETTINGS, order[0], *table(ExLlamaV2Sampler.Settings)]
    text = "\n".join(lines) + "\n"
    return text.replace("docs/reference/reproducibility.md", "[Reproducible tokens](reproducibility.md)")


def main() -> int:
    """Write or check the page."""
    text = page()
    if "--check" not in sys.argv:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.read_text(encoding="utf-8") != text:
        print(f"{PAGE} is not current: run `python scripts/job_tables.py`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
