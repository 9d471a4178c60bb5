"""The programs of docs/guides/batching.md run, one after the other in one process as a reader runs them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "guides" / "batching.md").read_text(encoding="utf-8")


def test_the_programs_run(capsys: pytest.CaptureFixture[str]) -> None:
    programs = re.findall(r"^```python\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)
    assert len(programs) == 2
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(programs[0], "<guide>", "exec"), names)  # noqa: S102
    assert sorted(line.partition(" ")[0] for line in capsys.readouterr().out.splitlines()) == ["0", "1", "2", "3"]
    exec(compile(programs[1], "<guide>", "exec"), names)  # noqa: S102
    texts = names["generator"].generate(["Once upon a time", "One day, a cat"], 4, add_bos=True)
    assert all(texts)
