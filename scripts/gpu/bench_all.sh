#!/usr/bin/env bash
# The whole table of the CUDA backend on one GPU, about three minutes: JSON lines into a folder, a summary on the way.
#
# usage: scripts/gpu/bench_all.sh FOLDER [quick: the three most telling decode steps only]
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
if [ "${2:-}" = quick ]; then
  run step 60 "${step[@]}" --steps 100 --case 8b:4.0:fp16:256:1 "${many[@]}"
else
  run step 60 "${step[@]}" --case 8b:4.0:fp16:256:1 --case tinyllama:4.0:fp16:256:1
  run batches 60 "${step[@]}" --steps 100 "${many[@]}" --case 8b:4.0:fp16:256:64
  run others 60 "${step[@]}" --steps 100 --case 8b:3.0:fp16:256:1 --case 8b:gptq4:fp16:256:1 --case 8b:4.0:fp16:16384:1 --case 8b:4.0:q4:16384:1
  run prefill 30 python3 benchmarks/bench_prefill.py --strict
  run serve 40 python3 benchmarks/bench_serve.py --requests 64
  run gemv 40 python3 benchmarks/bench_gemv.py --quick
  run attn 40 python3 benchmarks/bench_attn.py --quick
fi
python3 scripts/gpu/summary.py "$folder"
