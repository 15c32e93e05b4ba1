#!/bin/bash
# The veth pair under the VM's two devices: `link.sh make`, and `link.sh restore` when one end was down, which takes routes
# away. Both ends are in the first network namespace (docs/soft-roce.md says why).
#
# Addresses of one machine reach each other by the loopback, unless the routing rules say otherwise: so a rule for what is
# sent to each of them comes before the local table, which is then for what arrives. accept_local lets in what comes with a
# source address that is our own.
set -e

own4=(192.0.2.1 192.0.2.2)
own6=(2001:db8::1 2001:db8::2)

ends() {
    local end
    for end in 0 1; do
        ip link set "veth$end" up
        ip address replace "${own4[end]}/24" dev "veth$end"
        ip address replace "${own6[end]}/64" dev "veth$end" nodad
    done
    for end in 0 1; do
        ip -4 route replace "${own4[1 - end]}" dev "veth$end" src "${own4[end]}" table "$((10 + end))"
        ip -6 route replace "${own6[1 - end]}" dev "veth$end" src "${own6[end]}" table "$((10 + end))"
        # No asking for each other's: an answer comes before the kernel's address resolution (ib_core) has put itself
        # on the list of those that wait for one, and it then sleeps until its time is over.
        read -r hardware <"/sys/class/net/veth$((1 - end))/address"
        ip neighbour replace "${own4[1 - end]}" lladdr "$hardware" dev "veth$end" nud permanent
        ip neighbour replace "${own6[1 - end]}" lladdr "$hardware" dev "veth$end" nud permanent
    done
}

case $1 in
make)
    # Room for a path MTU of 4096 and RoCE's headers.
    ip link add veth0 mtu 4200 type veth peer name veth1 mtu 4200
    for end in 0 1; do
        conf=/proc/sys/net/ipv4/conf/veth$end
        echo 1 >"$conf/accept_local"
        echo 0 >"$conf/rp_filter"
        # Which address belongs to which end matters here.
        echo 1 >"$conf/arp_ignore"
        echo 2 >"$conf/arp_announce"
        ip -4 rule add pref "$((10 + end))" iif lo to "${own4[1 - end]}" lookup "$((10 + end))"
        ip -6 rule add pref "$((10 + end))" iif lo to "${own6[1 - end]}" lookup "$((10 + end))"
        # rdma_cm takes a request only if the way back is through the device that it came by. It asks with the device, but
        # without "iif lo", and a local IPv6 route would do for it whatever its device.
        ip -6 rule add pref "$((20 + end))" oif "veth$end" to "${own6[1 - end]}" lookup "$((10 + end))"
    done
    for family in -4 -6; do
        ip "$family" rule add pref 100 lookup local
        ip "$family" rule del pref 0
    done
    ends
    ;;
restore) ends ;;
*)
    echo "usage: $0 make|restore" >&2
    exit 2
    ;;
esac
