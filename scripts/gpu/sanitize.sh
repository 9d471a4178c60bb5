#!/usr/bin/env bash
# Runs cases of every CUDA operator's tests under compute-sanitizer on a machine with a GPU.
#
# usage: scripts/gpu/sanitize.sh memcheck|racecheck|synccheck|initcheck [seconds, default 70] [pytest paths, default tests/kernels]
#
# One case of every test function at least, then as many as the time allows (subset_plugin.py). Kernels of torch and
# cuBLAS are left out by name: they are not ours and cost most of the time. memcheck runs without torch's caching
# allocator, so that every tensor is an allocation of its own whose ends are watched; tests that capture graphs cannot
# run so, and run under the other tools. Exit code 0: the tests passed and the tool found nothing.
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/gpu/environment.sh
tool=${1:?memcheck, racecheck, synccheck or initcheck}
export EXL_SUBSET_SECONDS=${2:-70} PYTHONPATH="$PWD/scripts/gpu:$PYTHONPATH"
paths=("${@:3}")
options=(--tool "$tool" --error-exitcode 99 --print-limit 30 --destroy-on-device-error kernel)
for name in at6native cublas cutlass; do options+=(--kernel-name-exclude "kns=$name"); done
case $tool in
  memcheck) export PYTORCH_NO_CUDA_MEMORY_CACHING=1 EXL_SUBSET_NO_CAPTURE=1 ;;
  racecheck) options+=(--racecheck-report analysis) ;;
esac
exec compute-sanitizer "${options[@]}" python3 -m pytest -m cuda -p no:cacheprovider -p subset_plugin --durations=12 "${paths[@]:-tests/kernels}"
