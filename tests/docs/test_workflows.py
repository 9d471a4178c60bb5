"""The workflows call verbs and files that exist, and run every check of `make ci`."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted(path for where in (ROOT, *ROOT.glob("examples/*")) for path in where.glob(".github/workflows/*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
VERBS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))


def commands(path: Path) -> str:
    """All shell commands of a workflow."""
    jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    found = "\n".join(step["run"] for job in jobs.values() for step in job["steps"] if "run" in step)
    return re.sub(r"\$\{\{.*?\}\}", "X", found)


def verbs(path: Path) -> set[str]:
    """The Makefile's verbs that a workflow calls."""
    called = re.findall(r"^make (.*)$", commands(path), re.MULTILINE)
    return {word for line in called for word in line.split() if "=" not in word}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_verbs_and_scripts_exist(path: Path) -> None:
    assert verbs(path) <= VERBS
    for script in re.findall(r"(scripts/[\w/.]+)", commands(path)):
        assert (ROOT / script).exists()
    for job in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values():
        assert job["timeout-minutes"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_workflow_expects_our_packages_from_an_index(path: Path) -> None:
    """No index has them: `pip install` names a folder, a wheel or a git URL."""
    for line in re.findall(r"^.*pip install .*$", commands(path), re.MULTILINE):
        for word in shlex.split(line):
            assert not re.match(r"exl-\w+(\[[\w,]+\])?([=<>~!].*)?$", word), line


def test_ci_runs_what_make_ci_runs() -> None:
    listed = re.findall(r"^ci: ([a-z -]+?) +##", MAKEFILE, re.MULTILINE)[0].split()
    path = ROOT / ".github" / "workflows" / "ci.yml"
    assert set(listed) - {"test"} <= verbs(path)
    assert "uv run --no-sync pytest" in commands(path)


def test_the_classifiers_name_the_pythons_that_are_tested() -> None:
    nightly, ci = (
        yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text(encoding="utf-8"))["jobs"]
        for name in ("nightly", "ci")
    )
    tested = nightly["full"]["strategy"]["matrix"]["python"]
    assert ci["tests"]["strategy"]["matrix"]["python"] == [tested[0], tested[-1]]
    for file in ROOT.glob("packages/*/pyproject.toml"):
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        assert re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"])) == tested, file
        assert project["requires-python"] == f">={tested[0]}", file


def test_the_rust_version_is_the_manifests() -> None:
    """The page for users repeats it, because they need it before they have a checkout."""
    manifest = tomllib.loads((ROOT / "rust" / "Cargo.toml").read_text(encoding="utf-8"))
    needed = manifest["workspace"]["package"]["rust-version"]
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md"))
    assert set(re.findall(r"Rust (\d+\.\d+)", pages)) == {needed}
