#!/usr/bin/env bash
# Runs the tests marked `cuda` on a machine with a GPU that has Python, torch and pytest but no Rust and no package index.
#
# Before, on the development machine:  scripts/gpu/pack.sh        (copies the built module to .device/)
# Then on the GPU machine, with .device/ carried along:  scripts/gpu/run_tests.sh [pytest arguments]
#
# With pytest-xdist there: `-n 10 --dist worksteal tests/kernels` takes half a minute. (Dealt out in advance, the slow cases of one
# function are one process's, and the others wait for it.) All tests on a GPU, with the tools: test_all.sh.
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/gpu/environment.sh
python3 -c '
import sys, torch
from exl_kernels.device import cuda_status
s = cuda_status()
names = [d.name for d in s.devices]
print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, driver CUDA {s.driver_version}, {names}, archs {s.archs}, reason: {s.reason}")
'
exec python3 -m pytest -m cuda -p no:cacheprovider "${@:-tests/kernels}"
