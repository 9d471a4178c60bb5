"""The layout of a float folder for `exl_kernels.quantize.folder`, from the tables that load the model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from exl_kernels.quantize.folder import QuantizeReport, quantize_folder
from exl_kernels.quantize.layout import FolderMatrix

from ..config import ExLlamaV2Config
from ..errors import FormatError, ModelStateError
from ..layers import (
    Attention,
    FeedForward,
    GatedMLP,
    Head,
    Linear,
    Module,
    MoE,
    ParallelDecoder,
    PlainMLP,
    build_modules,
)
from ..loading.checkpoint import Checkpoint, TensorReader
from ..loading.linears import stored_key

__all__ = ["folder_layout", "quantize_model"]


def quantize_model(source: str | os.PathLike[str], target: str | os.PathLike[str], **options: Any) -> QuantizeReport:
    """Quantize a float model folder of every supported architecture; otherwise as `quantize_folder`.

    The projections of attention, MLP and experts are quantized, for EXL2 also the head; routers stay float. Matrices
    that the files keep fused, stacked or transposed are written split, under the names of this package's tables, and
    load with the same config.json.

    Args:
        source: float model folder.
        target: new or empty folder.
        **options: options of `exl_kernels.quantize.folder.quantize_folder`.

    Raises:
        ConfigError: the folder cannot be loaded.
        FormatError: the model is quantized already; also the errors of `quantize_folder`.
    """
    config = ExLlamaV2Config(source)
    names = config.checkpoint.tensors if config.checkpoint is not None else ()
    packed = next((name for name in names if name.endswith((".q_weight", ".qweight"))), None)
    if packed is not None:
        raise FormatError(f"{config.model_dir}: {packed} is quantized already; start from the float model")
    return quantize_folder(source, target, layout=folder_layout(config), **options)


def folder_layout(config: ExLlamaV2Config) -> list[FolderMatrix]:
    """Return every matrix of the model that can be quantized, layer by layer, the head last.

    Raises:
        MissingTensorError: the folder lacks a matrix.
        ModelStateError: the config was prepared without tensors.
    """
    if config.checkpoint is None:
        raise ModelStateError("the config was prepared with no_tensors=True: call config.prepare() first")
    reader = TensorReader(config.checkpoint)
    return [
        _matrix(linear, slot, role, reader, config.checkpoint)
        for module in build_modules(config)
        for linear, slot, role in _linears(module)
    ]


def _linears(module: Module) -> Iterator[tuple[Linear, str, str]]:
    """Yield (matrix, slot, role) of a module's linears except routers."""
    if isinstance(module, Attention):
        for linear, role in zip((module.q_proj, module.k_proj, module.v_proj, module.o_proj), "qkvo", strict=True):
            yield linear, f"{module.key}.self_attn", role
    if isinstance(module, ParallelDecoder):
        yield from _linears(module.mlp)
    elif isinstance(module, FeedForward):
        for linear, role in _feed_forward(module):
            yield linear, f"{module.key}.mlp", role
    elif isinstance(module, Head):
        yield module.linear, "", "head"


def _feed_forward(module: FeedForward) -> Iterator[tuple[Linear, str]]:
    if isinstance(module, MoE):
        for role in ("gate", "up", "down"):  # in the order of stacked files, so that each tensor is read once
            yield from ((getattr(expert, role), role) for expert in module.experts)
        if module.shared is not None:
            yield from _feed_forward(module.shared)
    elif isinstance(module, GatedMLP):
        yield from zip((module.gate_proj, module.up_proj, module.down_proj), ("gate", "up", "down"), strict=True)
    elif isinstance(module, PlainMLP):
        yield from zip((module.up_proj, module.down_proj), ("up", "down"), strict=True)


def _matrix(linear: Linear, slot: str, role: str, reader: TensorReader, checkpoint: Checkpoint) -> FolderMatrix:
    spec = linear.spec
    key, rows = stored_key(reader, spec)
    name = f"{key}.weight" if reader.has(f"{key}.weight") else key
    tied = key == spec.alternate_key
    bias = f"{key}.bias" if reader.has(f"{key}.bias") and not tied else None
    out_features = spec.out_features
    if spec.wider and rows is None:  # heads keep the rows that pad the vocabulary
        out_features = max(out_features, (*reader.shape(name), 0)[0])
    return FolderMatrix(
        spec.key,
        slot,
        role,
        checkpoint.entry(name).name,
        spec.in_features,
        out_features,
        rows,
        None if bias is None else checkpoint.entry(bias).name,
        transposed=spec.transposed and not tied,
        rows_are_inputs=rows is not None and spec.fused_transposed,
        unit_rows=spec.unit_rows,
        kept=tied,
    )
