"""The CPU kernels' own threads and instruction set: read, set, and put back."""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import Tensor

from . import _native

__all__ = ["ISA", "best_isa", "isa", "num_threads", "pin", "read_bandwidth", "run_empty", "set_isa", "set_num_threads"]

ISA = Literal["scalar", "avx2", "avx512"]


def num_threads() -> int:
    """Threads the kernels use, the calling one included: the number set, else EXL_CPU_THREADS, else the cores."""
    return int(_native.num_threads())


def set_num_threads(n: int) -> None:
    """Sets the number of threads. Results do not depend on it. Raises ValueError below 1."""
    if n < 1:
        raise ValueError(f"number of threads is {n}; it must be at least 1")
    _native.set_num_threads(n)


def isa() -> ISA:
    """The instruction set in force: the one forced, else EXL_CPU_ISA, else the best of this processor."""
    return cast(ISA, _native.isa())


def best_isa() -> ISA:
    """The best instruction set this processor has kernels for."""
    return cast(ISA, _native.best_isa())


def set_isa(name: ISA) -> ISA:
    """Forces an instruction set, or the best available below it, and returns what is in force. For tests."""
    return cast(ISA, _native.set_isa(name))


def pin() -> bool:
    """Pins the calling thread and the pool's threads, started after this, to a processor each. For measurements.

    Call it before the first operator. False where the system cannot.
    """
    return bool(_native.pin_threads())


def read_bandwidth(data: Tensor) -> float:
    """Bytes per second at which the pool reads `data` (int64, CPU) once: the memory roof, if no cache holds it."""
    if data.dtype != torch.int64 or data.device.type != "cpu" or data.numel() == 0:
        raise ValueError(f"read_bandwidth: data is {data.dtype} {list(data.shape)} on {data.device}; expected int64")
    return float(_native.read_bandwidth(data.contiguous()))


def run_empty(tasks: int) -> None:
    """Runs a job of empty tasks: what the pool itself costs."""
    _native.run_empty(tasks)
