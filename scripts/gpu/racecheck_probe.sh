#!/usr/bin/env bash
# Whether racecheck accepts a right hand-over through an mbarrier and reports races planted in one (racecheck_mbarrier.cu).
# Exit code 0 if it does. usage: scripts/gpu/racecheck_probe.sh
set -uo pipefail
cd "$(dirname "$0")/../.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
nvcc -arch=native -o "$folder/probe" scripts/gpu/racecheck_mbarrier.cu || exit 2
for form in 1 3 5 6; do
  compute-sanitizer --tool racecheck --racecheck-report analysis --error-exitcode 99 "$folder/probe" $form > "$folder/$form" 2>&1 &
  running[form]=$!
done
wrong=0
for form in 1 3 5 6; do
  wait "${running[form]}"
  code=$?
  case $form in 1 | 3) wanted=0 ;; *) wanted=99 ;; esac
  [ $code = $wanted ] || { wrong=1; echo "racecheck, form $form of racecheck_mbarrier.cu: exit code $code, not $wanted"; tail -5 "$folder/$form"; }
done
[ $wrong = 1 ] || echo "racecheck accepts hand-overs in which every lane arrives and reports two races planted in them"
exit $wrong
