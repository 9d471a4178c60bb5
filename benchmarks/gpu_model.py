"""Models of true shapes and random weights, built on the GPU without weight files.

One layer's matrices are drawn and repacked; every layer has copies of its own in GPU memory, so that nothing is found
in a cache. Mixed widths as the reference's files have them: the widest rows first, groups of 128.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from make_random_model import SHAPES, llama_config, random_codes, write_tokenizer
from torch import Tensor

from exl_core import ExLlamaV2, ExLlamaV2Config
from exl_core.execution.own_pass import choose_own_pass
from exl_core.execution.sharded.context import TensorParallel
from exl_core.execution.sharded.cutting import shard_modules
from exl_core.execution.sharded.matrix import OutputCut, Part, SplitMatrix
from exl_core.execution.sharded.shares import Shares
from exl_core.layers import (
    Attention,
    Embedding,
    Head,
    LayerNorm,
    Linear,
    Module,
    MoE,
    Norm,
    ParallelDecoder,
    PositionEmbedding,
)
from exl_kernels import _native
from exl_kernels.formats import Exl2Parts, GptqFormat, GptqParts, exl2_groups
from exl_kernels.linear import QuantMatrix
from exl_kernels.linear.cuda import CudaQuantMatrix

GROUP = 128
HEAD_PLAN = "1:6b_128g"
WEIGHT_STD = 0.02


@dataclass(frozen=True)
class Recipe:
    """How matrices are stored: "exl2" with the plan of each part (as for `formats.exl2_groups`), "gptq" at 4 bits, or
    "float".

    fine_scales: as matrices are that share launches with groups of fewer than 128 rows.
    dtype: of float matrices, and of the head unless it is None.
    """

    name: str
    format: str
    plans: dict[str, str]
    fine_scales: bool = False
    dtype: torch.dtype | None = None


# The first groups of a matrix are one bit wider, gate differs from up: as in the reference's files.
RECIPES = {
    "4.0": Recipe("4.0", "exl2", {"": "0.125:5b_128g/0.875:4b_128g", "mlp.gate_proj": "1:4b_128g"}),
    "4.0-32g": Recipe("4.0-32g", "exl2", {"": "0.125:5b_32g/0.875:4b_32g", "mlp.gate_proj": "1:4b_32g"}),
    # The rows of the converter's table that most layers of a Llama 8B take at 4.0 bits.
    "4.0-file": Recipe(
        "4.0-file",
        "exl2",
        {
            "": "1:4b_64g",
            "self_attn.v_proj": "1:4b_32g",
            "mlp.gate_proj": "1:4b_128g",
            "mlp.up_proj": "1:4b_32g",
            "mlp.down_proj": "0.05:8b_32g/0.95:4b_128g",
            "w1": "1:4b_128g",
            "w3": "1:4b_32g",
            "w2": "0.05:8b_32g/0.95:4b_128g",
            "gate_proj": "1:4b_128g",
            "up_proj": "1:4b_32g",
            "down_proj": "0.05:8b_32g/0.95:4b_128g",
        },
        fine_scales=True,
    ),
    "3.0": Recipe("3.0", "exl2", {"": "0.125:4b_128g/0.875:3b_128g"}),
    "gptq4": Recipe("gptq4", "gptq", {}),
    "gptq4-float-head": Recipe("gptq4-float-head", "gptq", {}, dtype=torch.float16),
    "fp16": Recipe("fp16", "float", {}, dtype=torch.float16),
    "bf16": Recipe("bf16", "float", {}, dtype=torch.bfloat16),
}


def _words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)


def _codes(rows: int, n: int, width: int) -> Tensor:
    """Words of random codes [rows, n] of `width` bits whose mean is their zero. torch's seed decides them."""
    return random_codes(rows, n, width, np.random.Generator(np.random.SFC64(int(torch.randint(2**31, ())))))


def exl2_tensors(k: int, n: int, plan: str, order: Tensor) -> dict[str, Tensor]:
    """The five tensors of a matrix [k, n] whose groups follow `plan`. order: the permutation of K."""
    starts, scales, codes, first = [], [], [], 0
    for width, groups in groupby(exl2_groups(plan, k), lambda group: group.bits):
        rows = [group.rows for group in groups]
        for held in rows:
            starts += [width, first]
            first += held * width // 32
            scales.append(256 * WEIGHT_STD / ((2.0**width) / 12**0.5 * 108.5))
        codes.append(_codes(sum(rows), n, width))
    return {
        "q_weight": torch.cat(codes),
        "q_scale": _words(len(scales), n // 8),
        "q_scale_max": torch.tensor(scales, dtype=torch.float16),
        "q_groups": torch.tensor(starts, dtype=torch.int16),
        "q_invperm": order,
    }


def gptq_tensors(k: int, n: int) -> dict[str, Tensor]:
    groups = k // GROUP
    return {
        "qweight": _codes(k, n, 4),
        "qzeros": torch.full((groups, n // 8), 0x77777777, dtype=torch.int32),
        "scales": torch.full((groups, n), WEIGHT_STD / 4.6, dtype=torch.float16),
        "g_idx": torch.arange(k, dtype=torch.int32) // GROUP,
    }


class _Copies:
    """One matrix's tensors, of which any number of matrices are made, each with memory of its own."""

    def __init__(
        self, tensors: dict[str, Tensor], format: Literal["exl2", "gptq"], on_gpus: bool, fine_scales: bool = False
    ) -> None:
        self.tensors, self.format = tensors, format
        self.layout = None
        if on_gpus:
            if format == "exl2":
                exl2 = Exl2Parts(**{key: tensors[key] for key in Exl2Parts._fields})
                self.layout = _native.CudaLayout.from_exl2("random", exl2, 16, fine_scales=fine_scales)
            else:
                gptq = GptqParts(tensors["qweight"], tensors["qzeros"], tensors["scales"], tensors["g_idx"])
                self.layout = _native.CudaLayout.from_gptq("random", gptq, GptqFormat(), 16)

    def make(self, name: str, device: torch.device, bias: bool = False, prescale: float = 1.0) -> QuantMatrix:
        """With a bias of zeros, if it is to have one."""
        if self.layout is None:
            make = QuantMatrix.from_exl2 if self.format == "exl2" else QuantMatrix.from_gptq
            return make(self.tensors, compute="exact", name=name, prescale=prescale)
        weights = self.layout.in_features * self.layout.out_features
        bits = 8.0 * sum(t.nbytes for t in self.tensors.values()) / weights
        zeros = torch.zeros(self.layout.out_features) if bias else None
        return CudaQuantMatrix(
            self.layout,
            device,
            self.format,
            bits_per_weight=bits,
            bias=zeros,
            prescale=prescale,
            compute="int8",
            name=name,
        )


def build(
    shape_name: str, recipe_name: str, max_seq_len: int, device: str = "cuda:0", *, sharded: bool = False
) -> ExLlamaV2:
    """A loaded model of a shape ("8b", "qwen3-8b", ..) and recipe; config and tokenizer lie in a folder."""
    config = llama_config(SHAPES[shape_name], max_seq_len, rope_theta=500000.0)
    return build_config(config, recipe_name, device, sharded=sharded)


def build_config(
    config_json: dict[str, Any], recipe_name: str, device: str = "cuda:0", *, sharded: bool = False
) -> ExLlamaV2:
    """A loaded model of any family's config.json: norms are ones, all else as the recipe says.

    Routers are float, of the recipe's type or FP16. A float mixture is a config with experts and the recipe "fp16" or
    "bf16".

    `device`: one name, or several with commas, which get equal runs of layers; the weights are the same for all. With
    `sharded` they get equal parts of every matrix, as by `load_tp`, and weights of their own.
    """
    recipe = RECIPES[recipe_name]
    torch.manual_seed(1)
    folder = Path(tempfile.mkdtemp(prefix="exl-bench-"))
    (folder / "config.json").write_text(json.dumps(config_json))
    config = ExLlamaV2Config()
    config.model_dir = str(folder)
    config.prepare(no_tensors=True)
    write_tokenizer(folder, config.vocab_size)
    model = ExLlamaV2(config)
    names = _spread(device.split(","), model.modules)
    weights = _Weights(recipe, names[0].startswith("cuda"))
    if sharded:
        places = device.split(",")
        even = (1 / len(places),) * len(places)
        model.tp_context = weights.context = TensorParallel(places, Shares(even, even), config.num_key_value_heads)
        shard_modules(model.modules, model.tp_context)
        names = [places[0]] * len(model.modules)
    for module, name in zip(model.modules, names, strict=True):
        place = torch.device(name)
        if isinstance(module, Embedding):
            rows = torch.randn(1024, config.hidden_size).to(place, torch.float16)
            module.weight = rows.repeat(-(-config.vocab_size // 1024), 1)[: config.vocab_size]
        elif isinstance(module, PositionEmbedding):
            module.weight = torch.zeros(module.positions, config.hidden_size, dtype=torch.float16, device=place)
        elif isinstance(module, Norm):
            _fill_norm(module, place)
        elif isinstance(module, Head):
            weights.fill(module.linear, "head", place)
        else:
            _fill_layer(module, weights, place)
    model._place(names)
    model.loaded = True
    return model


def _spread(names: list[str], modules: list[Module]) -> list[str]:
    """The device of each module: equal runs of layers, the head with the last one."""
    layers = [sum(isinstance(m, Attention) for m in modules[:at]) for at in range(1, len(modules) + 1)]
    return [names[min(max(layer - 1, 0) * len(names) // layers[-1], len(names) - 1)] for layer in layers]


def _fill_norm(norm: Norm, place: torch.device) -> None:
    # Of one head where RMS norms of q and k may have that: as published models do.
    norm.weight = torch.ones(norm.shapes[0 if isinstance(norm, LayerNorm) else -1], device=place)
    if isinstance(norm, LayerNorm) and norm.has_bias:
        norm.bias = torch.zeros(norm.shapes[0], device=place)


def _fill_layer(module: Module, weights: _Weights, place: torch.device) -> None:
    holders = [module, module.mlp] if isinstance(module, ParallelDecoder) else [module]
    for norm in (value for holder in holders for value in vars(holder).values() if isinstance(value, Norm)):
        _fill_norm(norm, place)
    routing = {module.router, module.shared_gate} if isinstance(module, MoE) else set()
    for linear in module.submodules():
        if linear in routing:
            values = (torch.randn(linear.out_features, linear.in_features) * WEIGHT_STD).to(weights.router_dtype)
            linear.matrix = QuantMatrix.from_float(values, device=place, name=linear.key, precise=True)
        else:
            weights.fill(linear, ".".join(linear.key.split(".")[-2:]), place)
    if isinstance(module, MoE):
        module.make_router()
    choose_own_pass(module)


class _Weights:
    """Matrices of a recipe: of each part of a layer one is drawn and repacked."""

    def __init__(self, recipe: Recipe, on_gpus: bool) -> None:
        self._recipe, self._on_gpus = recipe, on_gpus
        self.context: TensorParallel | None = None
        self._made: dict[tuple[str, int, int], _Copies] = {}
        self._orders: dict[tuple[str, int], Tensor] = {}
        self.router_dtype = (recipe.dtype if recipe.format == "float" else None) or torch.float16

    def fill(self, linear: Linear, part: str, place: torch.device) -> None:
        if isinstance(linear.cut, OutputCut):
            assert self.context is not None
            parts = []
            for shard, begin, end in linear.cut.bounds:
                matrix = self._made_for(linear, part, self.context.device(shard), end - begin)
                parts.append(Part(shard, slice(begin, end), end - begin, matrix, ((0, end - begin),)))
            linear.matrix = SplitMatrix(linear.spec, self.context, parts, linear.out_features)
        else:
            linear.matrix = self._made_for(linear, part, place, linear.out_features)

    def _made_for(self, linear: Linear, part: str, place: torch.device, n: int) -> QuantMatrix:
        k = linear.in_features
        part = part if part == "head" else part.split(".")[-1] if part.split(".")[0].isdigit() else part
        if self._recipe.dtype is not None and (self._recipe.format == "float" or part == "head"):
            weight = torch.randn(n, k, dtype=self._recipe.dtype, device=place).mul_(WEIGHT_STD)
            bias = torch.zeros(n) if linear.spec.bias else None
            return QuantMatrix.from_float(weight, bias, prescale=linear.spec.prescale, device=place, name=linear.key)
        made = self._made.get((part, k, n))
        if made is None:
            tensors, format = self._tensors(part, k, n)
            made = self._made[part, k, n] = _Copies(tensors, format, self._on_gpus, self._recipe.fine_scales)
        return made.make(linear.key, place, linear.spec.bias, linear.spec.prescale)

    def _tensors(self, part: str, k: int, n: int) -> tuple[dict[str, Tensor], Literal["exl2", "gptq"]]:
        if self._recipe.format != "exl2" and part != "head":
            return gptq_tensors(k, n), "gptq"
        plan = HEAD_PLAN if part == "head" else self._recipe.plans.get(part, self._recipe.plans.get("", "1:4b_128g"))
        return exl2_tensors(k, -(-n // 32) * 32, plan, self._order_of(part, k)), "exl2"

    def _order_of(self, part: str, k: int) -> Tensor:
        """q, k and v share one permutation, gate and up another: as in the reference's files."""
        shared = next((name for name in ("qkv", "gateup") if part.split(".")[-1].split("_")[0] in name), part)
        return self._orders.setdefault((shared, k), torch.randperm(k).to(torch.int32))
