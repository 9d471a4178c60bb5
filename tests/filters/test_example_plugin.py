"""The example plugin: built, installed, found by name, its own tests run, and checked by the command line."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "examples" / "exl-filters-plugin"


def run(*command, cwd, env=None):
    return subprocess.run(
        [str(c) for c in command], cwd=cwd, env={**os.environ, **(env or {})}, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The plugin built and installed into a folder of its own, on the path of a subprocess."""
    uv = shutil.which("uv")
    if uv is None:
        pytest.skip("uv is not on the PATH")
    copy = tmp_path_factory.mktemp("plugin") / "source"
    shutil.copytree(PLUGIN, copy, ignore=shutil.ignore_patterns("__pycache__", ".pytest_cache", ".hypothesis"))
    target = tmp_path_factory.mktemp("installed")
    command = (uv, "pip", "install", "--quiet", "--no-deps", "--python", sys.executable, "--target", target, copy)
    for _ in range(3):  # what builds it may have to come from the registry
        done = run(*command, cwd=copy)
        if not done.returncode:
            break
    # CI has the registry, and says so, as in test_json_schema_suite.
    if os.environ.get("EXL_REGISTRY") != "required" and re.search(
        r"[Ff]ailed to fetch|[Oo]ffline|network", done.stderr
    ):
        pytest.skip(f"the plugin's build backend cannot be fetched: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr
    return copy, {"PYTHONPATH": str(target)}


@pytest.mark.full
@pytest.mark.covers("filters: plugins")
def test_its_own_tests_pass(installed):
    copy, env = installed
    done = run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", cwd=copy, env=env)
    assert done.returncode == 0, done.stdout


@pytest.mark.full
@pytest.mark.covers("filters: plugins")
def test_the_command_line_lists_and_checks_it(installed, tmp_path):
    copy, env = installed
    listed = run(sys.executable, "-m", "exl_filters", "list", cwd=tmp_path, env=env)
    assert "exl_filters_iso_date:IsoDateFilter" in listed.stdout
    options = ("--profile", "quick", "--examples", "4", "--json")
    good = run(sys.executable, "-m", "exl_filters", "check", "iso-date", *options, cwd=tmp_path, env=env)
    assert good.returncode == 0, good.stdout
    # Its oracle comes by the entry point: the laws that need one have run.
    assert {f"LAW-{n}" for n in range(21, 28)} <= laws(good, "holds")
    source = (copy / "src" / "exl_filters_iso_date" / "__init__.py").read_text(encoding="utf-8")
    broken = source.replace("return text + raw[len(pending) :], pending[len(raw) :]", 'return text, b""')
    assert broken != source
    broken += "\n\ndef make(vocab):\n    return IsoDateFilter(None, vocab)\n"
    broken += "\n\nfrom exl_filters_iso_date.oracle import dates\n\nmake.language = dates\n"
    (tmp_path / "broken_date.py").write_text(broken, encoding="utf-8")
    bad = run(sys.executable, "-m", "exl_filters", "check", "broken_date:make", "--laws", "22", cwd=tmp_path, env=env)
    assert bad.returncode == 1
    assert "LAW-22 only what keeps the text in the language is allowed: broken" in bad.stdout


@pytest.mark.full
def test_the_good_filter_and_the_broken_copy_are_told_apart_by_the_same_language(installed):
    copy, env = installed
    common = ("--language", "exl_filters_iso_date.oracle:dates", "--laws", "21,22,23,24,25,26,27", "--profile", "quick")

    def check(target, *options):
        return run(sys.executable, "-m", "exl_filters", "check", target, *common, *options, cwd=copy, env=env)

    good = check("exl_filters_iso_date:IsoDateFilter", "--json")
    assert good.returncode == 0, good.stdout
    assert laws(good, "holds") == {f"LAW-{n}" for n in range(21, 28)}
    bad = check("broken_date:make")
    assert bad.returncode == 1
    assert "LAW-22 only what keeps the text in the language is allowed: broken" in bad.stdout
    assert "leaves dates" in bad.stdout


@pytest.mark.full  # tests/filters/test_registry.py installs plugins, test_kit.py checks filters with their language
def test_the_broken_copy_brings_its_language(installed):
    copy, env = installed
    options = ("--laws", "22", "--profile", "quick")
    bad = run(sys.executable, "-m", "exl_filters", "check", "broken_date:make", *options, cwd=copy, env=env)
    assert bad.returncode == 1
    assert "LAW-22" in bad.stdout
    assert "leaves dates" in bad.stdout


def laws(done, status):
    """The laws of this status in the JSON lines of a check."""
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {row["law"] for row in rows if row["status"] == status}
