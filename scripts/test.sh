#!/usr/bin/env bash
# The whole test suite in its own environment, files of tests side by side; arguments go to pytest: scripts/test.sh -k solve -x
# One after the other, as a debugger needs it: scripts/test.sh -n 0 --pdb
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
ensure_env "$TEST_EXTRAS"
cd "$repo"
exec "$venv/bin/python" -m pytest -n auto --maxprocesses 4 --dist loadfile "$@"
