"""The examples in the package's README run as they stand."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "packages" / "exl-filters" / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_runs(example):
    exec(compile(example, str(README), "exec"), {"__name__": "readme"})  # noqa: S102 - our own README


def test_there_are_examples():
    assert EXAMPLES
