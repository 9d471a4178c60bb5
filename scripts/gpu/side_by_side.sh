#!/usr/bin/env bash
# Several tasks at once on a machine with several GPUs, each on GPUs of its own and in a copy of the checkout of its own, so that each
# may have its own native module and patch.
#
# usage, here:  scripts/gpu/side_by_side.sh pack FOLDER TASK...
#        there: scripts/gpu/side_by_side.sh run OUT SECONDS TASK:GPUS...     such as tests:0,1 sm80:2
#
# Each task runs on the cores of its GPUs: the machine's are shared out evenly among its GPUs, so that tasks do not disturb one another.
#
# FOLDER/TASK holds run.sh and may hold _native.abi3.so, commit (which results name) and change.patch; `pack` puts them into
# .device/tasks.tar.xz. `run` calls each task's run.sh in its copy, with CUDA_VISIBLE_DEVICES, EXL_NATIVE, EXL_COMMIT, OUT (a folder of
# its own) and SECONDS_LEFT set, ends what has not ended after SECONDS, and leaves OUT/TASK.txt and OUT/TASK.tgz. The exit codes come last.
set -uo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
verb=${1:?pack or run}
case $verb in
  pack)
    folder=$(cd "${2:?a folder of tasks}" && pwd)
    shift 2
    for task in "$@"; do
      [ -f "$folder/$task/run.sh" ] || { echo "$folder/$task has no run.sh" >&2; exit 1; }
      [ ! -f "$folder/$task/_native.abi3.so" ] || strip -S "$folder/$task/_native.abi3.so"
    done
    mkdir -p "$root/.device"
    # A dictionary that reaches from one task's module to the next one's: most are equal.
    tar -C "$folder" -cf - "$@" | xz --lzma2=preset=6,dict=128MiB > "$root/.device/tasks.tar.xz"
    ls -l "$root/.device/tasks.tar.xz"
    ;;
  run)
    out=${2:?a folder for the results} limit=${3:?seconds}
    shift 3
    cd "$root" || exit 1
    mkdir -p "$out"
    out=$(cd "$out" && pwd)
    work=$(mktemp -d)
    trap 'kill $(jobs -p) 2> /dev/null; rm -rf "$work"' EXIT
    began=$SECONDS
    on_cores=(python3 -c 'import os, sys; os.sched_setaffinity(0, map(int, sys.argv[1].split(","))); os.execvp(sys.argv[2], sys.argv[2:])')
    mapfile -t cores < <(python3 -c 'import os; print(*sorted(os.sched_getaffinity(0)), sep="\n")')
    gpus_here=$(nvidia-smi --list-gpus | wc -l)
    ((gpus_here)) || { echo "nvidia-smi lists no GPU" >&2; exit 1; }
    each=$((${#cores[@]} / gpus_here))
    ((each)) || each=1
    declare -A running
    for task in "$@"; do
      name=${task%%:*} gpus=${task#*:} own_cores=
      for gpu in ${gpus//,/ }; do own_cores+=${own_cores:+,}$(IFS=,; echo "${cores[*]:gpu*each%${#cores[@]}:each}"); done
      copy=$work/$name
      mkdir -p "$copy/.device"
      tar --exclude='./.*' --exclude=./rust/target -cf - . | tar -C "$copy" -xf -
      tar -xf .device/tasks.tar.xz -C "$copy/.device" "$name" || exit 1
      own=$copy/.device/$name
      [ ! -f "$own/change.patch" ] || patch -s -p1 -d "$copy" < "$own/change.patch" || exit 1
      (
        cd "$copy" || exit 1
        export CUDA_VISIBLE_DEVICES=$gpus OUT=$work/$name.out TMPDIR=$work/$name.tmp SECONDS_LEFT=$((limit - SECONDS + began))
        [ ! -f "$own/_native.abi3.so" ] || export EXL_NATIVE=$own/_native.abi3.so
        [ ! -f "$own/commit" ] || EXL_COMMIT=$(cat "$own/commit")
        export EXL_COMMIT=${EXL_COMMIT:-}
        mkdir -p "$OUT" "$TMPDIR"
        # In a session of its own, all of which ends with it: a process that ran on would disturb what is timed next.
        setsid --wait bash -c 'echo $$ > "$0"; exec "$@"' "$work/$name.session" \
          timeout -k 5 "$SECONDS_LEFT" "${on_cores[@]}" "$own_cores" bash "$own/run.sh" > "$out/$name.txt" 2>&1
        code=$?
        [ ! -s "$work/$name.session" ] || pkill -KILL -s "$(cat "$work/$name.session")"
        tar -C "$OUT" -czf "$out/$name.tgz" .
        exit $code
      ) &
      running[$name]=$!
    done
    failed=0
    for name in "${!running[@]}"; do
      wait "${running[$name]}"
      code=$?
      ((code == 0)) || failed=1
      running[$name]=$code
    done
    for name in "${!running[@]}"; do
      echo "== $name: $(tail -40 "$out/$name.txt")"
    done
    for name in "${!running[@]}"; do echo "$name: exit code ${running[$name]}"; done
    exit $failed
    ;;
  *) echo "pack or run, not $verb" >&2; exit 2 ;;
esac
