# Sourced by scripts/demo and scripts/test: virtual environments in the repository.
#
#   use_environment NAME          .venv, or .venv-lowest with the lowest versions that
#                                 pyproject.toml allows
#   prepare_environment EXTRA     makes or reuses it, installs dustmap[EXTRA] if anything it
#                                 depends on changed since the last time; EXTRA may be empty
#
# Afterwards $root is the repository and $python the interpreter of the environment.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

use_environment() {
    venv="$root/$1"
    python="$venv/bin/python"
}
use_environment .venv

is_recent_enough() {
    "$@" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    local candidate
    for candidate in python3 python3.14 python3.13 python3.12 python3.11 python; do
        if command -v "$candidate" >/dev/null 2>&1 && is_recent_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    echo "dustmap needs Python 3.11 or newer, and none was found on the PATH" \
        "(python3 is $(python3 --version 2>&1 || echo missing)). Install one and run this again." >&2
    return 1
}

make_environment() {
    if is_recent_enough "$python" && "$python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    local base
    base="$(find_python)" || return 1
    echo "Making the virtual environment $venv with $("$base" --version)"
    if ! "$base" -m venv --clear "$venv"; then
        echo "$base -m venv failed; on Debian and Ubuntu, install the package python3-venv." >&2
        return 1
    fi
}

# What an installed environment depends on: the requirements, the pins, the interpreter, this path.
fingerprint() {
    "$python" - "$root" "$1" <<'PYTHON'
import hashlib, pathlib, sys
root, extra = pathlib.Path(sys.argv[1]).resolve(), sys.argv[2]
files = [root / "pyproject.toml", root / "scripts" / "constraints.txt"]
parts = [str(root).encode(), extra.encode(), sys.version.encode(), *(f.read_bytes() for f in files)]
print(hashlib.sha256(b"\0".join(parts)).hexdigest())
PYTHON
}

# The versions that are installed. The lowest are those of pyproject.toml, but for what is pinned
# anyway: of torch, older releases for processors alone are not on every package index, and those
# for GPUs take gigabytes.
pins() {
    cat "$root/scripts/constraints.txt"
    if [[ "$venv" == *-lowest ]]; then
        "$python" - "$root" <<'PYTHON'
import pathlib, sys, tomllib
root = pathlib.Path(sys.argv[1])
pinned = (root / "scripts" / "constraints.txt").read_text()
for requirement in tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]:
    name, _, version = requirement.partition(">=")
    if f"{name}==" not in pinned:
        print(f"{name}=={version}")
PYTHON
    fi
}

prepare_environment() {
    local extra="$1" stamp now
    make_environment || return 1
    stamp="$venv/installed-${extra:-plain}"
    now="$(fingerprint "$extra")" || return 1
    if [[ -f "$stamp" && "$(cat "$stamp")" == "$now" ]]; then
        return
    fi
    echo "Installing dustmap${extra:+[$extra]} into $venv"
    rm -f "$stamp"
    pins >"$venv/pins.txt" || return 1
    "$python" -m pip install --quiet --quiet --disable-pip-version-check \
        --constraint "$venv/pins.txt" \
        --editable "$root${extra:+[$extra]}" || return 1
    echo "$now" >"$stamp"
}
