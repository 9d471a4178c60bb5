"""Read and set the threads and the instruction set of the CPU kernels."""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import Tensor

from . import _native

__all__ = ["ISA", "best_isa", "isa", "num_threads", "pin", "read_bandwidth", "run_empty", "set_isa", "set_num_threads"]

ISA = Literal["scalar", "avx2", "avx512"]


def num_threads() -> int:
    """Return the number of threads that the kernels use, the calling thread included.

    The number is the one set by `set_num_threads`, else `EXL_CPU_THREADS`, else the number of cores.
    """
    return int(_native.num_threads())


def set_num_threads(n: int) -> None:
    """Set the number of threads. Results do not depend on the number.

    Args:
        n: threads, the calling thread included.

    Raises:
        ValueError: n is below 1.
    """
    if n < 1:
        raise ValueError(f"number of threads is {n}; it must be at least 1")
    _native.set_num_threads(n)


def isa() -> ISA:
    """Return the instruction set in use: the forced one, else `EXL_CPU_ISA`, else the best of this processor."""
    return cast(ISA, _native.isa())


def best_isa() -> ISA:
    """Return the best instruction set of this processor that kernels exist for."""
    return cast(ISA, _native.best_isa())


def set_isa(name: ISA) -> ISA:
    """Force an instruction set, or the best available one below it, and return the set in use. For tests.

    Args:
        name: "scalar", "avx2" or "avx512".
    """
    return cast(ISA, _native.set_isa(name))


def pin() -> bool:
    """Pin the calling thread and the pool's threads to one processor each. For measurements.

    Call this function before the first operator, since it only affects threads that start later. Returns False where
    the operating system does not support pinning.
    """
    return bool(_native.pin_threads())


def read_bandwidth(data: Tensor) -> float:
    """Measure the bytes per second at which the pool reads `data` once.

    The result is the memory roof if no cache holds the data.

    Args:
        data: int64, not empty, on the CPU.

    Raises:
        ValueError: data is empty, of another dtype, or on another device.
    """
    if data.dtype != torch.int64 or data.device.type != "cpu" or data.numel() == 0:
        raise ValueError(f"read_bandwidth: data is {data.dtype} {list(data.shape)} on {data.device}; expected int64")
    return float(_native.read_bandwidth(data.contiguous()))


def run_empty(tasks: int) -> None:
    """Run a job of empty tasks, to measure the overhead of the thread pool.

    Args:
        tasks: number of tasks.
    """
    _native.run_empty(tasks)
