"""The reference pages render every public name."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path

import pytest

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"


def rendered() -> set[str]:
    """Identifiers that the pages ask mkdocstrings for."""
    pages = "".join(page.read_text(encoding="utf-8") for page in REFERENCE.glob("*.md"))
    return set(re.findall(r"^::: ([\w.]+)$", pages, re.MULTILINE))


@pytest.mark.parametrize("package", ["exl_core", "exl_generate", "exl_filters", "exllamav2.generator"])
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


def test_the_page_of_exllamav2s_names_is_current() -> None:
    """`python scripts/compat_names.py` writes it."""
    script = REFERENCE.parents[1] / "scripts" / "compat_names.py"
    spec = importlib.util.spec_from_file_location("compat_names", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (REFERENCE / "compat-names.md").read_text(encoding="utf-8") == module.page()
