"""scripts/check_words.py finds the listed words wherever they are, and allows each file what the list says."""

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
        ("# See spec core.md 9.3.", "spec core"),
        ('"""What a job holds."""', '"""what'),
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
    ],
)
def test_other_text_passes(text: str) -> None:
    assert found(text) == []


def test_allowances_follow_a_moved_file_and_are_zero_elsewhere() -> None:
    allowed = check_words.allowances("3 old/place.py\n2 kept.py\n", {"new/place.py", "kept.py", "new.py"})
    assert allowed == {"new/place.py": 3, "kept.py": 2, "new.py": 0}


def test_update_lowers_an_allowance_and_never_raises_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.py").write_text("# proven\n")
    (tmp_path / "b.py").write_text("# proven, and proven\n")
    allowed = tmp_path / "allowed.txt"
    allowed.write_text("5 a.py\n1 b.py\n")
    monkeypatch.setattr(check_words, "ROOT", tmp_path)
    monkeypatch.setattr(check_words, "ALLOWED", allowed)
    monkeypatch.setattr(check_words, "tracked", lambda: ["a.py", "b.py"])
    assert check_words.main(["--update"]) == 1
    assert allowed.read_text() == "1 a.py\n1 b.py\n"
    assert "b.py:1: 'proven': write tested, verified" in capsys.readouterr().out
