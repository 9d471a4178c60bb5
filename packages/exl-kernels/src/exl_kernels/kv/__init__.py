"""One layer's keys and values in pages, and the codecs that store them.

| kind | keys | values | stored bytes of one head of D elements (D' = D rounded up to a multiple of 64) |
|---|---|---|---|
| fp16 | float16 | float16 | 2 D |
| fp8 | E5M2, to nearest even, saturating | same | D |
| q8 | 8 bit, Hadamard | same | D' + scales |
| q6 | 8 bit, Hadamard | 4 bit, Hadamard | D' and D' / 2, + scales |
| q4 | 4 bit, Hadamard | same | D' / 2 + scales |

Scales are float16, one for 32 elements (D' / 16 bytes). A block of 64 belongs to one head of one token, so storing a
token never changes another. Values are first rounded to half; finite values beyond +-65504 saturate, NaN and infinities
are kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeVar

import torch
from torch import Tensor

from .. import _native
from .._check import require_cpu, require_dtype, require_shape
from ..errors import DTypeError, ShapeError, UnsupportedError
from ..reference import kv as _twin
from . import cuda as kv_cuda

__all__ = ["KVKind", "KVPages", "load_kv", "store_kv"]

V = TypeVar("V", _native.Pages, _native.CudaPages)
KVKind = Literal["fp16", "fp8", "q8", "q6", "q4"]
_BITS: dict[str, tuple[int, int]] = {"fp16": (16, 16), "fp8": (8, 8), "q8": (8, 8), "q6": (8, 4), "q4": (4, 4)}


@dataclass(frozen=True, slots=True)
class KVPages:
    """Keys and values of one layer, in pages.

    The tensors belong to their creator; this object only says how to read them. The page size is the second dimension,
    so a contiguous cache [batch, seq, H, stored] is `batch` pages of `seq` tokens.

    Attributes:
        kind: storage format: "fp16", "fp8", "q8", "q6" or "q4".
        head_dim: elements D of a head.
        key: [P, page, H, stored].
        value: [P, page, H, stored].
        key_scales: [P, page, H, D'/32] float16, or None for kinds without scales.
        value_scales: like key_scales.

    Raises:
        UnsupportedError: the kind is unknown.
        ShapeError, DTypeError: a tensor does not fit.
    """

    kind: KVKind
    head_dim: int
    key: Tensor
    value: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None
    # The kernels' view of the same memory, on the CPU or on a GPU, made on first use.
    _view: list[_native.Pages] = field(default_factory=list, init=False, repr=False, compare=False)
    _cuda_view: list[_native.CudaPages] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.kind not in _BITS:
            raise UnsupportedError(f"KVPages: unknown kind {self.kind!r}, expected one of {', '.join(_BITS)}")
        if self.key.dim() != 4 or self.head_dim < 1:
            raise ShapeError(
                f"KVPages: key {tuple(self.key.shape)}, head_dim {self.head_dim}; "
                "expected [pages, page_size, heads, stored]"
            )
        lead = tuple(self.key.shape[:3])
        key_width, value_width, scale_width = self.stored_widths(self.kind, self.head_dim)
        dtype = torch.float16 if self.kind == "fp16" else torch.uint8
        self._check_part("key", self.key, (*lead, key_width), dtype)
        self._check_part("value", self.value, (*lead, value_width), dtype)
        for name, scales in (("key_scales", self.key_scales), ("value_scales", self.value_scales)):
            if (scales is not None) != bool(scale_width):
                raise ShapeError(f"KVPages: {name} must {'' if scale_width else 'not '}be given for kind {self.kind!r}")
            if scales is not None:
                self._check_part(name, scales, (*lead, scale_width), torch.float16)

    def _check_part(self, name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        require_shape(f"KVPages: {name}", tensor, shape)
        require_dtype(f"KVPages: {name}", tensor, dtype)
        if not tensor.is_contiguous():
            raise ShapeError(f"KVPages: {name} is not contiguous")
        if tensor.device != self.key.device:
            raise DTypeError(f"KVPages: {name} is on {tensor.device}, key on {self.key.device}; put both on one device")

    @staticmethod
    def stored_widths(kind: KVKind, head_dim: int) -> tuple[int, int, int]:
        """Return the elements stored for a head of a token: of key, of value, of each scales tensor (or 0)."""
        if kind in ("fp16", "fp8"):
            return head_dim, head_dim, 0
        padded = -(-head_dim // _twin.BLOCK) * _twin.BLOCK
        key_bits, value_bits = _BITS[kind]
        return padded * key_bits // 8, padded * value_bits // 8, padded // _twin.RUN

    @classmethod
    @torch.inference_mode(False)  # pages outlive the mode that they are made in, and are written to in place
    def allocate(
        cls,
        kind: KVKind,
        num_pages: int,
        page_size: int,
        heads: int,
        head_dim: int,
        device: torch.device | str = "cpu",
    ) -> KVPages:
        """Allocate zeroed pages on a device.

        Args:
            kind: storage format.
            num_pages: number of pages.
            page_size: tokens of a page.
            heads: key/value heads.
            head_dim: elements of a head.
            device: where the pages are.

        Raises:
            UnsupportedError: the kind is unknown.
            ShapeError: a size is below 1.
        """
        if kind not in _BITS:
            raise UnsupportedError(f"KVPages: unknown kind {kind!r}, expected one of {', '.join(_BITS)}")
        if min(num_pages, page_size, heads, head_dim) < 1:
            raise ShapeError(
                f"KVPages: num_pages {num_pages}, page_size {page_size}, heads {heads}, head_dim {head_dim}: "
                "all must be at least 1"
            )
        key_width, value_width, scale_width = cls.stored_widths(kind, head_dim)
        dtype = torch.float16 if kind == "fp16" else torch.uint8
        lead = (num_pages, page_size, heads)
        key = torch.zeros((*lead, key_width), dtype=dtype, device=device)
        value = torch.zeros((*lead, value_width), dtype=dtype, device=device)
        if not scale_width:
            return cls(kind, head_dim, key, value)
        scales = [torch.zeros((*lead, scale_width), dtype=torch.float16, device=device) for _ in range(2)]
        return cls(kind, head_dim, key, value, scales[0], scales[1])

    @property
    def num_pages(self) -> int:
        """Number of pages P."""
        return self.key.shape[0]

    @property
    def page_size(self) -> int:
        """Tokens of one page."""
        return self.key.shape[1]

    @property
    def heads(self) -> int:
        """Key/value heads H."""
        return self.key.shape[2]

    @property
    def device(self) -> torch.device:
        """The device of the pages."""
        return self.key.device

    @property
    def key_bits(self) -> int:
        """Bits of one stored key element: 16, 8 or 4."""
        return _BITS[self.kind][0]

    @property
    def value_bits(self) -> int:
        """Bits of one stored value element: 16, 8 or 4."""
        return _BITS[self.kind][1]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Return the storage: key, value, then scales if the kind has them."""
        return [t for t in (self.key, self.value, self.key_scales, self.value_scales) if t is not None]

    def __reduce__(self) -> tuple[object, ...]:
        # Copies and pickles hold the tensors; the native view is made again.
        parts = (self.key, self.value, self.key_scales, self.value_scales)
        return KVPages, (self.kind, self.head_dim, *parts)

    def native(self) -> _native.Pages:
        """Return the CPU kernels' view of pages in CPU memory. Not for use outside exl_kernels."""
        if not self._view:
            self._view.append(self._viewed_as(_native.Pages))
        return self._view[0]

    def native_cuda(self) -> _native.CudaPages:
        """Return the CUDA kernels' view of pages on a GPU. Not for use outside exl_kernels."""
        if not self._cuda_view:
            self._cuda_view.append(self._viewed_as(_native.CudaPages))
        return self._cuda_view[0]

    def _viewed_as(self, view: type[V]) -> V:
        return view(
            self.kind,
            self.head_dim,
            key=self.key,
            value=self.value,
            key_scales=self.key_scales,
            value_scales=self.value_scales,
        )

    def repaged(self, page_size: int) -> KVPages:
        """View the same memory as pages of another size: [1, seq, ...] as [seq / page_size, page_size, ...] and back.

        Raises:
            ShapeError: page_size does not divide the number of tokens.
        """
        tokens = self.num_pages * self.page_size
        if page_size < 1 or tokens % page_size:
            raise ShapeError(f"KVPages: {tokens} tokens cannot be seen as pages of {page_size}")

        def view(t: Tensor) -> Tensor:
            return t.view(tokens // page_size, page_size, *t.shape[2:])

        ks, vs = self.key_scales, self.value_scales
        return KVPages(
            self.kind,
            self.head_dim,
            view(self.key),
            view(self.value),
            None if ks is None else view(ks),
            None if vs is None else view(vs),
        )


def store_kv(pages: KVPages, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Encode k and v into the pages, one token each.

    Args:
        pages: pages of the layer.
        k: [T, H, D], float32 on the CPU; float16, bfloat16 or float32 on the GPU of the pages.
        v: like k.
        slots: int64 [T], slot = page * page_size + offset; -1 skips the token. Slots are distinct.

    Raises:
        ShapeError: shapes do not fit, or, on the CPU, a slot is out of range.
        DTypeError: an element type or device does not fit.
        UnsupportedError: the pages are neither on the CPU nor on a CUDA device.
    """
    if pages.device.type == "cuda":
        _check_slots("store_kv", slots)
        kv_cuda.store_kv(pages, k, v, slots)
        return
    try:
        _native.kv_store(pages.native(), k=k, v=v, slots=slots)
    except (TypeError, ValueError):
        _check_store(pages, k, v, slots)
        _native.kv_store(pages.native(), k=k.contiguous(), v=v.contiguous(), slots=slots.contiguous())


def _check_store(pages: KVPages, k: Tensor, v: Tensor, slots: Tensor) -> None:
    require_cpu("store_kv", pages.key, k, v, slots)
    _check_slots("store_kv", slots)
    shape = (slots.shape[0], pages.heads, pages.head_dim)
    for name, tensor in (("k", k), ("v", v)):
        require_dtype(f"store_kv: {name}", tensor, torch.float32)
        require_shape(f"store_kv: {name}", tensor, shape)


def load_kv(pages: KVPages, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Decode keys and values of tokens, with the codec's own roundings.

    Args:
        pages: pages of the layer.
        slots: int64 [T]; -1 gives zeros.

    Returns:
        k and v, float32 [T, H, D], on the pages' device.

    Raises:
        ShapeError: shapes do not fit, or, on the CPU, a slot is out of range.
        DTypeError: slots are not int64 or on another device.
        UnsupportedError: the pages are neither on the CPU nor on a CUDA device.
    """
    _check_slots("load_kv", slots)
    if pages.device.type == "cuda":
        return kv_cuda.load_kv(pages, slots)
    require_cpu("load_kv", pages.key, slots)
    shape = (slots.shape[0], pages.heads, pages.head_dim)
    k, v = torch.empty(shape), torch.empty(shape)
    _native.kv_load(pages.native(), k=k, v=v, slots=slots.contiguous())
    return k, v


def _check_slots(what: str, slots: Tensor) -> None:
    require_dtype(f"{what}: slots", slots, torch.int64)
    if slots.dim() != 1:
        raise ShapeError(f"{what}: slots {tuple(slots.shape)}, expected one dimension")
