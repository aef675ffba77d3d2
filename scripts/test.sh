#!/usr/bin/env bash
# The whole test suite in its own environment; arguments go to pytest: scripts/test.sh -k solve -x
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
ensure_env "$TEST_EXTRAS"
cd "$repo"
exec "$venv/bin/python" -m pytest "$@"
