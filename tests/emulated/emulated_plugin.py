"""Run tests that need a GPU on the interpreter of PTX: `pytest -p emulated_plugin -m cuda tests/kernels/...`.

`EXL_PTX_LIBRARY` names the library; without it, the newest build of rust/exl-ptx is taken. `EXL_PTX_CARD` names the
card (3090). Import this module before the first use of the native module.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch_cuda


def _library() -> Path:
    named = os.environ.get("EXL_PTX_LIBRARY")
    if named:
        return Path(named)
    root = Path(__file__).resolve().parents[2] / "rust" / "target"
    built = sorted(root.glob("*/libexl_ptx.so"), key=lambda path: path.stat().st_mtime)
    if not built:
        raise RuntimeError(
            f"no libexl_ptx.so in {root}: build it with `cargo build --profile edit -p exl-ptx` in rust/"
        )
    return built[-1]


def _attribute(driver: ctypes.CDLL, which: int) -> int:
    value = ctypes.c_int()
    if driver.cuDeviceGetAttribute(ctypes.byref(value), which, 0) != 0:
        raise RuntimeError(f"the driver does not know attribute {which}")
    return value.value


def _install() -> None:
    # The library's own name is that of the driver: a later search for the driver finds it, since it is loaded.
    driver = ctypes.CDLL(str(_library()), mode=ctypes.RTLD_GLOBAL)
    driver.exl_ptx_register.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
    driver.exl_ptx_unregister.argtypes = [ctypes.c_uint64]
    driver.exl_ptx_register.restype = driver.exl_ptx_unregister.restype = None
    if driver.cuInit(0) != 0:
        raise RuntimeError("the stand-in driver does not start: see the line that it printed")
    count, memory, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(256)
    driver.cuDeviceGetCount(ctypes.byref(count))
    driver.cuDeviceTotalMem_v2(ctypes.byref(memory), 0)
    driver.cuDeviceGetName(name, 256, 0)
    torch_cuda.install(
        driver,
        devices=count.value,
        sms=_attribute(driver, 16),
        compute=(_attribute(driver, 75), _attribute(driver, 76)),
        memory=memory.value,
        name=name.value.decode(),
    )


_install()
