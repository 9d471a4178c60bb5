"""The page for operators names every error code, metric and deployment file, and the key file as it is read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from preloaded import run

from exl_serve.api.keys import read_keys
from exl_serve.engine.failures import BY_CODE
from exl_serve.super.registry import COUNTERS, GAUGES, HISTOGRAMS, SPREADS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "serving" / "operating.md").read_text(encoding="utf-8")
CELLS = [line.split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]


def constants(call: ast.Call) -> list[object]:
    return [one.value if isinstance(one, ast.Constant) else None for one in call.args]


def codes() -> Iterator[tuple[int, str]]:
    """(status, code) of every error that the server's source raises with both as constants."""
    for path in Path(str(files("exl_serve"))).rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(call, ast.Call):
                continue
            name, given = getattr(call.func, "attr", getattr(call.func, "id", "")), constants(call)
            if name == "ServeError" and len(given) > 2 and isinstance(given[0], int) and isinstance(given[2], str):
                yield given[0], given[2]
            elif name in ("invalid", "unavailable"):
                status, place = (400, 2) if name == "invalid" else (503, 0)
                yield from ((status, code) for code in given[place : place + 1] if isinstance(code, str))


def test_every_error_code_is_explained() -> None:
    raised = {*codes(), *((status, code) for status, _, code in BY_CODE.values())}
    assert {status for status, _ in raised} >= {400, 401, 403, 404, 408, 409, 429, 431, 500, 501, 503}
    told = {
        (int(status), code)
        for statuses, names, *_ in (row for row in CELLS if re.match(r"\| \d", row[0]))
        for status in re.findall(r"\d+", statuses)
        for code in re.findall(r"`(\w+)`", names)
    }
    assert sorted(raised - told) == []


def test_every_metric_is_in_the_table() -> None:
    told = {row[0].strip("| `"): row for row in CELLS}
    for kind, table in (("counter", COUNTERS), ("histogram", HISTOGRAMS), ("gauge", GAUGES)):
        for name, (_, labels, other) in table.items():
            assert told[name][1] == kind
            assert re.findall(r"`(\w+)`", told[name][3]) == list(labels)
            assert (other or "") in told[name][4]
    for name, (_, labels, others) in SPREADS.items():
        assert told[name][1] == "histogram"
        assert re.findall(r"`(\w+)`", told[name][3]) == list(labels)
        assert re.findall(r"`([\w:]+)`", told[name][4]) == list(others)


def test_every_deployment_file_is_named() -> None:
    assert [p.name for p in (ROOT / "packages/exl-serve/deploy").iterdir() if f"`{p.name}`" not in PAGE] == []


def test_the_command_for_a_key_makes_an_entry_that_is_read(tmp_path: Path) -> None:
    (command,) = re.findall(r"^\(umask 077 && exl serve (key new .*) >> keys.toml\)$", PAGE, re.MULTILINE)
    done = run(["-m", "exl_serve", *command.split()])
    assert done.returncode == 0, done.stderr
    fields = {row[0].strip("| ") for row in CELLS}
    (tmp_path / "keys.toml").write_text(
        done.stdout + 'weight = 2\npriority = 0\nmodels = ["a"]\nexpires = 2999-01-01\n[key.limits]\nconcurrent = 3\n'
    )
    (tmp_path / "keys.toml").chmod(0o600)
    (key,) = read_keys(tmp_path / "keys.toml")
    assert (key.name, sorted(key.scopes), key.limits.concurrent) == ("alice", ["infer"], 3)
    assert {"`name`", "`scopes`", "`weight`", "`priority`", "`limits`", "`models`", "`expires`"} <= fields
