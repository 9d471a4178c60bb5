#!/usr/bin/env bash
# Tests and times the experimental warp ring and attention kernels (EXL_SM80_RING=1) on a GPU that runs code for sm_80, sm_86 or sm_89. On an H100 that is a
# module built with EXL_CUDA_ARCHS=80+ptx. It builds nothing: see run_tests.sh for how the module gets there.
#
# usage: scripts/gpu/try_sm80.sh FOLDER
#
# Correctness runs first, each part in its own process, so that a failed launch costs one part only. Each part has TEST_SECONDS (default 60) or
# BENCH_SECONDS (default 75). A table is printed last; FOLDER has the logs and the JSON lines.
set -uo pipefail
folder=$(mkdir -p "${1:?folder for the results}" && cd "$1" && pwd)
cd "$(dirname "$0")/../.."
source scripts/gpu/environment.sh
export CUDA_FORCE_PTX_JIT=${CUDA_FORCE_PTX_JIT:-0}
tests=tests/kernels/test_cuda_warp_ring.py

# NAME SECONDS COMMAND...: a part with its log; its exit status goes to NAME.status.
part() {
  local name=$1 seconds=$2
  shift 2
  timeout "$seconds" "$@" > "$folder/$name.log" 2>&1
  echo $? > "$folder/$name.status"
}
check() {
  part "test-$1" "${TEST_SECONDS:-60}" env EXL_SM80_RING=1 python3 -m pytest -q -x -m cuda -p no:cacheprovider "$tests" -k "$2"
}

check one-matrix "test_one_matrix"
check shapes "test_every_shape or test_blocks_of_many_tiles or test_rows_that_do_not_fit"
check fused "test_random_matmuls"
check chained "test_a_chained_layer"
for file in teams own; do
  part "test-attention-$file" "${TEST_SECONDS:-60}" env EXL_SM80_RING=1 python3 -m pytest -q -m cuda -p no:cacheprovider "tests/kernels/test_cuda_attention_$file.py"
done
part test-others "${TEST_SECONDS:-60}" env EXL_SM80_RING=1 python3 -m pytest -q -m cuda -p no:cacheprovider tests/kernels/test_cuda_fused_linear.py

for switch in 0 1; do
  part "gemv-$switch" "${BENCH_SECONDS:-75}" env EXL_SM80_RING=$switch python3 benchmarks/bench_gemv.py --quick
  part "step-$switch" "${BENCH_SECONDS:-75}" env EXL_SM80_RING=$switch python3 benchmarks/bench_step.py --steps 400 \
    --case 8b:4.0:fp16:256:1 --case 8b:4.0:fp16:256:8
done

python3 scripts/gpu/few/sm80_table.py "$folder"
pack_results "$folder"
