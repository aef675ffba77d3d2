#!/usr/bin/env bash
# Trains a small language model on emulated devices, sharded by jaxauto: scripts/demo.sh [--steps N] [--devices N] [--mesh data=4,model=2] [--budget 60%] [--help]
# Needs nothing but Python 3.11 or newer and a network.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
ensure_env viz
exec "$venv/bin/python" "$repo/scripts/demo.py" "$@"
