"""A driver too old or broken, no card, a card without kernels in this build: typed errors that say what to do.

A library of the driver's name replaces the driver, in a process that has asked no driver yet.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from preloaded import run

from exl_kernels.device import cuda_status

MODEL = Path(__file__).parent.parent / "golden" / "data" / "pylib-4m-exl2-4.5"
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
PLAIN = """
cuDevicePrimaryCtxRetain cuCtxGetCurrent cuCtxPushCurrent_v2 cuCtxPopCurrent_v2 cuModuleLoadData cuModuleGetFunction
cuFuncSetAttribute cuLaunchKernelEx cuStreamGetCtx cuThreadExchangeStreamCaptureMode cuMemcpyHtoDAsync_v2
"""
STANDIN = """
#include <stdlib.h>
#include <string.h>
static int number(const char* name, int otherwise) {
  const char* text = getenv(name);
  return text ? atoi(text) : otherwise;
}
int cuInit(unsigned flags) { return number("STANDIN_INIT", 0); }
int cuDriverGetVersion(int* version) { *version = number("STANDIN_VERSION", 13000); return 0; }
int cuDeviceGetCount(int* count) { *count = number("STANDIN_COUNT", 1); return 0; }
int cuDeviceGet(int* device, int index) { *device = index; return 0; }
int cuDeviceGetName(char* name, int size, int device) { strncpy(name, "Stand-in 9000", size); return 0; }
int cuDeviceTotalMem_v2(size_t* bytes, int device) { *bytes = 8ul << 30; return 0; }
int cuDeviceGetAttribute(int* value, int which, int device) {
  *value = which == 75 ? number("STANDIN_MAJOR", 6) : which == 76 ? 1 : which == 97 ? 49152 : 16;
  return 0;
}
int cuGetErrorName(int code, const char** text) {
  *text = code == 100 ? "CUDA_ERROR_NO_DEVICE" : "CUDA_ERROR_UNKNOWN";
  return 0;
}
int cuGetErrorString(int code, const char** text) { *text = "says the stand-in"; return 0; }
"""
SCRIPT = """
import ctypes
import sys
ctypes.CDLL(sys.argv[2])  # the one that is loaded first is found by its name from then on
from exl_core import ExLlamaV2, ExLlamaV2Config
from exl_core.errors import DeviceError
from exl_kernels.device import cuda_status, require_cuda

status = cuda_status()
print("status", status.available, status.driver_version, status.reason)
model = ExLlamaV2(ExLlamaV2Config(sys.argv[1]))
for call in (lambda: require_cuda("cuda:0"), model.load):
    try:
        call()
        print("fine")
    except DeviceError as error:
        print("DeviceError", str(error).replace(chr(10), " "))
"""


@pytest.fixture(scope="module")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the stand-in in it."""
    if not sys.platform.startswith("linux") or COMPILER is None:
        pytest.skip("needs Linux and a C compiler")
    if not cuda_status().built_with_cuda:
        pytest.skip("a build without kernels asks no driver")
    folder = tmp_path_factory.mktemp("driver")
    source = folder / "standin.c"
    source.write_text(STANDIN + "".join(f"int {name}(void) {{ return 0; }}\n" for name in PLAIN.split()))
    for name, what in (("whole", ()), ("old", ("-DcuLaunchKernelEx=cuSomethingElse",))):
        (folder / name).mkdir()
        flags = ["-w", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", *what]
        command = [COMPILER, *flags, "-o", str(folder / name / "libcuda.so.1"), str(source)]
        subprocess.run(command, check=True)
    return folder


def lines_of(library: Path, **numbers: int) -> list[str]:
    environment = {**os.environ, "EXL_DEVICE": "cuda:0"}
    environment |= {f"STANDIN_{name}": str(value) for name, value in numbers.items()}
    done = run(["-c", SCRIPT, str(MODEL), str(library / "libcuda.so.1")], env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("numbers", "says"),
    [
        ({"VERSION": 12040}, ["too old", "supports CUDA 12.4", "need CUDA 13.0 or newer", "update the driver"]),
        ({"INIT": 100}, ["sees no GPU", "CUDA_ERROR_NO_DEVICE", "check nvidia-smi and CUDA_VISIBLE_DEVICES"]),
        ({"INIT": 999}, ["does not start", "CUDA_ERROR_UNKNOWN", "says the stand-in"]),
        ({"MAJOR": 6}, ["Stand-in 9000 is sm_61", "kernels are for sm_", "rebuild with EXL_CUDA_ARCHS=61"]),
    ],
)
def test_every_entry_point_says_what_is_wrong(standin: Path, numbers: dict[str, int], says: list[str]) -> None:
    status, kernel, load = lines_of(standin / "whole", **numbers)
    assert status.startswith("status False")
    assert kernel.startswith("DeviceError")
    assert load.startswith("DeviceError")
    for line in (status, kernel, load):
        for words in says:
            assert words in line


def test_a_driver_without_what_is_called_names_it(standin: Path) -> None:
    for line in lines_of(standin / "old"):
        assert "lacks cuLaunchKernelEx: update it to one for CUDA 13" in line
