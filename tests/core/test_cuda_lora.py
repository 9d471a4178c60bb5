"""LoRA on a GPU: the CPU's logits with the same adapter, and rows that do not depend on the batch; needs a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mixtures import FAMILIES
from mixtures import SIZES as MIXTURE_SIZES
from random_models import loaded_on, write_random_model

from exl_core import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Lora, PagedParams
from exl_core.device import GIB, devices
from exl_core.loading.plan import plan_modules
from exl_kernels.safetensors_file import write_safetensors

pytestmark = [pytest.mark.cuda, pytest.mark.covers("core: lora")]

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "vocab_size": 512}


def adapter(folder: Path, rank: int = 6) -> Path:
    """Projections and a head of its own."""
    generator = torch.Generator().manual_seed(3)
    head = {"base_model.model.lm_head.weight": (torch.randn(512, 256, generator=generator) * 0.3).half()}
    return projections(folder, rank, head, generator)


def projections(
    folder: Path, rank: int, others: dict[str, torch.Tensor] | None = None, generator: torch.Generator | None = None
) -> Path:
    folder.mkdir(parents=True)
    generator = generator or torch.Generator().manual_seed(rank)
    tensors = dict(others or {})
    for layer in range(2):
        for block, name, inputs, outputs in (
            ("self_attn", "q_proj", 256, 256),
            ("self_attn", "v_proj", 256, 128),
            ("self_attn", "o_proj", 256, 256),
            ("mlp", "gate_proj", 256, 384),
            ("mlp", "down_proj", 384, 256),
        ):
            key = f"base_model.model.model.layers.{layer}.{block}.{name}"
            tensors[f"{key}.lora_A.weight"] = (torch.randn(rank, inputs, generator=generator) * 0.05).half()
            tensors[f"{key}.lora_B.weight"] = (torch.randn(outputs, rank, generator=generator) * 0.05).half()
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    (folder / "adapter_config.json").write_text(f'{{"peft_type": "LORA", "r": {rank}, "lora_alpha": {3 * rank}}}')
    return folder


@pytest.mark.parametrize("kind", ["float", "exl2", "gptq"])
def test_logits_and_rows(lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    folder, adapted = lab.write(kind=kind, **SIZES), adapter(tmp_path / "adapter")
    ids = lab.ids(8, 70, vocab=512)
    cpu = lab.load(folder)
    expected = cpu.forward(ids, loras=[ExLlamaV2Lora.from_directory(cpu, adapted)])
    monkeypatch.setenv("EXL_DEVICE", "cuda:0")
    model = ExLlamaV2(ExLlamaV2Config(folder))
    model.load()
    lora = ExLlamaV2Lora.from_directory(model, adapted)
    assert all(pair.a.device.type == "cuda" for pair in lora.tensors.values())
    logits = model.forward(ids, ExLlamaV2Cache(model, batch_size=8), loras=[lora]).cpu()
    plain = model.forward(ids, ExLlamaV2Cache(model, batch_size=8)).cpu()
    scale = float(expected[..., :512].abs().max())
    assert float((logits - expected)[..., :512].abs().max()) < 0.02 * scale
    assert float((logits - plain)[..., :512].abs().max()) > 0.1 * scale

    cache = ExLlamaV2Cache(model, max_seq_len=2048)
    model.forward(ids, cache=ExLlamaV2Cache(model, batch_size=8), loras=[lora])
    for token in range(3):  # decode steps of eight rows in pages, against one row alone
        params = PagedParams(
            8,
            torch.arange(8, dtype=torch.int32)[:, None],
            torch.full((8,), token, dtype=torch.int32),
            token,
        )
        step = ids[:, token : token + 1]
        together = model.forward_chunk(step, cache, attn_params=params, loras=[lora])["logits"].clone()
        for row in (0, 5):
            alone = PagedParams(1, params.block_index[row : row + 1], params.cache_seqlens[row : row + 1], token)
            single = model.forward_chunk(step[row : row + 1], cache, attn_params=alone, loras=[lora])["logits"]
            assert torch.equal(single, together[row : row + 1])


def test_a_router_of_an_adapter_keeps_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A router of the model does, too: weights far smaller than the largest may choose an expert."""
    family = "MixtralForCausalLM"
    folder = write_random_model(tmp_path / "model", {**MIXTURE_SIZES, **FAMILIES[family], "architectures": [family]})
    model = loaded_on("cuda:0", folder, monkeypatch)
    (router,) = (linear for linear in model.linears() if linear.spec.role == "router" and ".0." in linear.key)
    generator = torch.Generator().manual_seed(1)
    weight = (torch.randn(router.out_features, router.in_features, generator=generator) * 2.0**-22).to(torch.bfloat16)
    weight[0, 0] = 2.0
    name = f"base_model.model.{router.key}.weight"
    folder = tmp_path / "adapter"
    folder.mkdir()
    write_safetensors(folder / "adapter_model.safetensors", {name: weight})
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 4}')
    lora = ExLlamaV2Lora.from_directory(model, folder)
    x = (torch.randn(3, router.in_features, generator=generator) * 1e3).half()
    found = router.forward_precise(x.cuda(), [lora]).double().cpu()
    want = x.double() @ weight.double().t()
    assert (found[:, 1:] - want[:, 1:]).abs().max() <= 1e-6 * want[:, 1:].abs().max()


def test_an_adapter_over_two_gpus(lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its matrices are on the devices of the model's: the logits are bitwise those of one GPU."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU here: this test runs on a machine with two")
    folder, adapted = lab.write(kind="exl2", num_hidden_layers=2, **SIZES), adapter(tmp_path / "adapter")
    folders = [projections(tmp_path / str(rank), rank) for rank in (6, 40)]
    ids = lab.ids(2, 40, vocab=512)
    found: list[torch.Tensor] = []
    captured: list[torch.Tensor] = []
    for names, split in (("cuda:0", None), ("cuda:0,cuda:1", True)):
        monkeypatch.setenv("EXL_DEVICE", names)
        model = ExLlamaV2(ExLlamaV2Config(folder))
        needed = plan_modules(model.config, model.modules, devices()[:1], None, [64.0], None, True).devices[0]
        model.load([(needed.weights * 0.6 + needed.tables + needed.scratch) / GIB, 8.0] if split else None)
        assert len(set(model.cache_map.values())) == (2 if split else 1)
        lora = ExLlamaV2Lora.from_directory(model, adapted)
        found.append(model.forward(ids, ExLlamaV2Cache(model, batch_size=2), loras=[lora]).cpu())
        loras = [ExLlamaV2Lora.from_directory(model, path) for path in folders]
        cache = ExLlamaV2Cache(model, max_seq_len=1024)
        for token, sets in enumerate(([(0,), (), (1, 0), (1,)], [(), (0, 1), (0,), ()])):
            past = torch.full((4,), token, dtype=torch.int32)
            params = PagedParams(4, torch.arange(4, dtype=torch.int32)[:, None], past, token)
            rows = [[loras[i] for i in numbers] for numbers in sets]
            step = model.forward_chunk(ids[:1, token::10].T, cache, attn_params=params, row_loras=rows)
            captured.append(step["logits"].cpu())
        assert model.decode.count > 0, model.decode.reason
    assert torch.equal(*found)
    assert all(torch.equal(*pair) for pair in zip(captured[:2], captured[2:], strict=True))


@pytest.mark.parametrize("kind", ["exl2", "gptq"])
def test_rows_with_adapters_of_their_own(lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """By kernels, captured: bitwise the step of each row alone, eager and captured; the CPU's logits."""
    folder = lab.write(kind=kind, **SIZES)
    folders = [projections(tmp_path / str(rank), rank) for rank in (6, 40)]
    sets = [(0,), (), (1, 0), (0, 1), (1,), (0,), (), (1,)]
    ids = lab.ids(8, 1, vocab=512)
    params = PagedParams(8, torch.arange(8, dtype=torch.int32)[:, None], torch.zeros(8, dtype=torch.int32), 0)

    def steps(model: ExLlamaV2) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Logits of all rows together, and of each alone."""
        loras = [ExLlamaV2Lora.from_directory(model, one) for one in folders]
        rows = [[loras[i] for i in found] for found in sets]
        cache = ExLlamaV2Cache(model, max_seq_len=2048)
        together = model.forward_chunk(ids, cache, attn_params=params, row_loras=rows)["logits"].cpu().clone()
        assert model.device is not None
        assert model.device.type == "cpu" or model.decode.reason == expected_reason, model.decode.reason
        single = []
        for row, adapters in enumerate(rows):
            alone = PagedParams(1, params.block_index[row : row + 1], params.cache_seqlens[row : row + 1], 0)
            out = model.forward_chunk(ids[row : row + 1], cache, attn_params=alone, loras=adapters)
            single.append(out["logits"][0].cpu().clone())
        for lora in loras:
            lora.unload()
        return together, single

    expected_reason: str | None = None
    reference, _ = steps(lab.load(folder))
    monkeypatch.setenv("EXL_DEVICE", "cuda:0")
    model = ExLlamaV2(ExLlamaV2Config(folder))
    model.load()
    together, single = steps(model)
    for row in range(8):
        assert torch.equal(single[row], together[row]), (row, sets[row])
    scale = float(reference[..., :512].abs().max())
    assert float((together - reference)[..., :512].abs().max()) < 0.02 * scale
    monkeypatch.setenv("EXL_CUDA_GRAPHS", "0")
    expected_reason = "EXL_CUDA_GRAPHS=0 asks for eager launches"
    eager_model = ExLlamaV2(ExLlamaV2Config(folder))
    eager_model.load()
    eager, _ = steps(eager_model)
    assert torch.equal(eager, together)


@pytest.mark.parametrize("kind", ["exl2", "gptq"])
@pytest.mark.parametrize(
    ("batch", "q_len"), [(1, 1), (1, 4), (2, 1), (6, 1), (3, 2), (32, 1), (64, 1), (65, 1), (160, 1), (20, 4)]
)
def test_captured_steps_with_adapters(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, batch: int, q_len: int
) -> None:
    """Captured with joined launches, captured module by module, and eager: bitwise the same, while adapters change."""
    folder = lab.write(kind=kind, **SIZES)
    folders = [projections(tmp_path / str(rank), rank) for rank in (6, 40, 16)]
    ids = lab.ids(batch, 5 * q_len, vocab=512)
    monkeypatch.setenv("EXL_DEVICE", "cuda:0")
    model = ExLlamaV2(ExLlamaV2Config(folder))
    model.load()

    def steps(*, captured: bool) -> list[torch.Tensor]:
        """Logits of five steps, each with other adapters; the third adapter comes late, and the first one goes."""
        loras = [ExLlamaV2Lora.from_directory(model, one) for one in folders[:2]]
        cache, found = ExLlamaV2Cache(model, max_seq_len=256 * batch), []
        for turn in range(5):
            if turn == 2:
                loras.append(ExLlamaV2Lora.from_directory(model, folders[2]))
            if turn == 4:
                loras.pop(0).unload()
            sets = [[], [loras[0]], [loras[-1], loras[0]], [loras[1]]]
            rows = [sets[(row + turn + 1) % 4] for row in range(batch)]
            past = torch.full((batch,), turn * q_len, dtype=torch.int32)
            table = torch.arange(batch, dtype=torch.int32)[:, None]
            params = PagedParams(batch, table, past, turn * q_len, q_len=q_len)
            now = ids[:, turn * q_len : (turn + 1) * q_len]
            logits = model.forward_chunk(now, cache, attn_params=params, row_loras=rows)["logits"]
            assert (model.decode.reason is None) == captured, model.decode.reason
            found.append(logits.cpu().clone())
        for lora in loras:
            lora.unload()
        return found

    joined = steps(captured=True)
    assert model.decode.apart_reason is None
    monkeypatch.setenv("EXL_DECODE_JOINED_ADAPTERS", "0")
    apart = steps(captured=batch * q_len <= 64)  # modules' own passes of more rows are not captured
    monkeypatch.setenv("EXL_CUDA_GRAPHS", "0")
    model.decode.clear()
    eager = steps(captured=False)
    for turn in range(5):
        assert torch.equal(joined[turn], apart[turn]), turn
        assert torch.equal(joined[turn], eager[turn]), turn
