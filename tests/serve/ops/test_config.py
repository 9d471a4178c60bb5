"""The configuration: where it comes from, what is refused, what a reload takes over."""

from __future__ import annotations

import re
import tomllib
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exl_serve.config.load import ConfigError, keys, load, parse, reloaded
from exl_serve.config.model import ServeConfig
from exl_serve.config.reference import reference

ROOT = Path(__file__).resolve().parents[3]


def test_options_go_over_variables_and_those_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('[server]\nport = 1\nworkers = 2\nhost = "::1"\n[[model]]\nid = "a"\npath = "x"\n')
    variables = {"EXL_SERVE_SERVER_PORT": "2", "EXL_SERVE_SERVER_WORKERS": "3", "HOME": "unrelated"}
    config = load(file, variables, {"server.port": "4", "server.cors_origins": "https://a, https://b"})
    assert (config.server.port, config.server.workers, config.server.host) == (4, 3, "::1")
    assert config.server.cors_origins == ("https://a", "https://b")
    assert config.model[0].path == "x"


@pytest.mark.parametrize(
    ("data", "path", "says"),
    [
        ({"server": {"prot": 1}}, "server.prot", "nearest is port"),
        ({"sever": {}}, "sever", "nearest is server"),
        ({"server": {"limits": {"max_bodybytes": 1}}}, "server.limits.max_bodybytes", "max_body_bytes"),
        ({"model": [{"id": "a", "path": "b", "cashe": "q4"}]}, "model[0].cashe", "cache"),
        ({"server": {"port": "x"}}, "server.port", "int"),
        ({"server": {"port": 70000}}, "server.port", "65535"),
        ({"server": {"workers": 0}}, "server.workers", "allowed are 1"),
        (
            {"model": [{"id": "a", "path": "b", "cache": "q5"}]},
            "model[0].cache",
            "'q5'; it must be one of fp16, fp8, q8",
        ),
        ({"log": {"level": "loud"}}, "log.level", "'loud'; it must be one of debug, info, warning, error"),
        ({"model": [{"id": "a"}]}, "model[0]", "path"),
        ({"model": [{"id": "a", "path": "b"}, {"id": "c", "path": "b", "aliases": ["a"]}]}, "model.id", "two models"),
        ({"model": [{"id": "a:b", "path": "b"}]}, "model.id", "colon"),
        ({"server": {"tls_cert": "x"}}, "server.tls_cert", "both or neither"),
        ({"server": {"cors_origins": ["*"]}}, "server.cors_origins", "name the origins"),
        ({"server": {"cors_origins": ["https://a.example/"]}}, "server.cors_origins", "'https://a.example/'"),
        ({"server": {"cors_origins": ["localhost:3000"]}}, "server.cors_origins", "http://HOST:PORT"),
        ({"server": {"cors_origins": ["https://a.example:443"]}}, "server.cors_origins", "https://HOST"),
        ({"server": {"cors_origins": ["http://a.example:80"]}}, "server.cors_origins", "http://HOST:PORT"),
        ({"server": {"cors_origins": ["https://bücher.example"]}}, "server.cors_origins", "https://HOST"),
    ],
)
def test_a_bad_value_is_refused_with_its_path(data: dict[str, Any], path: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        parse(data)
    assert caught.value.path == path


@pytest.mark.parametrize(
    "origin",
    ["null", "file://", "https://a.example:80", "http://[::1]:8080", "https://[::80]", "chrome-extension://abc"],
)
def test_origins_that_browsers_send_are_taken(origin: str) -> None:
    assert parse({"server": {"cors_origins": [origin]}}).server.cors_origins == (origin,)


def test_a_variable_that_sets_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="EXL_SERVE_SERVER_PORT"):
        load(environment={"EXL_SERVE_SERVER_PROT": "1"})


@pytest.mark.parametrize("text", ["[server", "\xff", "a = 1\na = 2"])
def test_a_file_that_is_not_toml_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match="not TOML"):
        load(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "missing.toml")


@given(st.sampled_from(sorted(path for path, _ in keys())), st.text(max_size=20))
def test_any_text_for_any_key_is_taken_or_refused(path: str, text: str) -> None:
    with suppress(ConfigError):
        assert isinstance(load(options={path: text}), ServeConfig)


def test_the_example_of_the_page_is_a_configuration() -> None:
    (example,) = re.findall(r"^```toml\n(.*?)^```", reference(), re.DOTALL | re.MULTILINE)
    config = parse(tomllib.loads(example))
    assert (config.server.port, config.model[0].id, config.model[0].cache_tokens) == (9000, "llama", 65536)


def test_every_key_has_a_note_and_a_reader() -> None:
    """A key that nothing reads would be ignored in silence."""
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \|[^|]*\| (.*) \|$", reference(), re.MULTILINE)
    assert len(rows) > 70
    assert [key for key, note in rows if not note.strip()] == []
    package = Path(str(files("exl_serve")))
    source = "".join(path.read_text() for path in package.rglob("*.py") if path.parent.name != "config")
    source += (package / "config" / "load.py").read_text()
    assert [key for key, _ in rows if f".{key}" not in source] == []


def test_every_default_survives_its_own_text() -> None:
    for path, _ in keys():
        value: Any = ServeConfig()
        for name in path.split("."):
            value = getattr(value, name)
        if value is not None and value != {}:
            text = ",".join(value) if isinstance(value, tuple) else msgspec.json.encode(value).decode().strip('"')
            assert load(options={path: text}) == ServeConfig(), path


def test_a_reload_takes_over_limits_and_models_and_names_the_rest() -> None:
    old = parse({"server": {"port": 1}, "model": [{"id": "a", "path": "x"}, {"id": "b", "path": "x"}]})
    new = parse(
        {
            "server": {"port": 2, "limits": {"max_n": 3}},
            "auth": {"key_file": "k"},
            "log": {"level": "debug", "format": "json"},
            "model": [{"id": "a", "path": "y"}, {"id": "c", "path": "x"}],
        }
    )
    taken, restart = reloaded(old, new)
    assert (taken.server.port, taken.server.limits.max_n, taken.log.level, taken.log.format) == (1, 3, "debug", "auto")
    assert [(m.id, m.path) for m in taken.model] == [("a", "x"), ("c", "x")]
    assert sorted(restart) == ["log.format", "model.a", "server.port"]


def test_the_page_is_what_the_structs_say() -> None:
    page = ROOT / "docs" / "serving" / "configuration.md"
    assert page.read_text() == reference(), (
        "write it again: python -m exl_serve.config.reference > docs/serving/configuration.md"
    )
