"""`exl doctor`: what this machine offers, and what is missing."""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib.metadata import version
from typing import Any

import torch

from exl_core.device import DEVICE_VARIABLE, device_line, devices
from exl_core.errors import DeviceError
from exl_core.execution.environment import GRAPHS_VARIABLE, captures_steps
from exl_generate.cli.tables import show_table
from exl_kernels import threads
from exl_kernels.device import CudaDevice, CudaStatus, cuda_status, programmatic_launch
from exl_kernels.selection import Card

__all__ = ["examine", "run"]


def run(as_json: bool) -> int:
    """Print the findings; 0 when models can run here, on the device of EXL_DEVICE if it is set."""
    facts = examine()
    if as_json:
        print(json.dumps(facts))
    else:
        for title, values in facts.items():
            if isinstance(values, dict):
                show_table(title, ["", ""], [[k, "-" if v is None else str(v)] for k, v in values.items()])
        for line in facts["advice"]:
            print(f"faster: {line}")
        print("models can run here" if facts["ok"] else "models cannot run here")
    return 0 if facts["ok"] else 1


def examine() -> dict[str, Any]:
    """Everything `exl doctor` says, as data."""
    cuda = cuda_status()
    bundled = _bundled()
    device, device_works = _device()
    return {
        "machine": {
            "python": platform.python_version(),
            "platform": platform.platform(),
            "torch": torch.__version__,
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory_gb": _memory_gb(),
        },
        "cpu": {
            "instruction_set": threads.isa(),
            "best_instruction_set": threads.best_isa(),
            "threads": threads.num_threads(),
            "matmul": os.environ.get("EXL_CPU_MATMUL") or "int8",
        },
        "models": {"device": device},
        "cuda": {
            "usable": cuda.available,
            "reason": cuda.reason,
            "built_with_cuda": cuda.built_with_cuda,
            "architectures": ", ".join(cuda.archs) or None,
            "chosen_by": cuda.archs_origin or None,
            "toolkit": cuda.toolkit or None,
            "driver": cuda.driver_version,
            "captured_steps": captures_steps(),
            "devices": "; ".join(_card(d) for d in cuda.devices) or None,
            "kernels_use": "; ".join(_features(d) for d in cuda.devices if d.code is not None) or None,
        },
        "packages": {
            **{name: version(name) for name in ("exl-kernels", "exl-core", "exl-filters", "exl-generate")},
            "bundled model": bundled,
        },
        "advice": _advice(cuda),
        "ok": _kernels_work() and device_works,
    }


def _card(card: CudaDevice) -> str:
    """A GPU and the code that it runs."""
    code = "no code for it" if card.code is None else f"code of {card.code}"
    treated = "" if card.treated_as is None else f", treated as a {card.treated_as}"
    return f"{card.index}: {card.name}, {card.memory_bytes / 2**30:.0f} GiB, {code}{treated}"


def _features(card: CudaDevice) -> str:
    """Return what the choice of kernels may count on where a GPU runs code of this build."""
    try:
        features = sorted(Card.device(card.index).features)
    except DeviceError as error:
        return f"{card.index}: {error}"
    return f"{card.index}: {', '.join(features) or 'kernels for any card alone'}"


def _advice(cuda: CudaStatus) -> list[str]:
    """Changes that would make models run faster here."""
    lines = []
    for card in cuda.devices:
        if card.treated_as is not None:
            lines.append(f"EXL_CUDA_LIMITS treats cuda:{card.index} ({card.name}) as a {card.treated_as}: unset it")
        if card.code == card.own_arch or (card.code, card.own_arch) == ("86", "89"):  # the code of both is the same
            continue
        remedy = f"`EXL_CUDA_ARCHS={card.own_arch} uv sync` in a checkout builds code for it"
        if card.code is None:
            lines.append(f"cuda:{card.index} ({card.name}) is not used, this build has no code for it: {remedy}")
        elif card.code.endswith("+ptx"):
            lines.append(
                f"cuda:{card.index} ({card.name}) runs portable code, which the driver compiles at first use: {remedy}"
            )
        else:
            lines.append(f"cuda:{card.index} ({card.name}) runs code for sm_{card.code}: {remedy}")
    if cuda.available:
        if not captures_steps():
            lines.append(f"{GRAPHS_VARIABLE}=0 turns captured steps off: unset it")
        if not programmatic_launch():
            lines.append("EXL_CUDA_PDL=0 turns programmatic dependent launch off: unset it")
    elif threads.isa() != threads.best_isa():
        lines.append(f"the CPU has {threads.best_isa()} and kernels use {threads.isa()}: unset EXL_CPU_ISA")
    return lines


def _device() -> tuple[str, bool]:
    """Where models run unless a device is named, or why they cannot; and whether they can."""
    try:
        return device_line() or f"{', '.join(d.name for d in devices())} ({DEVICE_VARIABLE})", True
    except DeviceError as error:
        return str(error), False


def _kernels_work() -> bool:
    """Run one small matmul through the native module."""
    try:
        from exl_kernels.linear import QuantMatrix

        weight = torch.eye(32, dtype=torch.float16)
        got = QuantMatrix.from_float(weight, compute="exact").matmul(torch.ones(1, 32))
        return bool(torch.equal(got, torch.ones(1, 32)))
    except Exception as error:
        print(f"exl doctor: the native kernels failed: {error}", file=sys.stderr)
        return False


def _memory_gb() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None


def _bundled() -> str | None:
    try:
        from exl_generate import bundled
    except ImportError:
        return None
    return str(bundled.default_model_dir())
