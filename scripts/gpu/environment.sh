# Sourced by the scripts of this folder: puts the carried module into its package and the packages' sources on the path.
carried=${EXL_NATIVE:-.device/_native.abi3.so}
native=packages/exl-kernels/src/exl_kernels/_native.abi3.so
# Never overwritten: other processes run from it and would crash.
if [ -f "$carried" ] && ! cmp -s "$carried" "$native"; then
  { cp "$carried" "$native.$$.so" && mv -f "$native.$$.so" "$native"; } || {
    rm -f "$native.$$.so"
    echo "$carried cannot be put in the place of $native" >&2
    exit 1
  }
fi
for package in packages/*/src; do
  PYTHONPATH="$PWD/$package${PYTHONPATH:+:$PYTHONPATH}"
done
export PYTHONPATH PYTHONUNBUFFERED=1
# The commit that lines and tables name: the one the carried module was packed at, where the checkout came without its history.
if [ -z "${EXL_COMMIT:-}" ] && [ -f .device/commit ]; then
  EXL_COMMIT=$(cat .device/commit)
  export EXL_COMMIT
fi
# FOLDER: all that is in it so far into the one file that PACKED names, if it does. For machines of which few files come back, and
# which may be taken away before the end: called after every part.
pack_results() {
  [ -n "${PACKED:-}" ] || return 0
  (
    flock 9
    tar -czf "$1/.packed" -C "$1" --warning=no-file-changed --exclude .packed --exclude .lock --exclude images . || true
    mv "$1/.packed" "$PACKED"
  ) 9> "$1/.lock"
}
