#!/bin/bash
# The VM's second program, on the host's root: makes the devices that run.py asked for, runs its command, says how it
# ended, and turns the VM off. Its orders are in /run/rxe-vm/job, as shell variables:
#   RDMA      rxe, siw, modules (loaded, but no device) or none
#   LIMIT     seconds that the command may take
#   FOLDER, COMMAND (an array), VM_USER (a name or empty), and exports
# Its ports, by name: "output" (all that the command prints) and "status" (its exit status, a line).

export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
here=/run/rxe-vm

printer=
turn_off() {
    if [ -n "$printer" ]; then
        # What was printed is to be on its way before the machine is off.
        exec >/dev/console 2>&1
        wait "$printer"
    fi
    echo o >/proc/sysrq-trigger
    sleep 100
}

port() {
    local folder
    for folder in /sys/class/virtio-ports/*; do
        if [ "$(cat "$folder/name")" = "$1" ]; then
            echo "/dev/${folder##*/}"
            return
        fi
    done
    echo "rxe-vm: no port $1" >/dev/console
    turn_off
}

# What udev would do. bash wants the first for what follows.
ln -sfn /proc/self/fd /dev/fd
ln -sfn fd/0 /dev/stdin
ln -sfn fd/1 /dev/stdout
ln -sfn fd/2 /dev/stderr

exec 3>"$(port status)"
output=$(port output)
# A port can be open only once: everything goes through this one.
exec > >(exec cat >"$output") 2>&1
printer=$!

quit() {
    echo "rxe-vm: $1"
    echo 125 >&3
    turn_off
}

load() {
    local module
    [ -e "$here/order/$1" ] || return 1
    while read -r module; do
        if [ ! -d "/sys/module/$(echo "${module%.ko}" | tr - _)" ]; then
            # crc32_pclmul isn't for all processors.
            "$here/busybox" insmod "$here/mods/$module" 2>/dev/null || return 1
        fi
    done <"$here/order/$1"
}

make_devices() {
    local end module
    [ "$RDMA" != none ] || return 0
    if ! load ib_uverbs || ! load rdma_ucm; then
        quit "this kernel has no RDMA (ib_uverbs, rdma_ucm)"
    fi
    for module in crc32_generic crc32_pclmul crc32_cryptoapi sch_netem; do
        load "$module"
    done
    case $RDMA in
    modules) load rdma_rxe || quit "this kernel has no rdma_rxe"; return ;;
    rxe) load rdma_rxe || quit "this kernel has no rdma_rxe" ;;
    siw) load siw || quit "this kernel has no siw" ;;
    esac
    "$(dirname "$GUEST")/link.sh" make || quit "no veth pair"
    for end in 0 1; do
        rdma link add "$RDMA$end" type "$RDMA" netdev "veth$end" || quit "rdma link add $RDMA$end failed"
    done
    # No udev here: device nodes come from the kernel (devtmpfs), for root alone.
    chmod 666 /dev/infiniband/uverbs* /dev/infiniband/rdma_cm
}

mkdir -p /dev/shm /dev/pts
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t devpts devpts /dev/pts
ip link set lo up
# What kernels are configured with elsewhere, and containers share with their host.
ulimit -l unlimited

# shellcheck disable=SC1091
. "$here/job"
make_devices

# shellcheck disable=SC2153
cd "$FOLDER" || quit "no folder $FOLDER"
# Folders on the way that are root's alone, as tox makes its own: opened here, in the overlay, for users whom the command is
# run as, or whom it runs something as.
for folder in "$FOLDER" "${PATH%%:*}"; do
    while [ "$folder" != / ]; do
        chmod a+rx "$folder"
        folder=$(dirname "$folder")
    done
done
as_user=()
if [ -n "$VM_USER" ]; then
    as_user=(setpriv --reuid "$VM_USER" --regid "$(id -g "$VM_USER")" --clear-groups)
fi
export HOME=/root
[ -z "$VM_USER" ] || export HOME=/tmp

begun=$SECONDS
# shellcheck disable=SC2153
timeout --kill-after=10 "$LIMIT" "${as_user[@]}" "${COMMAND[@]}" </dev/null &
command=$!
wait "$command"
status=$?
# timeout's own when it had to kill; before the time is over, it's the kernel that killed it, for want of memory say.
[ "$status" -ne 137 ] || [ $((SECONDS - begun)) -lt "$LIMIT" ] || status=124
if [ "$status" -eq 124 ]; then
    # Who waits for what in the kernel goes to the console, which run.py shows.
    echo w >/proc/sysrq-trigger
fi
echo "$status" >&3
turn_off
