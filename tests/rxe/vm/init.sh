#!/bin/busybox sh
# shellcheck shell=dash
# The VM's first program, from the initramfs: mounts the host's root, read-only, under an overlay in memory, and goes on
# there with guest.sh. What is written in the VM is gone with it.
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev

fail() {
    echo "rxe-vm: $*" >/dev/console
    echo o >/proc/sysrq-trigger
    sleep 100
}

while read -r module; do
    insmod "/mods/$module" || fail "insmod $module failed"
done </order/boot

mkdir -p /lower /upper /newroot
mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=loose,ro hostroot /lower || fail "no 9p share"
mount -t tmpfs -o size=75% tmpfs /upper
mkdir /upper/changes /upper/work
mount -t overlay -o lowerdir=/lower,upperdir=/upper/changes,workdir=/upper/work overlay /newroot || fail "no overlay"
for name in dev proc sys run tmp; do
    mkdir -p "/newroot/$name"
done
mount --move /dev /newroot/dev
mount --move /proc /newroot/proc
mount --move /sys /newroot/sys
mount -t tmpfs tmpfs /newroot/run
# The host's lists are of another kernel's modules; ours come along.
mkdir -p /newroot/run/rxe-vm
cp -r /mods /order /job /bin/busybox /newroot/run/rxe-vm/
guest=$(sed -n 's/^GUEST=//p' /job)
exec switch_root /newroot /bin/bash "$guest"
