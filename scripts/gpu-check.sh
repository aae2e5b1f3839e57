#!/usr/bin/env bash
# Builds the CUDA code on a GPU host, checks its bytes and its order, and measures. Needs no network, only nvcc, a C
# compiler, CMake, and a python3 with torch for CUDA, pytest and what Maru needs.
#
#   scripts/gpu-check.sh [options of benchmarks/gpu_copy.py, such as --lmcache FILE or --json FILE]
set -euo pipefail
cd "$(dirname "$0")/.."
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT

cmake -S . -B "$build" > "$build/log" || { cat "$build/log"; exit 1; }
grep -x ready "$build/parts/cuda" > /dev/null || { cat "$build/parts/cuda"; exit 1; }
cmake --build "$build" --target maru_cuda
cp "$build/lib/libmaru_cuda.so" maru_transfer/

export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
reason=$(python3 -c 'from maru_transfer.kernel import KernelEngine; print(KernelEngine().import_error() or "")')
[ -z "$reason" ] || { echo "the kernels cannot be used: $reason"; exit 1; }
python3 -m pytest -q tests/transfer/test_kernel_cuda.py tests/transfer/test_device_cuda.py
if command -v compute-sanitizer > /dev/null; then
  some="bytes and tuned and (MLA or packed)"
  for tool in memcheck racecheck; do
    compute-sanitizer --tool "$tool" --error-exitcode 1 python3 -m pytest -q tests/transfer/test_kernel_cuda.py -k "$some"
  done
fi
status=0
python3 benchmarks/gpu_copy.py "$@" || status=1
python3 benchmarks/gpu_interference.py || status=1
exit $status
