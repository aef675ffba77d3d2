#!/usr/bin/env bash
# Everything that can be checked without running the library: lint, types, notebooks without outputs.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
ensure_env "$TEST_EXTRAS"
cd "$repo"
status=0
echo "ruff";      "$venv/bin/python" -m ruff check . || status=1
echo "pyright";   "$venv/bin/python" -m pyright --pythonpath "$venv/bin/python" || status=1
echo "notebooks"; "$venv/bin/python" scripts/notebooks.py check || status=1
exit $status
