#!/usr/bin/env bash
# Sets the environment up and runs every check and test. --fast leaves out the tests on a real vLLM engine.
set -euo pipefail
cd "$(dirname "$0")/.."

fast=
for option in "$@"; do
  case $option in
  --fast) fast=1 ;;
  *)
    echo "usage: scripts/test.sh [--fast]" >&2
    exit 2
    ;;
  esac
done

scripts/setup-env.sh

step() {
  echo "== $*"
  "$@"
}

export PATH="$PWD/.venv/bin:$PATH"
step ruff check .
step ruff format --check .
step mypy
step python -m pytest -q -n auto --hypothesis-profile=full
# They wait for processes and clocks more than they compute.
step python -m pytest -q -n "$(($(nproc) + 1))" --hypothesis-profile=full -m "slow and not engine and not long and not build and not vendor and not vm"
step python -m pytest -q -n auto -m build
# In one process: they share an environment that takes seconds to make.
step python -m pytest -q -m vendor
if [[ -z $fast ]]; then
  # One at a time: an engine takes all cores.
  step python -m pytest -q -m engine
  # 77: machines cannot be built here, and it has said why.
  step scripts/test-vm.sh || (($? == 77))
fi
echo "== all passed"
