"""Which devices "auto" means: the GPUs that the kernels of this build and torch run on, else the CPU."""

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
NVIDIA, DISPLAY = "0x10de", "0x03"  # vendor, and the class that graphics and compute cards begin with


@dataclass(frozen=True, slots=True)
class AutoDevices:
    """Names of devices in the order in which they are filled, and one line that says so and what was skipped.

    `unused_card`: models run on the CPU although an NVIDIA card may be here.
    """

    names: tuple[str, ...]
    line: str
    unused_card: bool = False


def choose_devices() -> AutoDevices:
    """Choose anew. Opens the driver at the first call; never raises."""
    status = cuda_status()
    coded = any(d.reason is None for d in status.devices)
    # Cards that the kernels have no code for are listed one by one; everything else is true of all of them.
    why = None if status.devices and not coded else status.reason or _torch_reason(status)
    if why is not None:
        card = _may_have_gpu(status)
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
    """Why torch cannot use any GPU although the kernels can."""
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
    """Why torch does not run on this GPU."""
    if device.index >= torch.cuda.device_count():
        return f"torch sees {torch.cuda.device_count()} GPU(s) only"
    archs = torch.cuda.get_arch_list()
    if archs and not any(_runs_on(arch, device.compute_capability) for arch in archs):
        major, minor = device.compute_capability
        return f"torch {torch.__version__} has no code for sm_{major}{minor}: install a newer torch"
    return None


def _runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Whether code for `arch` ("sm_90", "compute_120") runs on a card: binaries on its major version from their minor
    version on, PTX on every newer card. Names of another form count as code for it."""
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)", arch)
    if match is None:
        return True
    built = (int(match[2]), int(match[3]))
    return built <= capability and (match[1] == "compute" or built[0] == capability[0])


def _may_have_gpu(status: CudaStatus) -> bool:
    """Whether an NVIDIA card may be here: only then is it of use to say why CUDA cannot be used."""
    if status.devices or not sys.platform.startswith("linux") or any(file.exists() for file in DRIVER_FILES):
        return True
    return any(_read(card / "vendor") == NVIDIA and _read(card / "class").startswith(DISPLAY) for card in PCI.glob("*"))


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
