"""Where a model runs: the one place that decides, so that CUDA execution is switched on here and nowhere else."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from exl_kernels.device import require_cuda

from .errors import DeviceError

__all__ = ["DEVICE_VARIABLE", "activation_dtype", "default_device", "out_of_memory_as_error"]

DEVICE_VARIABLE = "EXL_DEVICE"  # "cpu" or "cuda:<index>"


def default_device() -> torch.device:
    """The device for weights and cache: EXL_DEVICE if set, else the CPU.

    Raises DeviceError for a value that names no device of this machine, or one that our kernels cannot run on.
    """
    name = os.environ.get(DEVICE_VARIABLE, "cpu").strip().lower() or "cpu"
    if name == "cpu":
        return torch.device("cpu")
    match = re.fullmatch(r"cuda(?::(\d+))?", name)
    if match is None:
        raise DeviceError(f'{DEVICE_VARIABLE} is {name!r}, must be "cpu" or "cuda:<index>"')
    index = int(match.group(1) or 0)
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        raise DeviceError(
            f"{DEVICE_VARIABLE} is {name!r}, but this machine has {torch.cuda.device_count()} CUDA devices"
        )
    return require_cuda(torch.device("cuda", index))


def activation_dtype(device: torch.device) -> torch.dtype:
    """Element type of hidden states: float32 on the CPU, float16 on a GPU."""
    return torch.float16 if device.type == "cuda" else torch.float32


@contextmanager
def out_of_memory_as_error(task: str) -> Iterator[None]:
    """Turns torch's out-of-memory error into DeviceError, with the freed memory given back to the GPU."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        raise DeviceError(
            f"not enough GPU memory to {task}: use a smaller model, cache or batch, or free memory ({error})"
        ) from error
