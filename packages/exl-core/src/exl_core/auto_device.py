"""The meaning of the device "auto": the GPUs that the kernels of this build and torch run on, else the CPU."""

from __future__ import annotations

import re
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from exl_kernels.device import CudaDevice, CudaStatus, cuda_status

__all__ = ["AutoDevices", "choose_devices"]

PCI = Path("/sys/bus/pci/devices")
DRIVER_FILES = (Path("/proc/driver/nvidia"), Path("/dev/nvidiactl"), Path("/dev/dxg"))  # the last one: WSL 2
NVIDIA, DISPLAY = "0x10de", "0x03"  # PCI vendor, and the first byte of the class of graphics and compute cards


@dataclass(frozen=True, slots=True)
class AutoDevices:
    """The devices of "auto".

    Attributes:
        names: devices in the order in which they are filled.
        line: one line for people that names the devices and the skipped cards.
        unused_card: models run on the CPU although an NVIDIA card may be present.
    """

    names: tuple[str, ...]
    line: str
    unused_card: bool = False


def choose_devices() -> AutoDevices:
    """Choose the devices of "auto" again. The first call opens the driver; never raises."""
    status = cuda_status()
    coded = any(d.reason is None for d in status.devices)
    # Cards without kernel code are listed one by one; every other reason applies to all cards.
    why = None if status.devices and not coded else status.reason or _torch_reason(status)
    if why is not None:
        card = may_have_gpu(status)
        return AutoDevices(("cpu",), f"running on the CPU: {why if card else 'no NVIDIA GPU found'}", unused_card=card)
    reasons = [(d, d.reason or _torch_skips(d)) for d in status.devices]
    usable = [d for d, reason in reasons if reason is None]
    skipped = [f"cuda:{d.index} ({d.name}) is skipped: {reason}" for d, reason in reasons if reason is not None]
    if not usable:
        return AutoDevices(("cpu",), "; ".join(["running on the CPU", *skipped]), unused_card=True)
    parts = [f"running on {_described(usable[0])}"]
    if usable[1:]:
        parts.append(f"split models also use {', '.join(map(_described, usable[1:]))}")
    return AutoDevices(tuple(f"cuda:{d.index}" for d in usable), "; ".join([*parts, *skipped]))


def _described(device: CudaDevice) -> str:
    return f"cuda:{device.index} ({device.name}, {device.memory_bytes / 2**30:.0f} GiB)"


def _torch_reason(status: CudaStatus) -> str | None:
    """Return why torch cannot use any GPU although the kernels can, or None."""
    with warnings.catch_warnings():  # torch warns of an old driver in several lines
        warnings.simplefilter("ignore")
        available = torch.cuda.is_available()
    if available:
        return None
    return (
        f"torch {torch.__version__} finds no GPU; it is built for CUDA {torch.version.cuda}, the driver supports CUDA "
        f"{status.driver_version}: update the driver, or install a torch for an older CUDA"
    )


def _torch_skips(device: CudaDevice) -> str | None:
    """Return why torch does not run on this GPU, or None."""
    if device.index >= torch.cuda.device_count():
        return f"torch sees {torch.cuda.device_count()} GPU(s) only"
    archs = torch.cuda.get_arch_list()
    if archs and not any(_runs_on(arch, device.compute_capability) for arch in archs):
        major, minor = device.compute_capability
        return f"torch {torch.__version__} has no code for sm_{major}{minor}: install a newer torch"
    return None


def _runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Return whether code for `arch` ("sm_90", "compute_120") runs on a card.

    Binaries run on their major version from their minor version on, PTX on every newer card. Unknown forms of names
    count as runnable.
    """
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)", arch)
    if match is None:
        return True
    built = (int(match[2]), int(match[3]))
    return built <= capability and (match[1] == "compute" or built[0] == capability[0])


def may_have_gpu(status: CudaStatus) -> bool:
    """Return whether an NVIDIA card may be present, so that the reason why CUDA cannot be used is of interest."""
    if status.devices or not sys.platform.startswith("linux") or any(file.exists() for file in DRIVER_FILES):
        return True
    return any(_read(card / "vendor") == NVIDIA and _read(card / "class").startswith(DISPLAY) for card in PCI.glob("*"))


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
