"""Results that several GPUs gather by storing into one another's memory.

Nothing here waits on the host, and all of it can be captured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from . import _native
from ._check import require_shape
from .cuda_ops import launch_on
from .errors import DeviceError, DTypeError, ShapeError, UnsupportedError
from .selection import COLUMN_MARKS, MOST_EXCHANGES, MOST_GPUS

__all__ = ["ExchangeBuffers", "PeerResults", "exchange_buffer_bytes", "free_deleted", "peer_result_bytes"]

WORD = 4  # bytes
ALIGNED = 16
"""Bytes that a thread stores at once. Results and columns begin at multiples of it."""
_gone: list[Sequence[Tensor]] = []
"""Buffers of deleted objects: launches of other GPUs, which no stream of their own GPU waits for, may still store
into them. `free_deleted` frees them when the GPUs are idle."""


def exchange_buffer_bytes(size: int, odd: int = 0) -> int:
    """Return the bytes of a GPU's exchange buffer, which takes 64 bits for each 32 of a result.

    Args:
        size: bytes of the largest result.
        odd: bytes of a larger one that only exchanges of odd numbers have.
    """
    return 2 * WORD * (_words(size) + _words(max(size, odd)))


def _words(size: int) -> int:
    return 2 * -(-size // (2 * WORD))  # even: pairs of words are aligned in both halves


def free_deleted() -> None:
    """Free the memory of deleted exchange buffers and results. Waits for their GPUs."""
    gone: list[Sequence[Tensor]] = []
    with contextlib.suppress(IndexError):  # not by a copy: a garbage collection may add buffers meanwhile
        while True:
            gone.append(_gone.pop())
    for device in {buffer.device for buffers in gone for buffer in buffers}:
        torch.cuda.synchronize(device)


class ExchangeBuffers:
    """Memory through which GPUs of this process exchange parts of results, without a host or an event in between.

    Each GPU stores its part into the others' memory. A word carries a mark of the step and of the exchange, for which
    its reader waits. All GPUs run the same steps: `begin_step`, then the same exchanges in the same order on one stream
    each. A step has an even number of exchanges. An exchange that not all GPUs receive is the last of its step, and the
    next step waits for its receivers by other means.

    Args:
        devices: the GPUs, two to eight; each can access the memory of the others. A GPU may be named more than once
            where sending and receiving are called apart.
        size: bytes of the largest result.
        odd: bytes of larger results that exchanges of odd numbers have, by the numbers of the GPUs that receive them.
        limit: seconds that a kernel waits for a part before it gives up: this GPU then gets NaN and sends nothing any
            more, so that the others give up, too, and `check` raises.

    Raises:
        UnsupportedError: the number of devices is out of range.
    """

    _buffers: Sequence[Tensor] = ()  # also where the constructor failed

    @torch.inference_mode(False)
    def __init__(
        self, devices: Sequence[torch.device], size: int, odd: Mapping[int, int] | None = None, limit: float = 10.0
    ) -> None:
        if not 2 <= len(devices) <= MOST_GPUS:
            raise UnsupportedError(f"{len(devices)} GPUs exchange results; from 2 to {MOST_GPUS} can")
        self.devices = list(devices)
        free_deleted()
        self._half, larger = _words(size), odd or {}
        buffers = self._buffers = [
            torch.zeros(exchange_buffer_bytes(size, larger.get(gpu, 0)) // (2 * WORD), dtype=torch.int64, device=device)
            for gpu, device in enumerate(self.devices)
        ]
        self.steps = [torch.zeros(1, dtype=torch.int32, device=device) for device in self.devices]
        self._failed = [torch.zeros(1, dtype=torch.int32, device=device) for device in self.devices]
        for device in {*self.devices}:  # no GPU may store into a buffer that is still to be filled with zeros
            torch.cuda.synchronize(device)
        limit_ns = int(limit * 1e9)
        self._parts: dict[tuple[tuple[int, ...], int], _native.PeerParts] = {}
        self._native = [
            _native.PeerExchange(buffers, half=self._half, me=gpu, step=step, failed=failed, limit_ns=limit_ns)
            for gpu, (step, failed) in enumerate(zip(self.steps, self._failed, strict=True))
        ]

    def __del__(self) -> None:
        # No waiting here: a garbage collection may call this method during a capture.
        if self._buffers:
            _gone.append(self._buffers)

    def begin_step(self, gpu: int) -> None:
        """Queue the beginning of a step of the GPU number `gpu` on its current stream."""
        self.steps[gpu].add_(1)

    def gather(
        self,
        gpu: int,
        own: Tensor,
        full: Tensor,
        begins: Sequence[int],
        number: int,
        receivers: Sequence[int] | None = None,
        *,
        send: bool = True,
        receive: bool = True,
    ) -> None:
        """Queue an exchange on a GPU's current stream: gather the parts of all GPUs in `full`, in the order of columns.

        Args:
            gpu: number of the GPU.
            own: [rows, width] of 16 or 32 bits, contiguous, on it; rows of 16 bits are pairs.
            full: [rows, columns] of the same dtype, contiguous, on it; written by receivers only.
            begins: first column of each GPU, and the number of columns at the end, ascending; even for 16 bits. Each
                GPU has columns: who receives nothing from one would not know how far it is.
            number: of the exchange within its step, from 0.
            receivers: numbers of the GPUs that get the whole; None for all.
            send: send the own part.
            receive: wait for the parts of the others.

        Raises:
            ShapeError, DTypeError: the operands do not fit, or exceed the size of the buffers.
            DeviceError: the launch failed.
        """
        what = "ExchangeBuffers.gather"
        size = own.element_size()
        if size not in (2, WORD) or full.dtype != own.dtype:
            raise DTypeError(f"{what}: own is {own.dtype}, full {full.dtype}; expected one dtype of 16 or 32 bits")
        per = WORD // size
        if any(begin % per for begin in begins) or len(begins) != len(self.devices) + 1:
            raise ShapeError(f"{what}: begins is {list(begins)}; expected {len(self.devices) + 1} multiples of {per}")
        if any(end <= begin for begin, end in pairwise(begins)):
            raise ShapeError(f"{what}: begins is {list(begins)}; expected columns for every GPU")
        if not set(range(len(self.devices))).issuperset(receivers or ()):
            raise ShapeError(f"{what}: receivers is {receivers}; expected numbers below {len(self.devices)}")
        require_shape(f"{what}: own", own, (own.shape[0], begins[gpu + 1] - begins[gpu]))
        require_shape(f"{what}: full", full, (own.shape[0], begins[-1]))
        if not 0 <= number < MOST_EXCHANGES:
            raise ShapeError(f"{what}: exchange {number} of a step; at most {MOST_EXCHANGES} are possible")
        got = set(range(len(self.devices)) if receivers is None else receivers)
        if any(full.nbytes > WORD * self._room(to, number) for to in got):
            raise ShapeError(f"{what}: {full.nbytes} bytes exceed the exchange buffers, which were made for fewer")
        if not (own.is_contiguous() and full.is_contiguous()):
            raise ShapeError(f"{what}: own and full must be contiguous")
        if not full.numel():
            return
        parts = self._parts_of(tuple(begin // per for begin in begins), sum(1 << one for one in got))
        mine, whole, launch = own.view(torch.int32), full.view(torch.int32), launch_on(full)
        self._native[gpu].gather(
            own=mine, full=whole, parts=parts, number=number, launch=launch, send=send, receive=receive
        )

    def _parts_of(self, words: tuple[int, ...], receivers: int) -> _native.PeerParts:
        """Return the first word of each GPU and their number as the kernels take them, with the receivers' bits."""
        found = self._parts.get((words, receivers))
        if found is None:
            found = self._parts[words, receivers] = _native.PeerParts(words, receivers=receivers)
        return found

    def _room(self, gpu: int, number: int) -> int:
        """Return the words of a result that a GPU can receive in an exchange."""
        return self._buffers[gpu].numel() - self._half if number % 2 else self._half

    def check(self) -> None:
        """Raise DeviceError if a kernel gave up waiting. Waits for the GPUs."""
        _check_failed(self.devices, self._failed)


def peer_result_bytes(even: int, odd: int) -> int:
    """Return the bytes of the results of a GPU in `PeerResults`.

    Args:
        even: bytes of the largest result of a store of an even number.
        odd: the same of odd numbers.
    """
    return _up(even) + _up(odd)


def _up(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


class PeerResults:
    """Results of many rows on several devices of this process. Each device stores its columns into all of them.

    Each device has two results, which take turns: a result is valid until the device makes its second `store` after
    it. All devices make the same stores in the same order, each on one stream.

    Stores either mark that they are done and wait for the marks of the others: all devices then call `begin_step`, make
    an even number of stores, and have all work of a step queued without a wait of the host. Or the caller orders all
    devices after each store, by events for example. On the CPU there is nothing to order.

    Args:
        devices: two to eight, all GPUs that can access the memory of the others, or all the CPU. A GPU may be named
            more than once where marking and waiting are called apart.
        even: bytes of the largest result of a store of an even number.
        odd: the same of odd numbers.
        limit: seconds that a store waits for the others before it gives up: this GPU then gets NaN and marks nothing
            any more, so that the others give up, too, and `check` raises.

    Raises:
        UnsupportedError: the number of devices is out of range.
    """

    _marked = False  # also where the constructor failed

    @torch.inference_mode(False)
    def __init__(self, devices: Sequence[torch.device], even: int, odd: int, limit: float = 10.0) -> None:
        if not 2 <= len(devices) <= MOST_GPUS:
            raise UnsupportedError(f"{len(devices)} devices store into each other's results; from 2 to {MOST_GPUS} can")
        free_deleted()
        self.devices = list(devices)
        self._sizes = (_up(even), _up(odd))
        words, count = peer_result_bytes(even, odd) // WORD, len(self.devices)

        def on_each(make: Callable[..., Tensor], *shape: int) -> list[Tensor]:
            return [make(shape, dtype=torch.int32, device=device) for device in self.devices]

        self._results, self._marks = on_each(torch.empty, words), on_each(torch.zeros, count, COLUMN_MARKS)
        self._steps, self._failed = on_each(torch.zeros, 1), on_each(torch.zeros, 1)
        self._views: dict[tuple[int, int, int, int, torch.dtype], Tensor] = {}
        self._checked: dict[tuple[int, int, tuple[int, ...], torch.dtype, tuple[int, ...]], list[int]] = {}
        self._native: list[_native.PeerColumns] = []
        if self.devices[0].type == "cuda":
            self._native = [
                _native.PeerColumns(
                    self._results,
                    half=self._sizes[0] // WORD,
                    marks=self._marks,
                    me=gpu,
                    step=step,
                    failed=failed,
                    limit_ns=int(limit * 1e9),
                )
                for gpu, (step, failed) in enumerate(zip(self._steps, self._failed, strict=True))
            ]

    def __del__(self) -> None:
        # Without events, launches of other GPUs may still store into a result. No waiting: see `ExchangeBuffers`.
        if self._marked:
            _gone.append([*self._results, *self._marks])

    def begin_step(self, gpu: int) -> None:
        """Queue the beginning of a step of the GPU number `gpu` on its current stream."""
        self._marked = True
        self._steps[gpu].add_(1)

    def store(
        self, gpu: int, own: Tensor, begins: Sequence[int], number: int, *, mark: bool = False, wait: bool = False
    ) -> Tensor:
        """Queue a store of columns on a device's current stream.

        Args:
            gpu: number of the device.
            own: [rows, width] of 16 or 32 bits, contiguous, on it; on a GPU rows of 16 bits are pairs.
            begins: first column of each device, and the number of columns at the end, ascending.
            number: of the store within its step, from 0.
            mark: tell the other GPUs that the columns are stored.
            wait: wait for the columns of all other GPUs. They must mark.

        Returns:
            The result [rows, columns] of the device, of own's type.

        Raises:
            ShapeError, DTypeError: the operands do not fit, or exceed the size of the results.
            DeviceError: the launch failed.
        """
        rows, place = own.shape[0], number % 2
        key = (gpu, place, tuple(own.shape), own.dtype, tuple(begins))
        words = self._checked.get(key)  # checks cost host time in every store
        if words is None:
            words = self._checked[key] = self._words_of(gpu, place, own, begins)
        if own.device != self.devices[gpu] or not own.is_contiguous():
            raise ShapeError(
                f"PeerResults.store: own is on {own.device}, strides {own.stride()}; it must be contiguous and on "
                f"{self.devices[gpu]}"
            )
        if not 0 <= number < MOST_EXCHANGES:
            raise ShapeError(f"PeerResults.store: number {number} of a step; at most {MOST_EXCHANGES - 1}")
        if self._native:
            aligned = own if own.data_ptr() % ALIGNED == 0 else own.clone()
            launch = launch_on(aligned)
            self._native[gpu].store(aligned.view(torch.int32), words, number, launch, mark=mark, wait=wait)
        else:
            for at in range(len(self.devices)):
                self.result_of(at, number, rows, begins[-1], own.dtype)[:, begins[gpu] : begins[gpu + 1]] = own
        return self.result_of(gpu, number, rows, begins[-1], own.dtype)

    def _words_of(self, gpu: int, place: int, own: Tensor, begins: Sequence[int]) -> list[int]:
        """Check the shapes of a store and return `begins` in words of 32 bits."""
        what, size = "PeerResults.store", own.element_size()
        if size not in (2, WORD):
            raise DTypeError(f"{what}: own is {own.dtype}; expected 16 or 32 bits")
        if len(begins) != len(self.devices) + 1 or any(end <= begin for begin, end in pairwise(begins)):
            raise ShapeError(f"{what}: begins is {list(begins)}; expected columns for each of {len(self.devices)}")
        require_shape(f"{what}: own", own, (own.shape[0], begins[gpu + 1] - begins[gpu]))
        per = WORD // size
        if self._native and any(begin % per for begin in begins):
            raise ShapeError(f"{what}: begins is {list(begins)}; expected multiples of {per}")
        if (nbytes := own.shape[0] * begins[-1] * size) > self._sizes[place]:
            raise ShapeError(f"{what}: the result has {nbytes} bytes; at most {self._sizes[place]} were asked for")
        return [begin // per for begin in begins]

    def result_of(self, gpu: int, number: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Return the result of the store `number` on the device number `gpu`, [rows, columns] of `dtype`."""
        # Cached: making a view costs host time in every store.
        key = (gpu, number % 2, rows, columns, dtype)
        view = self._views.get(key)
        if view is None:
            even = self._sizes[0] // WORD
            found = (self._results[gpu][even:] if number % 2 else self._results[gpu][:even]).view(dtype)
            view = self._views[key] = found[: rows * columns].view(rows, columns)
        return view

    def check(self) -> None:
        """Raise DeviceError if a store gave up waiting. Waits for the GPUs."""
        _check_failed(self.devices, self._failed)


def _check_failed(devices: Sequence[torch.device], failed: Sequence[Tensor]) -> None:
    for device, flag in zip(devices, failed, strict=True):
        if int(flag):
            raise DeviceError(
                f"{device} waited in vain for results of the other GPUs: one of them stopped or is not in step; "
                "try again, and restart the process if it happens again"
            )
