#!/usr/bin/env bash
# Shows Maru at work, from nothing but Python and the package indexes: see docs/quickstart.md, or --help.
# PYTHON chooses the interpreter; otherwise it is the first suitable one on the path.
set -euo pipefail
# An interrupt that comes when a child is about to end by itself would be lost otherwise.
trap 'exit 130' INT
here=$(cd "$(dirname "$0")" && pwd)

suitable() {
  "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' 2>/dev/null
}

found=
for candidate in ${PYTHON:-python3 python3.12 python3.11 python3.10}; do
  if suitable "$candidate"; then
    found=$candidate
    break
  fi
done
if [[ -z $found ]]; then
  echo "quickstart: no Python 3.10 to 3.12 with the modules venv and ensurepip among" \
    "${PYTHON:-python3, python3.12, python3.11, python3.10}; install one (Debian: python3-venv) or set PYTHON" >&2
  exit 1
fi
exec "$found" "$here/quickstart" "$@"
