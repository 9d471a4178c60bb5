# Sourced by the scripts of this folder: puts the carried module beside its package and the packages' sources on the path.
carried=${EXL_NATIVE:-.device/_native.abi3.so}
if [ -f "$carried" ]; then
  cp "$carried" packages/exl-kernels/src/exl_kernels/_native.abi3.so
fi
for package in packages/*/src; do
  PYTHONPATH="$PWD/$package${PYTHONPATH:+:$PYTHONPATH}"
done
export PYTHONPATH PYTHONUNBUFFERED=1
