"""One process for each device: bitwise the results of one device, and typed errors when a process fails."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import tp_worker
from mixtures import FAMILIES
from mixtures import SIZES as MIXTURE
from preloaded import run_ranks
from random_models import write_random_model

from exl_core import ProcessExchange, errors
from exl_kernels.safetensors_file import write_safetensors

pytestmark = pytest.mark.covers("core: tensor-parallel")

WORKER = Path(tp_worker.__file__)
PROCESSES = 2
SIZES: dict[str, Any] = {
    "hidden_size": 160,
    "intermediate_size": 224,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 130,
}


def run(folder: Path, job: dict[str, Any], kind: str = "cpu") -> list[Any]:
    """Run a job in PROCESSES processes; return what each of them saved, None where it saved nothing."""
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    devices = ",".join(f"{kind}:{i}" for i in range(PROCESSES))
    environment = {**os.environ, "EXL_DEVICE": devices, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = run_ranks([str(WORKER), str(path)], PROCESSES, environment)
    assert [process.returncode for process in done] == [0] * PROCESSES, "\n".join(p.stderr for p in done)
    files = [Path(f"{path}.{rank}") for rank in range(PROCESSES)]
    return [torch.load(file, map_location="cpu") if file.exists() else None for file in files]


def write_adapter(folder: Path) -> Path:
    """A random adapter of every projection of a model of SIZES."""
    generator = torch.Generator().manual_seed(3)
    heads, dim = SIZES["num_attention_heads"], SIZES["head_dim"]
    hidden, inner, values = SIZES["hidden_size"], SIZES["intermediate_size"], SIZES["num_key_value_heads"] * dim
    shapes = {
        **{"self_attn.q_proj": (hidden, heads * dim), "self_attn.k_proj": (hidden, values)},
        **{"self_attn.v_proj": (hidden, values), "self_attn.o_proj": (heads * dim, hidden)},
        **{"mlp.gate_proj": (hidden, inner), "mlp.up_proj": (hidden, inner), "mlp.down_proj": (inner, hidden)},
    }
    tensors = {}
    for layer in range(2):
        for name, (ins, outs) in shapes.items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(4, ins, generator=generator) * 0.1
            tensors[f"{key}.lora_B.weight"] = torch.randn(outs, 4, generator=generator) * 0.1
    folder.mkdir()
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    config = {"r": 4, "lora_alpha": 8, "peft_type": "LORA", "target_modules": sorted(n.split(".")[1] for n in shapes)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_two_processes_are_bitwise_identical_to_one_device(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EXL2, GPTQ and float, FP16 and quantized caches, an adapter, and mixtures."""
    mixture = tmp_path / "mixture"
    mixture.mkdir()
    write_random_model(
        mixture, {**lab.config, **MIXTURE, "architectures": ["Qwen2MoeForCausalLM"], **FAMILIES["Qwen2MoeForCausalLM"]}
    )
    uneven = tmp_path / "uneven"  # the first process has both experts
    uneven.mkdir()
    write_random_model(
        uneven,
        {
            **{**lab.config, **MIXTURE, "architectures": ["MixtralForCausalLM"], **FAMILIES["MixtralForCausalLM"]},
            **{"num_local_experts": 2, "num_experts_per_tok": 2},
        },
    )
    exl2 = str(lab.write(kind="exl2", **SIZES))
    cases: list[dict[str, Any]] = [
        {"folder": exl2, "cache": "ExLlamaV2Cache_Q4"},
        {"folder": exl2, "lora": str(write_adapter(tmp_path / "adapter"))},
        {"folder": str(lab.write(kind="gptq-act-order", **SIZES))},
        {"folder": str(lab.write(**SIZES))},
        {"folder": str(mixture)},
        {"folder": str(uneven), "split": [7.4, 2.6]},
    ]
    found = run(tmp_path, {"task": "cases", "limit": 120.0, "cases": cases})
    monkeypatch.setenv("EXL_DEVICE", "cpu")
    for number, case in enumerate(cases):
        whole = tp_worker.run_case(case, None)
        ranks = [process[number] for process in found]
        for process in ranks:
            for ours, theirs in zip(process["logits"], whole["logits"], strict=True):
                assert torch.equal(ours, theirs)
            for ours, theirs in zip(process["weights"], whole["weights"], strict=True):
                assert torch.equal(ours, theirs)
            begin, end = process["heads"]
            for (ours,), theirs in zip(process["keys"], whole["keys"], strict=True):
                assert torch.equal(ours, theirs[:, :, begin:end])
            assert process["bytes"] < whole["bytes"]
        assert [process["heads"] for process in ranks] == [
            [0, whole["heads"][1] // 2],
            [whole["heads"][1] // 2, whole["heads"][1]],
        ]
    for case, process in zip(cases, found[0], strict=True):
        if case["folder"] == exl2 and "lora" not in case:
            assert process["exchanges"] == 3 * 2 + 1  # three a layer, and the head's


@pytest.mark.parametrize(
    ("task", "limit", "message"),
    [
        ("die", 120.0, "lost another process"),
        pytest.param("hang", 4.0, "waited for it for 4 s", marks=pytest.mark.full),
        ("differ", 120.0, "run a forward pass with different arguments"),
        pytest.param("dequantize", 120.0, "run a forward pass with different arguments", marks=pytest.mark.full),
        pytest.param(
            "starve", 120.0, "load_tp: cpu:1 would have none of the 4 key/value heads", marks=pytest.mark.full
        ),
    ],
)
def test_a_failing_process_ends_the_passes_of_the_others(
    lab: Any, tmp_path: Path, task: str, limit: float, message: str
) -> None:
    """Every later pass fails too, at once: none waits for a process that is lost."""
    first, second = run(tmp_path, {"task": task, "limit": limit, "folder": str(lab.write(**SIZES))})
    assert len(first) == 2
    assert message in first[0]
    assert first[0] == first[1]
    if task in ("differ", "starve"):
        assert message in second[0]
    if task == "die":
        assert second is None


def test_wrong_environments_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXL_DEVICE", "cpu:0,cpu:1")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(errors.DeviceError, match="RANK is ''"):
        ProcessExchange()
    for rank, size in (("0", "3"), ("2", "2")):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", size)
        with pytest.raises(errors.DeviceError, match="one process for each device"):
            ProcessExchange()
    for limit in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(errors.InputError, match="limit is"):
            ProcessExchange(limit)
