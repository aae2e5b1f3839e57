#!/usr/bin/env bash
# Runs the tests of the connector with another version of vLLM's CPU engine, in an environment of its own.
# --fast leaves out the tests on a real engine.
set -euo pipefail
cd "$(dirname "$0")/.."

version=${1:-}
if [[ ! $version =~ ^[0-9]+(\.[0-9]+)+$ || ${2:-} != @(|--fast) ]]; then
  echo "usage: scripts/test-vllm.sh VERSION [--fast]    for example 0.22.1" >&2
  exit 2
fi
scripts/setup-env.sh "$version"

step() {
  echo "== vLLM $version: $*"
  "$@"
}

export PATH="$PWD/.venv-vllm-$version/bin:$PATH"
step python -m pytest -q -n auto tests/vllm
step python -m pytest -q -n "$(($(nproc) + 1))" -m "slow and not long" tests/vllm
if [[ -z ${2:-} ]]; then
  # One at a time: an engine takes all cores.
  step python -m pytest -q -m engine tests/engine
fi
echo "== vLLM $version: all passed"
