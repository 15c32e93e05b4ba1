#!/usr/bin/env bash
# Prepares a machine and a virtual environment for work on aiordma. Safe to run again: what is done isn't redone.
#
#   scripts/bootstrap.sh tools      distribution packages, and a virtual environment with the build and test tools
#   scripts/bootstrap.sh package    that, and the package built and installed into the environment   (the default)
#   scripts/bootstrap.sh develop    that, but as an editable install, which rebuilds itself when imported
#   scripts/bootstrap.sh vm         only the distribution packages that tests/rxe/vm needs: QEMU and a few tools
#   scripts/bootstrap.sh bench      the tools, and what the benchmarks need; bench-ucx: what some of them need
#
# AIORDMA_PYTHON   the Python to use; it must import pyverbs (default: the distribution's)
# AIORDMA_VENV     the virtual environment (default: .venv); several can live side by side
set -euo pipefail

cd "$(dirname "$0")/.."

goal=${1:-package}
case $goal in
tools | package | develop | bench | bench-ucx | vm) ;;
*)
    echo "usage: $0 [tools|package|develop|bench|bench-ucx|vm]" >&2
    exit 2
    ;;
esac

venv=$(realpath -m "${AIORDMA_VENV:-.venv}")
stamps=$venv/.aiordma
# Each environment has a build directory of its own: Meson records the interpreter that it configured for.
build_dir=build/$(basename "$venv" | sed 's/^\.*//')
constraints=requirements/constraints.txt

say() { printf 'bootstrap: %s\n' "$*" >&2; }
die() {
    say "$*"
    exit 1
}

# ---- distribution packages ------------------------------------------------------------------------------------------

# pyverbs must be the distribution's: it works only with the libibverbs that it was built with.
apt_packages=(
    ca-certificates   # pip's downloads
    gcc libc6-dev     # the extension and the emulator
    pkg-config        # finds libibverbs and libmlx5
    python3           # the Python that python3-pyverbs is built for
    python3-dev       # Python.h
    python3-venv      # venv with pip
    python3-pyverbs   # the control plane
    libibverbs-dev    # infiniband/verbs.h, infiniband/mlx5dv.h, and both libraries
    librdmacm-dev     # rdma/rdma_cma.h, and librdmacm, which connections use
    ibverbs-providers # libmlx5, the driver that the emulated NIC speaks to
    ibverbs-utils     # ibv_devinfo and others, run on the emulated NIC by examples and tests
    perftest          # ib_write_bw and others, run on the emulated NIC by tests
    ucx-utils         # ucx_perftest, run on the emulated NIC by tests
    nftables iptables # whose rules `aiordma doctor` reads; tests set some, in network namespaces of their own
    librdmacm1        # the connection manager's library, which the emulated NIC answers
    rdmacm-utils      # rping and others, run on the emulated NIC by tests
    linux-libc-dev    # rdma/mlx5-abi.h: the kernel's side of the uverbs interface
    valgrind          # callgrind and its headers: make bench-instructions
)

# For the VM with Soft-RoCE in its kernel, which `tox -e rxe` starts. The kernel is downloaded by itself.
vm_packages=(
    busybox-static # the first programs in the VM
    kmod           # which module needs which
    iproute2       # ip and rdma
    zstd           # Ubuntu's kernel modules are packed with it
)
case $(uname -m) in
x86_64) vm_packages+=(qemu-system-x86) ;;
aarch64) vm_packages+=(qemu-system-arm) ;;
esac

distribution() {
    (
        # shellcheck disable=SC1091
        . /etc/os-release 2>/dev/null && echo "${ID:-unknown}-${VERSION_ID:-}"
    ) || echo unknown
}

# install_distribution_packages NAME...: those that aren't there
install_distribution_packages() {
    local name there missing=() sudo=()
    # A package may be provided by another of a different name (librdmacm1 by librdmacm1t64), which counts.
    there=$(dpkg-query -W -f '${db:Status-Status} ${Package}, ${Provides}\n' |
        sed -n 's/^installed //p' | sed 's/([^)]*)//g' | tr ',' '\n' | tr -d ' ')
    for name in "$@"; do
        grep -Fqx "$name" <<<"$there" || missing+=("$name")
    done
    [ ${#missing[@]} -gt 0 ] || return 0

    say "installing distribution packages: ${missing[*]}"
    if [ "$(id -u)" -ne 0 ]; then
        command -v sudo >/dev/null ||
            die "these packages need root to install, and there is no sudo. As root: apt-get install ${missing[*]}"
        sudo=(sudo)
    fi
    # "${sudo[@]+...}": an empty array is an unset variable to the bash of some systems
    ${sudo[@]+"${sudo[@]}"} apt-get update -q </dev/null
    ${sudo[@]+"${sudo[@]}"} env DEBIAN_FRONTEND=noninteractive \
        apt-get install -q -y --no-install-recommends "${missing[@]}" </dev/null
}

check_unknown_distribution() {
    say "this is $1, which the project doesn't know how to install packages on (it knows Debian 12 and 13 and Ubuntu 24.04)."
    say "going on with what is here. Needed: gcc, pkg-config, Python 3.11 or newer with its headers, venv and pyverbs,"
    say "and rdma-core with its headers (pkg-config must know libibverbs and libmlx5) and mlx5 driver."
    command -v cc >/dev/null || command -v gcc >/dev/null || die "there is no C compiler"
    command -v pkg-config >/dev/null || die "there is no pkg-config"
    pkg-config --exists libibverbs libmlx5 || die "pkg-config doesn't find libibverbs and libmlx5"
}

# ---- Python ---------------------------------------------------------------------------------------------------------

serves() {
    "$1" -c '
import sys
assert sys.version_info >= (3, 11)
import ensurepip, venv
import pyverbs.device
' >/dev/null 2>&1
}

# The distribution's own comes first. One from pyenv or the like is taken only if it imports pyverbs, which it won't
# unless somebody saw to it.
find_python() {
    local candidate
    if [ -n "${AIORDMA_PYTHON:-}" ]; then
        serves "$AIORDMA_PYTHON" || die "AIORDMA_PYTHON=$AIORDMA_PYTHON: not a Python 3.11 or newer that imports pyverbs and has venv"
        command -v "$AIORDMA_PYTHON"
        return
    fi
    for candidate in /usr/bin/python3 /usr/bin/python3.[0-9]*[0-9] "$(command -v python3 || true)"; do
        if [ -x "$candidate" ] && serves "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    die "no Python 3.11 or newer here imports pyverbs (tried /usr/bin/python3, /usr/bin/python3.* and python3)"
}

# ---- virtual environment --------------------------------------------------------------------------------------------

# done_already STAMP KEY: the step STAMP was finished, for what KEY describes
done_already() { [ "$(cat "$stamps/$1" 2>/dev/null)" = "$2" ]; }
mark_done() { echo "$2" >"$stamps/$1"; }

digest() { sha256sum | cut -d' ' -f1; }

pip_install() {
    # Only for this command: a constraint given in pip's own settings elsewhere would contradict ours. Meson would remember
    # cython by its name alone, and an editable install rebuilds itself under whatever PATH it's imported.
    PIP_CONSTRAINT=$PWD/$constraints PATH=$venv/bin:$PATH CYTHON=$venv/bin/cython \
        "$venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check --no-input "$@" </dev/null
}

make_venv() {
    local python key
    python=$(find_python)
    # What -V prints is in the key: an environment doesn't survive its interpreter's move to another version.
    key="$(realpath "$python") $("$python" -V)"
    if ! done_already interpreter "$key" || ! "$venv/bin/python" -c 'import pyverbs.device' 2>/dev/null; then
        say "making ${venv#"$PWD"/} on $key"
        if [ -e "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ]; then
            die "$venv is there, and is no virtual environment: remove it, or name another in AIORDMA_VENV"
        fi
        rm -rf "$venv" "$build_dir"
        "$python" -m venv --system-site-packages "$venv"
        mkdir -p "$stamps"
        mark_done interpreter "$key"
    fi
    mark_done python "$python" # for tox, which the Makefile tells
}

install_tools() {
    local key
    key=$(cat pyproject.toml "$constraints" | digest)
    done_already tools "$key" && return
    say "installing build and test tools into ${venv#"$PWD"/}"
    pip_install --upgrade pip
    pip_install --group dev 'rich' 'typer'
    mark_done tools "$key"
}

install_group() {
    local key
    key=$(cat pyproject.toml "$constraints" | digest)
    done_already "$1" "$key" && return
    say "installing what the group $1 of pyproject.toml names into ${venv#"$PWD"/}"
    pip_install --group "$1"
    mark_done "$1" "$key"
}

# Everything that goes into the package: any change of it, a removal too, is a reason to install again.
package_digest() {
    find aiordma scripts/not-installed.py meson.build meson.options pyproject.toml README.md LICENSE \
        -name __pycache__ -prune -o -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | digest
}

install_package() {
    local key
    key=$(package_digest)
    done_already package "$key" && return
    # An editable install stays one: its imports rebuild it. Remove the environment to go back.
    if [ "$(cat "$stamps/package" 2>/dev/null)" = editable ]; then
        say "${venv#"$PWD"/} has an editable install, which rebuilds itself when imported"
        return
    fi
    say "building and installing the package into ${venv#"$PWD"/}"
    pip_install --no-build-isolation --no-deps --force-reinstall -Cbuild-dir="$build_dir" .
    mark_done package "$key"
}

install_editable() {
    say "installing the package into ${venv#"$PWD"/}, editable"
    pip_install --no-build-isolation --no-deps --force-reinstall -Cbuild-dir="$build_dir" --editable .
    mark_done package editable
}

# ---- main -----------------------------------------------------------------------------------------------------------

if [ "$goal" = vm ]; then
    case $(distribution) in
    debian-12 | debian-13 | ubuntu-24.04) install_distribution_packages "${vm_packages[@]}" ;;
    *) die "no packages are known for $(distribution); needed: QEMU, busybox (static), kmod, iproute2" ;;
    esac
    exit
fi

# Two at once in one checkout would spoil each other's work.
mkdir -p build
exec 9>"build/.$(basename "$venv").lock"
flock 9

case $(distribution) in
debian-12 | debian-13 | ubuntu-24.04) install_distribution_packages "${apt_packages[@]}" ;;
*) check_unknown_distribution "$(distribution)" ;;
esac

make_venv
install_tools
case $goal in
package) install_package ;;
develop) install_editable ;;
bench | bench-ucx) install_group "$goal" ;;
esac
