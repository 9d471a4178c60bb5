"""The guide to filter plugins lists the laws as they are, and shows the example's workflow."""

from __future__ import annotations

import re
from pathlib import Path

from exl_filters.testing import LAWS, Law

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "guides" / "filter-plugin.md").read_text(encoding="utf-8")


def condition(law: Law) -> str:
    """When the law applies, in words."""
    conditions = [f"filters with {' or '.join(f'`{name}`' for name in law.needs)}"] if law.needs else []
    conditions += ["with a `language`"] if law.oracle else []
    conditions += [f"not to filters that claim `{law.unless}`"] if law.unless else []
    return "; ".join(conditions) or "always"


def test_the_table_of_laws_is_current() -> None:
    """Write the rows that the message shows into the guide."""
    rows = [f"| {law.id} | {law.level} | {law.title} | {condition(law)} |" for _, law in sorted(LAWS.items())]
    table = "\n".join(["| law | level | what holds | applies |", "|---|---|---|---|", *rows])
    shown = "\n".join(line for line in GUIDE.partition("## The laws")[2].splitlines() if line.startswith("|"))
    assert shown == table


def test_the_workflow_is_that_of_the_example() -> None:
    file = ROOT / "examples" / "exl-filters-plugin" / ".github" / "workflows" / "contract.yml"
    (shown,) = re.findall(r"^```yaml\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)
    assert shown == file.read_text(encoding="utf-8")
