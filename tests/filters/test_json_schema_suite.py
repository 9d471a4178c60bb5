"""The official JSON-Schema-Test-Suite: nothing invalid gets through, and no case comes out worse than the baseline."""

import os
from pathlib import Path

import pytest

pytest.importorskip("llguidance", reason="extra `grammar`")
import json_schema_suite as suite

BACKENDS = ["llguidance", "xgrammar"]


@pytest.fixture(scope="module")
def groups(request, tmp_path_factory):
    cache = getattr(request.config, "cache", None)  # none under `-p no:cacheprovider`
    folder = Path(cache.mkdir("json-schema-suite")) if cache else tmp_path_factory.mktemp("json-schema-suite")
    try:
        return list(suite.groups(suite.suite(folder)))
    except suite.Unreachable as error:
        # CI has the registry, and says so: there a suite that cannot be fetched is a failure.
        if os.environ.get("EXL_REGISTRY") == "required":
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.mark.full
@pytest.mark.covers("filters: grammars", "filters: compile-errors")
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_case_is_worse_than_the_baseline(groups, backend):
    pytest.importorskip(backend)
    found = {group.name: suite.outcomes(group, backend) for group in groups}
    baseline = suite.read_baseline(backend)
    assert "w" not in "".join(found.values()), "an invalid instance was accepted"
    assert found.keys() == baseline.keys()
    changed = {name: (before, found[name]) for name, before in baseline.items() if before != found[name]}
    worse = {name: pair for name, pair in changed.items() if suite.worse(*pair)}
    assert not worse, worse
    assert not changed, f"better than the baseline: run tests/filters/json_schema_suite.py and commit it: {changed}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_baseline_holds_what_the_documentation_says(backend):
    found = suite.counts(suite.read_baseline(backend))
    assert found["w"] == 0
    text = (Path(__file__).parents[2] / "docs" / "reference" / "filter-guarantees.md").read_text(encoding="utf-8")
    row = f"| {backend} | {found['tests']} | {found['a']} | {found['r']} | {found['x']} | {found['l']} | 0 |"
    assert row in text, f"docs/reference/filter-guarantees.md must hold {row}"


def test_a_step_back_is_noticed():
    assert suite.worse("axr", "axx")
    assert suite.worse("a", "ar")
    assert suite.worse("a", "l")
    assert suite.worse("x", "w")
    assert not suite.worse("xxl", "arx")
