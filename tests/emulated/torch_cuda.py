"""Let CPU memory pass as tensors of CUDA devices, so that code for a GPU runs on the interpreter of rust/exl-ptx.

Kernels are launched through the stand-in driver; every other operation of torch runs on the CPU. Results carry the
device.
"""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

DISABLED = torch._C.DisableTorchFunctionSubclass  # noqa: SLF001 (torch has no public name for it)

STREAMS = 0x5EED_0000
"""First handle of a stream, as in rust/exl-ptx/src/driver.rs; a device has 4096 of them."""


class CudaTensor(Tensor):
    """A tensor in CPU memory that says it is on a CUDA device."""

    claimed: int

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device that it claims."""
        return torch.device("cuda", self.claimed)

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """Always true."""
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        """Always false."""
        return False

    def get_device(self) -> int:
        """Return the device's index."""
        return self.claimed

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are made of the plain tensor."""
        return (claim, (plain(self), self.claimed))

    def __deepcopy__(self, memo: dict[int, Any]) -> CudaTensor:
        """Return a copy on the same device."""
        return claim(plain(self).clone(), self.claimed)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return torch's text with the device."""
        return f"{plain(self)!r} on cuda:{self.claimed}"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on the CPU."""
        return run(func, args, kwargs or {})


ALIGNMENT = 512
"""Bytes, as of torch's allocator for GPUs."""


class _Memory:
    """The functions of the driver that learn what is allocated."""

    register: Callable[[int, int], object]
    unregister: Callable[[int], object]


_memory = _Memory()
_owned: set[int] = set()
"""Starts of the allocations that the driver knows."""
_current = [0]
_stream_numbers = [0] * 16


def plain(tensor: Tensor) -> Tensor:
    """Return the CPU tensor of the same memory."""
    with DISABLED():
        return tensor.as_subclass(Tensor)


def claim(tensor: Tensor, index: int) -> CudaTensor:
    """Return a CPU tensor as one of a device, and make its memory known to the driver."""
    with DISABLED():
        if tensor.untyped_storage().data_ptr() not in _owned and tensor.layout == torch.strided:
            _allocate(tensor)
        made = tensor.as_subclass(CudaTensor)
        made.claimed = index
    return made


def _allocate(tensor: Tensor) -> None:
    """Move a new tensor to memory of its own, aligned as on a GPU, which the driver knows as long as it lives."""
    old = tensor.untyped_storage()
    size = old.nbytes()
    if size == 0:
        return
    base = np.empty(size + 3 * ALIGNMENT, np.uint8)
    first = -base.ctypes.data % ALIGNMENT + ALIGNMENT
    memory = torch.from_numpy(base[first : first + size])
    memory.copy_(torch.empty(0, dtype=torch.uint8).set_(old))
    start = memory.data_ptr()
    shape = tensor.size(), tensor.stride()
    tensor.set_(memory.untyped_storage(), tensor.storage_offset(), *shape)
    _owned.add(start)
    _memory.register(start, size)
    weakref.finalize(base, _forget, start).atexit = False


def _forget(start: int) -> None:
    _owned.discard(start)
    _memory.unregister(start)


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply a function to the leaves of lists, tuples and dicts."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(v, change) for v in value))
    if isinstance(value, tuple) and type(value).__module__ == "torch.return_types":
        return type(value)([_map(item, change) for item in value])
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_map(v, change) for v in value)
    if isinstance(value, torch.Size | dict) and isinstance(value, dict):
        return {k: _map(v, change) for k, v in value.items()}
    return change(value)


def _index_of(device: Any) -> int | None:
    """Return the index of a CUDA device; None for any other device."""
    if device is None:
        return None
    if isinstance(device, int):
        return device
    device = torch.device(device)
    if device.type != "cuda":
        return None
    return _current[0] if device.index is None else int(device.index)


_CPU = torch.device("cpu")


def _moved(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Split the arguments of `Tensor.to`: the device (or None), and the arguments without it."""
    rest, device = [args[0]], kwargs.pop("device", None)
    for value in args[1:]:
        if isinstance(value, str | torch.device):
            device = torch.device(value)
        elif isinstance(value, Tensor):
            device = value.device
            kwargs["dtype"] = value.dtype
        else:
            rest.append(value)
    return device, tuple(rest), kwargs


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function of torch on the CPU and give its results the device that they would have."""
    name = getattr(func, "__name__", "")
    kwargs = dict(kwargs)
    if name == "cuda" and func is Tensor.cuda:
        wanted = _index_of(args[1] if len(args) > 1 else kwargs.get("device") or "cuda")
        args, kwargs, name, func = (args[0], torch.device("cuda", wanted or 0)), {}, "to", Tensor.to
    if name == "cpu" and func is Tensor.cpu:
        args, name, func = (args[0], _CPU), "to", Tensor.to
    if name == "to" and func is Tensor.to:
        return _to(args, kwargs)
    if name == "pin_memory":
        with DISABLED():
            copied = args[0].clone()
            _allocate(copied)  # kernels may read and write it
        return copied
    if name == "is_pinned":
        return True
    pinned = kwargs.pop("pin_memory", False)
    index, inputs = None, [0]
    if "device" in kwargs and func is not torch.device:
        index = _index_of(kwargs["device"])
        kwargs["device"] = _CPU
        inputs[0] = -1

    def lower(value: Any) -> Any:
        nonlocal index
        if isinstance(value, CudaTensor):
            if inputs[0] == 0:
                index = value.claimed
            return plain(value)
        return value

    lowered = _map(tuple(args), lower)
    options = _map(kwargs, lower) if kwargs else kwargs
    with DISABLED():
        result = func(*lowered, **options)
    out = kwargs.get("out")
    if isinstance(out, Tensor):
        return out
    if index is None:
        if pinned and isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in _owned:
            with DISABLED():
                _allocate(result)  # as for `pin_memory`
        return result
    if isinstance(args[0] if args else None, CudaTensor) and isinstance(result, Tensor) and result is lowered[0]:
        return args[0]
    return _map(result, lambda v: claim(v, index) if isinstance(v, Tensor) and not isinstance(v, CudaTensor) else v)


def _to(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    device, rest, kwargs = _moved(args, kwargs)
    source = args[0]
    before = source.claimed if isinstance(source, CudaTensor) else None
    after = before if device is None else _index_of(device)
    kwargs.pop("non_blocking", None)
    own = plain(source) if before is not None else source
    with DISABLED():
        result = own.to(*rest[1:], **kwargs) if len(rest) > 1 or kwargs else own
        if result is own and before == after and not kwargs.get("copy"):
            return source
        if before != after and result.data_ptr() == own.data_ptr():
            result = result.clone()
    return result if after is None else claim(result, after)


class Mode(TorchFunctionMode):
    """Sends factory functions with a CUDA device to the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on the CPU."""
        return run(func, args, kwargs or {})


class Stream:
    """A stream of the stand-in driver: everything that was launched is done."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        index = _index_of(device)
        self.index = _current[0] if index is None else index
        _stream_numbers[self.index] += 1
        self.cuda_stream = STREAMS + 4096 * self.index + _stream_numbers[self.index]
        self.device = torch.device("cuda", self.index)

    def _nothing(self, *_: Any, **__: Any) -> None:
        return None

    synchronize = wait_stream = wait_event = _nothing

    def query(self) -> bool:
        """Return whether the stream is idle."""
        return True

    def record_event(self, event: Any = None) -> Any:
        """Return an event."""
        return event or Event()


class Event:
    """An event that has happened."""

    def __init__(self, **_: Any) -> None:
        self.cuda_event = 0

    def _nothing(self, *_: Any, **__: Any) -> None:
        return None

    record = wait = synchronize = _nothing

    def query(self) -> bool:
        """Return whether it has happened."""
        return True

    def elapsed_time(self, _: Any) -> float:
        """Return no time: the interpreter says nothing about speed."""
        return 0.0


_defaults: dict[int, Stream] = {}
_chosen: list[Stream] = []


def current_stream(device: Any = None) -> Stream:
    """Return the chosen stream of a device, or its default stream."""
    index = _index_of(device)
    index = _current[0] if index is None else index
    for stream in reversed(_chosen):
        if stream.index == index:
            return stream
    if index not in _defaults:
        _defaults[index] = Stream(index)
    return _defaults[index]


@contextlib.contextmanager
def stream(chosen: Stream | None) -> Iterator[None]:
    """Choose a stream."""
    if chosen is None:
        yield
        return
    before = _current[0]
    _chosen.append(chosen)
    _current[0] = chosen.index
    try:
        yield
    finally:
        _chosen.pop()
        _current[0] = before


class device:
    """Choose a device."""

    def __init__(self, index: Any) -> None:
        self._chosen = _index_of(index)

    def __enter__(self) -> None:
        self._before = _current[0]
        if self._chosen is not None:
            _current[0] = self._chosen

    def __exit__(self, *_: object) -> None:
        _current[0] = self._before


def install(driver: Any, devices: int, sms: int, compute: tuple[int, int], memory: int, name: str) -> None:
    """Replace the functions of torch.cuda that the project calls, and make CUDA devices of CPU memory for this process.

    Args:
        driver: the library of rust/exl-ptx, opened by ctypes.
        devices: number of cards.
        sms: number of SMs that a card reports.
        compute: compute capability.
        memory: bytes.
        name: name of the card.
    """
    _memory.register, _memory.unregister = driver.exl_ptx_register, driver.exl_ptx_unregister
    properties = types.SimpleNamespace(
        multi_processor_count=sms, major=compute[0], minor=compute[1], total_memory=memory, name=name
    )
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.is_initialized = lambda: True
    cuda.device_count = lambda: devices
    cuda.current_device = lambda: _current[0]
    cuda.get_device_properties = lambda device=None: properties
    cuda.get_device_name = lambda device=None: name
    cuda.get_device_capability = lambda device=None: compute
    cuda.get_arch_list = lambda: [f"sm_{compute[0]}{compute[1]}"]
    cuda.mem_get_info = lambda device=None: (memory, memory)
    for idle in ("synchronize", "empty_cache", "init", "_lazy_init", "reset_peak_memory_stats", "manual_seed_all"):
        setattr(cuda, idle, lambda *_, **__: None)
    for zero in ("memory_allocated", "memory_reserved", "max_memory_allocated"):
        setattr(cuda, zero, lambda *_, **__: 0)
    cuda.is_current_stream_capturing = lambda: False
    cuda.Stream, cuda.Event, cuda.stream, cuda.device = Stream, Event, stream, device
    cuda.current_stream = current_stream
    cuda.default_stream = current_stream
    cuda.set_device = lambda index: _current.__setitem__(0, _index_of(index) or 0)
    binding: Any = torch._C  # noqa: SLF001 (the operators ask it for the stream)
    binding._cuda_getCurrentRawStream = lambda index: current_stream(index).cuda_stream  # noqa: SLF001
    mode: Any = Mode()
    mode.__enter__()
