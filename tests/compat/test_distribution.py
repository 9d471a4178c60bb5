"""Host programs read the version of the distribution `exllamav2`; an original one in the environment is reported."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from preloaded import run

import exllamav2


def test_the_distribution_has_the_version_of_the_interface() -> None:
    found = Version(importlib.metadata.version("exllamav2"))
    assert found in SpecifierSet(">=0.3.1")
    assert found in SpecifierSet("==0.3.2")
    assert (found.public, found.local) == (exllamav2.__version__, "exl")
    assert str(found).split("+")[0] == exllamav2.__version__  # hosts cut off the label of a build


def test_the_distribution_is_recorded_as_exl_compats() -> None:
    found = importlib.metadata.distribution("exllamav2")
    assert found.metadata["Name"] == "exllamav2"
    assert (found.read_text("INSTALLER") or "").strip() == "exl-compat"
    assert found.requires == ["exl-compat"]
    # Without RECORD no installer uninstalls or replaces it: the files are exl-compat's.
    assert found.read_text("RECORD") is None
    assert "exllamav2" in importlib.metadata.packages_distributions()["exllamav2"]


def import_with(folder: Path) -> subprocess.CompletedProcess[str]:
    """`import exllamav2` in a process of its own, with one more folder of distributions."""
    places = os.pathsep.join([str(folder), *sys.path])
    done = run(["-c", "import exllamav2; print(exllamav2.__version__)"], env={**os.environ, "PYTHONPATH": places})
    done.check_returncode()
    return done


@pytest.mark.parametrize("version", ["0.3.2", "0.2.8+cu121.torch2.6.0"])
def test_an_original_in_the_environment_is_reported_at_import(tmp_path: Path, version: str) -> None:
    entry = tmp_path / f"exllamav2-{version}.dist-info"
    entry.mkdir()
    (entry / "METADATA").write_text(f"Metadata-Version: 2.1\nName: exllamav2\nVersion: {version}\n")
    done = import_with(tmp_path)
    assert f"RuntimeWarning: exllamav2 {version} and exl-compat are both installed" in done.stderr
    assert "Uninstall exl-compat and exllamav2" in done.stderr
    assert done.stdout == "0.3.2\n"


def test_without_an_original_nothing_is_reported(tmp_path: Path) -> None:
    assert "exllamav2" not in import_with(tmp_path).stderr
