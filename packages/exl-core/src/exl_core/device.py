"""Where a model runs: the one place that decides, so that CUDA execution is switched on here and nowhere else."""

from __future__ import annotations

import os
import re

import torch

from .errors import DeviceError, UnsupportedError

__all__ = ["DEVICE_VARIABLE", "default_device"]

DEVICE_VARIABLE = "EXL_DEVICE"  # "cpu" or "cuda:<index>"


def default_device() -> torch.device:
    """The device for weights and cache: EXL_DEVICE if set, else the CPU.

    Raises DeviceError for a value that names no device of this machine, UnsupportedError for one that no code here
    can run a model on yet.
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
    raise UnsupportedError(f"running a model on {name} is not built in this version; set {DEVICE_VARIABLE}=cpu")
