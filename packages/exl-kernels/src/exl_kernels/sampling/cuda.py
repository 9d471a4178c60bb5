"""The CUDA side of `sampling`: one set of launches samples all rows on a GPU; only answers are read back.

The other inputs of the rows are written to pinned memory and copied in one piece; the kernels write the answers to
pinned memory. Buffers grow to the largest call and are kept. One launch at a time uses the buffers of a GPU: the next
launch waits for the answers of the previous one and stores them for its `LaunchedGpuRows`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .. import _native
from ..cuda_ops import stream_of
from ..device import launch_of
from ..selection import LIMITS
from .bias import SparseBias

if TYPE_CHECKING:
    from . import Failure, Plan, Row, Sampled, TokenTarget

__all__ = ["LaunchedGpuRows", "launch", "workspace_bytes"]

_STAGING = 1 << 18
_SEGMENT, _BLOCKS = LIMITS.sampling_segment, LIMITS.sampling_blocks
_places: dict[torch.device, _Place] = {}
_places_lock = threading.Lock()


def workspace_bytes(rows: int, width: int) -> int:
    """Return the bytes on a GPU that calls of up to `rows` rows of `width` logits keep, none with a tail-free cut.

    A tail-free cut takes two more int32 for each logit of every row.
    """
    rows, pitch = _sizes(rows, width)
    return rows * (4 * pitch + 12 * _BLOCKS) + _native.SamplingWorkspace.wide_bytes(rows) + _STAGING


def _sizes(rows: int, width: int) -> tuple[int, int]:
    """Return the rows and logits of a row that memory is allocated for."""
    return 1 << (rows - 1).bit_length(), -(-width // _SEGMENT) * _SEGMENT


class _Place:
    """The buffers of one GPU."""

    @torch.inference_mode(False)  # the buffers serve callers of every mode
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.Lock()
        self.under_way = False  # whether launches may read the buffers below
        self.uncollected: LaunchedGpuRows | None = None  # the launch whose answers are still in them
        self.sampled, self._copied = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copy_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._workspace: _native.SamplingWorkspace | None = None
        self.shaped = torch.empty(0, 0, device=device)
        self.grow(_STAGING)
        self.maxima = torch.empty(0, _BLOCKS, dtype=torch.int32, device=device)
        self.sums = torch.empty(0, _BLOCKS, dtype=torch.int64, device=device)
        self.wide = torch.zeros(_native.SamplingWorkspace.wide_bytes(0), dtype=torch.uint8, device=device)
        self.tails = torch.empty(0, dtype=torch.int32, device=device)

    @torch.inference_mode(False)
    def grow(self, size: int) -> None:
        """Replace the staging memory on the host and on the GPU."""
        staging = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
        copy = torch.empty(size, dtype=torch.uint8, device=self.device)
        self._workspace = None
        self.staging, self.copy = staging, copy  # both, or none if the second allocation fails
        self._copy_stream.wait_stream(self.stream())  # earlier users of this memory

    def reserve(self, rows: int, width: int, tail_free: bool) -> None:
        """Make room for `rows` rows of `width` logits, any of them with a tail-free cut."""
        have_rows, have_width = self.shaped.shape
        if rows <= have_rows and width <= have_width:
            if tail_free and not self.tails.numel():
                with torch.inference_mode(False):
                    tails = torch.empty(have_rows, 2, have_width, dtype=torch.int32, device=self.device)
                self._workspace, self.tails = None, tails
            return
        rows, pitch = (max(have, need) for have, need in zip(self.shaped.shape, _sizes(rows, width), strict=True))
        with torch.inference_mode(False):
            shaped = torch.empty(rows, pitch, device=self.device)
            maxima = torch.empty(rows, _BLOCKS, dtype=torch.int32, device=self.device)
            sums = torch.empty(rows, _BLOCKS, dtype=torch.int64, device=self.device)
            wide = torch.zeros(_native.SamplingWorkspace.wide_bytes(rows), dtype=torch.uint8, device=self.device)
            sizes = (rows, 2, pitch) if tail_free or self.tails.numel() else (0,)
            tails = torch.empty(sizes, dtype=torch.int32, device=self.device)
        self._workspace = None
        self.shaped, self.maxima, self.sums, self.wide, self.tails = shaped, maxima, sums, wide, tails  # all or none

    def workspace(self) -> _native.SamplingWorkspace:
        """Return the buffers as the native functions take them, made again when one of them has grown."""
        if self._workspace is None:
            self._workspace = _native.SamplingWorkspace(
                staging=self.staging,
                device_copy=self.copy,
                shaped=self.shaped,
                maxima=self.maxima,
                sums=self.sums,
                wide=self.wide,
                tails=self.tails,
            )
        return self._workspace

    def launch(self, rows: Sequence[Row], into: TokenTarget | None = None, separate_copy: bool = False) -> None:
        """Fill the staging memory, copy it and launch.

        `separate_copy`: copy on a separate stream while the current stream is still busy with earlier work. Only for
        calls whose preceding launches have all been waited for. Otherwise a capture may contain the launches, after a
        call of the same size, as in benchmarks.
        """
        tail_free = any(row.plan.native.tail_free for row in rows)
        self.reserve(len(rows), max(row.logits.shape[0] for row in rows), tail_free)
        constants = [_constants(row.plan, self.device) for row in rows]
        stream = stream_of(rows[0].logits)
        way = self._copy_stream.cuda_stream if separate_copy else stream
        staged = _native.cuda_sample_fill(self.workspace(), rows, constants, way)
        while staged.bytes > self.staging.numel():
            self.grow(2 * staged.bytes)
            staged = _native.cuda_sample_fill(self.workspace(), rows, constants, way)
        if separate_copy:
            self._copied.record(self._copy_stream)
            self.stream().wait_event(self._copied)
        _native.cuda_sample_launch(self.workspace(), staged, launch_of(stream), into)

    def stream(self) -> torch.cuda.Stream:
        """Return torch's current stream. The object is cached, since making one is slow."""
        number = stream_of(self.shaped)
        found = self._streams.get(number)
        if found is None:
            found = self._streams[number] = torch.cuda.current_stream(self.device)
        return found

    def answers(self, count: int) -> list[Sampled | Failure | None]:
        """Return the answers of the last launch, which its stream must have passed."""
        return _native.cuda_sample_answers(self.workspace(), count)


def _constants(plan: Plan, device: torch.device) -> _native.SamplingConstants | None:
    """Return a plan's bias and XTC set on the GPU, cached in the plan."""
    if plan.bias is None and plan.xtc_ignored is None:
        return None
    found = plan.on_devices.get(device)
    if found is None:
        # The kernels take a row of values.
        bias = plan.bias.dense(plan.size) if isinstance(plan.bias, SparseBias) else plan.bias
        bias = None if bias is None else bias.detach().to(device, torch.float32).contiguous()
        ignored = None if plan.xtc_ignored is None else torch.from_numpy(plan.xtc_ignored).to(device)
        found = plan.on_devices[device] = _native.SamplingConstants(bias=bias, xtc_ignored=ignored)
    return found


def _place(device: torch.device) -> _Place:
    with _places_lock:
        found = _places.get(device)
        if found is None:
            found = _places[device] = _Place(device)
        return found


class LaunchedGpuRows:
    """The launched sampling of a call's rows on one GPU. Keeps the operands of its launches alive."""

    __slots__ = ("_answers", "_into", "_place", "_rows")

    def __init__(self, place: _Place, rows: Sequence[Row], into: TokenTarget | None) -> None:
        self._place, self._rows, self._into = place, rows, into
        self._answers: list[Sampled | Failure | None] | None = None

    def collect(self) -> list[Sampled | Failure | None]:
        """Wait for this launch, not for later ones, and return the result of each row; None: the CPU samples it."""
        with self._place.lock:
            return self.finish()

    def finish(self) -> list[Sampled | Failure | None]:
        """Return what `collect` does, for a caller that holds the place's lock."""
        if self._answers is None:
            self._place.sampled.synchronize()
            self._answers = self._place.answers(len(self._rows))
            self._place.uncollected, self._place.under_way = None, False
        return self._answers


def launch(rows: Sequence[Row], into: TokenTarget | None = None) -> LaunchedGpuRows:
    """Queue the sampling of rows of one GPU on torch's current stream; `into` gets their tokens."""
    place = _place(rows[0].logits.device)
    with place.lock:
        if place.uncollected is not None:  # of another thread, or not collected because of an interrupt
            place.uncollected.finish()
        elif place.under_way:  # an interrupt or a failure came before the launches were complete
            torch.cuda.synchronize(place.device)
        place.under_way = True
        place.launch(rows, into, separate_copy=True)
        place.sampled.record(place.stream())
        place.uncollected = LaunchedGpuRows(place, rows, into)
        return place.uncollected
