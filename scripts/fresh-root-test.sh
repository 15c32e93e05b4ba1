#!/usr/bin/env bash
# Proves that a checkout works from nothing: makes a bare root of a Debian or Ubuntu suite, with git, make and CA
# certificates and nothing else, clones the committed state of this repository into it and runs commands there.
#
#   sudo scripts/fresh-root-test.sh bookworm                                  make build and make test, twice each
#   sudo scripts/fresh-root-test.sh trixie 'make demo' 'make test ARGS="-e lint"'     these commands
#
# FRESH_ROOT_DIR     where the roots lie (default: /var/tmp/aiordma-roots). SUITE.base is made once and kept; SUITE.run
#                    is made anew each time, and left for a look inside, unless FRESH_ROOT_KEEP=1 continues in it
# FRESH_ROOT_MIRROR  the mirror for debootstrap (default: the suite's own)
# FRESH_ROOT_CA      a bundle of certificates to trust, on networks that have their own
# FRESH_ROOT_USER    run the commands as a user of this name, made for it, with no sudo, instead of as root
set -euo pipefail

if [ $# -eq 0 ] || [ "${1#-}" != "$1" ]; then
    sed -n '2,/^set -/{/^#/s/^# \{0,1\}//p}' "$0"
    exit 2
fi
[ "$(id -u)" -eq 0 ] || { echo "$0: needs root, for debootstrap and chroot" >&2; exit 1; }

repository=$(git -C "$(dirname "$0")" rev-parse --show-toplevel)
suite=$1
shift
if [ $# -eq 0 ]; then
    set -- 'make build' 'make build' 'make test' 'make test'
fi

roots=${FRESH_ROOT_DIR:-/var/tmp/aiordma-roots}
base=$roots/$suite.base
run=$roots/$suite.run
user=${FRESH_ROOT_USER:-root}

mkdir -p "$roots"
if [ ! -e "$base/.complete" ]; then
    rm -rf "$base"
    mirror=()
    [ -z "${FRESH_ROOT_MIRROR:-}" ] || mirror=("$FRESH_ROOT_MIRROR")
    debootstrap --variant=minbase --include=git,make,ca-certificates "$suite" "$base" ${mirror[@]+"${mirror[@]}"}
    touch "$base/.complete"
fi

if [ -z "${FRESH_ROOT_KEEP:-}" ] || [ ! -d "$run" ]; then
    rm -rf "$run"
    cp -a --reflink=auto "$base" "$run"
fi
cp /etc/resolv.conf "$run/etc/resolv.conf"

# What the commands see of this machine's environment: the way to the network, and nothing else.
environment=(HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin CI=true)
for name in http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY; do
    [ -z "${!name:-}" ] || environment+=("$name=${!name}")
done
if [ -n "${FRESH_ROOT_CA:-}" ]; then
    cp "$FRESH_ROOT_CA" "$run/etc/fresh-root-ca.pem"
    for name in PIP_CERT SSL_CERT_FILE REQUESTS_CA_BUNDLE; do
        environment+=("$name=/etc/fresh-root-ca.pem")
    done
fi
if [ "$user" != root ]; then
    chroot "$run" id "$user" >/dev/null 2>&1 || chroot "$run" useradd -m "$user"
    environment[0]=HOME=/home/$user
fi

if [ ! -d "$run/srv/checkout" ]; then
    git clone -q --no-hardlinks "$repository" "$run/srv/checkout"
else
    # the checkout may belong to FRESH_ROOT_USER, which git would mind
    git -c safe.directory='*' -C "$run/srv/checkout" pull -q --ff-only "$repository" HEAD
fi
chroot "$run" chown -R "$user:" /srv/checkout

# Namespaces of their own: the mounts, and whatever a command leaves running, end with it.
for command in "$@"; do
    echo "==== $suite, as $user: $command"
    # shellcheck disable=SC2016 # expanded by the inner shell
    time unshare --mount --pid --fork bash -euc '
        run=$1 user=$2 command=$3
        shift 3
        mount --make-rprivate /
        mount --rbind /dev "$run/dev"
        mount --rbind /sys "$run/sys"
        mount -t proc proc "$run/proc"
        exec chroot --userspec="$user:$user" "$run" /usr/bin/env -i "$@" \
            bash -c "cd /srv/checkout && $command" </dev/null
    ' fresh-root "$run" "$user" "$command" "${environment[@]}"
done
