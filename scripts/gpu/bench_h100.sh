#!/usr/bin/env bash
# The H100's table in one short lease: 150 seconds at most, about 110 if nothing hangs. The most telling parts come first: decode steps
# of one sequence and matmuls alone, which have bars there, then 8 to 64 sequences, 3 bits, GPTQ and long contexts, the roofs, a prompt.
#
# usage: [PACKED=FILE.tgz] scripts/gpu/bench_h100.sh FOLDER
#
# scripts/gpu/keep.py puts its lines into benchmarks/results; scripts/gpu/tables.py gives this card its columns.
export BENCH_SECONDS=${BENCH_SECONDS:-145}
exec "$(dirname "$0")/bench_all.sh" "${1:?folder for the results}" step gemv batches others roof prefill
