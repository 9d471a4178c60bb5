"""The GPUs of this machine and, when CUDA cannot be used, the reason. Nothing is initialised before the first call."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from exl_kernels import _native
from exl_kernels.errors import DeviceError

__all__ = [
    "CudaDevice",
    "CudaStatus",
    "cuda_status",
    "launch_of",
    "programmatic_launch",
    "require_cuda",
    "row_invariant",
    "rows_are_invariant",
    "set_programmatic_launch",
    "set_row_invariant",
]


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """One visible GPU, in torch's numbering."""

    index: int
    """Number of the GPU, as in "cuda:0"."""
    name: str
    """The driver's name of the card."""
    compute_capability: tuple[int, int]
    """(major, minor), e.g. (9, 0)."""
    sm_count: int
    """Number of SMs."""
    shared_bytes_per_block: int
    """Most bytes of shared memory of a block."""
    memory_bytes: int
    """Bytes of the card's memory."""
    reason: str | None
    """Why this build's kernels do not run on it; None when they do."""
    code: str | None = None
    """Architecture of this build that the GPU runs, e.g. "89", or "80+ptx" (compiled by the driver at first use)."""
    own_arch: str = ""
    """The architecture that a build for this card compiles."""
    treated_as: str | None = None
    """The card that EXL_CUDA_LIMITS names: launches are planned for it and for the sizes above."""


@dataclass(frozen=True, slots=True)
class CudaStatus:
    """The state of CUDA in this process. `reason` is None exactly when at least one GPU can be used."""

    built_with_cuda: bool
    """Whether the native module has kernels for GPUs."""
    archs: tuple[str, ...]
    """Architectures the kernels were built for, e.g. ("90a",)."""
    toolkit: str
    """Version of the toolkit they were built with; "" when there was none."""
    driver_version: str | None
    """Highest CUDA version the driver supports, e.g. "13.0"; None when no driver could be opened."""
    devices: tuple[CudaDevice, ...]
    """The visible GPUs, whether this build runs on them or not."""
    reason: str | None
    archs_origin: str = ""
    """The origin of the choice of architectures, e.g. "EXL_CUDA_ARCHS=89" or "the GPUs present at build time"."""

    @property
    def available(self) -> bool:
        """Whether kernels can run on at least one GPU."""
        return self.reason is None


def cuda_status() -> CudaStatus:
    """Return what this build and this machine offer. The first call opens the driver. Never raises."""
    build, probe = _native.cuda_build(), _native.cuda_probe()
    version, reason = probe.driver_version, probe.reason
    if reason is None and torch.version.cuda is None:
        reason = "this torch is a CPU-only build: install a CUDA build of torch"
    return CudaStatus(
        built_with_cuda=not build.note,
        archs=tuple(build.archs),
        toolkit=build.toolkit,
        driver_version=None if version is None else f"{version[0]}.{version[1]}",
        devices=tuple(map(_device, probe.devices)),
        reason=reason,
        archs_origin=build.origin,
    )


def _device(found: _native.ProbedDevice) -> CudaDevice:
    return CudaDevice(
        index=found.index,
        name=found.name,
        compute_capability=found.compute_capability,
        sm_count=found.sm_count,
        shared_bytes_per_block=found.shared_bytes_per_block,
        memory_bytes=found.memory_bytes,
        reason=found.reason,
        code=found.code,
        own_arch=found.own_arch,
        treated_as=found.treated_as,
    )


def require_cuda(device: torch.device | str | int) -> torch.device:
    """Check that kernels run on a device and return the device with its index.

    Args:
        device: a CUDA device; without an index, torch's current one.

    Raises:
        DeviceError: the device is no CUDA device, or CUDA cannot be used; the message says what is missing.
    """
    asked = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if asked.type != "cuda":
        raise DeviceError(f"device {asked} is not a CUDA device: expected cuda or cuda:<index>")
    status = cuda_status()
    if status.reason is not None:
        raise DeviceError(f"device {asked} cannot be used: {status.reason}")
    index = asked.index if asked.index is not None else torch.cuda.current_device()
    if index >= len(status.devices):
        raise DeviceError(f"device {asked} does not exist: {len(status.devices)} GPU(s) are visible")
    reason = status.devices[index].reason
    if reason is not None:
        raise DeviceError(f"device {asked} cannot be used: {reason}")
    return torch.device("cuda", index)


_programmatic = os.environ.get("EXL_CUDA_PDL", "1") != "0"


def programmatic_launch() -> bool:
    """Return whether kernels use programmatic dependent launch: a kernel begins while its predecessor drains."""
    return _programmatic


_launches: tuple[dict[int, _native.Launch], dict[int, _native.Launch]] = ({}, {})


def launch_of(stream: int) -> _native.Launch:
    """Return the launch settings of a stream under the current `programmatic_launch`; cached per stream.

    Args:
        stream: the driver's handle of a CUDA stream.
    """
    programmatic = _programmatic  # read once: another thread may change it
    known = _launches[programmatic]
    found = known.get(stream)
    if found is None:
        found = known[stream] = _native.Launch(stream, programmatic)
    return found


def set_programmatic_launch(enabled: bool) -> None:
    """Turn programmatic dependent launch on (`enabled`, the default) or off, as EXL_CUDA_PDL=0 does.

    Results do not change.
    """
    global _programmatic
    _programmatic = bool(enabled)


_row_invariant = os.environ.get("EXL_ROW_INVARIANT", "0") == "1"


def row_invariant() -> bool:
    """Return whether matmuls of more than 64 rows on a GPU are batch-invariant where the call does not say."""
    return _row_invariant


def rows_are_invariant(rows: int, *, invariant: bool | None = None) -> bool:
    """Return whether a matmul of so many rows on a GPU is batch-invariant: few rows always are.

    Args:
        rows: number of rows.
        invariant: what the call asks for; None: `row_invariant`.
    """
    return _native.cuda_rows_invariant(rows, row_invariant() if invariant is None else invariant)


def set_row_invariant(enabled: bool) -> None:
    """Make matmuls of more than 64 rows on a GPU batch-invariant if `enabled`, or not (the default).

    `EXL_ROW_INVARIANT=1` does the same. Calls that pass `invariant` decide for themselves. Off: cuBLAS multiplies many
    rows fast, with sums that depend on the number of rows. On: the kernels for few rows take 64 or 128 rows at a time,
    so a prompt's logits depend neither on its chunks nor on cached pages. docs/performance.md has the cost.
    """
    global _row_invariant
    _row_invariant = bool(enabled)
