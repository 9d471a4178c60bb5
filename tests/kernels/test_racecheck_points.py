"""The races that `scripts/gpu/racecheck_planted.py` plants have their places in the kernels."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_planted_race_has_its_place() -> None:
    script = ROOT / "scripts" / "gpu" / "racecheck_planted.py"
    spec = importlib.util.spec_from_file_location("racecheck_planted", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    assert module.RACES
    for race in module.RACES:
        text = (ROOT / "rust" / "exl-cuda" / "kernels" / race.file).read_text()
        for image in race.images:
            assert [*(ROOT / "rust" / "exl-cuda" / "kernels").rglob(f"{image}.cu")]
        for old, new in race.changes:
            assert old in text, f"{race.file}: {race.name}"
            text = text.replace(old, new)
