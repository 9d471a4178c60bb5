#!/usr/bin/env bash
# Build manylinux wheels of all packages into dist/VARIANT.
#
# usage: scripts/wheels.sh [gpu|cpu]
#
# gpu: the kernels of every architecture of a release (about half an hour of two cores), or of EXL_CUDA_ARCHS.
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
# Wheels of another version would be installed with these: `pip install dist/gpu/*.whl`.
rm -rf "$out"
mkdir -p "$out"
run() { uv run --isolated --locked "${groups[@]}" "$@"; }

(cd packages/exl-kernels && run maturin build --release --locked --zig --compatibility $tag --out "$out")
for package in exl-filters exl-core exl-generate exl-compat exl-serve; do
  uv build --quiet --wheel --package $package --out-dir "$out"
done
wheel=$(ls -t "$out"/exl_kernels-*.whl | head -1)
# The file's name holds the tag, too; what counts is what auditwheel finds in the libraries.
found=$(run auditwheel show --json "$wheel" | python3 -c 'import json, sys; print(json.load(sys.stdin)["overall_tag"])')
echo "$(basename "$wheel"): $found"
# An older glibc than asked for is fine, too.
newest=$(printf '%s\n' "$found" "${tag}_x86_64" | sort -V | tail -1)
[[ $found == manylinux_* && $newest == "${tag}_x86_64" ]] || { echo "error: the wheel needs $found, expected ${tag}_x86_64 or older"; exit 1; }
ls -l "$out"
