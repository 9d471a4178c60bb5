"""The CUDA side of `sampling`: rows whose logits are on a GPU, one set of launches for all, only answers read back.

What the rows bring beside logits is written to pinned memory and copied in one piece; the answers are written to pinned
memory by the kernels. Buffers grow to the largest call and stay; one launch at a time uses those of a GPU: the next one
waits for its answers and keeps them for whoever collects them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import _native
from ..cuda_ops import stream_of
from ..device import launch_of

if TYPE_CHECKING:
    from . import Answer, NextInputs, Plan, Row

__all__ = ["Launched", "launch", "queue"]

_SEGMENT = 2048
_BLOCKS = 2048
_places: dict[torch.device, _Place] = {}
_places_lock = threading.Lock()


class _Place:
    """The buffers of one GPU."""

    @torch.inference_mode(False)  # the buffers serve callers of every mode
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.Lock()
        self.under_way = False  # whether launches may read the buffers below
        self.pending: Launched | None = None  # the launch whose answers are still in them
        self.sampled, self._copied = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._workspace: _native.SamplingWorkspace | None = None
        self.shaped = torch.empty(0, 0, device=device)
        self.grow(1 << 18)
        self.maxima = torch.empty(0, _BLOCKS, dtype=torch.int32, device=device)
        self.sums = torch.empty(0, _BLOCKS, dtype=torch.int64, device=device)
        self.wide = torch.zeros(_native.SamplingWorkspace.wide_bytes(0), dtype=torch.uint8, device=device)

    @torch.inference_mode(False)
    def grow(self, size: int) -> None:
        """New staging memory, here and there."""
        staging = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
        copy = torch.empty(size, dtype=torch.uint8, device=self.device)
        self._workspace = None
        self.staging, self.copy = staging, copy  # both or, without memory for the second, none
        self._beside.wait_stream(self.stream())  # what had this memory before

    def reserve(self, rows: int, width: int) -> None:
        """Room for this many rows of this width."""
        have_rows, have_width = self.shaped.shape
        if rows <= have_rows and width <= have_width:
            return
        rows = max(have_rows, 1 << (rows - 1).bit_length())
        pitch = max(have_width, -(-width // _SEGMENT) * _SEGMENT)
        with torch.inference_mode(False):
            shaped = torch.empty(rows, pitch, device=self.device)
            maxima = torch.empty(rows, _BLOCKS, dtype=torch.int32, device=self.device)
            sums = torch.empty(rows, _BLOCKS, dtype=torch.int64, device=self.device)
            wide = torch.zeros(_native.SamplingWorkspace.wide_bytes(rows), dtype=torch.uint8, device=self.device)
        self._workspace = None
        self.shaped, self.maxima, self.sums, self.wide = shaped, maxima, sums, wide  # all or none

    def workspace(self) -> _native.SamplingWorkspace:
        """The buffers as the native functions take them: made anew when one of them has grown."""
        if self._workspace is None:
            self._workspace = _native.SamplingWorkspace(
                self.staging, self.copy, self.shaped, self.maxima, self.sums, self.wide
            )
        return self._workspace

    def launch(self, rows: Sequence[Row], into: NextInputs | None = None, beside: bool = False) -> None:
        """Fill the staging memory, copy it and launch. `beside`: the copy is made on a stream of its own, while the
        current one is still busy with what was queued before; for calls whose launches have all been waited for."""
        self.reserve(len(rows), max(row.logits.shape[0] for row in rows))
        requests = [row.request() for row in rows]
        constants = [_constants(row.plan, self.device) for row in rows]
        stream = stream_of(rows[0].logits)
        way = self._beside.cuda_stream if beside else stream
        need, needs = _native.cuda_sample_fill(self.workspace(), requests, constants, way)
        while need > self.staging.numel():
            self.grow(2 * need)
            need, needs = _native.cuda_sample_fill(self.workspace(), requests, constants, way)
        if beside:
            self._copied.record(self._beside)
            self.stream().wait_event(self._copied)
        _native.cuda_sample_launch(self.workspace(), len(rows), needs, launch_of(stream), into)

    def stream(self) -> torch.cuda.Stream:
        """Torch's current stream; its object is kept, since making one costs 4 to 8 us."""
        number = stream_of(self.shaped)
        found = self._streams.get(number)
        if found is None:
            found = self._streams[number] = torch.cuda.current_stream(self.device)
        return found

    def answers(self, count: int) -> list[Answer]:
        """What the last launch answered; its stream must have passed it."""
        return _native.cuda_sample_answers(self.workspace(), count)


def _constants(plan: Plan, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """A plan's bias and XTC set on the GPU, made once."""
    if plan.bias is None and plan.xtc_ignored is None:
        return None, None
    found = plan.on_devices.get(device)
    if found is None:
        bias = None if plan.bias is None else plan.bias.detach().to(device, torch.float32).contiguous()
        ignored = None if plan.xtc_ignored is None else torch.from_numpy(plan.xtc_ignored).to(device)
        found = plan.on_devices[device] = (bias, ignored)
    return found


def _place(device: torch.device) -> _Place:
    with _places_lock:
        found = _places.get(device)
        if found is None:
            found = _places[device] = _Place(device)
        return found


def queue(rows: Sequence[Row]) -> _Place:
    """Launches on torch's current stream and returns at once; nothing is allocated once a call as large has been made,
    so that a capture may hold it. The answers are at the returned place after the stream has passed."""
    place = _place(rows[0].logits.device)
    if place.pending is not None:
        place.pending.answers()
    place.under_way = True
    place.launch(rows)
    return place


class Launched:
    """Queued sampling of rows on one GPU. Keeps alive what its launches read and write."""

    __slots__ = ("_answers", "_into", "_place", "_rows")

    def __init__(self, place: _Place, rows: Sequence[Row], into: NextInputs | None) -> None:
        self._place, self._rows, self._into = place, rows, into
        self._answers: list[Answer] | None = None

    def answers(self) -> list[Answer]:
        """Wait for the launches, not for what was queued after them, and return (token, probability, top) of each row,
        as `_native.sample_rows` does; token -3: the row needs the CPU."""
        with self._place.lock:
            return self.finish()

    def finish(self) -> list[Answer]:
        """`answers`, for a caller that holds the place's lock."""
        if self._answers is None:
            self._place.sampled.synchronize()
            self._answers = self._place.answers(len(self._rows))
            self._place.pending, self._place.under_way = None, False
        return self._answers


def launch(rows: Sequence[Row], into: NextInputs | None = None) -> Launched:
    """Queue the sampling of rows of one GPU on torch's current stream; `into` gets their tokens."""
    place = _place(rows[0].logits.device)
    with place.lock:
        if place.pending is not None:  # another thread's, or one that an interrupt kept from being collected
            place.pending.finish()
        elif place.under_way:  # an interrupt or a failure came before the launches were complete
            torch.cuda.synchronize(place.device)
        place.under_way = True
        place.launch(rows, into, beside=True)
        place.sampled.record(place.stream())
        place.pending = Launched(place, rows, into)
        return place.pending
