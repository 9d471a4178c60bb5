#!/usr/bin/env bash
# Copies this checkout's built native module to .device/ (ignored by git), without debug information.
# usage: scripts/gpu/pack.sh [folder that receives .device/; default: this checkout]
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
target=${1:-$root}/.device
mkdir -p "$target"
strip -S -o "$target/_native.abi3.so" "$root/packages/exl-kernels/src/exl_kernels/_native.abi3.so"
git -C "$root" rev-parse --short HEAD > "$target/commit"
ls -l "$target"
