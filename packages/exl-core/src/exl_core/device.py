"""Where a model runs: the one place that decides, so that CUDA execution is switched on here and nowhere else."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from exl_kernels.device import cuda_status, require_cuda

from .errors import DeviceError

__all__ = [
    "DEVICE_VARIABLE",
    "GIB",
    "Device",
    "activation_dtype",
    "default_device",
    "device_error",
    "devices",
    "out_of_memory_as_error",
    "torch_device",
]

DEVICE_VARIABLE = "EXL_DEVICE"
"""Devices of a model, in the order of its layers: "cpu", "cuda:<index>", "cuda" (every GPU), or a list of them. A
device may be capped: "cuda:0=20" uses at most 20 GiB of it. "cpu:<index>" are logical devices of the one CPU."""

GIB = 1024**3
_ENTRY = re.compile(r"(?P<kind>cpu|cuda)(?::(?P<index>\d{1,4}))?(?:=(?P<cap>\d{1,6}(?:\.\d{1,6})?)(?:gi?b)?)?")


@dataclass(frozen=True)
class Device:
    """A device by the name that maps carry. `cap`: bytes of it that may be used, None = all that is free."""

    name: str
    cap: int | None = None

    @property
    def torch_device(self) -> torch.device:
        """torch's name for it: all logical CPUs are one to torch."""
        return torch_device(self.name)

    @property
    def is_cuda(self) -> bool:
        return self.name.startswith("cuda")


def torch_device(name: str | torch.device | int) -> torch.device:
    """The torch device behind a name of a device map ("cpu:1" is the CPU)."""
    device = torch.device("cuda", name) if isinstance(name, int) else torch.device(name)
    return torch.device("cpu") if device.type == "cpu" else device


def devices() -> list[Device]:
    """The devices of EXL_DEVICE, in order; the CPU if it is not set.

    Raises DeviceError for a value that names no device of this machine, or one that our kernels cannot run on.
    """
    text = os.environ.get(DEVICE_VARIABLE, "cpu").strip().lower() or "cpu"
    found: list[Device] = []
    for entry in text.split(","):
        match = _ENTRY.fullmatch(entry.strip())
        if match is None:
            raise DeviceError(
                f'{DEVICE_VARIABLE} is {text!r}, must be "cpu", "cuda:<index>", "cuda", or a list of them with commas; '
                '"=<GiB>" behind a device caps its memory'
            )
        cap = None if match["cap"] is None else int(float(match["cap"]) * GIB)
        found += [Device(name, cap) for name in _names(match["kind"], match["index"], text)]
    names = [d.name for d in found]
    if len(set(names)) < len(names):
        raise DeviceError(f"{DEVICE_VARIABLE} is {text!r}: a device stands there twice")
    return found


def default_device() -> torch.device:
    """The first device: where everything goes unless a split says otherwise. Raises DeviceError."""
    return devices()[0].torch_device


def _names(kind: str, index: str | None, text: str) -> list[str]:
    if kind == "cpu":
        return ["cpu" if index is None else f"cpu:{int(index)}"]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    indices = [int(index)] if index is not None else list(range(count))
    if not indices or max(indices) >= count:
        why = cuda_status().reason
        found = f"this machine has {count} CUDA devices" if why is None else f"CUDA cannot be used: {why}"
        raise DeviceError(f"{DEVICE_VARIABLE} is {text!r}, but {found}")
    return [str(require_cuda(torch.device("cuda", i))) for i in indices]


def activation_dtype(device: torch.device) -> torch.dtype:
    """Element type of hidden states: float32 on the CPU, float16 on a GPU."""
    return torch.float16 if device.type == "cuda" else torch.float32


@contextmanager
def out_of_memory_as_error(task: str) -> Iterator[None]:
    """Turns torch's errors of a GPU into DeviceError: out of memory (what was freed goes back to the GPU), lost."""
    try:
        yield
    except RuntimeError as error:
        typed = device_error(task, error)
        if typed is None:
            raise
        raise typed from error


def device_error(task: str, error: RuntimeError) -> DeviceError | None:
    """What torch's `error` says about the GPU; None when it is about something else."""
    if isinstance(error, torch.OutOfMemoryError):
        torch.cuda.empty_cache()
        return DeviceError(
            f"not enough GPU memory to {task}: use a smaller model, cache or batch, or free memory ({error})"
        )
    if isinstance(error, getattr(torch, "AcceleratorError", ())) or str(error).startswith("CUDA error"):
        first = str(error).splitlines()[0]
        return DeviceError(f"the GPU failed while asked to {task}: its context is lost, restart the process ({first})")
    return None
