# Sourced by demo.sh, test.sh and check.sh: one virtual environment for all of them, made once and kept up to date.
#
#   PYTHON=…         the interpreter to build on (default: the first of python3.11 … python3.14, python3 that is 3.11 or newer)
#   JAXAUTO_EXTRAS=… what test.sh and check.sh install with the package (default: everything, the ahead-of-time compilers too: 1.2 GB)
#   JAXAUTO_VENV=…   where the environment lives (default: .venv-jaxauto in the repository, git-ignored)

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${JAXAUTO_VENV:-$repo/.venv-jaxauto}
TEST_EXTRAS=${JAXAUTO_EXTRAS:-dev,viz,checkpoint,tpu-aot,gpu-aot}

is_recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
  if [ -n "${PYTHON:-}" ]; then
    is_recent "$PYTHON" && { command -v "$PYTHON"; return; }
    echo "jaxauto: PYTHON=$PYTHON is not a working Python 3.11 or newer." >&2
    return 1
  fi
  local candidate
  for candidate in python3.11 python3.12 python3.13 python3.14 python3 python; do
    is_recent "$candidate" && { command -v "$candidate"; return; }
  done
  echo "jaxauto: needs Python 3.11 or newer and found none on PATH (tried python3.11 … python3.14, python3, python)." >&2
  echo "         Install one (https://www.python.org/downloads, your package manager, or 'uv python install 3.12') or name it: PYTHON=/path/to/python $0" >&2
  return 1
}

# Some distributions ship Python without ensurepip: then another pip or uv on the machine fills the new environment.
make_venv() {
  local python=$1
  rm -rf "$venv"
  "$python" -m venv "$venv" >/dev/null 2>&1 && return
  rm -rf "$venv"
  if "$python" -m venv --without-pip "$venv" >/dev/null 2>&1 && "$python" -m pip --python "$venv/bin/python" install --quiet pip 2>/dev/null; then return; fi
  rm -rf "$venv"
  if command -v uv >/dev/null && uv venv --quiet --seed --python "$python" "$venv"; then return; fi
  echo "jaxauto: $python cannot make a virtual environment: its venv or ensurepip module is missing." >&2
  echo "         On Debian or Ubuntu: apt install python3-venv. Or name another Python: PYTHON=/path/to/python $0" >&2
  return 1
}

# ensure_env EXTRAS: the environment exists and holds the package (editable) with these extras; says so when it has to work.
# It is rebuilt when the interpreter changed, and updated when setup.cfg or pyproject.toml or the extras did.
ensure_env() {
  local extras=$1 python version stamp
  python=$(find_python) || return 1
  version=$("$python" -c 'import sys; print("%d.%d.%d %s" % (*sys.version_info[:3], sys.base_prefix))')
  if [ "$(cat "$venv/.jaxauto-python" 2>/dev/null)" != "$version" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    echo "jaxauto: making a virtual environment in ${venv#"$repo"/} with $python (${version%% *})"
    make_venv "$python" || return 1
    echo "$version" > "$venv/.jaxauto-python"
  fi
  stamp="$repo $(cat "$repo/setup.cfg" "$repo/pyproject.toml" | cksum | cut -d' ' -f1)"
  if [ "$(cat "$venv/.jaxauto-$extras" 2>/dev/null)" != "$stamp" ]; then
    echo "jaxauto: installing the package with [$extras]; the first time this downloads JAX and takes a few minutes"
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check --editable "$repo[$extras]" || {
      echo "jaxauto: pip could not install the package; its message is above (is the network up?)" >&2
      return 1
    }
    echo "$stamp" > "$venv/.jaxauto-$extras"
  fi
}
