"""From a module key to a matrix: the format in the files, split or fused, with or without bias."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from exl_kernels.linear import QuantMatrix
from exl_kernels.selection import has_fine_scales

from ..errors import FormatError, MissingTensorError
from .checkpoint import TensorSource

__all__ = [
    "LinearOptions",
    "LinearSpec",
    "Ranges",
    "StoredAlike",
    "check_vocabulary",
    "columns_at",
    "is_quantized",
    "load_columns",
    "load_linear",
    "read_quantized",
    "require_finite_float",
    "stored_key",
    "take_rows",
]

WEIGHT_TENSORS = ("q_weight", "qweight", "weight")
EXL2_TENSORS = ("q_weight", "q_scale", "q_scale_max", "q_groups", "q_invperm")
GPTQ_TENSORS = ("qweight", "qzeros", "scales")
COLUMN_PADDING = 32  # quantized files pad out_features to a multiple of this
VOCABULARY_PADDING = 256  # most rows that pad embeddings and heads
BLOCK = 32  # columns at whose multiples every quantized format and width can be cut
# Tensors of a matrix that are cut along their last dimension, and the number of its columns in an element.
EXL2_COLUMNS = {"q_weight": Fraction(1), "q_scale": Fraction(8)}


Ranges = tuple[tuple[int, int], ...]  # [begin, end) each


def take_rows(tensor: Tensor, ranges: Ranges) -> Tensor:
    """Return the rows of `ranges`, one range after the other."""
    parts = [tensor[begin:end] for begin, end in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


Role = Literal["q", "k", "v", "o", "gate", "up", "down", "router", "shared_gate", "head"]
"""The place of a matrix in its module."""
Division = Literal["heads", "outputs", "mlp", "experts"]
"""How several devices divide a matrix: by key/value heads, by outputs, with the other matrices of its MLP, or expert by
expert."""
_DIVISIONS: dict[Role, Division] = {
    **dict.fromkeys(("q", "k", "v"), "heads"),
    **dict.fromkeys(("o", "head"), "outputs"),
    **dict.fromkeys(("gate", "up", "down"), "mlp"),
}


@dataclass(frozen=True)
class LinearSpec:
    """One linear layer as the model needs it, independent of the storage in the files."""

    key: str
    in_features: int
    out_features: int
    role: Role
    expert: int | None = None  # number of the expert whose matrix it is
    in_mixture: bool = False  # of a mixture of experts: its router, its gate, a shared expert's or an expert's matrix
    bias: bool = False
    prescale: float = 1.0
    wider: bool = False  # heads: files may hold rows that pad the vocabulary
    alternate_key: str | None = None  # tied heads: the embedding's matrix (float only)
    fused_key: str | None = None  # a larger matrix that holds this one in some files
    fused_rows: Ranges = ()  # the rows of this matrix in it, in the order of the outputs
    fused_size: int = 0  # rows of the larger matrix
    fused_transposed: bool = False  # the rows are inputs: each slice of the file is [in, out]
    transposed: bool = False  # float weights are stored [in, out] (GPT-2)
    unit_rows: bool = False  # float weights are scaled to unit vectors (norm_head)

    @property
    def division(self) -> Division | None:
        """How several devices divide the matrix; None: it is whole on the first one."""
        return _DIVISIONS.get(self.role) if self.expert is None else "experts"

    @property
    def is_precise(self) -> bool:
        """Whether the layer multiplies by `Linear.forward_precise`, whose rows are batch-invariant."""
        return self.role in ("router", "shared_gate")


@dataclass(frozen=True)
class LinearOptions:
    """Settings of the configuration that apply to every matrix."""

    compute: Literal["exact", "int8"] = "int8"
    gptq_bits: int = 4
    gptq_zeros: Literal["classic", "v2"] = "classic"
    gptq_group_size: int | None = None
    device: str = "cpu"
    fine_scales: bool = False
    """Whether a GPU stores a scale for every 32 rows: `QuantMatrix.from_exl2`."""


def load_linear(source: TensorSource, spec: LinearSpec, options: LinearOptions) -> QuantMatrix:
    """Read, check and repack one matrix.

    Args:
        source: the tensors.
        spec: the matrix that the model needs.
        options: settings for every matrix.

    Raises:
        FormatError: a tensor is invalid; the message names file and tensor.
        MissingTensorError: a tensor is missing.
    """
    key, rows = stored_key(source, spec)
    matrix = _load(source, spec, key, rows, options)
    _check_size(spec, matrix, matrix.out_features)
    return matrix


class StoredAlike:
    """Matrices that one launch on a GPU may take, which are stored alike there.

    Their EXL2 groups may differ: if one of them has a scale for every 32 rows, all are stored so.
    """

    def __init__(self, specs: Iterable[LinearSpec]) -> None:
        self._specs = tuple(specs)
        self._known: WeakKeyDictionary[TensorSource, bool] = WeakKeyDictionary()

    def fine_scales(self, source: TensorSource) -> bool:
        """Return whether these files have one of the matrices in EXL2 with groups of fewer than 128 rows.

        Reads nothing but the groups, once.
        """
        if source not in self._known:
            self._known[source] = any(_has_fine_scales(source, spec) for spec in self._specs)
        return self._known[source]


def _has_fine_scales(source: TensorSource, spec: LinearSpec) -> bool:
    key, _ = stored_key(source, spec)
    groups, words = f"{key}.q_groups", f"{key}.q_weight"
    if not (source.has(groups) and source.has(words)):
        return False
    found, shape = source.read(groups), source.shape(words)
    if found.dtype != torch.int16 or len(shape) != 2:
        return False  # left to the load of this matrix, which names it
    return has_fine_scales(found.flatten(), shape[0])


def load_columns(
    source: TensorSource, spec: LinearSpec, options: LinearOptions, begin: int, end: int
) -> tuple[QuantMatrix, Ranges, int]:
    """Load the outputs [begin, end) of a matrix. Raises as `load_linear`.

    Quantized columns are cut at multiples of BLOCK around the requested range. The sums are those of the whole matrix.

    Returns:
        A matrix; the columns of it that were requested, in order; and the number of outputs in the files.
    """
    read, kept, stored = columns_at(source, spec, begin, end)
    matrix = _load(source, spec, stored_key(source, spec)[0], read, options)
    _check_size(spec, matrix, stored)
    return matrix, kept, stored


def columns_at(source: TensorSource, spec: LinearSpec, begin: int, end: int) -> tuple[Ranges, Ranges, int]:
    """Return what `load_columns` reads, without reading it: columns in the files, and its last two results.

    Raises as `load_linear` about names and shapes.
    """
    key, rows = stored_key(source, spec)
    wanted = _part_of(rows or ((0, spec.out_features),), begin, end)
    stored = _stored_columns(source, spec, key)
    read = wanted
    if not source.has(f"{key}.weight"):
        read = tuple((b // BLOCK * BLOCK, min(-(-e // BLOCK) * BLOCK, max(stored, e))) for b, e in wanted)
    kept, offset = [], 0
    for (b, e), (first, last) in zip(wanted, read, strict=True):
        kept.append((offset + b - first, offset + e - first))
        offset += last - first
    return read, tuple(kept), stored if rows is None else spec.out_features


def is_quantized(source: TensorSource, spec: LinearSpec) -> bool:
    """Return whether the files hold a matrix in EXL2 or GPTQ format. Raises as `load_linear` about names."""
    key = stored_key(source, spec)[0]
    return any(source.has(f"{key}.{marker}") for marker in ("q_weight", "qweight"))


def _part_of(rows: Ranges, begin: int, end: int) -> Ranges:
    """Return the rows of outputs [begin, end) among `rows`, which are all outputs in order."""
    found, offset = [], 0
    for first, last in rows:
        low, high = max(begin - offset, 0), min(end - offset, last - first)
        if low < high:
            found.append((first + low, first + high))
        offset += last - first
    return tuple(found)


def _stored_columns(source: TensorSource, spec: LinearSpec, key: str) -> int:
    """Return the outputs of a matrix in the files, with a quantized matrix's padding; 0 for tensors of other shapes."""
    name = next(f"{key}.{suffix}" for suffix in WEIGHT_TENSORS if source.has(f"{key}.{suffix}"))
    shape = source.shape(name)
    if len(shape) != 2:
        return 0
    return shape[0 if name.endswith(".weight") and not spec.transposed else 1]


def _load(source: TensorSource, spec: LinearSpec, key: str, rows: Ranges | None, options: LinearOptions) -> QuantMatrix:
    """Load the matrix under `key`, or `rows` of its outputs."""
    if source.has(f"{key}.q_weight"):
        return _load_exl2(source, spec, key, rows, options)
    if source.has(f"{key}.qweight"):
        return _load_gptq(source, spec, key, rows, options)
    return _load_float(source, spec, key, rows, options)


def _check_size(spec: LinearSpec, matrix: QuantMatrix, out_features: int) -> None:
    if spec.wider and matrix.in_features == spec.in_features:
        check_vocabulary(out_features, spec.out_features, matrix.name)
        return
    most = -(-spec.out_features // COLUMN_PADDING) * COLUMN_PADDING
    if matrix.in_features != spec.in_features or not spec.out_features <= out_features <= most:
        raise FormatError(
            f"{matrix.name}: {matrix.in_features} x {out_features} (in x out) in the file, "
            f"config.json needs {spec.in_features} x {spec.out_features}"
        )


def stored_key(source: TensorSource, spec: LinearSpec) -> tuple[str, Ranges | None]:
    """Return the matrix's key in the files: its own key, a fused one (with the rows to take), or the alternate."""

    def stored(key: str) -> bool:
        return any(source.has(f"{key}.{suffix}") for suffix in WEIGHT_TENSORS)

    if stored(spec.key):
        return spec.key, None
    if spec.fused_key is not None and (stored(spec.fused_key) or source.has(spec.fused_key)):
        _check_fused(source, spec, spec.fused_key)
        return spec.fused_key, spec.fused_rows
    if spec.alternate_key is not None and source.has(f"{spec.alternate_key}.weight"):
        return spec.alternate_key, None
    raise MissingTensorError(f"Could not find {spec.key}.* in model")


def _check_fused(source: TensorSource, spec: LinearSpec, key: str) -> None:
    """Raise FormatError unless the fused matrix has exactly the rows of its parts.

    With any other number of rows config.json describes other parts than the file holds, and every slice would be wrong.
    """
    name = next((f"{key}.{suffix}" for suffix in WEIGHT_TENSORS if source.has(f"{key}.{suffix}")), key)
    shape, quantized = source.shape(name), name.endswith(("q_weight", "qweight"))
    if len(shape) == 3:  # stacked experts
        found = shape[0] * shape[1]
    else:
        found = shape[1 if quantized or spec.transposed else 0] if len(shape) == 2 else 0
    most = -(-spec.fused_size // COLUMN_PADDING) * COLUMN_PADDING if quantized else spec.fused_size
    if not spec.fused_size <= found <= most:
        raise FormatError(
            f"{source.describe(name)}: {found} outputs in the file, config.json needs {spec.fused_size} for all parts "
            "of this fused matrix; the head counts or widths of config.json are not those of the weights"
        )


def _read_parts(
    source: TensorSource, key: str, needed: tuple[str, ...], optional: tuple[str, ...]
) -> dict[str, Tensor]:
    for part in needed:
        if not source.has(f"{key}.{part}"):
            raise MissingTensorError(f"{source.describe(f'{key}.{needed[0]}')}: {key}.{part} is missing")
    names = [f"{key}.{p}" for p in (*needed, *(p for p in optional if source.has(f"{key}.{p}")))]
    group = source.read_group(names)
    return {name[len(key) + 1 :]: tensor for name, tensor in group.items()}


def read_quantized(
    source: TensorSource, spec: LinearSpec, options: LinearOptions
) -> tuple[Literal["exl2", "gptq"], dict[str, Tensor], str] | None:
    """Return the format, the tensors and the name in messages of a quantized matrix; None for a float matrix.

    Raises as `load_linear`.
    """
    key, rows = stored_key(source, spec)
    if source.has(f"{key}.q_weight"):
        return "exl2", _read_exl2(source, key, rows), source.describe(f"{key}.q_weight")
    if source.has(f"{key}.qweight"):
        return "gptq", _read_gptq(source, key, rows, options), source.describe(f"{key}.qweight")
    return None


def _read_exl2(source: TensorSource, key: str, rows: Ranges | None) -> dict[str, Tensor]:
    tensors = _read_parts(source, key, EXL2_TENSORS, ("bias",))
    return _take_columns(tensors, rows, EXL2_COLUMNS, source.describe(f"{key}.q_weight"))


def _read_gptq(source: TensorSource, key: str, rows: Ranges | None, options: LinearOptions) -> dict[str, Tensor]:
    tensors = _read_parts(source, key, GPTQ_TENSORS, ("g_idx", "bias"))
    columns = {"qweight": Fraction(1), "qzeros": Fraction(32, max(options.gptq_bits, 1)), "scales": Fraction(1)}
    return _take_columns(tensors, rows, columns, source.describe(f"{key}.qweight"))


def _load_exl2(
    source: TensorSource, spec: LinearSpec, key: str, rows: Ranges | None, options: LinearOptions
) -> QuantMatrix:
    tensors = _read_exl2(source, key, rows)
    _settle_bias(source, spec, key, tensors)
    name = source.describe(f"{key}.q_weight")
    return QuantMatrix.from_exl2(
        tensors,
        prescale=spec.prescale,
        compute=options.compute,
        device=options.device,
        name=name,
        fine_scales=options.fine_scales,
    )


def _load_gptq(
    source: TensorSource, spec: LinearSpec, key: str, rows: Ranges | None, options: LinearOptions
) -> QuantMatrix:
    tensors = _read_gptq(source, key, rows, options)
    _settle_bias(source, spec, key, tensors)
    return QuantMatrix.from_gptq(
        tensors,
        bits=options.gptq_bits,
        zeros=options.gptq_zeros,
        group_size=options.gptq_group_size,
        prescale=spec.prescale,
        compute=options.compute,
        device=options.device,
        name=source.describe(f"{key}.qweight"),
    )


def _load_float(
    source: TensorSource, spec: LinearSpec, key: str, rows: Ranges | None, options: LinearOptions
) -> QuantMatrix:
    name = source.describe(f"{key}.weight")
    if source.has(f"{key}.weight"):
        tensors = _read_parts(source, key, ("weight",), () if key == spec.alternate_key else ("bias",))
    else:  # stacked experts: a tensor without a suffix
        name = source.describe(key)
        tensors = {"weight": source.read_group([key])[key]}
    if rows is not None and tensors["weight"].dim() == 3:
        tensors["weight"] = tensors["weight"].flatten(0, 1)
    if tensors["weight"].dim() != 2:
        shape = list(tensors["weight"].shape)
        raise FormatError(f"{name}: a linear weight has two dimensions, this one has shape {shape}")
    if spec.transposed:
        tensors["weight"] = tensors["weight"].T
    if rows is not None:
        _check_rows(rows, tensors["weight"].shape[0], name)
        tensors = {part: take_rows(t, rows) for part, t in tensors.items()}
        if spec.fused_transposed:
            tensors["weight"] = tensors["weight"].T
    for part, tensor in tensors.items():
        require_finite_float(tensor, source.describe(f"{key}.{part}"))
    _settle_bias(source, spec, key, tensors)
    weight = tensors["weight"]
    if spec.unit_rows:
        weight = torch.nn.functional.normalize(weight.float())
    return QuantMatrix.from_float(
        weight.contiguous(),
        tensors.get("bias"),
        prescale=spec.prescale,
        compute=options.compute,
        device=options.device,
        name=name,
        precise=spec.is_precise,
    )


def check_vocabulary(rows: int, vocab_size: int, name: str) -> None:
    """Check that an embedding or head of `rows` fits a vocabulary: exactly, or with padding rows.

    transformers rejects every other number than vocab_size. Quantizers and trainers pad the rows to a multiple of 8, at
    most VOCABULARY_PADDING more; other rows are tokens that config.json lacks.

    Raises:
        FormatError: the number of rows does not fit.
    """
    if rows != vocab_size and not (rows % 8 == 0 and 0 < rows - vocab_size <= VOCABULARY_PADDING):
        raise FormatError(
            f"{name}: {rows} rows, but config.json's vocab_size is {vocab_size}, which up to {VOCABULARY_PADDING} rows "
            f"may pad to a multiple of 8: config.json is another model's, or its vocab_size should be {rows}"
        )


def require_finite_float(tensor: Tensor, name: str) -> None:
    """Raise FormatError unless `tensor` is F16, BF16 or F32 without NaN and infinities."""
    if tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise FormatError(f"{name}: element type {tensor.dtype}; a float weight must be F16, BF16 or F32")
    # A sum is one fast pass and non-finite if any element is; an overflow of finite elements is handled below.
    if not torch.isfinite(tensor.sum(dtype=torch.float32)) and not torch.isfinite(tensor).all():
        raise FormatError(
            f"{name}: holds NaN or infinity; the file is damaged or was written by an overflowing conversion"
        )


def _take_columns(
    tensors: dict[str, Tensor], rows: Ranges | None, per_element: Mapping[str, Fraction], name: str
) -> dict[str, Tensor]:
    """Return columns of a quantized matrix, if the cut splits none of their elements."""
    if rows is None:
        return tensors
    multiple = max(share.numerator for share in per_element.values())
    if any(bound % multiple for bounds in rows for bound in bounds):
        raise FormatError(
            f"{name}: a quantized matrix of these widths is cut at multiples of {multiple} columns, not {list(rows)}"
        )
    cut = dict(tensors)
    for part, share in per_element.items():
        if cut[part].dim() != 2:
            raise FormatError(f"{name}: {part} has shape {list(cut[part].shape)}; expected two dimensions")
        _check_rows(rows, int(cut[part].shape[1] * share), name)
        slices = [cut[part][:, int(begin / share) : int(end / share)] for begin, end in rows]
        cut[part] = torch.cat(slices, dim=1).contiguous()
    if "bias" in cut:
        cut["bias"] = take_rows(cut["bias"], rows)
    return cut


def _check_rows(rows: Ranges, available: int, name: str) -> None:
    needed = max(end for _, end in rows)
    if needed > available:
        raise FormatError(f"{name}: has {available} outputs, config.json needs at least {needed}")


def _settle_bias(source: TensorSource, spec: LinearSpec, key: str, tensors: dict[str, Tensor]) -> None:
    """Check the bias: a declared one must exist; an undeclared one may exist only if it is all zero."""
    if spec.bias and "bias" not in tensors:
        place = source.describe(next(f"{key}.{s}" for s in WEIGHT_TENSORS if source.has(f"{key}.{s}")))
        raise MissingTensorError(f"{place}: {spec.key} has no bias but bias expected")
    if "bias" in tensors:
        name = source.describe(f"{key}.bias")
        require_finite_float(tensors["bias"], name)
        if not spec.bias:
            if tensors["bias"].any():
                raise FormatError(f"{name}: has a bias, but config.json declares none for {spec.key}")
            del tensors["bias"]
