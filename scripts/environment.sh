#!/bin/sh
# Makes .venv ready: what `make demo`, `make test`, `make bench` and `make lint` stand on.
#   scripts/environment.sh tools       say plainly what this machine lacks
#   scripts/environment.sh venv        .venv with maturin, torch (any build >= 2.4 that is there is kept) and NumPy
#   scripts/environment.sh package     build relight in release mode and install it into .venv
#   scripts/environment.sh need NAME.. install what is not there yet
# pip's configuration decides where packages come from and which build of torch is taken. Works from any folder: all paths are relative.
set -eu
cd "$(dirname "$0")/.."
venv_python=.venv/bin/python

say() { printf '\033[1m== %s\033[0m\n' "$*"; }
lacks() { printf 'relight cannot be built here: %s\n' "$1" >&2; exit 1; }

find_python() {
  for name in ${PYTHON:-} python3 python3.14 python3.13 python3.12 python3.11; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      printf '%s' "$name"
      return
    fi
  done
  lacks "it needs Python 3.11 or newer, and PATH has $(python3 --version 2>/dev/null || echo 'no python3'). Install one, or name it: make PYTHON=/path/to/python3.12"
}

tools() {
  python=$(find_python)
  [ -n "$python" ] || exit 1
  "$python" -c 'import venv, ensurepip' 2>/dev/null || lacks "$python has no venv module. Debian and Ubuntu have it in the package python3-venv."
  command -v cargo >/dev/null 2>&1 || lacks "it needs a Rust toolchain (1.88 or newer), and there is no cargo in PATH. Install Rust with rustup."
  command -v cc >/dev/null 2>&1 || lacks "Rust needs a C linker, and there is no cc in PATH. Install gcc or clang (Debian and Ubuntu: build-essential)."
}

pip() { "$venv_python" -m pip --disable-pip-version-check "$@"; }

venv() {
  tools
  if [ ! -x "$venv_python" ]; then
    say "Creating .venv with $($python --version)"
    "$python" -m venv .venv
  fi
  need 'maturin>=1.9,<2' numpy
  if ! "$venv_python" -c 'import torch' 2>/dev/null; then
    say "Installing torch (it is large; your pip configuration decides which build)"
    pip install --progress-bar on 'torch>=2.4'
  fi
}

# Is every requirement there? Asked of the installed packages, without a network.
present() {
  "$venv_python" - "$@" <<'PYTHON'
import sys
from importlib.metadata import PackageNotFoundError, version
from pip._vendor.packaging.requirements import Requirement
try:
    sys.exit(not all(r.specifier.contains(version(r.name), prereleases=True) for r in map(Requirement, sys.argv[1:])))
except PackageNotFoundError:
    sys.exit(1)
PYTHON
}

need() {
  if ! present "$@"; then
    say "Installing $*"
    pip install --quiet "$@"
  fi
}

package() {
  say "Building relight in release mode and installing it into .venv (the first build takes a few minutes)"
  # What `pip install .` does, but with cargo's progress to look at and cargo's own target folder, which all builds share.
  rm -rf target/wheel
  "$venv_python" -m maturin build --release --compatibility linux --interpreter "$venv_python" --out target/wheel
  pip install --quiet --no-deps --force-reinstall target/wheel/relight-*.whl
}

"$@"
