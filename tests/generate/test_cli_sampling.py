"""Sampler settings of the command line: numbers that only a typing error gives are refused."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from exl_generate.cli.options import FIELDS, RANGES
from exl_generate.errors import RequestError
from exl_generate.sampling import Settings

MODEL = str(Path(__file__).parents[1] / "golden" / "data" / "pylib-4m-exl2-4.5")
SHARES = ["top_p", "min_p", "top_a", "tfs", "typical", "xtc_probability", "xtc_threshold"]


def refused(exl, *args: str) -> str:
    code, out, err = exl("generate", "x", "-m", MODEL, "-n", "2", *args)
    assert (code, out) == (2, ""), err
    return " ".join(err.replace("│", " ").split())


@pytest.mark.parametrize(
    ("flag", "value", "limits"),
    [
        ("--top-p", "1.5", "from 0 to 1"),
        ("--min-p", "2", "from 0 to 1"),
        ("--typical", "7", "from 0 to 1"),
        ("--tfs", "-0.1", "from 0 to 1"),
        ("--top-a", "nan", "from 0 to 1"),
        ("--temperature", "-1", "at least 0"),
        ("--top-k", "-5", "at least 0"),
        ("--repetition-penalty", "0", "from 1e-06 to 1e+06"),
        ("--repetition-range", "-2", "at least -1"),
        ("--dry-allowed-length", "0", "at least 1"),
    ],
)
def test_a_number_out_of_range_is_a_usage_error(exl, flag: str, value: str, limits: str) -> None:
    told = refused(exl, flag, value)
    assert flag in told
    assert f"{value} is out of range; it must be {limits}" in told


def test_an_option_beyond_every_float_is_a_usage_error(exl) -> None:
    assert "--top-k: a number below -1e308 is out of range" in refused(exl, "--top-k", f"-1{'0' * 400}")


def test_assignments_have_the_same_ranges(exl) -> None:
    assert "--set top_p=1.5: 1.5 is out of range; it must be from 0 to 1" in refused(exl, "--set", "top_p=1.5")


@pytest.mark.parametrize(
    "value",
    [
        *("{[1]}", "[[1]]", "{1: [2]}", "1j", "b'x'", "..."),
        pytest.param(f"1{'0' * 400}", id="too large"),
        pytest.param(f"-1{'0' * 400}", id="too small"),
        pytest.param(f"{'-' * 5000}1", id="signs"),
    ],
)
def test_values_that_python_reads_and_no_setting_takes(exl, value: str) -> None:
    for name in ("temperature", "top_k", "dry_sequence_breakers"):
        code, out, err = exl("generate", "x", "-m", MODEL, "-n", "2", "--set", f"{name}={value}")
        assert (code, out) == (1, ""), err
        assert len(err.splitlines()) == 1
        assert err.endswith(" [request]\n")


@pytest.mark.parametrize("value", [10**400, -(10**400), 1 << 20_000], ids=["large", "small", "not to be printed"])
def test_an_int_that_no_float_can_hold_is_refused(value: int) -> None:
    for name in ("temperature", "skew", "cfg_scale"):
        changed: dict[str, Any] = {name: value}
        with pytest.raises(RequestError, match=f"Settings.{name} is "):
            Settings(**changed).validate()


def test_chat_has_the_same_ranges(exl, chat_model: str) -> None:
    code, _, err = exl("chat", "-m", chat_model, "--top-p", "80", stdin="hello\n")
    assert code == 2
    assert "80 is out of range" in err


@pytest.mark.parametrize("name", sorted(RANGES))
def test_the_ends_of_a_range_are_in_it(exl, name: str) -> None:
    """They are values that the sampler takes; just outside is refused here, and by it unless the setting is a share."""
    low, high = RANGES[name]
    default = getattr(Settings(), name)
    for end in (low, high):
        if end is not None:
            dataclasses.replace(Settings(max_temp=1e9), **{name: type(default)(end)}).validate()
    assert low is not None
    outside = type(default)(math.floor(low) - 1)
    with pytest.raises(RequestError):
        dataclasses.replace(Settings(), **{name: outside}).validate()
    assert "is out of range" in refused(exl, FIELDS[name][0][-1], str(outside))


def test_every_number_with_a_limit_has_a_range() -> None:
    """Options reject values below the minimum of `Settings` and name that minimum; shares end at 1."""
    for name, (_, kind, _) in FIELDS.items():
        if kind in (int, float):
            try:
                dataclasses.replace(Settings(), **{name: kind(-1e9)}).validate()
            except RequestError:
                assert name in RANGES, name
    assert [name for name in FIELDS if RANGES.get(name) == (0, 1)] == SHARES
