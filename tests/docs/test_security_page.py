"""Every test that docs/serving/security.md names exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "serving" / "security.md").read_text(encoding="utf-8")


def test_every_defence_has_tests_that_exist() -> None:
    sections = re.split(r"^## \d+\. ", PAGE, flags=re.MULTILINE)[1:]
    assert len(sections) == 18
    for section in sections:
        named = re.findall(r"^- `(\S+)::(\w+)`$", section, re.MULTILINE)
        assert named, section
        assert len(named) == section.count("\n- "), section
        for file, name in named:
            path = ROOT / (file if file.startswith("tests/") else f"tests/serve/{file}")
            assert re.search(rf"^(def {name}\(|{name} = )", path.read_text(encoding="utf-8"), re.MULTILINE), (
                file,
                name,
            )


def test_the_policy_links_this_page_and_says_where_to_report() -> None:
    policy = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert "docs/serving/security.md" in policy
    assert "private security advisory" in policy
