"""The layout of a float folder for `exl_kernels.quantize.folder`, from the tables that load the model."""

from __future__ import annotations

import os
from typing import Any

from exl_kernels.quantize.folder import QuantizeReport, quantize_folder
from exl_kernels.quantize.layout import FolderMatrix

from ..config import ExLlamaV2Config
from ..errors import FormatError, ModelStateError
from ..layers import Linear, build_modules
from ..loading.checkpoint import Checkpoint, TensorReader
from ..loading.linears import Role, stored_key

__all__ = ["folder_layout", "quantize_model"]

BLOCKS: dict[Role, str] = {
    **dict.fromkeys(("q", "k", "v", "o"), "self_attn"),
    **dict.fromkeys(("gate", "up", "down"), "mlp"),
    "head": "",
}
"""The part of a layer whose matrices get their bit widths together, by the role of a matrix; others stay float."""


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
        _matrix(linear, f"{module.key}.{block}" if block else "", reader, config.checkpoint)
        for module in build_modules(config)
        for linear in module.submodules()
        if (block := BLOCKS.get(linear.spec.role)) is not None
    ]


def _matrix(linear: Linear, slot: str, reader: TensorReader, checkpoint: Checkpoint) -> FolderMatrix:
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
        spec.role,
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
