#!/usr/bin/env bash
# Build manylinux wheels of all packages into dist/VARIANT.
#
# usage: scripts/wheels.sh [gpu|cpu]
#
# gpu: the kernels of every architecture of a release (about 16 minutes of two cores), or of EXL_CUDA_ARCHS.
# cpu: no GPU kernels. zig links against an old glibc; auditwheel checks that the tag is true.
set -euo pipefail
cd "$(dirname "$0")/.."
variant=${1:-gpu}
tag=manylinux_2_17
case $variant in
  gpu) export EXL_CUDA_ARCHS=${EXL_CUDA_ARCHS:-release} groups=(--only-group wheels --only-group build) ;;
  cpu) export EXL_CUDA_ARCHS=none groups=(--only-group wheels) ;;
  *) echo "no variant $variant: gpu or cpu"; exit 2 ;;
esac
out=$PWD/dist/$variant
mkdir -p "$out"
run() { uv run --isolated --locked "${groups[@]}" "$@"; }

(cd packages/exl-kernels && run maturin build --release --locked --zig --compatibility $tag --out "$out")
for package in exl-filters exl-core exl-generate exl-compat exl-serve; do
  uv build --quiet --wheel --package $package --out-dir "$out"
done
wheel=$(ls -t "$out"/exl_kernels-*.whl | head -1)
run auditwheel show "$wheel" | tee /dev/stderr | tr '\n' ' ' | grep -Eq "${tag}_x86_64|${tag/_2_17/2014}_x86_64"
ls -l "$out"
