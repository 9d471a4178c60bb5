"""Which kernel a GPU runs for a call, asked without launching it and, for known cards, without having the card.

The answers come from the functions that plan the launches themselves (rust/exl-cuda, `select` of each family). A GPU
test compares the kernels that are launched with the answers (tests/kernels/test_cuda_selection.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from . import _native
from .errors import DeviceError

__all__ = ["FEW_ROWS", "GEMV_ROWS", "PACKED_ROWS", "Card", "MatrixShape", "Selection", "known_cards"]

GEMV_ROWS, FEW_ROWS, PACKED_ROWS = _native.cuda_row_limits()
"""Most rows that `gemv_ring` is chosen for where `gemm_few` fits, too; that `gemm_few` takes; that run on packed
weights, where a row's result does not depend on the number of rows. More rows are cheaper by dequantizing once. (At 128
rows both take the GPU as long, but two passes over the packed weights are twice the launches for the host.)"""

_EXL2_PARTS = ("q_weight", "q_scale", "q_scale_max", "q_groups", "q_invperm")


@dataclass(frozen=True, slots=True)
class Selection:
    """The kernel of a matmul, or of a layer's experts."""

    kernel: str
    """gemv_ring, gemm_few, gemm_batch, gemm_tile or gemm_large (dequantize, then cuBLAS)."""
    joined: bool
    """Whether one launch takes all matrices with norm, gate and residual. If not, the kernel is that of the first
    matrix by itself."""
    refused: tuple[tuple[str, str], ...]
    """Faster kernels and why each does not take the call."""


class MatrixShape:
    """A quantized matrix as far as it decides which kernel multiplies by it: format, group size, bit widths, order of
    inputs. Packed weights are not read, so `q_weight` and `qweight` may be uninitialized tensors of the right shape."""

    __slots__ = ("_native",)

    def __init__(self, native: _native.CudaShape) -> None:
        """Not for callers: use `from_exl2` or `from_gptq`."""
        self._native = native

    @classmethod
    def from_exl2(cls, tensors: Mapping[str, Tensor], *, name: str = "") -> MatrixShape:
        """From q_weight, q_scale, q_scale_max, q_groups and q_invperm, as `QuantMatrix.from_exl2` takes them.

        Raises FormatError (tensors that do not fit the format) and UnsupportedError (a matrix too large for a GPU).
        """
        q_weight, q_scale, q_scale_max, q_groups, q_invperm = (tensors[key] for key in _EXL2_PARTS)
        return cls(_native.CudaShape.from_exl2(name, (q_weight, q_scale, q_scale_max, q_groups, q_invperm)))

    @classmethod
    def from_gptq(
        cls,
        tensors: Mapping[str, Tensor],
        *,
        bits: int = 4,
        zeros: Literal["classic", "v2"] = "classic",
        group_size: int | None = None,
        name: str = "",
    ) -> MatrixShape:
        """From qweight, qzeros, scales (float16) and g_idx (or None), with the options of `QuantMatrix.from_gptq`.
        Raises as `from_exl2`."""
        if group_size is not None and group_size < 1:
            group_size = None
        parts = (tensors["qweight"], tensors["qzeros"], tensors["scales"], tensors.get("g_idx"))
        return cls(_native.CudaShape.from_gptq(name, parts, bits, zeros == "v2", group_size))


class Card:
    """A GPU as far as it decides which kernels run.

    What counts is the code that the card runs: a module built for `80+ptx` runs no Hopper kernel on an H100.
    """

    __slots__ = ("_native", "name")

    def __init__(self, native: _native.CudaCard, name: str) -> None:
        """Not for callers: use `device` or `named`."""
        self._native = native
        self.name = name

    @classmethod
    def device(cls, index: int = 0) -> Card:
        """GPU `index` of this machine, in torch's numbering, with the code this module holds for it. Raises
        DeviceError."""
        return cls(_native.CudaCard.device(index), f"cuda:{index}")

    @classmethod
    def named(cls, name: str) -> Card:
        """A card of `known_cards`, with the code of a build for it. Case, spaces and "RTX" do not matter. Raises
        DeviceError for any other name."""
        found = _native.CudaCard.named(name)
        if found is None:
            raise DeviceError(f"card {name!r} is not known; known cards: {', '.join(known_cards())}")
        return cls(found, name)

    @property
    def code(self) -> int:
        """Architecture of the code that the card runs, 80 for sm_80."""
        return int(self._native.code)

    @property
    def features(self) -> frozenset[str]:
        """Those of "bulk_copy", "clusters" and "wgmma" that this code may use."""
        return frozenset(self._native.features)

    def fused_matmul(
        self,
        matrices: Sequence[MatrixShape],
        rows: int,
        *,
        gate: bool = False,
        norm: bool = False,
        residual: bool = False,
    ) -> Selection:
        """The kernel of `linear.fused.FusedLinear` over one to three matrices: `rows` float16 rows of input, with an
        RMS norm of them, a gate of two matrices, or a residual that is added."""
        shapes = [matrix._native for matrix in matrices]
        return _selection(
            _native.cuda_select_fused(self._native, shapes, rows, gate=gate, norm=norm, residual=residual)
        )

    def matmul(self, matrix: MatrixShape, rows: int) -> Selection:
        """The kernel of `linear.QuantMatrix.matmul` for `rows` float16 rows."""
        return _selection(_native.cuda_select_alone(self._native, matrix._native, rows))

    def experts(
        self, experts: Sequence[tuple[MatrixShape, MatrixShape, MatrixShape]], rows: int, chosen: int
    ) -> Selection:
        """How the experts (gate, up, down) of a layer run for `rows` rows with `chosen` experts each: experts_few or
        experts_many in shared launches (`moe.GroupedExperts`), or experts_apart, one after the other."""
        shapes = [[matrix._native for matrix in parts] for parts in experts]
        kernel, why = _native.cuda_select_experts(self._native, shapes, rows, chosen)
        apart = kernel == "experts_apart"
        return Selection(kernel, not apart, () if why is None else (("shared launches", why),))

    def attention(
        self,
        kind: str,
        head_dim: int,
        q_heads: int,
        kv_heads: int,
        *,
        batch: int,
        tokens: int,
        keys: int,
        window: int = 0,
        softcap: float = 0.0,
    ) -> str:
        """The kernel of paged attention of `batch` sequences with `tokens` new tokens each, over `keys` keys of a cache
        of `kind` ("fp16", "fp8", "q8", "q6", "q4")."""
        name: str = _native.cuda_select_attention(
            self._native,
            kind,
            head_dim,
            q_heads,
            kv_heads,
            batch=batch,
            tokens=tokens,
            keys=keys,
            window=window,
            softcap=softcap,
        )
        return name


def known_cards() -> tuple[str, ...]:
    """Names of the cards that `Card.named` knows."""
    return tuple(_native.cuda_cards())


def _selection(row: tuple[str, bool, list[tuple[str, str]]]) -> Selection:
    kernel, joined, refused = row
    return Selection(kernel, joined, tuple(refused))
