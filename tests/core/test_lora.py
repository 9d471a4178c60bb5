"""LoRA adapters: PEFT's own adapters give PEFT's logits, rows do not depend on the batch, bad adapters are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import write_random_model
from torch import Tensor

from exl_core import (
    ExLlamaV2,
    ExLlamaV2Cache,
    ExLlamaV2Cache_Q4,
    ExLlamaV2Config,
    ExLlamaV2Lora,
    PagedParams,
    errors,
)
from exl_kernels.device import set_row_invariant
from exl_kernels.safetensors_file import read_safetensors_header, read_tensor, write_safetensors
from exl_kernels.selection import PACKED_ROWS

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.covers("core: lora")

QUANTIZED = Path(__file__).parents[1] / "golden" / "data" / "pylib-4m-exl2-4.5"
TOLERANCE = 2e-3  # of the largest logit
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
SIZES: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


@cache
def peft() -> Any:
    """The library. Its import takes seconds, so a process that runs other tests does without."""
    return pytest.importorskip("peft")


class Bench:
    """One model in transformers and here, and adapters for it made by PEFT."""

    def __init__(self, folder: Path, load: Callable[..., ExLlamaV2], tied: bool = False) -> None:
        torch.manual_seed(11)
        self.folder = folder
        config = transformers.LlamaConfig(**{**SIZES, "tie_word_embeddings": tied})
        transformers.LlamaForCausalLM(config).save_pretrained(folder / "model", safe_serialization=True)
        self.model = load(folder / "model")
        self._count = 0

    def plain(self) -> Any:
        return transformers.LlamaForCausalLM.from_pretrained(self.folder / "model", dtype=torch.float32).eval()

    def adapter(self, seed: int = 1, **options: Any) -> Path:
        """A saved PEFT adapter whose every trained tensor is random."""
        torch.manual_seed(seed)
        model = peft().get_peft_model(self.plain(), peft().LoraConfig(task_type="CAUSAL_LM", **options))
        for parameter in model.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.15)
        self._count += 1
        folder = self.folder / f"adapter-{self._count}"
        model.save_pretrained(str(folder))
        return folder

    def expected(self, adapter: Path, ids: Tensor) -> Tensor:
        with torch.no_grad():
            return peft().PeftModel.from_pretrained(self.plain(), str(adapter)).eval()(ids).logits

    def logits(self, ids: Tensor, *loras: ExLlamaV2Lora) -> Tensor:
        return self.model.forward(ids, loras=list(loras))[..., :90]


@pytest.fixture(scope="module")
def bench(lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("lora"), lab.load)


@pytest.fixture(scope="module")
def ids(lab: Any) -> Tensor:
    return lab.ids(2, 24)


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert float((ours - theirs).abs().max()) < TOLERANCE * float(theirs.abs().max())


OPTIONS: dict[str, dict[str, Any]] = {
    "every projection": {"r": 8, "lora_alpha": 16, "target_modules": ALL},
    "attention only": {"r": 4, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]},
    "one layer": {"r": 4, "lora_alpha": 8, "target_modules": ALL, "layers_to_transform": [1]},
    "rank-stabilised": {"r": 16, "lora_alpha": 8, "target_modules": ALL, "use_rslora": True},
    "rank and alpha patterns": {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ALL,
        "rank_pattern": {"k_proj": 3, "layers.1.mlp.up_proj": 24},
        "alpha_pattern": {"k_proj": 5, "down_proj": 40},
    },
    "patterns of whole names": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ALL,
        "rank_pattern": {"^model.layers.1.self_attn.q_proj": 3, "^layers.0.self_attn.q_proj": 5, "up_proj": 6},
        "alpha_pattern": {"^model.layers.0.mlp.down_proj": 31},
    },
    "head in full": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "embedding in full": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "head and embedding adapted": {"r": 4, "lora_alpha": 8, "target_modules": ["lm_head", "embed_tokens", "o_proj"]},
    "a projection in full": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "modules_to_save": ["up_proj"]},
    "biases of B": {"r": 4, "lora_alpha": 8, "target_modules": ALL, "lora_bias": True},
}


# A warning of a class of peft would make the process that collects results import peft, and torch with it.
@pytest.mark.filterwarnings("ignore:.lora_bias=True. was passed", "ignore:Adapter .default.")
@pytest.mark.covers("core: adapter-matrices")
@pytest.mark.parametrize("case", OPTIONS)
def test_logits_are_peft_s(bench: Bench, ids: Tensor, case: str) -> None:
    folder = bench.adapter(**OPTIONS[case])
    lora = ExLlamaV2Lora.from_directory(bench.model, folder)
    ours, expected = bench.logits(ids, lora), bench.expected(folder, ids)
    assert_close(ours, expected)
    plain = bench.logits(ids)
    assert float((ours - plain).abs().max()) > 10 * TOLERANCE * float(plain.abs().max())  # it does something
    lora.unload()
    with pytest.raises(errors.ModelStateError, match="unloaded"):
        bench.logits(ids, lora)
    assert torch.equal(bench.logits(ids), plain)


def test_a_tied_head_keeps_the_model_s_table(lab: Any, tmp_path: Path, ids: Tensor) -> None:
    """An adapter's embedding replaces the embedding only, as in PEFT, although the head has the same table."""
    bench = Bench(tmp_path, lab.load, tied=True)
    torch.manual_seed(3)
    folder = bench.adapter(r=4, lora_alpha=8, target_modules=["q_proj"])
    name = "base_model.model.model.embed_tokens.weight"
    tensors = load_tensors(folder)
    tensors[name] = torch.randn(90, 64) * 0.1
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    expected = bench.plain()
    expected.lm_head.weight = torch.nn.Parameter(expected.lm_head.weight.detach().clone())
    expected.model.embed_tokens.weight = torch.nn.Parameter(tensors[name])
    merged = peft().get_peft_model(expected, peft().LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"]))
    peft().set_peft_model_state_dict(merged, {k: v for k, v in tensors.items() if k != name})
    with torch.no_grad():
        logits = merged.eval()(ids).logits
    assert_close(bench.logits(ids, ExLlamaV2Lora.from_directory(bench.model, folder)), logits)


TIED: dict[str, dict[str, Any]] = {
    "embedding in full": {"modules_to_save": ["embed_tokens"]},
    "both in full": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "embedding in full, tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "embedding adapted": {"target_modules": ["q_proj", "embed_tokens"]},
    "embedding adapted, tied": {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
    "head adapted": {"target_modules": ["q_proj", "lm_head"]},
}


@pytest.mark.covers("core: adapter-matrices")
@pytest.mark.parametrize("case", TIED)
def test_adapters_of_a_model_whose_head_is_its_embedding(lab: Any, tmp_path: Path, ids: Tensor, case: str) -> None:
    """PEFT unties the two unless it is asked not to."""
    bench = Bench(tmp_path, lab.load, tied=True)
    folder = bench.adapter(**{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], **TIED[case]})
    assert_close(bench.logits(ids, ExLlamaV2Lora.from_directory(bench.model, folder)), bench.expected(folder, ids))


def test_several_adapters_add_up(bench: Bench, ids: Tensor) -> None:
    folders = [
        bench.adapter(seed=5, r=8, lora_alpha=16, target_modules=ALL),
        bench.adapter(seed=6, r=2, lora_alpha=3, target_modules=["k_proj", "down_proj"]),
    ]
    reference = peft().PeftModel.from_pretrained(bench.plain(), str(folders[0]), adapter_name="first")
    reference.load_adapter(str(folders[1]), adapter_name="second")
    reference.base_model.set_adapter(["first", "second"])
    with torch.no_grad():
        expected = reference.eval()(ids).logits
    loras = [ExLlamaV2Lora.from_directory(bench.model, f) for f in folders]
    assert_close(bench.logits(ids, *loras), expected)
    scaled = ExLlamaV2Lora.from_directory(bench.model, folders[0], lora_scaling=0.0)
    assert torch.equal(bench.logits(ids, scaled), bench.logits(ids))
    assert scaled.lora_scaling == 0.0
    assert loras[1].lora_scaling == 1.5
    assert (loras[1].lora_r, loras[1].lora_alpha) == (2, 3)
    assert bench.model.forward(ids, loras=[]) is not None


def test_of_two_replacements_the_first_counts(bench: Bench, ids: Tensor) -> None:
    first, second = (
        ExLlamaV2Lora.from_directory(
            bench.model, bench.adapter(seed, r=4, lora_alpha=8, target_modules=["q_proj"], modules_to_save=["lm_head"])
        )
        for seed in (7, 8)
    )
    first.pairs, second.pairs = {}, {}  # the heads alone
    assert torch.equal(bench.logits(ids, first, second), bench.logits(ids, first))
    assert torch.equal(bench.logits(ids, second, first), bench.logits(ids, second))
    assert not torch.equal(bench.logits(ids, second), bench.logits(ids, first))


def test_on_a_gpu_few_rows_do_not_depend_on_one_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model tells generators up to how many rows that holds, whether its matrices are quantized or float."""
    fields = {**SIZES, "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-6}
    for folder in (QUANTIZED, write_random_model(tmp_path, fields)):
        model = ExLlamaV2(ExLlamaV2Config(str(folder)))
        model.load()
        assert model.invariant_tokens() is None
        monkeypatch.setattr(model, "device", torch.device("cuda", 0))
        assert model.invariant_tokens() == PACKED_ROWS
        set_row_invariant(True)
        try:
            assert model.invariant_tokens() is None
        finally:
            set_row_invariant(False)


# ------------------------------------------------------------------------------------------------- bitwise identical


@pytest.mark.parametrize("kind", ["float", "exl2", "gptq"])
def test_a_row_does_not_depend_on_batch_or_chunks(lab: Any, bench: Bench, ids: Tensor, kind: str) -> None:
    model = lab.load(lab.write(kind=kind), cpu_matmul="int8")
    lora = ExLlamaV2Lora.from_directory(model, bench.adapter(r=5, lora_alpha=9, target_modules=[*ALL, "lm_head"]))
    whole = model.forward(ids, ExLlamaV2Cache(model, batch_size=2), loras=[lora])
    for row in range(2):
        cache = ExLlamaV2Cache(model)
        parts = [
            model.forward(ids[row : row + 1, a:b], cache, loras=[lora]) for a, b in ((0, 1), (1, 8), (8, 9), (9, 24))
        ]
        assert torch.equal(torch.cat(parts, dim=1), whole[row : row + 1])


def test_adapters_in_pages(bench: Bench, ids: Tensor) -> None:
    lora = ExLlamaV2Lora.from_directory(bench.model, bench.adapter(r=8, lora_alpha=16, target_modules=ALL))
    cache = ExLlamaV2Cache(bench.model, max_seq_len=512)
    params = PagedParams(
        2, torch.tensor([[1], [0]], dtype=torch.int32), torch.zeros(2, dtype=torch.int32), 0, 256, ids.shape[1]
    )
    result = bench.model.forward_chunk(ids, cache, attn_params=params, loras=[lora])
    assert torch.equal(result["logits"][..., :90], bench.logits(ids, lora))


@pytest.mark.covers("core: adapter-matrices")
def test_quantized_model_with_the_adapter_of_the_float_model(lab: Any, ids: Tensor, tmp_path: Path) -> None:
    """EXL2 stores rows in another order: the adapter's matrices still meet the right features."""
    tensors = lab.random_tensors(lab.config)
    model = lab.load(lab.write_model(tmp_path / "exl2", lab.config, lab.quantize(tensors, "exl2")))
    folder = hand_made(tmp_path / "adapter", ALL, r=4)
    lora = ExLlamaV2Lora.from_directory(model, folder)
    merged = {}
    adapter = load_tensors(folder)
    for layer in range(2):
        for part in (
            "self_attn.q_proj",
            "mlp.gate_proj",
            "mlp.up_proj",
            "mlp.down_proj",
            "self_attn.o_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
        ):
            key = f"model.layers.{layer}.{part}"
            a, b = (adapter[f"base_model.model.{key}.lora_{m}.weight"].float() for m in "AB")
            merged[f"{key}.weight"] = model.modules_dict[key].get_weight_tensor_dq().float().T + 2.0 * b @ a
    merged["lm_head.weight"] = model.modules_dict["lm_head"].get_weight_tensor_dq().T.contiguous()
    whole = {k: v.contiguous() for k, v in {**tensors, **merged}.items()}
    reference = lab.load(lab.write_model(tmp_path / "merged", lab.config, whole))
    assert_close(model.forward(ids, loras=[lora])[..., :90], reference.forward(ids)[..., :90])


@pytest.mark.sampled(3)
@pytest.mark.covers("core: tensor-parallel")
@pytest.mark.parametrize("kind", ["exl2", "gptq-act-order"])
@pytest.mark.parametrize("modules", [ALL, ["down_proj"], ["q_proj", "gate_proj"]], ids=["all", "down", "some"])
def test_adapters_of_a_model_sharded_over_devices(
    lab: Any, ids: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, modules: list[str]
) -> None:
    """Hidden features that stay on their devices meet on the first one where an adapter needs them; so do sums."""
    folder = lab.write_model(tmp_path / "model", lab.config, lab.quantize(lab.random_tensors(lab.config), kind))
    adapter = hand_made(tmp_path / "adapter", modules)
    whole = lab.load(folder, cpu_matmul="int8")
    expected = whole.forward(ids, loras=[ExLlamaV2Lora.from_directory(whole, adapter)])
    for devices in (2, 4):
        monkeypatch.setenv("EXL_DEVICE", ",".join(f"cpu:{i}" for i in range(devices)))
        model = ExLlamaV2(whole.config)
        model.load_tp()
        found = model.forward(ids, loras=[ExLlamaV2Lora.from_directory(model, adapter)])
        assert torch.equal(found, expected)
        assert torch.equal(model.forward(ids), whole.forward(ids))


# ------------------------------------------------------------------------------------------------------------- layouts


def load_tensors(folder: Path) -> dict[str, Tensor]:
    header = read_safetensors_header(folder / "adapter_model.safetensors")
    return {name: read_tensor(entry) for name, entry in header.entries.items()}


SHAPES = {
    "q_proj": ("self_attn", 64, 64),
    "k_proj": ("self_attn", 64, 32),
    "v_proj": ("self_attn", 64, 32),
    "o_proj": ("self_attn", 64, 64),
    "gate_proj": ("mlp", 64, 96),
    "up_proj": ("mlp", 64, 96),
    "down_proj": ("mlp", 96, 64),
}


def hand_made(
    folder: Path, modules: list[str], r: int = 4, rename: Callable[[str], str] = lambda n: n, **config: Any
) -> Path:
    """An adapter for the lab's model, without PEFT; scaling 2."""
    generator = torch.Generator().manual_seed(2)
    tensors = {}
    for layer in range(2):
        for module in modules:
            block, inputs, outputs = SHAPES[module]
            key = f"base_model.model.model.layers.{layer}.{block}.{module}"
            tensors[rename(f"{key}.lora_A.weight")] = torch.randn(r, inputs, generator=generator) * 0.1
            tensors[rename(f"{key}.lora_B.weight")] = torch.randn(outputs, r, generator=generator) * 0.1
    return save(folder, tensors, r=r, lora_alpha=2 * r, target_modules=modules, **config)


def save(folder: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **config}))
    return folder


RENAMES: dict[str, Callable[[str], str]] = {
    "named adapter": lambda n: n.replace(".weight", ".default.weight"),
    "no wrapper": lambda n: n.removeprefix("base_model.model."),
    "headless model": lambda n: n.replace("base_model.model.model.", "base_model.model."),
    "compiled model": lambda n: n.replace("base_model.model.", "base_model.model._orig_mod."),
    "multimodal model": lambda n: n.replace("base_model.model.model.", "base_model.model.model.language_model."),
}


@pytest.mark.covers("core: adapter-matrices")
@pytest.mark.parametrize("case", RENAMES)
def test_prefixes_of_wrappers(lab: Any, bench: Bench, ids: Tensor, tmp_path: Path, case: str) -> None:
    plain = ExLlamaV2Lora.from_directory(bench.model, hand_made(tmp_path / "plain", ALL))
    other = ExLlamaV2Lora.from_directory(bench.model, hand_made(tmp_path / "other", ALL, rename=RENAMES[case]))
    assert torch.equal(bench.logits(ids, other), bench.logits(ids, plain))


def test_pytorch_archive_as_alpaca_saves_it(bench: Bench, ids: Tensor, tmp_path: Path) -> None:
    folder = hand_made(tmp_path, ["q_proj", "v_proj"])
    expected = bench.logits(ids, ExLlamaV2Lora.from_directory(bench.model, folder))
    torch.save(load_tensors(folder), folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()
    lora = ExLlamaV2Lora.from_directory(bench.model, folder)
    assert torch.equal(bench.logits(ids, lora), expected)
    assert sorted(lora.tensors) == sorted(
        f"model.layers.{i}.self_attn.{m}" for i in (0, 1) for m in ("q_proj", "v_proj")
    )


@pytest.mark.covers("core: adapter-matrices")
def test_fused_modules_of_the_original_model(lab: Any, ids: Tensor, tmp_path: Path) -> None:
    """Phi-3 style: one adapter for qkv_proj and for gate_up_proj, split over the matrices here."""
    model = lab.load(lab.write())
    generator = torch.Generator().manual_seed(4)
    fused: dict[str, Tensor] = {}
    split: dict[str, Tensor] = {}
    for layer in range(2):
        prefix = f"base_model.model.model.layers.{layer}."
        for whole, parts in (
            ("self_attn.qkv_proj", (("self_attn.q_proj", 64), ("self_attn.k_proj", 32), ("self_attn.v_proj", 32))),
            ("mlp.gate_up_proj", (("mlp.gate_proj", 96), ("mlp.up_proj", 96))),
        ):
            a = torch.randn(4, 64, generator=generator) * 0.2
            b = torch.randn(sum(n for _, n in parts), 4, generator=generator) * 0.2
            fused |= {f"{prefix}{whole}.lora_A.weight": a, f"{prefix}{whole}.lora_B.weight": b}
            begin = 0
            for part, rows in parts:
                split |= {f"{prefix}{part}.lora_A.weight": a, f"{prefix}{part}.lora_B.weight": b[begin : begin + rows]}
                begin += rows
    config: dict[str, Any] = {"r": 4, "lora_alpha": 4}
    one = ExLlamaV2Lora.from_directory(model, save(tmp_path / "fused", fused, **config))
    other = ExLlamaV2Lora.from_directory(model, save(tmp_path / "split", split, **config))
    assert torch.equal(model.forward(ids, loras=[one]), model.forward(ids, loras=[other]))
    assert not torch.equal(model.forward(ids, loras=[one]), model.forward(ids))


def test_replacements_of_fused_modules_and_of_padded_tables(lab: Any, ids: Tensor, tmp_path: Path) -> None:
    """`modules_to_save` of a matrix that is split here; tables with the rows that pad the vocabulary, and without."""
    padded = {**lab.config, "vocab_size": 96}
    tensors, other = lab.random_tensors(padded), lab.random_tensors(padded, 5)
    model = lab.load(lab.write_model(tmp_path / "model", lab.config, tensors))
    new = {k: other[k] for k in other if "q_proj" in k or "k_proj" in k or "v_proj" in k}
    new |= {k: other[k] for k in ("lm_head.weight", "model.embed_tokens.weight")}
    expected = lab.load(lab.write_model(tmp_path / "replaced", lab.config, {**tensors, **new})).forward(ids)
    for rows in (96, 90):
        saved = {f"base_model.model.{k}": other[k][:rows].contiguous() for k in new if "layers" not in k}
        for layer in range(2):
            parts = [other[f"model.layers.{layer}.self_attn.{p}_proj.weight"] for p in "qkv"]
            saved[f"base_model.model.model.layers.{layer}.self_attn.qkv_proj.weight"] = torch.cat(parts)
        lora = ExLlamaV2Lora.from_directory(model, save(tmp_path / f"a-{rows}", saved, r=4, lora_alpha=4))
        assert torch.equal(model.forward(ids, loras=[lora]), expected)
    for name, rows in (("lm_head", 91), ("model.embed_tokens", 97), ("lm_head", 128), ("model.embed_tokens", 89)):
        wrong = {f"base_model.model.{name}.weight": torch.zeros(rows, 64)}
        folder = save(tmp_path / f"wrong-{name}-{rows}", wrong, r=4, lora_alpha=4)
        if rows == 91:  # some of the padding
            ExLlamaV2Lora.from_directory(model, folder)
            continue
        with pytest.raises(errors.AdapterError, match=str(rows)):
            ExLlamaV2Lora.from_directory(model, folder)


def test_old_adapter_configs_get_the_defaults_of_their_time(bench: Bench, tmp_path: Path) -> None:
    """The first adapters say rank and alpha and little more: plain LoRA, scaled by alpha / r."""
    folder = hand_made(tmp_path / "plain", ["q_proj"], r=4)
    (folder / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 8}')
    assert ExLlamaV2Lora.from_directory(bench.model, folder).lora_scaling == 2.0
    for more, scaling in (
        ({"use_rslora": True}, 4.0),
        ({"init_lora_weights": False}, 2.0),
        ({"peft_type": "LORA"}, 2.0),
    ):
        (folder / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8, **more}))
        assert ExLlamaV2Lora.from_directory(bench.model, folder).lora_scaling == scaling


def test_a_zero_bias_is_ignored_and_logged(bench: Bench, ids: Tensor, tmp_path: Path) -> None:
    folder = hand_made(tmp_path / "zero", ["q_proj"])
    tensors = load_tensors(folder)
    name = "base_model.model.model.layers.0.self_attn.q_proj.bias"
    write_safetensors(folder / "adapter_model.safetensors", {**tensors, name: torch.full((64,), 1e-7)})
    lora = ExLlamaV2Lora.from_directory(bench.model, folder)
    assert lora.bias_ignored
    write_safetensors(folder / "adapter_model.safetensors", {**tensors, name: torch.full((64,), 1e-3)})
    with pytest.raises(errors.AdapterError, match="a trained bias"):
        ExLlamaV2Lora.from_directory(bench.model, folder)


# ------------------------------------------------------------------------------------------------------------ refusals

Q = "base_model.model.model.layers.0.self_attn.q_proj"
CONFIG: dict[str, Any] = {"r": 4, "lora_alpha": 8}
A, B = torch.ones(4, 64), torch.ones(64, 4)
PAIR = {f"{Q}.lora_A.weight": A, f"{Q}.lora_B.weight": B}
UNKNOWN = "base_model.model.model.layers.0.self_attn.z_proj.lora_A.weight"
REFUSED: dict[str, tuple[dict[str, Tensor], dict[str, Any], type[Exception], str]] = {
    "unknown layer": ({**PAIR, UNKNOWN: A}, CONFIG, errors.AdapterError, f"unsupported layer: {UNKNOWN}"),
    "layer the model lacks": (
        {k.replace("layers.0", "layers.2"): v for k, v in PAIR.items()}, CONFIG, errors.AdapterError, r"layers\.2"),
    "part of a vision tower": (
        {k.replace("base_model.model", "base_model.model.vision_tower"): v for k, v in PAIR.items()},
        CONFIG, errors.AdapterError, "vision_tower"),
    "norm": ({**PAIR, "base_model.model.model.norm.weight": torch.ones(64)}, CONFIG, errors.AdapterError, "norm"),
    "A alone": ({f"{Q}.lora_A.weight": A}, CONFIG, errors.AdapterError, "lora_A and lora_B belong together"),
    "B alone": ({f"{Q}.lora_B.weight": B}, CONFIG, errors.AdapterError, "lora_A and lora_B belong together"),
    "rank of the tensors": (
        {f"{Q}.lora_A.weight": torch.ones(8, 64), f"{Q}.lora_B.weight": torch.ones(64, 8)},
        CONFIG, errors.AdapterError, "r = 4"),
    "narrow A": (
        {**PAIR, f"{Q}.lora_A.weight": torch.ones(4, 32)}, CONFIG, errors.AdapterError, r"\[4, 32\].*\[4, 64\]"),
    "long B": ({**PAIR, f"{Q}.lora_B.weight": torch.ones(96, 4)}, CONFIG, errors.AdapterError, r"\[96, 4\].*\[64, 4\]"),
    "A of one dimension": ({**PAIR, f"{Q}.lora_A.weight": torch.ones(64)}, CONFIG, errors.AdapterError, r"A \[64\]"),
    "integers": ({**PAIR, f"{Q}.lora_A.weight": A.int()}, CONFIG, errors.AdapterError, "element type"),
    "NaN": ({**PAIR, f"{Q}.lora_B.weight": B * float("nan")}, CONFIG, errors.AdapterError, "NaN"),
    "nothing": ({f"{Q}.original_module.weight": A}, CONFIG, errors.AdapterError, "changes nothing"),
    "small head": ({"lm_head.weight": torch.ones(80, 64)}, CONFIG, errors.AdapterError, r"\[90, 64\]"),
    "larger vocabulary": (
        {"model.embed_tokens.weight": torch.ones(95, 64)}, CONFIG, errors.AdapterError, r"\[95, 64\].*\[90, 64\]"),
    "rank zero": (PAIR, {"r": 0, "lora_alpha": 8}, errors.ConfigError, "r"),
    "rank is text": (PAIR, {"r": "4", "lora_alpha": 8}, errors.ConfigTypeError, "r"),
    "no alpha": (PAIR, {"r": 4}, errors.ConfigKeyError, "lora_alpha"),
    "transposed": (PAIR, {**CONFIG, "fan_in_fan_out": True}, errors.AdapterError, "fan_in_fan_out"),
    "DoRA": (PAIR, {**CONFIG, "use_dora": True}, errors.UnsupportedError, "use_dora"),
    "PiSSA": (PAIR, {**CONFIG, "init_lora_weights": "pissa"}, errors.UnsupportedError, "pissa"),
    "parameters": (PAIR, {**CONFIG, "target_parameters": ["mlp"]}, errors.UnsupportedError, "target_parameters"),
    "another method": (PAIR, {**CONFIG, "peft_type": "IA3"}, errors.UnsupportedError, "IA3"),
    "expression": (PAIR, {**CONFIG, "rank_pattern": {"(a+)+$": 4}}, errors.UnsupportedError, "rank_pattern"),
    "alpha of 400 digits": (PAIR, {**CONFIG, "alpha_pattern": {"q": 10**400}}, errors.AdapterError, "alpha_pattern"),
    "infinite alpha": (PAIR, {**CONFIG, "alpha_pattern": {"q": float("inf")}}, errors.AdapterError, "alpha_pattern"),
    "targets": (PAIR, {**CONFIG, "target_modules": 4}, errors.AdapterError, "target_modules"),
}  # fmt: skip


@pytest.mark.covers("core: adapter-matrices")
@pytest.mark.parametrize("case", REFUSED)
def test_the_error_names_the_tensor(bench: Bench, tmp_path: Path, case: str) -> None:
    tensors, config, error, named = REFUSED[case]
    with pytest.raises(error, match=named):
        ExLlamaV2Lora.from_directory(bench.model, save(tmp_path, tensors, **config))


def test_folders_that_hold_no_adapter(bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No LoRA found"):
        ExLlamaV2Lora.from_directory(bench.model, tmp_path / "nowhere")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="No LoRA found"):
        ExLlamaV2Lora.from_directory(bench.model, tmp_path)


def test_an_adapter_that_a_gpu_has_no_room_for(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hand_made(tmp_path, ["q_proj"])

    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    with monkeypatch.context() as patch:
        patch.setattr("exl_core.lora.adapter.LoraPair", full)
        with pytest.raises(errors.DeviceError, match="not enough GPU memory to load the adapter"):
            ExLlamaV2Lora.from_directory(bench.model, folder)
    assert ExLlamaV2Lora.from_directory(bench.model, folder).loaded


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.mark,))


def test_archives_run_no_code(bench: Bench, tmp_path: Path) -> None:
    folder = hand_made(tmp_path, ["q_proj"])
    tensors = load_tensors(folder)
    (folder / "adapter_model.safetensors").unlink()
    name = next(iter(tensors))
    mark = tmp_path / "code has run"
    for bad in (
        {name: Evil(mark)},
        {name: torch.zeros(1).expand(1 << 20, 1 << 10)},
        {name: 3},
        [1, 2],
        {name: tensors[name].to_sparse()},
    ):
        torch.save(bad, folder / "adapter_model.bin")
        with pytest.raises(errors.AdapterError, match=r"adapter_model\.bin"):
            ExLlamaV2Lora.from_directory(bench.model, folder)
    assert not mark.exists()
    for raw in (b"", b"PK\x03\x04", b"\x80\x02]q\x00."):
        (folder / "adapter_model.bin").write_bytes(raw)
        with pytest.raises(errors.AdapterError, match=r"adapter_model\.bin"):
            ExLlamaV2Lora.from_directory(bench.model, folder)


def test_wrong_arguments(lab: Any, bench: Bench, ids: Tensor, tmp_path: Path) -> None:
    folder = hand_made(tmp_path, ["q_proj"])
    lora = ExLlamaV2Lora.from_directory(bench.model, folder)
    for bad in (lora, ["q"], "adapter", 3):
        with pytest.raises(errors.InputError, match="loras"):
            bench.model.forward(ids, loras=bad)  # type: ignore[arg-type]
    for factor in (float("nan"), "1", None, True):
        with pytest.raises(errors.AdapterError, match="lora_scaling"):
            ExLlamaV2Lora.from_directory(bench.model, folder, lora_scaling=factor)  # type: ignore[arg-type]
    other = lab.load(lab.write())
    with pytest.raises(errors.ModelStateError, match="another model"):
        other.forward(ids, loras=[lora])
    own = ExLlamaV2Lora.from_directory(other, folder)
    other.unload()
    with pytest.raises(errors.ModelStateError, match="load the model"):
        ExLlamaV2Lora.from_directory(other, folder)
    other.load()
    with pytest.raises(errors.ModelStateError, match="loaded again"):
        other.forward(ids, ExLlamaV2Cache_Q4(other), loras=[own])


@pytest.mark.parametrize("q_len", [1, 3])
def test_rows_with_adapters_of_their_own(bench: Bench, lab: Any, q_len: int) -> None:
    """A row's logits are bitwise those of a pass in which all rows have its adapters."""
    folders = [
        bench.adapter(seed, r=rank, target_modules=names) for seed, rank, names in ((1, 4, ALL), (2, 9, ATTENTION))
    ]
    a, b = (ExLlamaV2Lora.from_directory(bench.model, folder) for folder in folders)
    assert a.mixable
    sets: list[list[ExLlamaV2Lora]] = [[a], [], [b, a], [a, b], [b], [a]]
    count = len(sets)
    ids = lab.ids(count, q_len)

    def step(**adapters: Any) -> Tensor:
        cache = ExLlamaV2Cache(bench.model, max_seq_len=256 * count)
        table = torch.arange(count, dtype=torch.int32)[:, None]
        params = PagedParams(count, table, torch.zeros(count, dtype=torch.int32), 0)
        return bench.model.forward_chunk(ids, cache, attn_params=params, **adapters)["logits"].clone()

    mixed = step(row_loras=sets)
    for row, adapters in enumerate(sets):
        assert torch.equal(mixed[row], step(loras=adapters)[row])
    assert torch.equal(step(row_loras=[[b]] * count), step(loras=[b]))
    assert torch.equal(step(row_loras=[[]] * count), step())
    assert len({tuple(row.flatten().tolist()) for row in step(row_loras=sets)}) == count


def test_row_adapters_are_checked(bench: Bench, lab: Any) -> None:
    folder = bench.adapter(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    whole = ExLlamaV2Lora.from_directory(bench.model, folder)
    plain = ExLlamaV2Lora.from_directory(bench.model, bench.adapter(r=4, target_modules=ALL))
    assert not whole.mixable
    ids = lab.ids(2, 1)

    def step(**adapters: Any) -> None:
        bench.model.forward_chunk(ids, ExLlamaV2Cache(bench.model, batch_size=2), **adapters)

    step(row_loras=[[whole], [whole]])
    for wrong, message in (([[whole], [plain]], "whole matrices"), ([[whole], []], "whole matrices")):
        with pytest.raises(errors.UnsupportedError, match=message):
            step(row_loras=wrong)
    for more in ({"row_loras": [[plain]]}, {"row_loras": [[plain], []], "loras": [plain]}, {"row_loras": [["x"], []]}):
        with pytest.raises(errors.InputError, match="loras"):
            step(**more)
    plain.unload()
    with pytest.raises(errors.ModelStateError, match="unloaded"):
        step(row_loras=[[plain], []])
