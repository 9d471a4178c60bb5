"""The free memory of a device, determined without allocating any."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from ..device import Device

__all__ = ["free_bytes"]

CGROUP = Path("/sys/fs/cgroup")


def free_bytes(devices: Sequence[Device]) -> list[int | None]:
    """Return the bytes that a model may use on each device: free memory, at most the device's limit; None if unknown.

    Logical CPUs without a limit share the CPU's memory that those with a limit leave.
    """
    cpus = [d for d in devices if not d.is_cuda]
    cpu = _cpu_bytes()
    if cpu is not None:
        uncapped = sum(d.cap is None for d in cpus)
        cpu = max(cpu - sum(d.cap or 0 for d in cpus), 0) // uncapped if uncapped else cpu
    free = [free_cuda_bytes(d.torch_device) if d.is_cuda else cpu for d in devices]
    return [_least(f, d.cap) if d.is_cuda or d.cap is None else d.cap for f, d in zip(free, devices, strict=True)]


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def free_cuda_bytes(device: torch.device) -> int:
    """Return the free memory of the driver plus torch's unused reserve."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def _cpu_bytes() -> int | None:
    """Return Linux's MemAvailable, or the limit of a control group if lower; None on other systems."""
    available = _fields(Path("/proc/meminfo")).get("MemAvailable")
    if available is None:
        return None
    limit, used = _number(CGROUP / "memory.max"), _number(CGROUP / "memory.current")
    if limit is None or used is None:
        return available * 1024
    reclaimable = _fields(CGROUP / "memory.stat").get("inactive_file", 0)
    return min(available * 1024, max(limit - used + reclaimable, 0))


def _fields(file: Path) -> dict[str, int]:
    try:
        lines = [line.replace(":", " ").split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
