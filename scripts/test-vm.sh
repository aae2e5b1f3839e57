#!/usr/bin/env bash
# Builds small virtual machines with a real /dev/dax in .cache/vm and runs the tests on one and on two of them: see
# docs/testing-vm.md. Exit code 77: they cannot be built here, and the last line says why. Needs root and Debian's
# package archive; installs nothing outside of .cache. Options go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup-env.sh
export PATH="$PWD/.venv/bin:$PATH"

# Also a checkout that is not the one installed in the environment tests itself.
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
# The tests lose sight of Maru's own variables.
export MARU_TEST_CACHE=${MARU_CACHE:-$PWD/.cache}
python -m scripts.vm build || exit $?
exec python -m pytest -q -m vm tests/vm "$@"
