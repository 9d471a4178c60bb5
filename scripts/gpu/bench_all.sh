#!/usr/bin/env bash
# The whole table of the CUDA backend on one GPU, about three minutes: JSON lines into a folder, a summary on the way.
#
# usage: scripts/gpu/bench_all.sh FOLDER [quick: the three most telling decode steps only
#        | PART ...: some of step batches others prefill serve gemv attn, for GPUs side by side]
set -uo pipefail
cd "$(dirname "$0")/../.."
source scripts/gpu/environment.sh
folder=${1:?folder for the results}
mkdir -p "$folder"
began=$(date +%s)

run() {  # NAME SECONDS COMMAND...: JSON lines to NAME.jsonl, all else to NAME.log
  local name=$1 limit=$2
  shift 2
  timeout "$limit" "$@" > "$folder/$name.jsonl" 2> "$folder/$name.log"
  echo "[$(($(date +%s) - began)) s] $name: exit code $?, $(wc -l < "$folder/$name.jsonl") lines"
}

step=(python3 benchmarks/bench_step.py --generator)
many=(--case 8b:4.0:fp16:256:8 --case 8b:4.0:fp16:256:32)
parts=("${@:2}")
[ ${#parts[@]} -gt 0 ] || parts=(step batches others prefill serve gemv attn)
for part in "${parts[@]}"; do
  case $part in
    quick) run step 60 "${step[@]}" --steps 100 --case 8b:4.0:fp16:256:1 "${many[@]}" ;;
    step) run step 60 "${step[@]}" --case 8b:4.0:fp16:256:1 --case tinyllama:4.0:fp16:256:1 ;;
    batches) run batches 70 "${step[@]}" --steps 100 "${many[@]}" --case 8b:4.0:fp16:256:64 ;;
    others)
      run others 70 "${step[@]}" --steps 100 --case 8b:3.0:fp16:256:1 --case 8b:gptq4:fp16:256:1 --case 8b:4.0:fp16:16384:1 \
        --case 8b:4.0:q4:16384:1
      ;;
    prefill) run prefill 30 python3 benchmarks/bench_prefill.py --strict ;;
    serve) run serve 40 python3 benchmarks/bench_serve.py --requests 64 ;;
    gemv) run gemv 40 python3 benchmarks/bench_gemv.py --quick ;;
    attn) run attn 40 python3 benchmarks/bench_attn.py --quick ;;
    *) echo "no part $part"; exit 2 ;;
  esac
done
python3 scripts/gpu/summary.py "$folder"
