"""From files to a loaded model: shards, formats side by side, callbacks, and broken files that leave nothing behind."""

from __future__ import annotations

import gc
import json
import os
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from exl_core import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, errors
from exl_core.loading import checkpoint
from exl_core.loading.sizes import module_tensors
from exl_kernels.formats import gptq_dequantize, gptq_quantize
from exl_kernels.safetensors_file import read_safetensors_header, write_safetensors

pytestmark = pytest.mark.covers("core: loading")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


# ------------------------------------------------------------------------------------------------------ what must work


def test_callbacks_and_generator(lab: Any) -> None:
    config = ExLlamaV2Config(lab.write())
    model = ExLlamaV2(config)
    seen: list[tuple[int, int]] = []

    def report(index: int, total: int) -> Iterator[str]:
        yield f"{index}/{total}"

    yielded = list(model.load_gen(callback=lambda i, n: seen.append((i, n)), callback_gen=report))
    assert seen == [(i, 7) for i in range(8)]
    assert yielded == [f"{i}/7" for i in range(8)]
    assert model.loaded
    assert all(m.loaded for m in model.modules)
    before = [m.weight_bytes() for m in model.modules]
    model.load()  # nothing to do
    assert [m.weight_bytes() for m in model.modules] == before
    with pytest.raises(errors.InputError, match="progress"):
        model.load(callback=lambda i, n: None, progress=True)


def test_lazy_plans_and_modules_load_one_by_one(lab: Any) -> None:
    model = ExLlamaV2(ExLlamaV2Config(lab.write()))
    model.load(lazy=True)
    assert not model.loaded
    assert model.cache_map == {0: "cpu", 1: "cpu"}
    assert model.weight_bytes() == 0
    with pytest.raises(errors.ModelStateError):
        model.forward(lab.ids(1, 4))


@pytest.mark.covers("core: loading-memory")
def test_unload_and_load_again(lab: Any) -> None:
    model = lab.load(lab.write())
    ids = lab.ids(1, 12)
    expected = model.forward(ids)
    model.unload()
    assert not model.loaded
    assert model.weight_bytes() == 0
    assert model.cache_map == {}
    with pytest.raises(errors.ModelStateError):
        model.forward(ids)
    model.load()
    assert torch.equal(model.forward(ids), expected)


@pytest.mark.parametrize("kind", ["float", "exl2", "gptq"])
def test_shards_give_the_same_model(lab: Any, kind: str) -> None:
    """Tensors of one linear lie in different files."""
    ids = lab.ids(1, 12)
    one, many = lab.load(lab.write(kind=kind)), lab.load(lab.write(kind=kind, shards=5))
    assert len(many.config.tensor_files) == 5
    assert torch.equal(one.forward(ids), many.forward(ids))


def test_fused_matrices_are_split(lab: Any, tmp_path: Path) -> None:
    tensors = lab.random_tensors(lab.config)
    fused = dict(tensors)
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        for name, parts in (
            ("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
        ):
            fused[f"{prefix}{name}.weight"] = torch.cat([fused.pop(f"{prefix}{p}.weight") for p in parts])
    expected = lab.load(lab.write_model(tmp_path / "split", lab.config, tensors))
    for kind in ("float", "gptq", "exl2"):
        source = fused if kind == "float" else lab.quantize(fused, kind)
        model = lab.load(lab.write_model(tmp_path / f"fused-{kind}", lab.config, source))
        for key in ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.up_proj"):
            found, wanted = (m.modules_dict[key].get_weight_tensor_dq() for m in (model, expected))
            assert found.shape == wanted.shape
            if kind == "float":
                assert torch.equal(found, wanted)
            else:
                assert float((found - wanted).abs().max()) < 0.1


@pytest.mark.parametrize("kind", ["float", "gptq", "exl2"])
@pytest.mark.parametrize("heads", [1, 4])
def test_a_fused_matrix_of_other_head_counts_is_refused(lab: Any, tmp_path: Path, kind: str, heads: int) -> None:
    """config.json says another number of key/value heads than the file's rows: every slice would be wrong."""
    tensors = lab.random_tensors(lab.config)
    for layer in range(2):
        prefix = f"model.layers.{layer}.self_attn."
        parts = [tensors.pop(f"{prefix}{part}.weight") for part in ("q_proj", "k_proj", "v_proj")]
        tensors[f"{prefix}qkv_proj.weight"] = torch.cat(parts)
    source = tensors if kind == "float" else lab.quantize(tensors, kind)
    folder = lab.write_model(tmp_path, {**lab.config, "num_key_value_heads": heads}, source)
    with pytest.raises(errors.FormatError, match=r"qkv_proj.*128 outputs in the file, config.json needs"):
        lab.load(folder)


@pytest.mark.covers("core: architecture-details")
def test_the_mlp_under_its_other_names(lab: Any, tmp_path: Path) -> None:
    """`swiglu.w12`, gate above up, and `swiglu.w3`, with biases and without."""
    for bias in (False, True):
        config = {**lab.config, "mlp_bias": bias}
        tensors = lab.random_tensors(config)
        expected = lab.load(lab.write_model(tmp_path / f"split-{bias}", config, tensors))
        for layer in range(2):
            mlp = f"model.layers.{layer}.mlp."
            for suffix in ("weight", *(["bias"] if bias else [])):
                parts = [tensors.pop(f"{mlp}{p}_proj.{suffix}") for p in ("gate", "up")]
                tensors[f"{mlp}swiglu.w12.{suffix}"] = torch.cat(parts)
                tensors[f"{mlp}swiglu.w3.{suffix}"] = tensors.pop(f"{mlp}down_proj.{suffix}")
        found = lab.load(lab.write_model(tmp_path / f"fused-{bias}", config, tensors))
        assert (found.config.checkpoint_fused_mlp, expected.config.checkpoint_fused_mlp) == (True, False)
        assert torch.equal(found.forward(lab.ids(1, 9)), expected.forward(lab.ids(1, 9)))


@pytest.mark.covers("core: loading-memory")
def test_bytes_loaded_are_known_in_a_callback(lab: Any) -> None:
    """Progress is reported in bytes as well as in modules."""
    model = ExLlamaV2(ExLlamaV2Config(lab.write(kind="exl2")))
    seen: list[int] = []
    model.load(callback=lambda index, total: seen.append(model.weight_bytes()))
    assert seen == sorted(seen)
    assert seen[0] == 0
    assert seen[-1] == model.weight_bytes() > 0
    assert len(set(seen)) == len(seen)


def test_formats_may_be_mixed(lab: Any, tmp_path: Path) -> None:
    tensors = lab.random_tensors(lab.config)
    mixed = lab.quantize(tensors, "exl2", keep=lambda key: "k_proj" in key or "layers.1.mlp.up" in key)
    model = lab.load(lab.write_model(tmp_path, lab.config, mixed))
    assert not model.modules_dict["model.layers.0.self_attn.k_proj"].is_quant()
    assert model.modules_dict["model.layers.0.self_attn.q_proj"].is_quant()
    assert model.is_quant()
    assert torch.isfinite(model.forward(lab.ids(1, 10))).all()


def test_tied_head_and_a_head_of_its_own(lab: Any, tmp_path: Path) -> None:
    config = {**lab.config, "tie_word_embeddings": True}
    tensors = lab.random_tensors(config)
    tied = lab.load(lab.write_model(tmp_path / "tied", config, tensors))
    embedding = tensors["model.embed_tokens.weight"]
    assert torch.equal(tied.modules_dict["lm_head"].get_weight_tensor_dq(), embedding.T)
    own = {**tensors, "lm_head.weight": embedding.flip(0)}
    model = lab.load(lab.write_model(tmp_path / "own", config, own))
    assert torch.equal(model.modules_dict["lm_head"].get_weight_tensor_dq(), embedding.flip(0).T)


@pytest.mark.parametrize(("kind", "tied"), [("float", True), ("float", False), ("exl2", False)])
def test_every_tensor_is_read_once(lab: Any, monkeypatch: pytest.MonkeyPatch, kind: str, tied: bool) -> None:
    config = ExLlamaV2Config(lab.write(kind=kind, tie_word_embeddings=tied))
    names: list[str] = []
    original = checkpoint.read_into

    def spy(path: Path, offset: int, tensor: torch.Tensor, *, name: str = "") -> None:
        names.append(name)
        original(path, offset, tensor, name=name)

    monkeypatch.setattr(checkpoint, "read_into", spy)
    ExLlamaV2(config).load()
    assert sorted(names) == sorted(config.tensor_file_map)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_float_types(lab: Any, tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {k: v.to(dtype) for k, v in lab.random_tensors(lab.config).items()}
    model = lab.load(lab.write_model(tmp_path, lab.config, tensors))
    half = lab.load(lab.write())
    error = (model.forward(lab.ids(1, 10)) - half.forward(lab.ids(1, 10))).abs().max()
    assert float(error) < (0.2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.covers("core: rope-tables")
@pytest.mark.parametrize("way", ["load", "module by module", "load again"])
@pytest.mark.parametrize(("name", "value"), [("scale_alpha_value", 3.0), ("rotary_embedding_base", 1e6)])
def test_settings_of_the_rotation_may_change_until_the_model_is_loaded(
    lab: Any, way: str, name: str, value: float
) -> None:
    folder = lab.write()
    before, after = ExLlamaV2Config(folder), ExLlamaV2Config(folder)
    setattr(before, name, value)
    expected, model = ExLlamaV2(before), ExLlamaV2(after)
    expected.load()
    if way == "load again":
        model.load()
        plain = model.content_digest
        model.unload()
    setattr(after, name, value)
    model.load(lazy=way == "module by module")
    for index in range(0 if model.loaded else len(model.modules)):
        model.load_module(index)
    ids = lab.ids(1, 40)
    assert torch.equal(model.forward(ids), expected.forward(ids))
    assert model.content_digest == expected.content_digest
    if way == "load again":
        assert model.content_digest != plain


def test_no_tensors_config_cannot_load(lab: Any) -> None:
    config = ExLlamaV2Config()
    config.model_dir = str(lab.write())
    config.prepare(no_tensors=True)
    with pytest.raises(errors.ModelStateError, match="no_tensors"):
        ExLlamaV2(config).load()


def test_a_zero_bias_that_config_does_not_declare_is_ignored(lab: Any, tmp_path: Path) -> None:
    tensors = lab.random_tensors(lab.config)
    plain = lab.load(lab.write_model(tmp_path / "plain", lab.config, tensors))
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64, dtype=torch.half)
    model = lab.load(lab.write_model(tmp_path / "zero", lab.config, tensors))
    assert torch.equal(model.forward(lab.ids(1, 5)), plain.forward(lab.ids(1, 5)))


# --------------------------------------------------------------------------------------------------- what must not work

Damage = Callable[[dict[str, torch.Tensor]], None]
Q = "model.layers.1.self_attn.q_proj"


def put(name: str, value: Any) -> Damage:
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = value

    return damage


def edit(name: str, change: Callable[[torch.Tensor], Any]) -> Damage:
    """Change the named tensor in place, or replace it by what `change` returns."""

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensor = tensors[name].clone()
        replaced = change(tensor)
        tensors[name] = replaced if isinstance(replaced, torch.Tensor) else tensor

    return damage


def drop(name: str) -> Damage:
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[name]

    return damage


def set_first(value: float) -> Callable[[torch.Tensor], None]:
    def change(tensor: torch.Tensor) -> None:
        tensor.view(-1)[0] = value

    return change


BROKEN: dict[str, tuple[str, Damage, str]] = {
    "NaN in a weight": ("float", edit(f"{Q}.weight", set_first(float("nan"))), f"{Q}.weight"),
    "infinity in a weight": ("float", edit(f"{Q}.weight", set_first(float("inf"))), f"{Q}.weight"),
    "NaN in a norm": ("float", edit("model.norm.weight", set_first(float("nan"))), "model.norm.weight"),
    "NaN in the embedding": (
        "float",
        edit("model.embed_tokens.weight", set_first(float("nan"))),
        "model.embed_tokens.weight",
    ),
    "NaN in an EXL2 scale": ("exl2", edit(f"{Q}.q_scale_max", set_first(float("nan"))), Q),
    "NaN in a GPTQ scale": ("gptq", edit(f"{Q}.scales", set_first(float("nan"))), Q),
    "groups that do not add up": ("exl2", edit(f"{Q}.q_groups", lambda t: t[:-2]), Q),
    "impossible width": ("exl2", edit(f"{Q}.q_groups", set_first(7)), Q),
    "not a permutation": ("exl2", edit(f"{Q}.q_invperm", set_first(1)), Q),
    "short q_weight": ("exl2", edit(f"{Q}.q_weight", lambda t: t[:-1]), Q),
    "narrow q_scale": ("exl2", edit(f"{Q}.q_scale", lambda t: t[:, :-1]), Q),
    "missing q_scale": ("exl2", drop(f"{Q}.q_scale"), f"{Q}.q_scale"),
    "missing qzeros": ("gptq", drop(f"{Q}.qzeros"), f"{Q}.qzeros"),
    "integer weight": ("float", edit(f"{Q}.weight", lambda t: t.int()), f"{Q}.weight"),
    "float codes": ("exl2", edit(f"{Q}.q_weight", lambda t: t.float()), Q),
    "three dimensions": ("float", edit(f"{Q}.weight", lambda t: t[None]), f"{Q}.weight"),
    "narrow weight": ("float", edit(f"{Q}.weight", lambda t: t[:, :32]), Q),
    "short weight": ("float", edit(f"{Q}.weight", lambda t: t[:32]), Q),
    "wide weight": ("float", edit(f"{Q}.weight", lambda t: torch.cat([t, t])), Q),
    "short norm": ("float", edit("model.norm.weight", lambda t: t[:32]), "model.norm.weight"),
    "norm with a bias": ("float", put("model.norm.bias", torch.zeros(64)), "model.norm.bias"),
    "short embedding": (
        "float",
        edit("model.embed_tokens.weight", lambda t: t[:50]),
        "model.embed_tokens.weight",
    ),
    "bias nobody declared": ("float", put(f"{Q}.bias", torch.ones(64)), f"{Q}.bias"),
}


@pytest.mark.covers("core: files-damaged")
@pytest.mark.parametrize("case", sorted(BROKEN))
def test_broken_tensors_name_file_and_tensor_and_leave_nothing(lab: Any, tmp_path: Path, case: str) -> None:
    kind, damage, named = BROKEN[case]
    tensors = lab.random_tensors(lab.config)
    tensors = lab.quantize(tensors, kind) if kind != "float" else tensors
    damage(tensors)
    folder = lab.write_model(tmp_path, lab.config, tensors)
    model = ExLlamaV2(ExLlamaV2Config(folder))
    files = open_files()
    with pytest.raises(errors.FormatError) as e:
        model.load()
    assert named in str(e.value)
    assert "model.safetensors" in str(e.value)
    assert not model.loaded
    assert not any(m.loaded for m in model.modules)
    assert model.weight_bytes() == 0
    assert model.cache_map == {}
    assert open_files() <= files  # less where those of other tests are gone


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight", f"{Q}.weight", "model.embed_tokens.weight"])
def test_missing_modules_are_found_before_loading(lab: Any, tmp_path: Path, name: str) -> None:
    tensors = lab.random_tensors(lab.config)
    del tensors[name]
    with pytest.raises(errors.MissingTensorError, match=name.removesuffix(".weight")):
        ExLlamaV2Config(lab.write_model(tmp_path, lab.config, tensors))


def test_missing_declared_bias(lab: Any, tmp_path: Path) -> None:
    config = {**lab.config, "architectures": ["Qwen2ForCausalLM"]}
    tensors = lab.random_tensors(config)
    del tensors[f"{Q}.bias"]
    model = ExLlamaV2(ExLlamaV2Config(lab.write_model(tmp_path, config, tensors)))
    with pytest.raises(errors.MissingTensorError, match="no bias but bias expected"):
        model.load()


def test_no_weight_files(lab: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(lab.config))
    with pytest.raises(errors.ConfigFileError, match=r"No \.safetensors files"):
        ExLlamaV2Config(tmp_path)


def test_the_same_tensor_in_two_files(lab: Any) -> None:
    folder = lab.write()
    write_safetensors(folder / "zz-extra.safetensors", {"model.norm.weight": torch.ones(64)})
    with pytest.raises(errors.FormatError, match=r"model\.norm\.weight.*also in model\.safetensors"):
        ExLlamaV2Config(folder)


@pytest.mark.covers("core: files-damaged")
def test_truncated_file_is_refused_before_loading(lab: Any) -> None:
    folder = lab.write()
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(errors.FormatError, match=r"model\.safetensors"):
        ExLlamaV2Config(folder)


@pytest.mark.covers("core: files-damaged")
def test_file_truncated_after_prepare(lab: Any) -> None:
    folder = lab.write()
    model = ExLlamaV2(ExLlamaV2Config(folder))
    os.truncate(folder / "model.safetensors", 5000)
    with pytest.raises(errors.FormatError, match=r"model\.safetensors"):
        model.load()
    assert not any(m.loaded for m in model.modules)


@pytest.mark.covers("core: files-damaged", "core: loading")
def test_file_replaced_after_prepare(lab: Any) -> None:
    """Another file under the same name, even of the same size and layout, is not the one whose header was checked."""
    folder, other = lab.write(seed=1), lab.write(seed=2)
    model = ExLlamaV2(ExLlamaV2Config(folder))
    os.replace(other / "model.safetensors", folder / "model.safetensors")
    with pytest.raises(errors.FormatError, match=r"model\.safetensors: the file changed"):
        model.load()
    assert not any(m.loaded for m in model.modules)
    model.config.prepare()
    model.load()
    (folder / "model.safetensors").unlink()
    again = ExLlamaV2(model.config)
    with pytest.raises(errors.FormatError, match=r"model\.safetensors: cannot be read"):
        again.load()


def test_file_written_to_while_it_is_read(lab: Any) -> None:
    folder = lab.write()
    model = ExLlamaV2(ExLlamaV2Config(folder))

    def touch(index: int, total: int) -> None:
        if index == 3:
            os.utime(folder / "model.safetensors", ns=(1, 1))

    with pytest.raises(errors.FormatError, match="the file changed"):
        model.load(callback=touch)
    assert not any(m.loaded for m in model.modules)


@pytest.mark.covers("core: safetensors")
def test_links_to_weight_files(lab: Any, tmp_path: Path) -> None:
    """The folder holds links to files with other names, as download caches do."""
    folder = lab.write(shards=3)
    for i, file in enumerate(sorted(folder.iterdir())):
        (tmp_path / f"blob{i}").write_bytes(file.read_bytes())
        (tmp_path / "snapshot").mkdir(exist_ok=True)
        (tmp_path / "snapshot" / file.name).symlink_to(tmp_path / f"blob{i}")
    ids = lab.ids(1, 8)
    assert torch.equal(lab.load(tmp_path / "snapshot").forward(ids), lab.load(folder).forward(ids))


def test_tensors_that_the_model_does_not_use_are_logged(
    lab: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lab.load(lab.write())
    assert not caplog.records
    tensors = lab.random_tensors(lab.config)
    folder = lab.write_model(tmp_path / "deep", {**lab.config, "num_hidden_layers": 1}, tensors)
    assert torch.isfinite(lab.load(folder).forward(lab.ids(1, 4))).all()
    assert "9 tensors are not part of this model" in caplog.text
    assert "model.layers.1.input_layernorm.weight" in caplog.text
    caplog.clear()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    folder = lab.write_model(tmp_path / "old", lab.config, tensors)
    lab.load(folder)
    assert not caplog.records
    with open(folder / "model.safetensors", "ab") as file:
        file.write(b"12345")
    lab.load(folder)
    assert "5 bytes after the last tensor are ignored" in caplog.text


@pytest.mark.covers("core: safetensors")
def test_reading_ahead_knows_every_matrix_and_is_no_need(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, changes in (("exl2", {}), ("gptq", {}), ("float", {"tie_word_embeddings": True})):
        config = ExLlamaV2Config(lab.write(kind=kind, shards=2, **changes))
        modules = ExLlamaV2(config).modules
        assert config.checkpoint is not None
        asked = set().union(*module_tensors(modules, config.checkpoint))
        assert asked == {name for name in config.tensor_file_map if "norm" not in name}
    before = set(threading.enumerate())
    monkeypatch.delattr(os, "RWF_NOWAIT", raising=False)  # every block is read
    assert lab.load(lab.write(shards=3)).loaded
    monkeypatch.delattr(os, "preadv")
    assert lab.load(lab.write()).loaded
    assert set(threading.enumerate()) <= before  # those of other tests may end meanwhile


def test_overlapping_tensors(lab: Any) -> None:
    folder = lab.write()
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + size])
    header[f"{Q}.weight"]["data_offsets"] = header["model.layers.0.self_attn.q_proj.weight"]["data_offsets"]
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])
    with pytest.raises(errors.FormatError, match=r"model\.safetensors"):
        ExLlamaV2Config(folder)


def test_error_in_a_callback_unloads(lab: Any) -> None:
    model = ExLlamaV2(ExLlamaV2Config(lab.write()))

    def fail(index: int, total: int) -> None:
        if index == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.load(callback=fail)
    assert not any(m.loaded for m in model.modules)
    model.load()
    assert model.loaded


def test_abandoned_generator_unloads(lab: Any) -> None:
    model = ExLlamaV2(ExLlamaV2Config(lab.write()))

    def report(index: int, total: int) -> Iterator[int]:
        yield index

    generator = model.load_gen(callback_gen=report)
    for _ in range(4):
        next(generator)
    assert any(m.loaded for m in model.modules)
    generator.close()  # type: ignore[attr-defined]
    assert not any(m.loaded for m in model.modules)


def test_device_variable(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = lab.write()
    monkeypatch.setenv("EXL_DEVICE", "cpu")
    assert lab.load(folder).device == torch.device("cpu")
    for value, error in (("tpu", errors.DeviceError), ("cuda:99", errors.DeviceError)):
        monkeypatch.setenv("EXL_DEVICE", value)
        with pytest.raises(error, match="EXL_DEVICE"):
            lab.load(folder)


@pytest.mark.covers("core: loading-memory")
def test_loading_and_dropping_many_times_holds_no_memory(lab: Any) -> None:
    folder = lab.write(hidden_size=256, intermediate_size=512, vocab_size=2048, kind="exl2")

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    def once() -> None:
        model = lab.load(folder)
        model.forward(lab.ids(1, 20), ExLlamaV2Cache(model, max_seq_len=64))
        model.unload()

    def growth(loads: int) -> int:
        before = resident()
        for _ in range(loads):
            once()
        gc.collect()
        return resident() - before

    growth(5)
    files = open_files()
    size = sum(e.nbytes for e in read_safetensors_header(folder / "model.safetensors").entries.values())
    # Every batch of a leak grows by ten times the size. The allocator decides when it gives free pages back, so that
    # one batch in a large process may grow by several megabytes without a leak.
    assert any(growth(10) < 3 * size for _ in range(3))
    assert open_files() <= files


def test_rows_of_embedding_and_head_against_vocab_size(lab: Any, tmp_path: Path) -> None:
    """Other rows than vocab_size are refused, as by transformers, except padding, whose logits no token gets."""
    tensors = lab.random_tensors({**lab.config, "vocab_size": 96})
    ids = lab.ids(1, 8)
    for kind in ("float", "exl2"):
        made = tensors if kind == "float" else lab.quantize(tensors, kind)
        folder = tmp_path / kind
        for vocab in (96, 90):
            model = lab.load(lab.write_model(folder / f"{vocab}", {**lab.config, "vocab_size": vocab}, made))
            logits = model.forward(ids)
            assert logits.shape[-1] == 96
            assert (logits[..., vocab:] == -65504).all()
            assert torch.isfinite(logits).all()
        for vocab in (97, 200):  # tokens without rows
            path = lab.write_model(folder / f"{vocab}", {**lab.config, "vocab_size": vocab}, made)
            with pytest.raises(errors.FormatError, match=rf"embed_tokens.*96 rows.*vocab_size is {vocab}"):
                lab.load(path)
    odd = lab.random_tensors({**lab.config, "vocab_size": 91})
    many = lab.random_tensors({**lab.config, "vocab_size": 90 + 262})
    for name, wrong, rows in (("odd", odd, 91), ("many", many, 352)):  # rows without tokens
        for part in ("model.embed_tokens.weight", "lm_head.weight"):
            mixed = {**lab.random_tensors(lab.config), part: wrong[part]}
            path = lab.write_model(tmp_path / name / part, lab.config, mixed)
            with pytest.raises(errors.FormatError, match=rf"{part}.*{rows} rows.*should be {rows}"):
                lab.load(path)


@pytest.mark.parametrize("bits", [-1, 0, 5, 2**70])
def test_gptq_widths_that_there_are_not(lab: Any, tmp_path: Path, bits: int) -> None:
    config = {**lab.config, "quantization_config": {"quant_method": "gptq", "bits": bits, "group_size": 2**70}}
    folder = lab.write_model(tmp_path / "model", config, lab.quantize(lab.random_tensors(lab.config), "gptq"))
    with pytest.raises(errors.ConfigError, match="bits"):
        lab.load(folder)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("inner", [96, 80])
def test_fused_gptq_matrices_are_split_at_any_width(lab: Any, tmp_path: Path, bits: int, inner: int) -> None:
    """Gate and up in one matrix: the halves of that are the halves of its zeros, where no element holds both."""
    config = {**lab.config, "intermediate_size": inner, "architectures": ["Phi3ForCausalLM"]}
    config["quantization_config"] = {"quant_method": "gptq", "bits": bits, "group_size": 32}
    tensors = lab.random_tensors({**config, "architectures": ["LlamaForCausalLM"]})
    fused, plain = dict(tensors), dict(tensors)
    for layer in range(2):
        key = f"model.layers.{layer}.mlp"
        both = torch.cat([fused.pop(f"{key}.{part}_proj.weight") for part in ("gate", "up")])
        made = gptq_quantize(both, bits=bits, group_size=32)
        fused |= {f"{key}.gate_up_proj.{part}": t for part, t in made.items()}
        weight = gptq_dequantize(made, bits=bits).T
        plain[f"{key}.gate_up_proj.weight"] = weight.contiguous()
        for part in ("gate", "up"):
            del plain[f"{key}.{part}_proj.weight"]
    folder = lab.write_model(tmp_path / "fused", config, fused)
    if (inner * bits) % 32:
        with pytest.raises(errors.FormatError, match="cut at multiples"):
            lab.load(folder)
        return
    ids = lab.ids(1, 12)
    ours, twin = lab.load(folder), lab.load(lab.write_model(tmp_path / "plain", config, plain))
    assert ours.is_quant()
    found, expected = ours.forward(ids)[..., :90], twin.forward(ids)[..., :90]
    assert float((found - expected).abs().max() / expected.abs().max()) < 2e-3
