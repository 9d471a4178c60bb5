#!/usr/bin/env bash
# Runs cases of every CUDA operator's tests under compute-sanitizer on a machine with a GPU.
#
# usage: scripts/gpu/sanitize.sh memcheck|racecheck|synccheck|initcheck [seconds, default 70] [processes, default 1] [pytest paths, default tests/kernels]
#
# A case for every kernel at least, by the list sanitize_cases.txt (kernels_covered.py says in the end which were launched), which has
# cases of most test functions too, and one of every other test function (racecheck: as time allows), then as many as the time allows
# (subset_plugin.py); processes side by side take one after the other.
# Kernels of torch are left out by name where the tool can do without: they are not ours and cost most of the time.
#
# memcheck, initcheck: without torch's caching allocator, so that every tensor is an allocation of its own whose ends are watched.
# Tests that capture graphs cannot run so (an allocation cannot be captured): one more process runs them with the allocator.
# racecheck, synccheck: the kernels that hand over through barriers are compiled anew, for the architecture of the module's code
# (racecheck_images.py; EXL_CUDA_IMAGES, if it is set, names a folder where that was done). racecheck itself is tested as well: it must accept a right hand-over and report a wrong one
# (racecheck_mbarrier.cu). Both take two launches of one kernel that overlap for one, so programmatic launches are off under them.
#
# Exit code 0: the tests passed, the tool found nothing in our kernels (racecheck cannot leave cuBLAS out: its reports on kernels
# named nvjet are counted apart), and no kernel of the module was left out (code 4, their names are printed), unless pytest paths were
# given, which are for a look at a few kernels. SANITIZE_LOG is a folder for the processes' output and the list of what ran,
# SANITIZE_UNTIL a time (`date +%s`) at which processes are cut off (exit code 124; what they ran until then is counted),
# SANITIZE_GPUS the GPUs that the processes take in turn, such as "1 1 0" for twice as many on the second; default: the visible ones.
# RACECHECK_WORKERS threads of racecheck's own (2).
set -uo pipefail
cd "$(dirname "$0")/../.."
source scripts/gpu/environment.sh
tool=${1:?memcheck, racecheck, synccheck or initcheck}
export EXL_SANITIZER=$tool EXL_SUBSET_SECONDS=${2:-70} PYTHONPATH="$PWD/scripts/gpu:$PYTHONPATH" OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
processes=${3:-1}
# The processes end with this script: `timeout` puts each into a group of its own, which no signal to this group reaches.
running=() probe=
trap 'kill "${running[@]}" $probe 2> /dev/null' EXIT
trap 'exit 143' TERM INT
paths=("${@:4}")
log=${SANITIZE_LOG:-$(mktemp -d)}
mkdir -p "$log"
limit=0 # none
remaining() { [ -z "${SANITIZE_UNTIL:-}" ] || limit=$((SANITIZE_UNTIL > $(date +%s) ? SANITIZE_UNTIL - $(date +%s) : 1)); }
remaining
options=(--tool "$tool" --error-exitcode 99 --print-limit 30 --destroy-on-device-error kernel)
case $tool in memcheck | racecheck | synccheck) for name in at6native cublas cutlass; do options+=(--kernel-name-exclude "kns=$name"); done ;; esac
case $tool in
  memcheck | initcheck) graphs=1 ;;
  racecheck | synccheck)
    if [ -z "${EXL_CUDA_IMAGES:-}" ]; then
      timeout -k 3 "$limit" python3 scripts/gpu/racecheck_images.py "$log/images" || exit 2
      export EXL_CUDA_IMAGES=$log/images
    fi
    ;;
esac
case $tool in racecheck | synccheck) export EXL_CUDA_PDL=0 EXL_SUBSET_WITHOUT=set_programmatic_launch,programmatic] ;; esac
remaining
if [ "$tool" = racecheck ]; then
  # Left out: a case of these has 400 to 1,200 million multiplications and takes minutes under the tool.
  [ ${#paths[@]} -gt 0 ] || EXL_SUBSET_WITHOUT+=,test_large_shapes,test_many_rows_are_several,test_a_following_matmul_that_would,test_matmuls_of_all_sizes_share
  export EXL_SUBSET_FUNCTIONS=0 # for each kernel a case, for each function one as time allows: cases take 10 to 100 times memcheck's time
  options+=(--racecheck-report analysis --racecheck-num-workers "${RACECHECK_WORKERS:-2}")
  timeout -k 3 "$limit" scripts/gpu/racecheck_probe.sh > "$log/probe.txt" 2>&1 &
  probe=$!
fi
read -ra gpus <<< "${SANITIZE_GPUS:-}"
rm -rf "$log/$tool"-{queue*,kernels,cases-*.txt}
export EXL_SUBSET_CASES=${EXL_SUBSET_CASES-$PWD/scripts/gpu/sanitize_cases.txt}
[ -f "$EXL_SUBSET_CASES" ] || unset EXL_SUBSET_CASES
for ((i = 0; i < processes + ${graphs:-0}; i++)); do
  if [ $i -lt "$processes" ]; then
    # The test of images asks the driver for a parameter that a kernel lacks, which the tools report.
    [ -z "${graphs:-}" ] || export PYTORCH_NO_CUDA_MEMORY_CACHING=1 EXL_SUBSET_WITHOUT=CUDAGraph,test_an_image_of_other_parameters
  else
    unset PYTORCH_NO_CUDA_MEMORY_CACHING EXL_SUBSET_WITHOUT
    export EXL_SUBSET_WITH=CUDAGraph
  fi
  [ ${#gpus[@]} = 0 ] || export CUDA_VISIBLE_DEVICES=${gpus[i % ${#gpus[@]}]}
  EXL_KERNELS_LOG=$log/$tool-kernels EXL_SUBSET_QUEUE=$log/$tool-queue-$((i < processes)) EXL_SUBSET_LOG=$log/$tool-cases-$i.txt \
    timeout -k 3 "$limit" compute-sanitizer "${options[@]}" python3 -m pytest -m cuda -p no:cacheprovider \
    -p subset_plugin -p kernels_plugin --tb=short "${paths[@]:-tests/kernels}" > "$log/$tool-$i.txt" 2>&1 &
  running[i]=$!
done
failed=0
if [ "$tool" = racecheck ]; then
  wait "$probe" || failed=3
  cat "$log/probe.txt"
fi
for ((i = 0; i < processes + ${graphs:-0}; i++)); do
  wait "${running[i]}"
  code=$?
  unset "running[i]"
  ours=$(grep -E '^.*=========.*(Race reported|Error|error detected|Uninitialized|Invalid)' "$log/$tool-$i.txt" | grep -cv 'nvjet\|ERROR SUMMARY: 0\|RACECHECK SUMMARY')
  [ $code = 5 ] && [ $i = "$processes" ] && code=0 # no graph in these tests
  if [ $code != 0 ] && ! { [ "$tool" = racecheck ] && [ $code = 99 ] && [ "$ours" = 0 ]; }; then
    failed=${failed/0/1}
    echo "process $i: exit code $code, $ours reports on our kernels"
    grep -E '=========|^FAILED|^ERROR|Exit' "$log/$tool-$i.txt" | grep -v 'Host Frame' | head -40
  fi
done
cat "$log/$tool"-cases-*.txt 2>/dev/null | awk -v tool="$tool" '{n[$1]++; split($3, name, "["); functions[name[1]] = 1}
  END {for (f in functions) k++; printf "%s: %d cases passed, %d failed, %d skipped; %d functions\n", tool, n["passed"], n["failed"], n["skipped"], k}'
# Of all kernels, unless paths say that few are asked for; another failure's code stays.
covered=$(python3 scripts/gpu/kernels_covered.py "$log/$tool-kernels") || [ ${#paths[@]} -gt 0 ] || failed=${failed/#0/4}
sed "s/^/$tool: /" <<< "$covered"
cat "$log/$tool"-[0-9]*.txt | grep -c 'Race reported.*nvjet' | sed 's/^/reports on kernels of cuBLAS: /'
cat "$log/$tool"-[0-9]*.txt | grep -hoE 'ERROR SUMMARY: [0-9]+ error|RACECHECK SUMMARY: .*' | sort | uniq -c
rm -rf "$log/$tool"-queue*
exit $failed
