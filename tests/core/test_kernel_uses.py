"""Which kernels `exl info --kernels` names, without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from make_random_model import Shape, make_model
from random_models import write_random_model

from exl_core import ExLlamaV2Config
from exl_core.convert import quantize_model
from exl_core.execution.kernels import KernelUse, kernel_uses
from exl_kernels.safetensors_file import read_safetensors_folder, read_tensor, write_safetensors
from exl_kernels.selection import Card

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 64,
}
MANY = 10**8


@pytest.mark.parametrize("quantized", [True, False])
def test_experts_share_launches(quantized: bool, tmp_path: Path) -> None:
    folder = write_random_model(tmp_path / "float", CONFIG)
    if quantized:
        quantize_model(folder, folder := tmp_path / "quantized", bits=4.0)
    uses = kernel_uses(ExLlamaV2Config(folder), Card.named("4090"), rows=(1, 8, 64), prompts=(MANY,))

    def named(operation: str, rows: int) -> KernelUse | None:
        return next((use for use in uses if (use.operation, use.rows) == (operation, rows)), None)

    for rows, by in ((1, 8), (8, 8), (64, 32 if quantized else 64)):
        router, experts, shared = (named(name, rows) for name in ("router", "experts", "gate_proj"))
        assert router is not None
        assert (router.kernel, router.why) == ("experts_route", ())
        form = "experts_{}_exl2_32_{}" if quantized else "experts_float_{}_{}"
        matmuls = [form.format(matmul, by) for matmul in ("gate_up", "down")]
        assert experts is not None
        assert experts.kernel == " + ".join(("experts_arrange", *matmuls, "experts_combine"))
        assert experts.why == ()
        assert shared is not None
        alone = "gemm_batch" if rows > 8 else "gemm_direct"
        floats = "gemm_float_tile_64" if rows > 8 else "gemm_float_rows_8"
        assert shared.kernel == (alone if quantized else floats)
    apart, many = named("gate_proj", MANY), named("experts", MANY)
    assert apart is not None
    assert many is not None
    assert many.kernel == ("experts_dequantized" if quantized else "experts_sorted")
    assert apart.kernel == ("gemm_large" if quantized else "cuBLAS")


@pytest.mark.parametrize("floats", ["all", "one"])
def test_float_experts_of_a_quantized_model(floats: str, tmp_path: Path) -> None:
    """Where only some of a layer are float, the host chooses them: no step is captured, modules run their own pass."""
    config = with_float_tensors(tmp_path, ".experts." if floats == "all" else "layers.1.mlp.experts.2.")
    found = {use.operation: use for use in kernel_uses(config, Card.named("H200"), rows=(8,), prompts=())}
    if floats == "all":
        assert "experts_float_gate_up_8" in found["experts"].kernel
        assert found["q+k+v"].kernel == "gemm_few"
        return
    assert "q+k+v" not in found
    assert any("chosen by the host: some of their matrices are float" in why for why in found["q_proj"].why)
    assert "gemm_float_rows_8" in found["up_proj"].kernel, "that of a shared expert is quantized"


def test_a_step_of_many_sequences_and_a_prompt_run_other_kernels(tmp_path: Path) -> None:
    """Up to 256 rows are a captured step, whose rows are batch-invariant; reasons are those of the half itself."""
    make_model(tmp_path, Shape(256, 768, 2, 4, 2, 96), 4.0)
    (path,) = tmp_path.glob("*.safetensors")
    tensors = {name: read_tensor(entry).clone() for name, entry in read_safetensors_folder(tmp_path).items()}
    for layer in range(2):
        order = tensors[f"model.layers.{layer}.self_attn.k_proj.q_invperm"]
        tensors[f"model.layers.{layer}.self_attn.k_proj.q_invperm"] = order.flip(0)
    for odd in (False, True):
        if odd:
            path.unlink()
            write_safetensors(path, tensors)
        found = kernel_uses(ExLlamaV2Config(tmp_path), Card.named("H200"), rows=(128,), prompts=(512,))
        uses = {(use.operation, use.rows): use for use in found}
        first = "q_proj" if odd else "q+k+v"
        for name in (first, "gate+up", "down"):
            assert uses[name, 128].kernel == "gemm_batch"
            assert bool(uses[name, 128].why) == (odd and name == first), "gate, up and down share launches"
        assert uses["down_proj", 512].kernel == "gemm_large"
        assert uses["attention", 128].kernel != uses["attention", 512].kernel


def test_attention_of_heads_that_rotate_in_part_says_why(tmp_path: Path) -> None:
    """A decode step rotates and stores keys in the launch of attention; a prompt does it before."""
    half = {**CONFIG, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_size": 512, "head_dim": 128}
    folder = write_random_model(tmp_path / "float", {**half, "partial_rotary_factor": 0.75})
    quantize_model(folder, folder := tmp_path / "quantized", bits=4.0)
    config, card = ExLlamaV2Config(folder), Card.named("H200")
    found = {(use.operation, use.rows): use for use in kernel_uses(config, card, rows=(1,), prompts=(512,), cache="q4")}
    step, prompt, store = found["attention", 1], found["attention", 512], found["rope+store", 512]
    assert (step.tokens, prompt.tokens) == (1, 512)
    assert step.kernel == "attention_q4_128_decode1"
    assert any(reason.startswith("attention_few: it takes rotations") for reason in step.why)
    assert prompt.why == ("attention_wide: it takes float16 pages",)
    assert store.why == ("rope_store_many: it takes float16 pages",)
    assert ("rope+store", 1) not in found


def test_a_step_that_is_not_captured_runs_batch_invariant_kernels_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of a decode step are batch-invariant, captured or not; without graphs no launches are joined."""
    make_model(tmp_path / "whole", Shape(256, 768, 2, 4, 2, 96), 4.0)
    config, card = ExLlamaV2Config(tmp_path / "whole"), Card.named("H200")

    def uses(config: ExLlamaV2Config) -> dict[tuple[str, int], KernelUse]:
        return {(use.operation, use.rows): use for use in kernel_uses(config, card, rows=(1, 64, 128), prompts=())}

    assert uses(config)["gate+up", 128].kernel == "gemm_batch"
    whole = uses(config)
    config.no_graphs = True
    found = uses(config)
    for rows in (1, 64, 128):
        assert found["gate_proj", rows].why[0] == "config.no_graphs asks for eager launches"
        assert found["gate_proj", rows].kernel == whole["gate+up", rows].kernel
        assert ("gate+up", rows) not in found
    config.no_graphs = False
    monkeypatch.setenv("EXL_DECODE_JOINED_ROWS", "32")
    found = uses(config)
    assert ("gate+up", 1) in found
    for rows in (64, 128):
        for name in ("gate+up", "down_proj"):  # one launch of gate and up still beats two
            assert any("at most 32 rows" in why for why in found[name, rows].why)
            assert found[name, rows].kernel == "gemm_batch"
    monkeypatch.delenv("EXL_DECODE_JOINED_ROWS")
    (path,) = (tmp_path / "whole").glob("*.safetensors")
    tensors = {name: read_tensor(entry).clone() for name, entry in read_safetensors_folder(path.parent).items()}
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("lm_head.")}
    path.unlink()
    write_safetensors(path, kept | {"lm_head.weight": torch.zeros(96, 256, dtype=torch.float16)})
    found = uses(ExLlamaV2Config(path.parent))
    assert found["head", 128].kernel == "gemm_float_tile_64"
    assert [found["gate+up", rows].kernel for rows in (64, 128)] == ["gemm_batch", "gemm_batch"], "a float head"


def test_a_padded_matrix_keeps_its_half_apart(tmp_path: Path) -> None:
    make_model(tmp_path, Shape(256, 768, 2, 4, 2, 96), 4.0)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 760}))
    found = {
        use.operation: use for use in kernel_uses(ExLlamaV2Config(tmp_path), Card.named("H200"), rows=(1,), prompts=())
    }
    assert "q+k+v" in found
    assert "gate+up" not in found
    assert any("gate_proj has padding columns" in why for why in found["gate_proj"].why)


def with_float_tensors(folder: Path, part: str) -> ExLlamaV2Config:
    """A quantized mixture whose tensors with `part` in their names are float."""
    source = write_random_model(folder / "float", CONFIG)
    quantize_model(source, folder / "mixed", bits=4.0)
    (path,) = (folder / "mixed").glob("*.safetensors")
    mixed, floats = read_safetensors_folder(folder / "mixed"), read_safetensors_folder(source)
    kept = {name: read_tensor(entry).clone() for name, entry in mixed.items() if part not in name}
    kept |= {name: read_tensor(entry).clone() for name, entry in floats.items() if part in name}
    path.unlink()
    write_safetensors(path, kept)
    return ExLlamaV2Config(folder / "mixed")


def with_float(folder: Path, key: str, out_features: int, in_features: int) -> ExLlamaV2Config:
    """A small quantized model of two layers of which one matrix is float."""
    make_model(folder, Shape(256, 768, 2, 4, 2, 96), 4.0)
    (path,) = folder.glob("*.safetensors")
    tensors = {name: read_tensor(entry).clone() for name, entry in read_safetensors_folder(folder).items()}
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(f"{key}.")}
    path.unlink()
    write_safetensors(path, kept | {f"{key}.weight": torch.zeros(out_features, in_features, dtype=torch.float16)})
    return ExLlamaV2Config(folder)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("card", ["B200", "H100"])
@pytest.mark.parametrize(("matrix", "shape"), [("down_proj", (256, 768)), ("gate_proj", (768, 256))])
def test_the_head_runs_alone_after_a_half_that_packs_nothing(
    card: str, matrix: str, shape: tuple[int, int], tmp_path: Path
) -> None:
    """The last half packs the head's input only if all its matmuls chain; a float matrix in it does not."""
    for layer, kernel in ((1, "gemv_ring"), (0, "gemm_few")):
        config = with_float(tmp_path / str(layer), f"model.layers.{layer}.mlp.{matrix}", *shape)
        (head,) = (
            use for use in kernel_uses(config, Card.named(card), rows=(8,), prompts=()) if use.operation == "head"
        )
        assert head.kernel == kernel, (layer, head)


def test_a_half_that_runs_apart_still_multiplies_q_k_and_v_at_once(tmp_path: Path) -> None:
    """One launch of three matrices beats three for a batch; for few rows it does not."""
    config = with_float(tmp_path, "model.layers.0.self_attn.o_proj", 256, 256)
    found = kernel_uses(config, Card.named("3090"), rows=(8, 32), prompts=())
    uses = {(use.operation, use.rows): use for use in found}
    assert (uses["q+k+v", 32].kernel, uses["q+k+v", 32].calls) == ("gemm_batch", (2,))
    assert ("q_proj", 32) not in uses
    assert uses["q_proj", 8].calls == uses["q+k+v", 8].calls == (1,)
    assert uses["o_proj", 8].kernel == "gemm_float_rows_8"


def test_short_prompts_run_on_packed_weights_where_a_launch_takes_a_block(tmp_path: Path) -> None:
    """Up to 256 tokens with wgmma; other cards dequantize matrices for more than 64 tokens."""
    make_model(tmp_path, Shape(256, 768, 2, 4, 2, 96), 4.0)
    config, prompts = ExLlamaV2Config(tmp_path), (64, 128, 256, 512)

    def uses(card: str) -> dict[tuple[str, int], KernelUse]:
        found = kernel_uses(config, Card.named(card), rows=(), prompts=prompts)
        assert {use.tokens == use.rows for use in found} == {True}
        return {(use.operation, use.rows): use for use in found}

    hopper, ada = uses("H100"), uses("4090")
    for rows in prompts:
        assert hopper["way", rows].kernel == ada["way", rows].kernel == "joined"
    assert [hopper["gate+up", rows].calls for rows in (64, 128, 256)] == [(2,), (2,), (4,)]
    assert hopper["gate+up", 128].kernel == ada["gate+up", 64].kernel == "gemm_batch"
    assert "more than 256 rows" in hopper["gate_proj", 512].why[0]
    for rows in (128, 256, 512):
        assert ada["gate_proj", rows].kernel == "gemm_large"
        assert "more than 64 rows" in ada["gate_proj", rows].why[0]


@pytest.mark.parametrize(("card", "most"), [("H100", 256), ("4090", 64), ("2080 Ti", 64)])
def test_prompts_of_float_models_have_own_kernels_for_as_many_rows_as_quantized_ones(
    card: str, most: int, tmp_path: Path
) -> None:
    """Beyond, cuBLAS reads each weight once, which blocks of few rows do not."""
    config = ExLlamaV2Config(write_random_model(tmp_path, {**CONFIG, "architectures": ["LlamaForCausalLM"]}))
    found = kernel_uses(config, Card.named(card), rows=(256,), prompts=(64, 65, 256, 257))
    kernels = {use.tokens: use.kernel for use in found if use.operation == "q_proj"}
    assert {tokens for tokens, kernel in kernels.items() if kernel != "cuBLAS"} == {1} | {
        tokens for tokens in (64, 65, 256) if tokens <= most
    }


def test_the_way_of_a_pass_has_a_reason(tmp_path: Path) -> None:
    make_model(tmp_path, Shape(256, 768, 2, 4, 2, 96), 4.0)
    config = ExLlamaV2Config(tmp_path)

    def ways() -> dict[tuple[int, int], tuple[str, tuple[str, ...]]]:
        found = kernel_uses(config, Card.named("H100"), rows=(8, 256, 257), prompts=(8,))
        return {(use.rows, use.tokens): (use.kernel, use.why) for use in found if use.operation == "way"}

    whole = ways()
    assert whole[8, 1] == whole[256, 1] == ("captured", ())
    assert whole[257, 1][0] == whole[8, 8][0] == "joined"
    assert "at most 256" in whole[257, 1][1][0]
    config.no_graphs = True
    assert set(ways().values()) == {("eager", ("config.no_graphs asks for eager launches",))}


def test_adapters_are_added_by_the_matmul_or_the_report_says_why_not(tmp_path: Path) -> None:
    make_model(tmp_path / "model", Shape(256, 768, 2, 4, 2, 96), 4.0)
    config = ExLlamaV2Config(tmp_path / "model")

    def uses(card: str, rows: int, rank: int) -> dict[str, KernelUse]:
        found = kernel_uses(config, Card.named(card), rows=(rows,), prompts=(), adapter_rank=rank)
        return {use.operation: use for use in found}

    for rows in (1, 2):
        own = uses("H200", rows, 32)
        assert {own[name].kernel for name in ("q+k+v", "o", "gate+up", "down")} == {"gemv_ring_adapted"}
        assert "adapters" not in own
    for card, rows, rank, why in (
        ("H200", 1, 33, "one adapter a row, of up to 32 ranks"),
        ("4090", 1, 16, "bulk"),
        ("H200", 3, 16, None),
    ):
        around = uses(card, rows, rank)
        assert "lora_expand_gated" in around["adapters"].kernel
        reasons = [reason for reason in around["adapters"].why if reason.startswith("gemv_ring: ")]
        assert len(reasons) == (why is not None)
        assert why is None or why in reasons[0]
