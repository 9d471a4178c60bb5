"""`exl info --kernels`: which kernels a model's steps run on a card."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from exl_kernels.selection import known_cards

GOLDEN = Path(__file__).parents[1] / "golden" / "data"
MODEL, FLOAT = str(GOLDEN / "pylib-4m-exl2-4.5"), str(GOLDEN / "pylib-4m-fp16")


@pytest.fixture
def info(exl):
    """Call `exl info`; returns exit code, standard output, standard error."""
    return partial(exl, "info")


def kernels(found: dict[str, object]) -> dict[tuple[str, int], str]:
    return {(use["operation"], use["rows"]): use["kernel"] for use in found["uses"]}  # type: ignore[attr-defined]


def test_a_card_that_is_not_here(info) -> None:
    found = json.loads(info(MODEL, "--kernels", "--card", "H100", "--json")[1])
    assert (found["code"], found["features"]) == (
        90,
        ["bulk_copy", "clusters", "tested_clusters", "wgmma"],
    )
    of = kernels(found)
    assert [of["gate+up", rows] for rows in (1, 8)] == ["gemv_ring", "gemm_few"]
    assert [of["gate+up", rows] for rows in (32, 64)] == ["gemm_batch", "gemm_batch"]
    assert of["gate_proj", 512] == "gemm_large"
    assert of["attention", 1].endswith("few1")
    why = {reason for use in found["uses"] if use["rows"] == 512 for reason in use["why"]}
    assert any("cheaper by dequantizing once" in reason for reason in why)


@pytest.mark.parametrize("card", known_cards())
def test_every_known_card_has_a_kernel_for_everything(info, card: str) -> None:
    code, out, _ = info(MODEL, "--kernels", "--card", card)
    assert code == 0
    for word in ("attention", "head", "1 ", "512", f"kernels on {card}"):
        assert word in out
    of = kernels(json.loads(info(MODEL, "--kernels", "--card", card, "--json")[1]))
    for rows in (1, 8, 32, 64, 512):
        joined = {("q+k+v", rows), ("gate+up", rows), ("down", rows), ("o", rows)}
        apart = {(f"{name}_proj", rows) for name in ("q", "k", "v", "o", "gate", "up", "down")}
        assert joined <= of.keys() or apart <= of.keys(), rows


def test_norms_and_adapters_are_part_of_the_report(info) -> None:
    plain = kernels(json.loads(info(MODEL, "--kernels", "--card", "H100", "--json")[1]))
    assert plain["norm", 1] == "rms_norm_f16_f32", "the last norm of one row"
    assert not any(operation == "adapters" for operation, _ in plain)
    of = kernels(json.loads(info(MODEL, "--kernels", "--card", "H100", "--adapter-rank", "16", "--json")[1]))
    assert ("adapters", 1) not in of
    assert {of[name, 1] for name in ("q+k+v", "o", "gate+up", "down")} == {"gemv_ring_adapted"}
    assert "lora_shrink_packing + lora_expand_gated" in of["adapters", 64]
    assert ("adapters", 512) not in of, "no step of so many rows with adapters is captured"
    for card, rank, shrink in (("H100", "33", "lora_shrink_group_1"), ("4090", "16", "lora_shrink_packing")):
        other = kernels(json.loads(info(MODEL, "--kernels", "--card", card, "--adapter-rank", rank, "--json")[1]))
        assert f"{shrink} + lora_expand_gated" in other["adapters", 1], card


def test_few_rows_of_float_matrices_have_kernels(info) -> None:
    of = kernels(json.loads(info(FLOAT, "--kernels", "--card", "4090", "--json")[1]))
    assert of["q_proj", 1] == "gemm_float_rows_8"
    assert of["head", 64] == "gemm_float_tile_64"
    assert of["q_proj", 512] == "cuBLAS"


def test_the_cache_format_picks_the_attention(info) -> None:
    of = kernels(json.loads(info(MODEL, "--kernels", "--card", "4090", "--cache", "q4", "--json")[1]))
    assert of["attention", 1].startswith("attention_q4_")


def test_a_card_without_the_fast_attention_says_why(info) -> None:
    _, out, _ = info(MODEL, "--kernels", "--card", "2080 Ti")
    assert "128 (a prompt)" in out
    assert "512 (a prompt)" in out
    assert "captured" in out
    assert "attention of 256 keys" in out
    for kernel in (
        "attention_few: it needs clusters",
        "attention_teams: it needs code",
        "attention_wide: it needs wgmma",
    ):
        assert kernel in out
    newer = kernels(json.loads(info(MODEL, "--kernels", "--card", "5090", "--json")[1]))
    assert newer["attention", 1].endswith("_teams1")
    found = json.loads(info(MODEL, "--kernels", "--card", "H100", "--json")[1])
    assert not any(use["why"] for use in found["uses"] if use["operation"] == "attention")
    assert {use["rows"]: use["tokens"] for use in found["uses"]} == {1: 1, 8: 1, 32: 1, 64: 1, 128: 128, 512: 512}


def test_sampling_is_listed_with_default_settings_and_greedy(info) -> None:
    found = json.loads(info(MODEL, "--kernels", "--card", "4090", "--json")[1])
    of = kernels(found)
    for rows in (1, 512):
        assert of["sampling", rows] == "sample_shape + sample_choose + sample_wide"
        assert of["sampling, greedy", rows] == "sample_shape + sample_choose"
    why = {use["operation"]: use["why"] for use in found["uses"] if use["rows"] == 8}
    assert ["2048 candidates" in reason for reason in why["sampling"]] == [True]
    assert not why["sampling, greedy"]


def test_without_a_gpu_a_card_must_be_named(info, monkeypatch: pytest.MonkeyPatch) -> None:
    from exl_generate.cli import kernels as report
    from exl_kernels.device import CudaStatus

    monkeypatch.setattr(report, "cuda_status", lambda: CudaStatus(True, ("90a",), "13.0", None, (), "no driver"))
    code, _, err = info(MODEL, "--kernels")
    assert code == 1
    assert "no driver" in err
    assert "--card" in err
    assert "4090" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--card", "4090"], "add --kernels"),
        (["--adapter-rank", "16"], "add --kernels"),
        (["--kernels", "--card", "Voodoo 2"], "known cards"),
        (["--kernels", "--plan"], "one at a time"),
    ],
)
def test_options_that_exclude_each_other(info, arguments: list[str], message: str) -> None:
    code, _, err = info(MODEL, *arguments)
    assert code == 1
    assert message in err
