"""exl-filters in environments that hold only it: with numpy alone, and with its extras; its own tests pass in each."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytestmark = [pytest.mark.install, pytest.mark.timeout(7200)]

_spec = importlib.util.spec_from_file_location("clean", Path(__file__).with_name("test_clean_environments.py"))
assert _spec is not None
assert _spec.loader is not None
clean = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(clean)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the one wheel; nothing native is built."""
    out = tmp_path_factory.mktemp("wheel")
    clean.uv("build", "-q", "--wheel", "--package", "exl-filters", "--out-dir", str(out))
    return out


@pytest.mark.covers("filters: numpy-alone")
def test_the_package_alone_installs_numpy_and_not_torch(wheel: Path, tmp_path: Path) -> None:
    python = clean.environment(tmp_path / "env")
    clean.install(python, wheel, "exl-filters")
    assert set(clean.installed(python)) == {"exl-filters", "numpy"}
    # The functions that a server calls work there, and an error names a missing extra.
    source = (
        "import sys, exl_filters as f\n"
        "v = f.Vocabulary(['yes', 'no', None], eos_token_id=2, special_ids=[2])\n"
        "assert f.create('select', v, options=['no']).next()[0] == [1]\n"
        "try: f.create('grammar', v, regex='a')\n"
        "except f.MissingExtra as error: assert error.extra == 'grammar'\n"
        "assert not {'torch', 'hypothesis', 'llguidance'} & set(sys.modules)\n"
    )
    clean.run(str(python), "-c", source)


@pytest.mark.covers("filters: numpy-alone", "filters: broken-filters")
@pytest.mark.parametrize("extras", ["testing", "testing,grammar"])
def test_its_own_tests_pass(wheel: Path, tmp_path: Path, extras: str) -> None:
    """Tests of what is not installed are skipped here, and here only: the development environment has everything."""
    python = clean.environment(tmp_path / "env")
    # jsonschema is the judge of JSON outputs, in the tests only.
    needs = ["jsonschema"] if "grammar" in extras else []
    clean.install(python, wheel, f"exl-filters[{extras}]", "pytest-timeout", *needs)
    here = clean.installed(python)
    assert "torch" not in here
    assert ("llguidance" in here) == ("grammar" in extras)
    clean.own_tests_pass(python, "filters")
