"""Scripts in the form of exllamav2's documented examples run unmodified through the `exllamav2` namespace."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from exl_generate.bundled import default_model_dir, draft_model_dir

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.py"))


@pytest.mark.covers("generators.md: 82", "generators.md: 84", "core.md: generators", "filters.md: CAP-24")
@pytest.mark.parametrize("script", SCRIPTS, ids=[path.stem for path in SCRIPTS])
def test_script_runs(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes the folders of a model and of a draft model, and asserts what it shows."""
    monkeypatch.setattr(sys, "argv", [str(script), str(default_model_dir()), str(draft_model_dir())])
    runpy.run_path(str(script), run_name="__main__")
