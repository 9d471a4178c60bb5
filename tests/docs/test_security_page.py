"""Every test that docs/serving/security.md names exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "serving" / "security.md").read_text(encoding="utf-8")


def test_every_defence_has_tests_that_exist() -> None:
    sections = re.split(r"^## \d+\. ", PAGE, flags=re.MULTILINE)[1:]
    assert len(sections) == 17
    for section in sections:
        named = re.findall(r"^- `(\S+)::(\w+)`$", section, re.MULTILINE)
        assert named, section
        assert len(named) == section.count("\n- "), section
        for file, name in named:
            path = ROOT / (file if file.startswith("tests/") else f"tests/serve/{file}")
            assert f"\ndef {name}(" in path.read_text(encoding="utf-8"), (file, name)
