"""The reference pages render every public name, and their generated tables are current and true."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from exl_filters import ExLlamaV2SelectFilter
from exl_generate import ExLlamaV2DynamicJob
from exl_generate.testing.small import EOS, TOKENIZER, job, make, run, says, speculate

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"


def rendered() -> set[str]:
    """Identifiers that the pages ask mkdocstrings for."""
    pages = "".join(page.read_text(encoding="utf-8") for page in REFERENCE.glob("*.md"))
    return set(re.findall(r"^::: ([\w.]+)$", pages, re.MULTILINE))


@pytest.mark.parametrize(
    "package",
    ["exl_core", "exl_generate", "exl_generate.bundled", "exl_filters", "exllamav2.generator"],
)
def test_every_public_name_is_rendered(package: str) -> None:
    module = importlib.import_module(package)
    shown = rendered()
    missing = [
        name
        for name in module.__all__
        if isinstance(getattr(module, name), type)
        and package not in shown
        and f"{package}.{name}" not in shown
        and getattr(module, name).__module__ not in shown
        and not any(identifier.endswith(f".{name}") for identifier in shown)
    ]
    assert not missing


def test_every_identifier_exists() -> None:
    for identifier in rendered():
        module, _, name = identifier.rpartition(".")
        try:
            importlib.import_module(identifier)
        except ModuleNotFoundError:
            assert hasattr(importlib.import_module(module), name), identifier


def script(name: str) -> ModuleType:
    """A program of scripts/."""
    spec = importlib.util.spec_from_file_location(name, REFERENCE.parents[1] / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("page", "name"), [("compat-names.md", "compat_names"), ("jobs.md", "job_tables")])
def test_a_generated_page_is_current(page: str, name: str) -> None:
    """`python scripts/NAME.py` writes it."""
    assert (REFERENCE / page).read_text(encoding="utf-8") == script(name).page()


def results_of_every_kind() -> Iterator[dict[str, Any]]:
    """Results that together have every key: of jobs that end in each way, and that report everything."""
    options: dict[str, Any] = {"return_probs": True, "return_logits": True, "return_hidden_state": True}
    for answer, kw in {
        ("a", "b", EOS): {**options, "identifier": 1, "return_top_tokens": 2, "stop_conditions": [EOS]},
        ("a", "xy"): {"stop_conditions": ["xy"]},
        ("abc", "d"): {"banned_strings": ["abc"]},
    }.items():
        yield from run(make(says(*answer, after=4)), job("aaaa", 6, **kw))
    yield from run(speculate("ngram"), job("abababab", 6))
    generator, excluding = make(), [ExLlamaV2SelectFilter(None, TOKENIZER, [text]) for text in "ab"]
    yield from run(generator, job("aaaa", filters=excluding))


def test_results_have_the_keys_of_their_tables() -> None:
    common, prefill, streaming, last = script("job_tables").kinds(inspect.getdoc(ExLlamaV2DynamicJob) or "").values()
    by_stage = {"started": {}, "prefill": prefill, "streaming": streaming}
    seen: set[str] = set()
    for result in results_of_every_kind():
        documented = {**common, **by_stage[result["stage"]], **(last if result["eos"] else {})}
        assert result.keys() <= documented.keys()
        seen |= result.keys()
    assert seen == {*common, *prefill, *streaming, *last}


def test_the_guide_explains_every_reason_for_an_end() -> None:
    *_, last = script("job_tables").kinds(inspect.getdoc(ExLlamaV2DynamicJob) or "").values()
    guide = (REFERENCE.parent / "guides" / "batching.md").read_text(encoding="utf-8")
    table = guide.partition("`eos_reason` | the job ended because |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == re.findall(r'"(\w+)"', last["eos_reason"])
