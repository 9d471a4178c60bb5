"""The devices of a model. No other module decides where models run."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from exl_kernels.device import cuda_status, require_cuda

from .auto_device import choose_devices
from .errors import DeviceError

__all__ = [
    "CPU_REMEDY",
    "DEVICE_VARIABLE",
    "GIB",
    "Device",
    "activation_dtype",
    "default_device",
    "device_error",
    "device_line",
    "devices",
    "out_of_memory_as_error",
    "torch_device",
    "using_devices",
]

DEVICE_VARIABLE = "EXL_DEVICE"
"""Devices of a model, in the order of its layers: "auto" (the default), "cpu", "cuda:<index>", "cuda" (every GPU), or a
list of them. "auto" means every GPU that the kernels run on, or the CPU if there is none. A device may have a memory
limit: "cuda:0=20" uses at most 20 GiB of it. "cpu:<index>" are logical devices of the one CPU."""

GIB = 1024**3
AUTO = "auto"
CPU_REMEDY = "EXL_DEVICE=cpu, or --device cpu on the command line"
log = logging.getLogger(__name__)
_chosen: ContextVar[tuple[str, str] | None] = ContextVar("exl_devices", default=None)  # (name of the option, its value)
_logged: set[str] = set()
_ENTRY = re.compile(r"(?P<kind>cpu|cuda)(?::(?P<index>\d{1,4}))?(?:=(?P<cap>\d{1,6}(?:\.\d{1,6})?)(?:gi?b)?)?")


@dataclass(frozen=True)
class Device:
    """A device by its name in device maps. `cap`: limit of its memory in bytes; None for all free memory."""

    name: str
    cap: int | None = None

    @property
    def torch_device(self) -> torch.device:
        """torch's device: all logical CPUs are the same device to torch."""
        return torch_device(self.name)

    @property
    def is_cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.name.startswith("cuda")


def torch_device(name: str | torch.device | int) -> torch.device:
    """Return the torch device of a name in a device map ("cpu:1" is the CPU)."""
    device = torch.device("cuda", name) if isinstance(name, int) else torch.device(name)
    return torch.device("cpu") if device.type == "cpu" else device


@contextmanager
def using_devices(value: str | None, option: str = "device") -> Iterator[None]:
    """Let `value` override EXL_DEVICE in this thread and inside this block; None changes nothing.

    `option`: the name of the setting in error messages.
    """
    if value is None:
        yield
        return
    token = _chosen.set((option, value))
    try:
        yield
    finally:
        _chosen.reset(token)


def devices() -> list[Device]:
    """Return the devices of EXL_DEVICE in order; those of "auto" if the variable is not set.

    The choice of "auto" is logged once, unless `device_line` has returned it. The level is INFO, or WARNING if models
    run on the CPU although an NVIDIA card may be present. Python prints a warning even for programs that configure no
    logging.

    Raises:
        DeviceError: the value names no device of this machine, or a device that the kernels cannot run on.
    """
    option, text = _setting()
    if text != AUTO:
        return _listed(option, text)
    found = choose_devices()
    if found.line not in _logged:
        _logged.add(found.line)
        log.log(logging.WARNING if found.unused_card else logging.INFO, "%s", found.line)
    return [Device(name) for name in found.names]


def device_line() -> str | None:
    """Return one line that names the choice of "auto" and why a GPU was skipped.

    None where the caller named the devices.

    The caller shows the line, so `devices` no longer logs it.
    """
    if _setting()[1] != AUTO:
        return None
    line = choose_devices().line
    _logged.add(line)
    return line


def _setting() -> tuple[str, str]:
    """Return name and value of the setting in effect."""
    option, text = _chosen.get() or (DEVICE_VARIABLE, os.environ.get(DEVICE_VARIABLE, ""))
    return option, text.strip().lower() or AUTO


def _listed(option: str, text: str) -> list[Device]:
    found: list[Device] = []
    for entry in text.split(","):
        match = _ENTRY.fullmatch(entry.strip())
        if match is None:
            raise DeviceError(
                f'{option} is {text!r}, must be "auto", "cpu", "cuda:<index>", "cuda", or a list of the last three '
                'with commas; "=<GiB>" after a device of a list limits its memory'
            )
        cap = None if match["cap"] is None else int(float(match["cap"]) * GIB)
        found += [Device(name, cap) for name in _names(option, match["kind"], match["index"], text)]
    names = [d.name for d in found]
    if len(set(names)) < len(names):
        raise DeviceError(f"{option} is {text!r}: it names a device twice")
    return found


def default_device() -> torch.device:
    """Return the first device, which holds everything unless a split says otherwise. Raises DeviceError."""
    return devices()[0].torch_device


def _names(option: str, kind: str, index: str | None, text: str) -> list[str]:
    if kind == "cpu":
        return ["cpu" if index is None else f"cpu:{int(index)}"]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    indices = [int(index)] if index is not None else list(range(count))
    if not indices or max(indices) >= count:
        why = cuda_status().reason
        found = f"this machine has {count} CUDA devices" if why is None else f"CUDA cannot be used: {why}"
        raise DeviceError(f"{option} is {text!r}, but {found}")
    return [str(require_cuda(torch.device("cuda", i))) for i in indices]


def activation_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of hidden states: float32 on the CPU, float16 on a GPU."""
    return torch.float16 if device.type == "cuda" else torch.float32


@contextmanager
def out_of_memory_as_error(task: str) -> Iterator[None]:
    """Convert torch's GPU errors into DeviceError: out of memory (freed memory is returned), or a lost device."""
    try:
        yield
    except RuntimeError as error:
        typed = device_error(task, error)
        if typed is None:
            raise
        raise typed from error


def device_error(task: str, error: RuntimeError) -> DeviceError | None:
    """Return torch's `error` as a DeviceError; None when it does not concern the GPU."""
    if isinstance(error, torch.OutOfMemoryError):
        torch.cuda.empty_cache()
        return DeviceError(
            f"not enough GPU memory to {task}: use a smaller model, cache or batch, free memory, or run on the CPU "
            f"({CPU_REMEDY}) ({error})"
        )
    if isinstance(error, getattr(torch, "AcceleratorError", ())) or str(error).startswith("CUDA error"):
        first = str(error).splitlines()[0]
        return DeviceError(f"the GPU failed while asked to {task}: its context is lost, restart the process ({first})")
    return None
