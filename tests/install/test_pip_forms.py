"""The two forms of `pip install` in docs/install.md without wheels: the folders of a checkout, and git URLs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.install, pytest.mark.timeout(7200)]

_spec = importlib.util.spec_from_file_location("clean", Path(__file__).with_name("test_clean_environments.py"))
assert _spec is not None
assert _spec.loader is not None
clean = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(clean)

FORMS = {
    "folders": lambda package: f"./packages/{package}",
    "git": lambda package: f"git+{ROOT.as_uri()}#subdirectory=packages/{package}",
}


@pytest.mark.parametrize("form", FORMS)
def test_pip_installs_all_packages(form: str, tmp_path: Path) -> None:
    """Pip itself, because uv would find siblings through the workspace. A stand-in for torch saves gigabytes."""
    python = clean.environment(tmp_path / "env", "--seed")
    clean.uv("pip", "install", "-q", "--python", str(python), str(clean.torch_stand_in(tmp_path)))
    wanted = [FORMS[form](package) for package in clean.PACKAGES]
    clean.run(str(python), "-m", "pip", "install", "-q", *wanted, EXL_CUDA_ARCHS="none")
    found = clean.installed(python)
    assert set(clean.PACKAGES) <= set(found)
    assert found["torch"] == "2.6.0"
    clean.run(str(python), "-m", "pip", "check")
    source = (
        "import importlib.util, sysconfig, exl_filters, pathlib\n"
        "folder = pathlib.Path(sysconfig.get_path('purelib'), 'exl_kernels')\n"
        "(file,) = folder.glob('_native*.so')\n"
        "spec = importlib.util.spec_from_file_location('exl_kernels._native', file)\n"
        "spec.loader.exec_module(importlib.util.module_from_spec(spec))\n"
    )
    clean.run(str(python), "-P", "-c", source)
