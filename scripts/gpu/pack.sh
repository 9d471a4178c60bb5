#!/usr/bin/env bash
# Copies this checkout's built native module to .device/ (ignored by git), without debug information.
# usage: scripts/gpu/pack.sh [folder that receives .device/; default: this checkout]
#
# Refuses a module without kernels, and says where sources are newer than the module: a GPU's time is too dear to find either out there.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
target=${1:-$root}/.device
module=$root/packages/exl-kernels/src/exl_kernels/_native.abi3.so
python=$root/.venv/bin/python
archs=$("$python" -c 'from exl_kernels.device import cuda_status; print(*cuda_status().archs)')
[ -n "$archs" ] || { echo "$module has no CUDA kernels: build it with nvcc (\`uv sync\` installs one)" >&2; exit 1; }
case " $archs " in
  *" 90a "*) ;;
  *) echo "kernels for $archs: an H100 or H200 runs its own with \`EXL_CUDA_ARCHS=90a uv sync\`" >&2 ;;
esac
newer=$(cd "$root" && git ls-files 'rust/*.rs' 'rust/*.cu' 'rust/*.cuh' rust/Cargo.lock | while read -r file; do
  [ "$file" -nt "$module" ] && echo "$file"
done || true)
[ -z "$newer" ] || echo "newer than the module: $(wc -l <<< "$newer") sources, such as $(head -1 <<< "$newer"); is it built from them? (\`uv sync\`)" >&2
mkdir -p "$target"
strip -S -o "$target/_native.abi3.so" "$module"
git -C "$root" describe --always --dirty --exclude '*' > "$target/commit"
echo "commit $(cat "$target/commit"), kernels for $archs"
ls -l "$target"
