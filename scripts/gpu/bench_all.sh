#!/usr/bin/env bash
# The whole table of the CUDA backend on one GPU, about three minutes: JSON lines into a folder, a summary last.
#
# usage: scripts/gpu/bench_all.sh FOLDER [quick: the three most telling decode steps only
#        | PART ...: some of step batches others features prefill serve gemv attn roof, for GPUs side by side]
#
# BENCH_SECONDS: no part goes on for longer than so many in all, and one that has less than ten of them left is not begun. What a part
# had printed until it was cut off counts. PACKED names a file that holds the folder as a .tgz after each part (environment.sh).
# Exit code 0 if every part ran to its end.
set -uo pipefail
cd "$(dirname "$0")/../.."
source scripts/gpu/environment.sh
folder=${1:?folder for the results}
mkdir -p "$folder"
began=$(date +%s)

failed=0

run() {  # NAME SECONDS COMMAND...: JSON lines to NAME.jsonl, all else to NAME.log
  local name=$1 limit=$2 code left=$((${BENCH_SECONDS:-86400} - $(date +%s) + began))
  shift 2
  if [ $left -lt 10 ]; then
    echo "$name: left out, $left s are left"
    failed=1
    return
  fi
  timeout -k 5 $((limit < left ? limit : left)) "$@" > "$folder/$name.jsonl" 2> "$folder/$name.log"
  code=$?
  echo "[$(($(date +%s) - began)) s] $name: exit code $code, $(wc -l < "$folder/$name.jsonl") lines"
  if [ $code != 0 ]; then
    failed=1
    tail -3 "$folder/$name.log"
  fi
  pack_results "$folder"
}

step=(python3 benchmarks/bench_step.py --generator)
many=(--case 8b:4.0:fp16:256:8 --case 8b:4.0:fp16:256:32)
parts=("${@:2}")
[ ${#parts[@]} -gt 0 ] || parts=(step batches others prefill serve gemv attn)
for part in "${parts[@]}"; do
  case $part in
    quick) run step 60 "${step[@]}" --steps 100 --case 8b:4.0:fp16:256:1 "${many[@]}" ;;
    step) run step 60 "${step[@]}" --case 8b:4.0:fp16:256:1 --case tinyllama:4.0:fp16:256:1 ;;
    batches) run batches 70 "${step[@]}" --steps 100 "${many[@]}" --case 8b:4.0:fp16:256:48 --case 8b:4.0:fp16:256:64 ;;
    others)
      run others 70 "${step[@]}" --steps 100 --case 8b:3.0:fp16:256:1 --case 8b:gptq4:fp16:256:1 --case 8b:4.0:fp16:16384:1 \
        --case 8b:4.0:q4:16384:1
      ;;
    features) run features 300 python3 benchmarks/bench_features.py ;;
    prefill) run prefill 30 python3 benchmarks/bench_prefill.py --strict ;;
    serve) run serve 40 python3 benchmarks/bench_serve.py --requests 64 ;;
    gemv) run gemv 40 python3 benchmarks/bench_gemv.py --quick ;;
    roof) run roof 20 python3 benchmarks/bench_roof.py ;;
    attn) run attn 40 python3 benchmarks/bench_attn.py --quick ;;
    *) echo "no part $part"; exit 2 ;;
  esac
done
python3 scripts/gpu/summary.py "$folder"
exit $failed
