#!/bin/sh
# Installs the Debian packages that are missing and builds .venv/. Does nothing, quickly, when all is there.
set -eu
cd "$(dirname "$0")/.."

say() { echo "setup: $*" >&2; }
fail() { say "$*"; exit 1; }

# Two makes at once (an editor's and a terminal's) must not build the same .venv/ together.
if command -v flock >/dev/null && [ "${LAYER_SETUP_LOCKED:-}" != 1 ]; then
    LAYER_SETUP_LOCKED=1 exec flock .setup.lock "$0" "$@"
fi

# A python3 on the path may be older than the one beside it, or a stub of a version manager that does not run.
find_python() {
    for name in python3 /usr/bin/python3 python3.11 python3.12 python3.13 python3.14; do
        for path in $(command -v "$name" || true); do
            if "$path" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
                echo "$path"
                return
            fi
        done
    done
}

can_make_venv() { [ -n "$1" ] && "$1" -c 'import venv, ensurepip' 2>/dev/null; }

has_postgres() {
    for initdb in /usr/lib/postgresql/*/bin/initdb; do
        version=${initdb#/usr/lib/postgresql/}
        version=${version%%/*}
        [ -x "$initdb" ] && [ "$version" -ge 15 ] 2>/dev/null && return 0
    done
    return 1
}

install() {
    command -v apt-get >/dev/null || fail "please install $* yourself: this machine has no apt-get"
    root=
    if [ "$(id -u)" != 0 ]; then
        command -v sudo >/dev/null || fail "please run as root, or install sudo: the Debian packages $* are missing"
        root=sudo
    fi
    say "installing $*"
    # Debian starts a server of its own when PostgreSQL is installed; the tests bring theirs, so ask for none.
    quiet=/etc/postgresql-common/createcluster.d/livinglayer.conf
    $root mkdir -p "$(dirname "$quiet")"
    echo 'create_main_cluster = false' | $root tee "$quiet" >/dev/null
    $root apt-get update -q </dev/null >&2 && status=0 || status=$?
    # An unreachable mirror need not matter: the lists that are there may do.
    [ "$status" = 0 ] || say "apt-get update failed ($status), trying with the package lists at hand"
    $root env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "$@" </dev/null >&2 && status=0 || status=$?
    $root rm -f "$quiet"
    [ "$status" = 0 ] || fail "apt-get could not install $*"
}

python=$(find_python)
missing=
[ -n "$python" ] || missing="$missing python3"
can_make_venv "$python" || missing="$missing python3-venv"
has_postgres || missing="$missing postgresql"
# shellcheck disable=SC2086  # a list of names
[ -z "$missing" ] || install $missing
if ! can_make_venv "$python"; then
    # What apt installed belongs to Debian's own Python.
    python=/usr/bin/python3
    can_make_venv "$python" || fail "Python 3.11 or newer with venv is needed; $python is $("$python" --version 2>&1)"
fi
has_postgres || fail "PostgreSQL 15 or newer is needed in /usr/lib/postgresql"

# .venv/ is current when it was made here, by this script, from this pyproject.toml.
want=$( (pwd; cat pyproject.toml tools/setup.sh) | cksum)
if [ "$(cat .venv/.made-from 2>/dev/null)" = "$want" ] && .venv/bin/python -c '' 2>/dev/null; then
    exit 0
fi
say "building .venv with $("$python" --version) ($python)"
# An environment that only lacks a package is topped up; one that does not run, or was moved, is made anew.
if ! .venv/bin/python -c '' 2>/dev/null || ! grep -qF "$(pwd)/.venv/bin/" .venv/bin/pip; then
    rm -rf .venv
    "$python" -m venv .venv
fi
.venv/bin/python -m pip install -q --disable-pip-version-check -e '.[dev]' </dev/null >&2
echo "$want" >.venv/.made-from
say "done"
