"""Which kernels `exl info --kernels` names for mixtures of experts, without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from random_models import write_random_model

from exl_core import ExLlamaV2Config
from exl_core.convert import quantize_model
from exl_core.execution.kernels import KernelUse, kernel_uses
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
def test_experts_share_launches_where_they_are_quantized(quantized: bool, tmp_path: Path) -> None:
    folder = write_random_model(tmp_path / "float", CONFIG)
    if quantized:
        quantize_model(folder, folder := tmp_path / "quantized", bits=4.0)
    uses = kernel_uses(ExLlamaV2Config(folder), Card.named("4090"), rows=(1, 8, 64, MANY))

    def named(operation: str, rows: int) -> KernelUse | None:
        return next((use for use in uses if (use.operation, use.rows) == (operation, rows)), None)

    for rows, kernel in ((1, "experts_few"), (8, "experts_few"), (64, "experts_many")):
        router, experts, shared = (named(name, rows) for name in ("router", "experts", "gate_proj"))
        assert router is not None
        assert (router.kernel, router.why) == ("experts_route", ())
        assert (None if experts is None else (experts.kernel, experts.why)) == ((kernel, ()) if quantized else None)
        assert shared is not None
        alone = "gemm_batch" if rows > 8 else "gemm_tile"
        assert shared.kernel == (alone if quantized else "cuBLAS")
    apart = named("gate_proj", MANY)
    assert named("experts", MANY) is None
    assert apart is not None
    assert apart.kernel == ("gemm_large" if quantized else "cuBLAS")
