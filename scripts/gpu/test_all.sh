#!/usr/bin/env bash
# Every test on a GPU, once, in about 200 seconds on two or three GPUs: all tests marked `cuda`, memcheck, racecheck. A
# table of what passed comes last. Racecheck takes the longest: it has all GPUs but the first, and what the others leave of
# the first, which all else runs on. With one GPU all of it runs there.
#
# usage: scripts/gpu/test_all.sh FOLDER [seconds, default 330: what has not ended by then is cut off, and the table says so]
#
# FOLDER receives each part's output. A kernel of the module that no test launched, or none under a tool, is a failure with its name
# (`kernels_covered.py`; of the tests in the row `launched`, which the part `kernels` brings with it). None is excepted. Parts can
# be left out: TEST_PARTS, default "two kernels rest errors memcheck racecheck". EXL_CUDA_IMAGES: as in sanitize.sh; PACKED, a file
# that holds the folder as a .tgz after each part: environment.sh.
set -uo pipefail
cd "$(dirname "$0")/../.."
source scripts/gpu/environment.sh
out=${1:?folder for the results}
limit=${2:-330}
parts=" ${TEST_PARTS:-two kernels rest errors memcheck racecheck} "
rm -rf "$out"/{parts,kernels} && mkdir -p "$out"/{parts,kernels/tests}
out=$(cd "$out" && pwd)
export PYTHONPATH="$PWD/scripts/gpu:$PYTHONPATH" OMP_NUM_THREADS=1 EXL_CPU_THREADS=1
IFS=, read -ra gpus <<< "${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader | tr -d ' ' | paste -sd,)}"
tests=${gpus[0]} raced=("${gpus[0]}") # racecheck's processes take these in turn
for gpu in "${gpus[@]:1}"; do raced+=("$gpu" "$gpu"); done
began=$(date +%s)
passed() { echo $(($(date +%s) - began)); }
left() { local s=$((limit - $(passed) - ${1:-0})); echo $((s > 1 ? s : 1)); }
has() { [[ $parts = *" $1 "* ]]; }

record() {  # NAME CODE SECONDS TEXT: a row of the table
  local how=passed
  case $2 in 0) ;; 124 | 137) how="CUT OFF" ;; *) how="FAILED ($2)" ;; esac
  printf '%-10s %-12s %4d s  %s\n' "$1" "$how" "$3" "${4:0:1500}" > "$out/parts/$1" # many names must not cost the reader the table
  echo "[$(passed) s] $(cat "$out/parts/$1")"
  pack_results "$out"
}

run_tests() {  # NAME GPUS ARGUMENTS...
  local name=$1 start code text
  start=$(passed)
  CUDA_VISIBLE_DEVICES=$2 EXL_KERNELS_LOG=$out/kernels/tests timeout -k 5 "$(left)" python3 -m pytest -m cuda -p no:cacheprovider \
    -p kernels_plugin --tb=short --durations=8 --junitxml="$out/$name.xml" "${@:3}" > "$out/$name.txt" 2>&1
  code=$?
  text=$(grep -aE '(passed|failed|error).* in ' "$out/$name.txt" | tail -1 | tr -d '=')
  [ $code = 124 ] && text="after $(grep -aoE '^[.FEsx]+( |$)' "$out/$name.txt" | tr -cd '.FEsx' | wc -c) tests"
  record "$name" $code $(($(passed) - start)) "$text"
}

run_tool() {  # TOOL GPUS SECONDS PROCESSES
  local start code
  start=$(passed)
  SANITIZE_GPUS=$2 SANITIZE_UNTIL=$((began + limit - 6)) SANITIZE_LOG=$out/$1 timeout -k 5 "$(left 1)" \
    scripts/gpu/sanitize.sh "$1" "$3" "$4" > "$out/$1.txt" 2>&1
  code=$?
  # Processes that ran out of time and nothing else.
  local cut='exit code (124|137), 0 reports'
  grep -qE "$cut" "$out/$1.txt" && ! grep 'exit code' "$out/$1.txt" | grep -qvE "$cut" && code=124
  record "$1" $code $(($(passed) - start)) "$(grep -aE "^$1: .*(cases|kernels|never)" "$out/$1.txt" | sed "s/^$1: //" | paste -sd';')"
}

echo "${EXL_COMMIT:-$(cat commit 2> /dev/null || git rev-parse --short HEAD)}, GPUs ${gpus[*]}, $(nproc --all) cores, $limit s"
nvidia-smi --query-gpu=index,name,driver_version --format=csv,noheader
devices=tests/core/test_cuda_devices.py errors=tests/core/test_cuda_errors.py
if has racecheck; then
  (
    if [ -z "${EXL_CUDA_IMAGES:-}" ]; then
      timeout -k 5 "$(left)" python3 scripts/gpu/racecheck_images.py "$out/images" > "$out/images.txt" 2>&1 || { record images $? "$(passed)" "$(tail -1 "$out/images.txt")"; exit; }
      export EXL_CUDA_IMAGES=$out/images
    fi
    run_tool racecheck "${raced[*]}" 0 $((4 * (${#raced[@]} > 3 ? ${#raced[@]} : 3))) # what sanitize_cases.txt names: under this tool a case that is not there may take minutes
    rm -rf "$out/images"
  ) &
fi
if has memcheck; then (unset EXL_CUDA_IMAGES; run_tool memcheck "$tests" 30 5) & fi
unset EXL_CUDA_IMAGES
if has kernels; then run_tests kernels "$tests" -n 9 --dist worksteal tests/kernels & fi
if has rest; then
  run_tests rest "$tests" -n 5 --dist loadfile tests/core tests/generate tests/golden tests/properties --ignore $devices --ignore tests/core/test_cuda_tp_processes.py --ignore $errors &
fi
if has errors; then run_tests errors "$tests" $errors & fi
if has two && [ ${#gpus[@]} -gt 1 ]; then
  run_tests two "${gpus[0]},${gpus[1]}" -rs $devices tests/core/test_cuda_tp_processes.py tests/core/test_cuda_lora.py tests/generate/test_cuda_generator.py tests/kernels/test_cuda_peer.py &
fi
wait
if has kernels; then
  python3 scripts/gpu/kernels_covered.py "$out/kernels/tests" > "$out/kernels/tests.txt"
  record launched $? "$(passed)" "tests: $(paste -sd';' "$out/kernels/tests.txt")"
fi
echo
echo "part       result       time    what"
[ ${#gpus[@]} -gt 1 ] || parts=${parts/ two / }
for part in $parts; do [ -f "$out/parts/$part" ] || record "$part" 1 0 "did not run" > /dev/null; done
for part in two kernels rest errors launched memcheck racecheck images; do cat "$out/parts/$part" 2> /dev/null; done
[ -n "${parts// /}" ] && ! grep -lqE 'FAILED|CUT OFF' "$out"/parts/*
