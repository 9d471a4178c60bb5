"""A float folder quantized by round to nearest: what is in the files, what they dequantize to, what is refused."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from exl_kernels import formats
from exl_kernels.errors import FormatError, UnsupportedError
from exl_kernels.quantize import command
from exl_kernels.quantize.folder import quantize_folder
from exl_kernels.quantize.plans import ATTENTION_ROLES, HEAD_PLANS, MLP_ROLES, OPTIONS, Matrix, Slot, allocate, point_of

HIDDEN, INNER, KV, VOCAB = 64, 96, 32, 100
PARTS = ("q_weight", "q_scale", "q_scale_max", "q_groups", "q_invperm")


def float_model(*, layers: int = 2, tied: bool = False, fused: bool = False, bias: bool = False) -> dict[str, Tensor]:
    """Random tensors of a small Llama-like model."""
    generator = torch.Generator().manual_seed(layers)

    def weight(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * 0.05).to(torch.bfloat16)

    tensors = {"model.embed_tokens.weight": weight(VOCAB, HIDDEN), "model.norm.weight": weight(HIDDEN)}
    if not tied:
        tensors["lm_head.weight"] = weight(VOCAB, HIDDEN)
    for i in range(layers):
        head = f"model.layers.{i}."
        attention = {"q_proj": HIDDEN, "k_proj": KV, "v_proj": KV}
        mlp = {"gate_proj": INNER, "up_proj": INNER}
        if fused:
            attention, mlp = {"qkv_proj": HIDDEN + 2 * KV}, {"gate_up_proj": 2 * INNER}
        for name, rows in attention.items():
            tensors[f"{head}self_attn.{name}.weight"] = weight(rows, HIDDEN)
            if bias:
                tensors[f"{head}self_attn.{name}.bias"] = weight(rows)
        for name, rows in mlp.items():
            tensors[f"{head}mlp.{name}.weight"] = weight(rows, HIDDEN)
        tensors[f"{head}self_attn.o_proj.weight"] = weight(HIDDEN, HIDDEN)
        tensors[f"{head}mlp.down_proj.weight"] = weight(HIDDEN, INNER)
        tensors[f"{head}input_layernorm.weight"] = weight(HIDDEN)
    return tensors


def write_folder(folder: Path, tensors: dict[str, Tensor], **config: object) -> Path:
    folder.mkdir()
    values = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": HIDDEN} | config
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "tokenizer.json").write_text("{}")
    formats.write_safetensors(folder / "model.safetensors", tensors)
    return folder


def read_matrix(entries: dict[str, formats.TensorEntry], key: str) -> Tensor:
    return formats.exl2_dequantize({part: formats.read_tensor(entries[f"{key}.{part}"]) for part in PARTS}, name=key)


@pytest.mark.parametrize("bits", [4.5, 6.0, 8.5])
def test_weights_come_back_close(tmp_path: Path, bits: float) -> None:
    tensors = float_model()
    source = write_folder(tmp_path / "source", tensors)
    report = quantize_folder(source, tmp_path / "target", bits=bits, head_bits=8)
    entries = formats.read_safetensors_folder(tmp_path / "target")
    assert report.bits_per_weight <= bits
    assert len(report.plans) == 2 * 7 + 1
    for key in report.plans:
        weight = tensors[f"{key}.weight"].float()
        found = read_matrix(entries, key).float().T
        assert found.shape[0] == -(-weight.shape[0] // 32) * 32
        assert not found[weight.shape[0] :].any()
        error = (found[: weight.shape[0]] - weight).norm() / weight.norm()
        assert error < (0.3 if bits == 4.5 else 0.1)
    assert formats.read_tensor(entries["model.norm.weight"]).equal(tensors["model.norm.weight"].half())
    block = json.loads((tmp_path / "target/config.json").read_text())["quantization_config"]
    assert block["quant_method"] == "exl2"
    assert (block["bits"], block["head_bits"]) == (bits, 8)
    assert (tmp_path / "target/tokenizer.json").exists()


def test_more_bits_mean_less_error(tmp_path: Path) -> None:
    tensors = float_model()
    source = write_folder(tmp_path / "source", tensors)
    errors = []
    for bits in (4.0, 5.0, 6.0, 7.0, 8.0):
        report = quantize_folder(source, tmp_path / f"{bits}", bits=bits)
        entries = formats.read_safetensors_folder(tmp_path / f"{bits}")
        keys = [key for key in report.plans if "layers" in key]
        errors.append(
            sum((read_matrix(entries, k).float().T - tensors[f"{k}.weight"].float()).square().sum() for k in keys)
        )
    assert all(wide < 0.75 * narrow for narrow, wide in pairwise(errors))


def test_tied_head_gets_its_own_matrix(tmp_path: Path) -> None:
    tensors = float_model(tied=True)
    quantize_folder(write_folder(tmp_path / "source", tensors), tmp_path / "target", bits=6)
    entries = formats.read_safetensors_folder(tmp_path / "target")
    head = read_matrix(entries, "lm_head")
    assert head.shape == (HIDDEN, 128)
    embedding = formats.read_tensor(entries["model.embed_tokens.weight"])
    assert embedding.dtype == torch.float16
    assert embedding.equal(tensors["model.embed_tokens.weight"].half())
    assert (head.T[:VOCAB].float() - embedding.float()).norm() / embedding.float().norm() < 0.05


def test_fused_matrices_are_split_and_biases_padded(tmp_path: Path) -> None:
    tensors = float_model(fused=True, bias=True)
    report = quantize_folder(write_folder(tmp_path / "source", tensors), tmp_path / "target", bits=8, head_bits=16)
    entries = formats.read_safetensors_folder(tmp_path / "target")
    assert "lm_head.weight" in entries
    assert not any("qkv_proj" in key or "gate_up_proj" in key for key in entries)
    key = "model.layers.1.self_attn.k_proj"
    fused = tensors["model.layers.1.self_attn.qkv_proj.weight"][HIDDEN : HIDDEN + KV].float()
    assert key in report.plans
    assert (read_matrix(entries, key).T.float() - fused).norm() / fused.norm() < 0.05
    bias = tensors["model.layers.1.self_attn.qkv_proj.bias"][HIDDEN : HIDDEN + KV].half()
    assert formats.read_tensor(entries[f"{key}.bias"]).equal(bias)


def test_shards_hold_everything_once(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source", float_model())
    one = quantize_folder(source, tmp_path / "one", bits=5)
    many = quantize_folder(source, tmp_path / "many", bits=5, shard_bytes=20_000)
    assert [file.name for file in one.files] == ["output.safetensors"]
    assert many.files[0].name == f"output-00001-of-{len(many.files):05d}.safetensors"
    first, second = (formats.read_safetensors_folder(tmp_path / name) for name in ("one", "many"))
    assert first.keys() == second.keys()
    assert all(formats.read_tensor(first[key]).equal(formats.read_tensor(second[key])) for key in first)
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())["weight_map"]
    assert index == {key: entry.path.name for key, entry in second.items()}


def test_a_layer_that_exl2_cannot_hold_stays_float(tmp_path: Path) -> None:
    tensors = float_model()
    tensors["model.layers.0.mlp.down_proj.weight"] = torch.ones(HIDDEN, 80)
    report = quantize_folder(write_folder(tmp_path / "source", tensors), tmp_path / "target", bits=6)
    entries = formats.read_safetensors_folder(tmp_path / "target")
    for name in ("gate_proj", "up_proj", "down_proj"):
        assert f"model.layers.0.mlp.{name}" not in report.plans
        assert entries[f"model.layers.0.mlp.{name}.weight"].dtype == "F16"
    assert "model.layers.1.mlp.down_proj" in report.plans


def test_refusals_leave_nothing_behind(tmp_path: Path) -> None:
    good = float_model()
    source = write_folder(tmp_path / "source", good)
    quantize_folder(source, tmp_path / "done", bits=6)
    bad = dict(good)
    bad["model.layers.1.mlp.up_proj.weight"] = torch.full((INNER, HIDDEN), float("nan"))
    broken = write_folder(tmp_path / "broken", bad)
    large = write_folder(tmp_path / "large", good | {"model.norm.weight": torch.full((HIDDEN,), 1e6)})
    empty = write_folder(tmp_path / "empty", {"model.embed_tokens.weight": torch.ones(4, 4)})
    cases = [
        (source, "done", {}, FormatError, "must be new or empty"),
        (source, "done/config.json", {}, FormatError, "must be new or empty"),
        (tmp_path / "done", "x", {}, FormatError, "already quantized"),
        (source, "x", {"bits": 1.5}, FormatError, "at least"),
        (source, "x", {"bits": 20}, FormatError, "bits 20"),
        (source, "x", {"head_bits": 7}, FormatError, "head_bits 7"),
        (broken, "x", {"bits": 6}, FormatError, "layers.1.mlp.up_proj"),
        (large, "x", {"bits": 6}, FormatError, "model.norm.weight"),
        (empty, "x", {}, UnsupportedError, "q_proj"),
        (tmp_path / "nowhere", "x", {}, FormatError, "config.json"),
    ]
    for folder, target, options, kind, text in cases:
        with pytest.raises(kind, match=text):
            quantize_folder(folder, tmp_path / target, **options)  # type: ignore[arg-type]
        assert not (tmp_path / "x").exists()
    assert (tmp_path / "done/output.safetensors").exists()


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_folder(tmp_path / "source", float_model(layers=1))
    assert command.main([str(source), str(tmp_path / "target"), "--bits", "6", "--fast"]) == 0
    assert "bits per weight" in capsys.readouterr().out
    assert command.main([str(source), str(tmp_path / "target")]) == 1
    assert "must be new or empty" in capsys.readouterr().err


def test_every_plan_of_the_tables_is_valid() -> None:
    plans = [plan for table in OPTIONS.values() for option in table for plan in option.values()]
    assert len(plans) == 19 * len(ATTENTION_ROLES) + 17 * len(MLP_ROLES)
    for plan in [*plans, *HEAD_PLANS.values()]:
        assert sum(rows for _, rows in formats.exl2_groups(plan, 4096)) == 4096


@examples(40, 8)
@given(
    layers=st.integers(1, 40),
    hidden=st.sampled_from([64, 256, 2048, 4096]),
    inner=st.sampled_from([96, 768, 5632, 14336]),
    bits=st.floats(1.0, 9.0),
)
def test_allocation_keeps_the_budget(layers: int, hidden: int, inner: int, bits: float) -> None:
    slots = []
    for i in range(layers):
        slots.append(Slot(f"{i}.a", tuple(Matrix(f"{i}.{r}", r, hidden, hidden) for r in ATTENTION_ROLES)))
        shapes = {"gate": (hidden, inner), "up": (hidden, inner), "down": (inner, hidden)}
        slots.append(Slot(f"{i}.m", tuple(Matrix(f"{i}.{r}", r, *shapes[r]) for r in MLP_ROLES)))
    weights = sum(m.weights for slot in slots for m in slot.matrices)
    if bits < 2.0:
        with pytest.raises(FormatError, match="too little"):
            allocate(slots, bits)
        return
    least = sum(
        formats.exl2_total_bits(slot.options[0][m.role], m.in_features, m.out_features)
        for slot in slots
        for m in slot.matrices
    )
    plans = allocate(slots, max(bits, (least + 1) / weights))
    bits = max(bits, (least + 1) / weights)
    used = sum(formats.exl2_total_bits(plans[m.key], m.in_features, m.out_features) for s in slots for m in s.matrices)
    assert used <= bits * weights
    assert plans == allocate(slots, bits)
    # The rest buys no slot a better option (one wide slot alone can leave more than a bit per weight).
    left = int(bits * weights) - used
    for slot in slots:
        points = [point_of(slot, i) for i in range(len(slot.options))]
        taken = next(
            p
            for p, o in zip(points, slot.options, strict=True)
            if all(plans[m.key] == o[m.role] for m in slot.matrices)
        )
        assert all(p.bits - taken.bits > left for p in points if p.error < taken.error)
