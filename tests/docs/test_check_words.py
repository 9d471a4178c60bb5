"""scripts/check_words.py finds the listed words wherever they are."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "check_words.py"
spec = importlib.util.spec_from_file_location("check_words", SCRIPT)
assert spec
assert spec.loader
check_words = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_words)
RULES = check_words.rules(check_words.WORDS.read_text(encoding="utf-8"))


def found(text: str) -> list[str]:
    return [words.lower() for _, words, _ in check_words.findings(text, RULES)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def run_in_a_row(self) -> None:", "in a row"),
        ("class UnbrokenStep:", "unbroken"),
        ("# See spec core 9.3.", "spec core"),
        ('@pytest.mark.covers("filters.md: base-class")', "filters.md"),
        ("What section 13 asks of the generators", "section 13 asks"),
        ('covers("core: better-3.6.4")', "better-3"),
        ('"""What a job holds."""', '"""what'),
        ('"""Of the pages."""', '"""of'),
        ("takes the pages (spec 3.12)", "spec 3"),
        ("def test_what_is_refused() -> None:", "def test what"),
        ("async def test_who_waits() -> None:", "def test who"),
        ('"""tabby#380: the others continue."""', "tabby#38"),
        ("pub meeting: u32,", "meeting"),
        ("pip install . 'exl-filters[testing]'", "pip install . 'exl-filters"),
        ('needs Pillow: pip install "exl-core[vision]"', 'pip install "exl-core'),
        ("Ray is not installed: install exl-serve[ray]", "install exl-serve["),
        ("Install `exl-serve[vision]`.", "install `exl-serve["),
        ("With `exl-serve[otel]`, spans are sent", "with `exl-serve["),
        ('    "needs sentencepiece: install "\n    "exl-core[sentencepiece]"', "install exl-core["),
        ('line["must_met"]', "must met"),
        ("benchmarks/results/proofs.jsonl", "proofs"),
        ("two jobs in a row", "in a row"),
        ("The results agree to the bit.", "to the bit"),
        ("it was slower at f273aeb", "at f273aeb"),
    ],
)
def test_a_listed_word_is_found(text: str, words: str) -> None:
    assert found(text) == [words]


@pytest.mark.parametrize(
    "text",
    [
        "# What happens next?",
        "row_index = arrow + 1",
        "0x1234567 of 1234567",
        "class FusedLinear:",
        "itertools.product",
        'pip install ./packages/exl-core "./packages/exl-filters[grammar]"',
        'pip install "exl-filters @ git+https://host/repository#subdirectory=packages/exl-filters"',
        '@pytest.mark.covers("core: windows-per-model", "generators: healing")',
        "[the states of a filter](../explanation/filters.md)",
    ],
)
def test_other_text_passes(text: str) -> None:
    assert found(text) == []


def test_a_place_is_printed_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.py").write_text("# tested\n")
    (tmp_path / "b.py").write_text("# tested\n# proven\n")
    monkeypatch.setattr(check_words, "ROOT", tmp_path)
    monkeypatch.setattr(check_words, "tracked", lambda: ["a.py"])
    assert check_words.main() == 0
    monkeypatch.setattr(check_words, "tracked", lambda: ["a.py", "b.py"])
    assert check_words.main() == 1
    assert capsys.readouterr().out == "error: b.py:2: 'proven': write tested, verified\n"
