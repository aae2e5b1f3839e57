#!/usr/bin/env bash
# Builds the CUDA code on a GPU host, checks its bytes and its order, and measures. Needs no network, only nvcc, a C
# compiler, CMake, and a python3 with torch for CUDA, pytest and what Maru needs; compute-sanitizer where there is one.
#
#   scripts/gpu-check.sh [options of benchmarks/gpu_copy.py, such as --lmcache FILE or --json FILE]
#
# With --lmcache, LMCache's c_ops library, also imports both extensions into one process, in either order.
set -euo pipefail
cd "$(dirname "$0")/.."
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT

cmake -S . -B "$build" > "$build/log" || { cat "$build/log"; exit 1; }
grep -x ready "$build/parts/cuda" > /dev/null || { cat "$build/parts/cuda" "$build/parts/cuda.remedy"; exit 1; }
cmake --build "$build" --target maru_cuda
cp "$build/lib/libmaru_cuda.so" maru_transfer/

export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
reason=$(python3 -c 'from maru_transfer.kernel import KernelEngine; print(KernelEngine().import_error() or "")')
[ -z "$reason" ] || { echo "the kernels cannot be used: $reason"; exit 1; }

previous=
for option in "$@"; do
  if [[ $previous == --lmcache ]]; then
    export MARU_TEST_LMCACHE=$option
  elif [[ $option == --lmcache=* ]]; then
    export MARU_TEST_LMCACHE=${option#--lmcache=}
  fi
  previous=$option
done

# One after the other: processes share a GPU by turns, and each copy that a test waits for waits for the others' turns.
python3 -m pytest -q -rs --durations=10 tests/transfer/test_*cuda.py

if command -v compute-sanitizer > /dev/null; then
  # Only our own kernels, where it can choose: those of torch are not at stake, and take most of the time.
  only=()
  if compute-sanitizer --help | grep -e --kernel-name > /dev/null; then
    only=(--kernel-name kernel_substring=maru_)
  fi
  export PYTEST_TIMEOUT=900
  for tool in memcheck racecheck; do
    compute-sanitizer --tool "$tool" --error-exitcode 1 "${only[@]}" \
      python3 -m pytest -q -p no:cacheprovider tests/transfer/test_kernel_small_cuda.py
  done
else
  echo "compute-sanitizer is not in PATH: neither memcheck nor racecheck was run"
fi

status=0
python3 benchmarks/gpu_copy.py "$@" || status=1
python3 benchmarks/gpu_interference.py || status=1
exit $status
