"""The bytes that benchmarks say a decode step reads."""

from __future__ import annotations

from bench_families import FAMILIES, sizes
from bench_step import bytes_of_step
from gpu_model import build_config

from exl_core import ExLlamaV2Cache
from exl_core.layers import PositionEmbedding


def test_a_step_reads_neither_all_embeddings_nor_all_positions() -> None:
    """Bytes of a step of a model with learned positions do not grow with the number of positions."""
    config = {**FAMILIES["gpt2-style-7b"], **sizes(128, 256, 2, 2, 256, 64), "n_inner": 256, "num_hidden_layers": 1}
    found = []
    for positions in (256, 1024):
        model = build_config({**config, "max_position_embeddings": positions, "n_positions": positions}, "4.0", "cpu")
        assert any(isinstance(module, PositionEmbedding) for module in model.modules)
        found.append(bytes_of_step(model, ExLlamaV2Cache(model, max_seq_len=256), 100, 1))
    assert found[0] == found[1] > 0
