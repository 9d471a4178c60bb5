"""Models written by our own quantizers: equal to their dequantized float twins, and bit for bit to the file."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from exl_core import ExLlamaV2, ExLlamaV2Cache
from exl_kernels import formats

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 9},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": False},
}
KINDS = ("exl2", "gptq", "gptq-act-order")


def dequantized(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The dequantized model, by exl_kernels.formats alone."""
    result: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        key, _, part = name.rpartition(".")
        group = {n[len(key) + 1 :]: t for n, t in tensors.items() if n.rpartition(".")[0] == key}
        if part == "q_weight":
            result[f"{key}.weight"] = formats.exl2_dequantize(group).T.contiguous()
        elif part == "qweight":
            result[f"{key}.weight"] = formats.gptq_dequantize(group, bits=4).T.contiguous()
        elif part in ("weight", "bias"):
            result[name] = tensor
    return result


@pytest.fixture(scope="module", params=[(f, k) for f in FAMILIES for k in KINDS], ids="-".join)
def twins(request: pytest.FixtureRequest, lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(quantized model, float twin, the twin's tensors)."""
    family, kind = request.param
    config = {**lab.config, **FAMILIES[family]}
    tensors = lab.quantize(lab.random_tensors(config), kind)
    plain = dequantized(tensors)
    folder = tmp_path_factory.mktemp("twins")
    for name, tensor in list(plain.items()):  # heads and biases lose the columns that pad them
        rows = {"lm_head.weight": config["vocab_size"]}.get(name)
        plain[name] = tensor[:rows] if rows else tensor
    return (
        lab.load(lab.write_model(folder / "quantized", config, tensors)),
        lab.load(lab.write_model(folder / "float", config, plain)),
        plain,
    )


def test_weights_are_bitwise_identical(twins: tuple[ExLlamaV2, ExLlamaV2, dict[str, torch.Tensor]]) -> None:
    quantized, _, plain = twins
    checked = 0
    for key, module in quantized.modules_dict.items():
        if key.endswith("_proj") or key == "lm_head":
            weight = module.get_weight_tensor_dq()  # type: ignore[union-attr]
            assert torch.equal(weight, plain[f"{key}.weight"].T), key
            checked += 1
    assert checked == 15


def test_logits_equal_the_dequantized_twin(
    twins: tuple[ExLlamaV2, ExLlamaV2, dict[str, torch.Tensor]], lab: Any
) -> None:
    quantized, plain, _ = twins
    ids = lab.ids(2, 30)
    a, b = (m.forward(ids, ExLlamaV2Cache(m, batch_size=2, max_seq_len=32)) for m in (quantized, plain))
    error = (a - b)[..., :90].abs().max() / b[..., :90].abs().max()
    assert float(error) < 2e-3  # FP16 keys and values may round differently by one step
    assert (a[..., 90:] == -65504).all()


def test_int8_path_is_close(lab: Any) -> None:
    folder = lab.write(kind="exl2", hidden_size=128, intermediate_size=256)
    ids = lab.ids(2, 30)
    exact, int8 = (lab.load(folder, cpu_matmul=mode).forward(ids)[..., :90] for mode in ("exact", "int8"))
    assert not torch.equal(exact, int8)
    kl = (exact.softmax(-1) * (exact.log_softmax(-1) - int8.log_softmax(-1))).sum(-1).mean()
    assert float(kl) < 2e-3
