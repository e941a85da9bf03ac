#!/bin/sh
# Installs the Debian packages that are missing and builds .venv/. Does nothing, quickly, when all is there.
# `setup.sh` installs what running needs, `setup.sh test` also what the tests use, `setup.sh test bench` also the peers that are measured.
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

# What boxes need, by the command or file that shows that it is there. The layer itself works without: a tier that lacks
# something is reported by `layer doctor`, which tries each of them.
sandbox_packages() {
    while read -r need package group; do
        case " run $* " in *" $group "*) ;; *) continue ;; esac
        case $need in
            /*) for found in $need; do [ -e "$found" ] || echo "$package"; break; done ;;
            *) PATH=$PATH:/usr/sbin:/sbin command -v "$need" >/dev/null || echo "$package" ;;
        esac
    done <<END
cc gcc run
/usr/include/stdio.h libc6-dev run
/usr/include/seccomp.h libseccomp-dev run
/usr/lib/*/libnftables.so.1 nftables run
mkfs.btrfs btrfs-progs run
ip iproute2 run
unshare util-linux run
openssl openssl run
crun crun run
runsc runsc run
qemu-system-x86_64 qemu-system-x86 run
/usr/include/slirp/libslirp.h libslirp-dev run
mkfs.erofs erofs-utils run
mkfs.ext4 e2fsprogs run
debootstrap debootstrap run
skopeo skopeo run
/usr/lib/python3/dist-packages/ipykernel python3-ipykernel run
/usr/lib/python3/dist-packages/matplotlib python3-matplotlib run
/usr/lib/python3/dist-packages/pandas python3-pandas run
git git test
curl curl test
strace strace test
runc runc test
umoci umoci test
node nodejs test
npm npm test
chromium chromium test
bwrap bubblewrap bench
podman podman bench
wrk wrk bench
END
}

become_root() {
    root=
    [ "$(id -u)" = 0 ] && return
    command -v sudo >/dev/null || return 1
    root=sudo
}

# A release may lack one of them (Ubuntu has no runsc): the others are installed all the same.
install_sandbox() {
    command -v apt-get >/dev/null && become_root || {
        say "boxes need packages that only root can install: $*; see layer doctor"
        return
    }
    $root apt-get update -q </dev/null >&2 || say "apt-get update failed, trying with the package lists at hand"
    there=
    for package in "$@"; do
        if [ -n "$(apt-cache policy "$package" 2>/dev/null | sed -n 's/^  Candidate: \([^(]*\)$/\1/p')" ]; then
            there="$there $package"
        else
            say "this release has no package $package; see layer doctor for what is lost"
        fi
    done
    [ -n "$there" ] || return 0
    say "installing$there"
    # shellcheck disable=SC2086  # a list of names
    $root env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $there </dev/null >&2 ||
        say "apt-get could not install$there; see layer doctor for what is lost"
}

# The runsc of Debian 12 is older than its `ls`; its backports have one that works. The machine's own sources stay as they are.
newer_runsc() {
    version=$(runsc --version 2>/dev/null | sed -n 's/^runsc version .*\(20[0-9]\{6\}\).*/\1/p')
    [ -n "$version" ] && [ "$version" -lt 20240729 ] || return 0
    codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
    mirror=$(apt-get indextargets --format '$(REPO_URI) $(RELEASE)' 'Created-By: Packages' | sed -n "s/ $codename\$//p" | head -n 1)
    [ -n "$mirror" ] && become_root || return 0
    say "installing a newer runsc from $codename-backports"
    spare=$(mktemp -d)
    chmod 755 "$spare"
    mkdir -p "$spare/lists/partial"
    echo "deb $mirror $codename-backports main" >"$spare/backports.list"
    options="-o Dir::Etc::SourceList=/dev/null -o Dir::Etc::SourceParts=$spare -o Dir::State::Lists=$spare/lists"
    # shellcheck disable=SC2086  # a list of options
    $root apt-get $options update -q </dev/null >&2 &&
        $root env DEBIAN_FRONTEND=noninteractive apt-get $options install -q -y --no-install-recommends runsc </dev/null >&2 ||
        say "apt-get could not; tier gvisor will be missing"
    $root rm -rf "$spare"
}

install() {
    command -v apt-get >/dev/null || fail "please install $* yourself: this machine has no apt-get"
    become_root || fail "please run as root, or install sudo: the Debian packages $* are missing"
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

# shellcheck disable=SC2046  # a list of names
missing=$(sandbox_packages "$@")
# shellcheck disable=SC2086
[ -z "$missing" ] || install_sandbox $missing
newer_runsc

# What JavaScript people install, for the tests that are theirs: exactly what package-lock.json names, and nothing of it is run.
install_node_modules() {
    want=$(cksum tests/node/package-lock.json)
    [ "$(cat tests/node/node_modules/.made-from 2>/dev/null)" != "$want" ] && command -v npm >/dev/null || return 0
    say "installing tests/node"
    if (cd tests/node && npm ci --ignore-scripts --prefer-offline --no-audit --no-fund --loglevel=error </dev/null >&2); then
        echo "$want" >tests/node/node_modules/.made-from
    else
        say "npm could not; tests in JavaScript are skipped, and fail where CI is set"
    fi
}
case " $* " in *" test "*) install_node_modules ;; esac

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
