"""The registry: lazy loading, isolation of broken plugins, name clashes, allow-list, specs; and its command line."""

import json
import sys

import pytest

from exl_filters import (
    ExLlamaV2SelectFilter,
    FilterError,
    FilterUsageError,
    PluginError,
    UnknownFilter,
    Vocabulary,
    registry,
)
from exl_filters.cli import main
from exl_filters.errors import AmbiguousPlugin

VOCAB = Vocabulary([*"abc", "</s>"], eos_token_id=3, special_ids=[3])


def distribution(folder, name, points, source=""):
    """An installed distribution as importlib.metadata sees one."""
    info = folder / f"{name.replace('-', '_')}-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    lines = "\n".join(f"{key} = {value}" for key, value in points.items())
    (info / "entry_points.txt").write_text(f"[{registry.GROUP}]\n{lines}\n")
    if source:
        (folder / f"{name.replace('-', '_')}_mod.py").write_text(source)


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.endswith("_mod"):
            del sys.modules[name]
    monkeypatch.undo()
    registry.refresh()


GOOD = """
from exl_filters import ExLlamaV2SelectFilter
def make(vocab, options: list[str], shout: bool = False):
    "Selects.\\n\\nAnd more."
    return ExLlamaV2SelectFilter(None, vocab, options)
"""


@pytest.mark.covers("filters: plugins")
def test_a_plugin_is_found_by_name_and_imported_on_use(site):
    distribution(site, "acme-good", {"acme": "acme_good_mod:make"}, GOOD)
    registry.refresh()
    assert "acme" in registry.names()
    assert "acme_good_mod" not in sys.modules
    assert registry.info("acme").loaded is False
    made = registry.create("acme", VOCAB, options=["ab"])
    assert isinstance(made, ExLlamaV2SelectFilter)
    info = registry.info("acme")
    assert (info.dist, info.version, info.value, info.doc) == ("acme-good", "1.2", "acme_good_mod:make", "Selects.")
    assert info.params == {
        "type": "object",
        "properties": {
            "options": {"type": "array", "items": {"type": "string"}},
            "shout": {"type": "boolean", "default": False},
        },
        "required": ["options"],
        "additionalProperties": False,
    }
    with pytest.raises(FilterUsageError, match="acme"):
        registry.create("acme", VOCAB, choices=["ab"])


@pytest.mark.covers("filters: plugins")
@pytest.mark.parametrize(
    "source",
    [
        "1/0",
        "import nothing_of_this_name",
        "raise SystemExit(3)",
        "make = 3",
        "def make(v): ...\nmake.__exl_filters_api__ = (2, 0)",
    ],
)
def test_a_broken_plugin_breaks_nothing_else(site, source):
    distribution(site, "acme-good", {"good": "acme_good_mod:make"}, GOOD)
    distribution(site, "acme-bad", {"bad": "acme_bad_mod:make"}, source)
    registry.refresh()
    assert {"good", "bad", "select"} <= set(registry.names())
    for _ in range(2):
        with pytest.raises(PluginError, match=r"acme-bad 1\.2"):
            registry.create("bad", VOCAB)
    assert "acme-bad" in registry.info("bad", load=True).error
    registry.create("good", VOCAB, options=["a"])


@pytest.mark.covers("filters: plugins")
def test_name_clashes(site):
    distribution(site, "acme-one", {"same": "acme_one_mod:make", "select": "acme_one_mod:make"}, GOOD)
    distribution(site, "acme-two", {"same": "acme_one_mod:make"})
    registry.refresh()
    with pytest.raises(AmbiguousPlugin, match="acme-two:same"):
        registry.get("same")
    assert registry.get("acme-two:same").__name__ == "make"
    assert registry.get("select") is ExLlamaV2SelectFilter
    assert {"acme-one:select", "acme-one:same", "acme-two:same", "select"} <= set(registry.names())
    assert registry.get("acme-one:select").__name__ == "make"


@pytest.mark.covers("filters: plugins")
def test_the_allow_list(site, monkeypatch):
    distribution(site, "acme-good", {"acme": "acme_good_mod:make"}, GOOD)
    registry.refresh()
    for setting, ok in (
        ("none", False),
        ("other", False),
        ("other, acme", True),
        ("all", True),
        ("acme-good:acme", True),
    ):
        monkeypatch.setenv("EXL_FILTERS_PLUGINS", setting)
        if ok:
            registry.get("acme")
        else:
            with pytest.raises(UnknownFilter, match="allow-list"):
                registry.get("acme")
            registry.get("select")
            assert "acme_good_mod" not in sys.modules
    with pytest.raises(UnknownFilter):
        registry.get("acme", allow=["select"])


def test_registering_in_process():
    @registry.register("mine")
    def make(vocab):
        return ExLlamaV2SelectFilter(None, vocab, ["a"])

    try:
        assert registry.get("mine") is make
        with pytest.raises(PluginError):
            registry.register("mine", make)
        with pytest.raises(PluginError):
            registry.register("select", make)
        registry.register("select", make, replace=True)
        assert registry.get("select") is make
    finally:
        registry.unregister("mine")
        registry.unregister("select")
    assert registry.get("select") is ExLlamaV2SelectFilter
    with pytest.raises(UnknownFilter):
        registry.get("mine")
    with pytest.raises(FilterUsageError):
        registry.register("three", 3)  # type: ignore[call-overload]


@pytest.mark.covers("filters: specs")
@pytest.mark.parametrize(
    "spec",
    [
        {"type": "select", "options": ["ab", "c"], "case_insensitive": True, "policy": "first"},
        {"type": "prefix", "prefix_strings": ["ab"], "overshoot": False},
    ],
)
def test_specs_round_trip(spec):
    made = registry.from_spec(spec, VOCAB)
    assert made.spec() == spec
    assert json.loads(json.dumps(made.spec())) == spec
    assert registry.from_spec(made.spec(), VOCAB).next() == made.next()


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({}, FilterUsageError),
        ({"type": 3}, FilterUsageError),
        ([], FilterUsageError),
        ({"type": "nothing"}, UnknownFilter),
        ({"type": "select"}, FilterUsageError),
        ({"type": "select", "o": 1}, FilterUsageError),
    ],
)
def test_bad_specs(bad, error):
    with pytest.raises(FilterError) as raised:
        registry.from_spec(bad, VOCAB)
    assert type(raised.value) is error


@pytest.mark.covers("filters: plugins")
def test_command_line(site, capsys):
    distribution(site, "acme-bad", {"bad": "acme_bad_mod:make"}, "1/0")
    registry.refresh()
    assert main(["list"]) == 0
    assert "acme_bad_mod:make" in capsys.readouterr().out
    assert main(["list", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {"name": "bad", "dist": "acme-bad", "version": "1.2", "value": "acme_bad_mod:make"} in rows
    assert main(["info", "select"]) == 0
    assert '"options"' in capsys.readouterr().out
    assert main(["info", "bad"]) == 2
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert main(["info", "nothing"]) == 2


@pytest.mark.covers("filters: plugins", "filters: vocabularies")
def test_a_plugin_brings_its_own_oracle(site, capsys):
    source = GOOD.replace("options: list[str]", "options=('ab',)") + "def language():\n    return ['ab']\n"
    distribution(site, "acme-told", {"told": "acme_told_mod:make"}, source)
    points = site / "acme_told-1.2.dist-info" / "entry_points.txt"
    for oracle, status in (("language", 0), ("make.__doc__", 2), ("nothing", 2)):
        points.write_text(
            f"[{registry.GROUP}]\ntold = acme_told_mod:make\n[exl_filters.languages]\ntold = acme_told_mod:{oracle}\n"
        )
        registry.refresh()
        assert main(["check", "told", "--laws", "22", "--profile", "quick", "--examples", "3"]) == status
    assert "language 'told'" in capsys.readouterr().err
