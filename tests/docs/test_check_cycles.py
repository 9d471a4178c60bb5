"""scripts/check_cycles.py finds circles of imports; `make layers` runs it on this repository."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "check_cycles.py"


@pytest.fixture(scope="module")
def cycles() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_cycles", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def found(cycles: ModuleType, root: Path, **files: str) -> list[set[str]]:
    """Circles of a package `p` of these files."""
    package = root / "packages" / "p" / "src" / "p"
    (package / "sub").mkdir(parents=True)
    for name, text in {"__init__": "", "sub__x": "", **files}.items():
        (package / f"{name.replace('__x', '/x')}.py").write_text(text)
    result: list[set[str]] = cycles.circles(cycles.imports(cycles.modules(root)))
    return result


def test_imports_for_types_and_inside_functions_count(cycles: ModuleType, tmp_path: Path) -> None:
    guarded = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.c import C\n"
    late = "def f():\n    from . import a\n"
    circles = found(cycles, tmp_path, a="import p.b\n", b=guarded, c=late)
    assert circles == [{"p.a", "p.b", "p.c"}]


def test_relative_imports_of_every_level(cycles: ModuleType, tmp_path: Path) -> None:
    circles = found(cycles, tmp_path, a="from .sub import x\n", sub__x="from ..b import B\n", b="from .a import A\n")
    assert circles == [{"p.a", "p.b", "p.sub.x"}]


def test_a_chain_is_no_circle(cycles: ModuleType, tmp_path: Path) -> None:
    assert not found(cycles, tmp_path, a="import p.b, os\n", b="from p import c\n", c="import sys\n")


def test_imports_run_the_packages_above(cycles: ModuleType, tmp_path: Path) -> None:
    """`a` names `sub.x` alone, and Python runs `sub` first, which needs `a`."""
    assert found(cycles, tmp_path, a="from .sub.x import X\n", b="from . import a\n", sub__x="") == []
    (tmp_path / "packages" / "p" / "src" / "p" / "sub" / "__init__.py").write_text("from ..b import B\n")
    assert cycles.circles(cycles.imports(cycles.modules(tmp_path))) == [{"p.a", "p.b", "p.sub"}]


def test_imports_for_types_close_a_circle_of_packages_that_run(cycles: ModuleType, tmp_path: Path) -> None:
    """Neither the imports that Python runs nor the modules that are named make a circle alone."""
    found(cycles, tmp_path, a="from .sub.x import X\n", b="from . import a\n", sub__x="")
    guarded = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..b import B\n"
    (tmp_path / "packages" / "p" / "src" / "p" / "sub" / "__init__.py").write_text(guarded)
    assert cycles.circles(cycles.imports(cycles.modules(tmp_path))) == [{"p.a", "p.b", "p.sub"}]


def test_imports_for_types_run_no_packages(cycles: ModuleType, tmp_path: Path) -> None:
    guarded = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .sub.x import X\n"
    found(cycles, tmp_path, a=guarded, b="from . import a\n", sub__x="")
    (tmp_path / "packages" / "p" / "src" / "p" / "sub" / "__init__.py").write_text("from ..b import B\n")
    assert cycles.circles(cycles.imports(cycles.modules(tmp_path))) == []


def test_a_package_may_need_its_modules_and_they_it(cycles: ModuleType, tmp_path: Path) -> None:
    files = {"__init__": "from .a import A\n", "a": "from .b import B\n", "b": "from .sub import x\n"}
    assert found(cycles, tmp_path, **files) == []


@pytest.mark.parametrize(
    "call",
    [
        'import_module("p.c")',
        'importlib.import_module("p.c").C',
        'import_module(name="p.c")',
        'import_module(".c", __package__)',
        'import_module(f"{__package__}.c")',
        'import_module("p" + ".c")',
        '__import__("p.c")',
    ],
)
def test_calls_that_import_a_module_count(cycles: ModuleType, tmp_path: Path, call: str) -> None:
    circles = found(cycles, tmp_path, a="import p.b\n", b=f"def f():\n    return {call}\n", c="import p.a\n")
    assert circles == [{"p.a", "p.b", "p.c"}]


@pytest.mark.parametrize("call", ['import_module("json")', 'import_module("p.c.C")', "import_module(x)", "f('p.c')"])
def test_other_calls_import_no_module(cycles: ModuleType, tmp_path: Path, call: str) -> None:
    assert found(cycles, tmp_path, a="import p.b\n", b=f"def f(x):\n    return {call}\n", c="import p.a\n") == []
