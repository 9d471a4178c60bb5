"""Attention on a GPU; `attention` calls these functions for tensors on a GPU.

The matrix multiplications take halves (queries, softmax weights and Hadamard codes times their scale are rounded to
half); sums and softmax are float32. The order of arithmetic depends on a token's own position only
(`attention_common.cuh`). So a token's result is bitwise identical alone or in a batch, in any chunking and at any page
placement. The kernels for few and for many tokens give identical results, so no setting is needed.

Nothing is read back from the GPU. Slots, rows, positions and page numbers out of range, which the CPU rejects, are
ignored here: such slots are not stored and load as zeros, such rows see no keys, such pages read as zeros. With
EXL_CUDA_CHECKS=1 the entry points reject them as the CPU does, outside captures (`index_checks`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import _native
from .._check import require_dtype, require_out, require_shape
from ..cuda_ops import stream_of
from ..device import launch_of
from ..errors import DTypeError, ShapeError, UnsupportedError
from ..index_checks import check_slots, check_tables, checks_enabled
from ..kv.cuda import one_device
from ..linear.cuda import CudaQuantMatrix
from ..linear.matmul_input import MatmulInput
from ..selection import LIMITS

if TYPE_CHECKING:
    from ..kv import KVPages

__all__ = [
    "AttentionOptions",
    "AttentionTables",
    "HeadNorms",
    "Rotation",
    "attend_own",
    "attend_stored",
    "attention_options",
    "counters",
    "flat_rows",
    "paged_attention",
    "zeros_of",
]

AttentionOptions = _native.AttentionOptions
AttentionTables = _native.AttentionTables
Rotation = _native.Rotation

attention_options = functools.lru_cache(maxsize=256)(AttentionOptions)
"""Attention options by scale, window and softcap of a layer: the same for every step."""

_by_stream: dict[tuple[torch.device, int], Tensor] = {}
"""Counters by device and stream: zero before and after every launch, so one tensor serves all launches of a stream."""

_current = threading.local()


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of each head of q and of k: x / sqrt(mean(x^2) + eps) * weight, rounded to the dtype of x."""

    q: Tensor
    """float32 [head_dim], contiguous, on the GPU of q; `k` likewise."""
    k: Tensor
    eps: float


@contextlib.contextmanager
def counters(device: torch.device | str) -> Iterator[Tensor]:
    """Provide a tensor of counters to the launches of this thread on a GPU, for capturing graphs.

    Launches that share counters must not run at the same time. Outside this context launches of one stream share a
    tensor. Every captured launch then first fills a separate tensor with zeros, which costs more than the counters
    save. Keep the tensor as long as the graph.
    """
    place = torch.device(device)
    count = LIMITS.attention_counters(torch.cuda.get_device_properties(place).multi_processor_count)
    held = torch.zeros(count, dtype=torch.int32, device=place)
    before = getattr(_current, "counters", None)
    _current.counters = held
    try:
        yield held
    finally:
        _current.counters = before


def paged_attention(
    q: Tensor,
    pages: KVPages,
    block_table: Tensor,
    rows: Tensor,
    positions: Tensor,
    *,
    scale: float,
    window: int,
    softcap: float,
    key_mask: Tensor | None,
    out: Tensor | None,
    max_keys: int | None,
) -> Tensor:
    """Implement `attention.paged_attention` on a GPU for checked arguments; q float16, bfloat16 or float32."""
    require_dtype("paged_attention: q", q, torch.float16, torch.bfloat16, torch.float32)
    one_device("paged_attention", pages, q, block_table, rows, positions, key_mask)
    out = require_out("paged_attention", out, q)
    tokens, q_heads = q.shape[:2]
    if not tokens:
        return out
    q_stride = q_heads * q.shape[2]
    table, rows, positions = block_table.contiguous(), rows.contiguous(), positions.contiguous()
    key_mask = None if key_mask is None else key_mask.contiguous()
    tables = AttentionTables(table, rows=rows, positions=positions, key_mask=key_mask, max_keys=max_keys)
    options = attention_options(scale, window=window, softcap=softcap)
    _launch("paged_attention", (q, q_stride), pages, tables=tables, options=options, out=out)
    return out


def attend_own(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: KVPages,
    *,
    tables: AttentionTables,
    slots: Tensor,
    rotation: Rotation,
    options: AttentionOptions,
    out: Tensor | None = None,
    early: bool = False,
    into: MatmulInput | None = None,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Run `apply_rope` on q and k, `store_kv` of k and v, and `paged_attention` of q in one launch, on a GPU.

    The result is bitwise identical to the three separate calls. The function serves steps of one token a row of the
    batch: no two tokens share a row of the block table. The key of position p must belong in the slot that block_table
    says.
    Capturable: allocates only `out` (if not given) and a workspace, and reads nothing back.

    Args:
        q: [T, Hq, D]; read, not rewritten. q, k and v are of one float type, and each may be a view of wider rows (of
            one fused matmul of q, k and v).
        k: [T, H, D], with the same stride between tokens as v.
        v: [T, H, D].
        pages: keys and values of the layer.
        tables: block table, and row and position of each token, as for `paged_attention`.
        slots: int64 [T], as for `store_kv`. A token with slot -1 is not stored, but sees its own key.
        rotation: cos and sin float32 [S, R/2], R <= D, and their row of each token; nothing is rotated if R = 0.
        options: `attention_options` of the layer.
        out: as for `paged_attention`.
        early: the kernel may read all operands but q, k, v before the preceding launches have ended. Only for callers
            that know these operands to be written before those launches began, such as by work before the launch of the
            captured graph that contains this call.
        into: the results go there instead of `out`, as float16; the function returns its scratch.
        norms: norms of q and k before the rotation, as `rms_norm`.

    Returns:
        [T, Hq, D], or the scratch of `into`.

    Raises:
        ShapeError, DTypeError: an operand does not fit.
        UnsupportedError: the pages are not on a GPU, or the matrix of `into` has no packed input.
    """
    what = "attend_own"
    _check_query(what, q, pages, "the separate operators")
    one_device(what, pages, q, k, v, *_tensors_of(tables), slots, rotation.cos, rotation.sin, rotation.positions)
    _check_new(what, q, k, v, pages, slots)
    if into is not None:
        _check_into(what, into, q, out)
    # With `into` only the shape of `out` is used.
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    require_shape(f"{what}: out", out, tuple(q.shape))
    if q.shape[0]:
        new_keys = _new_keys(what, k, v, rotation, slots, early, norms)
        flat = flat_rows(what, "q", q)
        _launch(what, flat, pages, tables=tables, options=options, out=out, new_keys=new_keys, into=into)
    return out if into is None else into.scratch


def attend_stored(
    q: Tensor,
    pages: KVPages,
    tables: AttentionTables,
    options: AttentionOptions,
    *,
    tokens: int,
    into: MatmulInput | None = None,
    windows: bool = False,
) -> Tensor:
    """Run `paged_attention` for tokens whose keys are stored already, on a GPU.

    The result is bitwise identical. Where rows have few tokens, these get blocks of their own if they read few keys, as
    in `attend_own`; others share what they read of a sequence. Capturable, as `attend_own`.

    Args:
        q: [T, Hq, D] in rotated form; may be a view of wider rows.
        pages: keys and values of the layer.
        tables: block table, and row and position of each token, as for `paged_attention`; tokens may share a row.
        options: `attention_options` of the layer.
        tokens: most tokens of a row of the block table, or of a window; more than DECODE_TOKENS are
            attended as prompts.
        into: the results of few tokens a row go there, as float16; the function returns its scratch.
        windows: the rows of block_table are windows of prompts, and the tokens of neighbouring windows may have one
            row. They are attended as prompts where this is faster.

    Returns:
        [T, Hq, D], or the scratch of `into`.

    Raises:
        ShapeError, DTypeError: an operand does not fit.
        UnsupportedError: the pages are not on a GPU, or the matrix of `into` has no packed input.
    """
    what = "attend_stored"
    _check_query(what, q, pages, "paged_attention")
    one_device(what, pages, q, *_tensors_of(tables))
    if into is not None:
        _check_into(what, into, q, None)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if q.shape[0]:
        flat = flat_rows(what, "q", q)
        _launch(what, flat, pages, tables=tables, options=options, out=out, into=into, tokens=tokens, windows=windows)
    return out if into is None else into.scratch


def _tensors_of(tables: AttentionTables) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    return tables.block_table, tables.rows, tables.positions, tables.key_mask


def _check_query(what: str, q: Tensor, pages: KVPages, instead: str) -> None:
    require_dtype(f"{what}: q", q, torch.float16, torch.bfloat16, torch.float32)
    if pages.device.type != "cuda":
        raise UnsupportedError(f"{what}: pages on {pages.device}; it runs on a GPU only, use {instead}")
    if q.dim() != 3 or q.shape[1] % pages.heads or q.shape[2] != pages.head_dim:
        raise ShapeError(f"{what}: q {tuple(q.shape)}, expected [T, n x {pages.heads}, {pages.head_dim}]")


def _check_new(what: str, q: Tensor, k: Tensor, v: Tensor, pages: KVPages, slots: Tensor) -> None:
    if checks_enabled():
        check_slots(what, pages.key, slots)
    for name, tensor in (("k", k), ("v", v)):
        require_shape(f"{what}: {name}", tensor, (q.shape[0], pages.heads, pages.head_dim))
        require_dtype(f"{what}: {name}", tensor, q.dtype)
    if k.stride(0) != v.stride(0) and q.shape[0] > 1:
        raise ShapeError(
            f"{what}: k and v are {k.stride(0)} and {v.stride(0)} elements a token apart; expected one stride"
        )


def _check_into(what: str, into: MatmulInput, q: Tensor, out: Tensor | None) -> None:
    require_dtype(f"{what}: q, with into", q, torch.float16)
    require_dtype(f"{what}: scratch", into.scratch, torch.uint8)
    if not isinstance(into.matrix, CudaQuantMatrix):
        raise UnsupportedError(f"{what}: into {into.matrix!r}, which has no packed input; expected a CudaQuantMatrix")
    if out is not None:
        raise UnsupportedError(f"{what}: out and into are both given; the results go to one of them")
    for name, device in (("matrix", into.matrix.device), ("scratch", into.scratch.device)):
        if device != q.device:
            raise DTypeError(f"{what}: the matmul's {name} is on {device}, q on {q.device}; use one device")


def flat_rows(what: str, name: str, t: Tensor) -> tuple[Tensor, int]:
    """Return rows [T, H, D] as one dimension, and the elements between them.

    Args:
        what: operator that an error names.
        name: operand that an error names.
        t: the rows, views of wider ones or not; each has its heads side by side.

    Raises:
        ShapeError: the heads of a row are not side by side.
    """
    heads, dim = t.shape[1:]
    if t.stride(2) != 1 or (heads > 1 and t.stride(1) != dim):
        raise ShapeError(f"{what}: {name} has strides {t.stride()}; expected heads side by side")
    stride = t.stride(0) if t.shape[0] > 1 else heads * dim
    return t.as_strided(((t.shape[0] - 1) * stride + heads * dim,), (1,)), stride


def _new_keys(
    what: str,
    k: Tensor,
    v: Tensor,
    rotation: Rotation,
    slots: Tensor,
    early: bool,
    norms: HeadNorms | None,
) -> _native.NewKeys:
    """Return the keys and values of `attend_own`."""
    (flat_k, stride), (flat_v, _) = flat_rows(what, "k", k), flat_rows(what, "v", v)
    try:
        heads = None if norms is None else _native.HeadNorms(norms.q, norms.k, norms.eps)
        return _native.NewKeys(
            key=flat_k, value=flat_v, stride=stride, rotation=rotation, slots=slots, early=early, norms=heads
        )
    except ValueError as error:
        raise ShapeError(f"{what}: {error}") from None


def _launch(
    what: str,
    q: tuple[Tensor, int],
    pages: KVPages,
    *,
    tables: AttentionTables,
    options: AttentionOptions,
    out: Tensor,
    new_keys: _native.NewKeys | None = None,
    into: MatmulInput | None = None,
    tokens: int | None = None,
    windows: bool = False,
) -> None:
    native, stream = pages.native_cuda(), stream_of(out)
    if checks_enabled():
        check_tables(what, pages.key, tables.block_table, tables.rows, tables.positions, options.window)
    try:
        to = None if into is None else into.native()
        call = native.attention(
            q[0],
            q_stride=q[1],
            tables=tables,
            options=options,
            out=out,
            launch=launch_of(stream),
            new_keys=new_keys,
            into=to,
            tokens=tokens,
            windows=windows,
        )
        floats, count = call.partial_floats, call.ticket_counters
        partials = torch.empty(floats, dtype=torch.float32, device=out.device) if floats else None
        call.run(partials, zeros_of(out.device, stream, count) if count else None)
    except ValueError as error:
        raise ShapeError(f"{what}: {error}") from None


def zeros_of(device: torch.device, stream: int, count: int) -> Tensor:
    """Return at least `count` int32 zeros that only launches on this stream use."""
    current = getattr(_current, "counters", None)
    if current is not None and current.device == device and current.numel() >= count:
        return current  # type: ignore[no-any-return]
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(count, dtype=torch.int32, device=device)
    held = _by_stream.get((device, stream))
    if held is None or held.numel() < count:
        held = torch.zeros(max(count, 1024), dtype=torch.int32, device=device)
        _by_stream[(device, stream)] = held
    return held
