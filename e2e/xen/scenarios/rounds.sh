# shellcheck shell=dash disable=SC2154 # lib.sh sets what is not set here
# The stock front-end with each number of queues, each length of ring, direct and indirect requests,
# and each way to move data: 72 rounds of attaching, verifying, detaching. Lengths and requests are the
# front-end's and need it to be loaded anew; for queues and data there is a daemon each, nine in all,
# and a guest with a disk of each. The last round is the kernel's own back-end, as control.
start_guest u1 4 448 || return
check by_hand by_hand vbd

# LETTER:QUEUES:DATA
disks="a:1:copy b:1:map c:1:persistent d:2:copy e:2:map f:2:persistent g:4:copy h:4:map i:4:persistent"
letters="a b c d e f g h i"
backends=
for disk in $disks; do
    rest=${disk#*:}
    queues=${rest%:*} data=${rest#*:} kind=queues-${rest%:*}-$data
    truncate -s 4M "/run/$kind.img"
    $ringway serve --xen --xen-name "$kind" --xen-data "$data" --queues "$queues" \
        --control "/run/$kind.sock" >"/run/$kind.out" 2>&1 &
    backends="$backends $!"
    permit "$kind"
done
for disk in $disks; do
    rest=${disk#*:} kind=queues-${rest%:*}-${rest#*:}
    within 20 grep -q '^backend/' "/run/$kind.out" || fail backend_starts "$kind: $(tail -n 3 "/run/$kind.out" | tr '\n' '|')"
done

seed=0
# batch ORDER SEGMENTS: nine rounds at once.
batch() {
    local order=$1 segments=$2 all="" disk rest kind shape=indirect
    [ "$2" -gt 11 ] || shape=direct
    check "order_${order}_${shape}_frontend" in_guest "frontend 4 $order $segments 1" || return
    for disk in $disks; do
        rest=${disk#*:} kind=queues-${rest%:*}-${rest#*:}
        add_disk "$kind" "${disk%%:*}" "/run/$kind.img"
        all="$all $kind ${disk%%:*}"
    done
    check "order_${order}_${shape}_attach" put_disks
    seed=$((seed + 1))
    in_guest "round $seed $letters; dmesg | grep 'blkfront: xvd' | tail -n 9" >/run/batch.out ||
        fail "order_${order}_${shape}_round" "$(tail -n 3 /run/batch.out)"
    xenstore-ls -f "/local/domain/$domid/device/vbd" >/run/batch.front
    [ "$segments" -gt 11 ] || segments=11
    awk -v disks="$disks" -v order="$order" -v pages_each=$((1 << order)) -v shape=$shape -v segments="$segments" "$judge" \
        /run/batch.out /run/batch.front
    info "order_${order}_${shape}_times" "$(grep '^times' /run/batch.out)"
    # Of one batch: each look is a program more.
    [ "$order:$shape" != 4:indirect ] || tell_stats
    # shellcheck disable=SC2086 # a list of words
    check "order_${order}_${shape}_detach" take_disks $all
    check "order_${order}_${shape}_gone" in_guest "none_left $letters"
}

# What the guest has found and the driver has said, and the pages that the front-end has named, beside
# what was asked for. One line for each disk: RINGWAY CHECK queues_N_order_N_SHAPE_DATA …
# shellcheck disable=SC2016
judge='
    / queues=/ { found[$1] = $2 " " $3 " " $4 " " $5; if ($5 != "ok") found[$1] = $0 }
    /blkfront: xvd/ {
        at = index($0, "xvd")
        spoken[substr($0, at, 4)] = ($0 ~ /persistent grants: enabled/ ? "persistent" : "not-persistent") \
            ($0 ~ /indirect descriptors: enabled/ ? " indirect" : " direct")
    }
    /\/ring-ref/ { split($1, part, "/"); pages[part[7]]++ }
    END {
        count = split(disks, all, " ")
        for (at = 1; at <= count; at++) {
            split(all[at], disk, ":")
            name = "xvd" disk[1]
            wanted = "queues=" disk[2] " segments=" segments " cache=write-back ok pages=" \
                disk[2] * pages_each " " (disk[3] == "persistent" ? "persistent" : "not-persistent") " " shape
            is = found[name] " pages=" pages[51712 + 16 * (at - 1)] " " spoken[name]
            word = is == wanted ? "ok " is : "FAIL wanted \"" wanted "\", found \"" is "\""
            print "RINGWAY CHECK queues_" disk[2] "_order_" order "_" shape "_" disk[3] " " word
        }
    }'

tell_stats() {
    for disk in $disks; do
        rest=${disk#*:} kind=queues-${rest%:*}-${rest#*:}
        $ringway ctl --control "/run/$kind.sock" stats --json >/run/stats.out
        info "stats.$kind" "$(tr -d ' \n' </run/stats.out | cut -c1-400)"
    done
}

# A front-end with persistent grants has pages for all segments of all slots: 225 MiB
# for the seven queues of each batch.
for limits in 0:0 1:0 2:0 4:0 0:256 1:128 2:64 4:16; do
    batch ${limits%:*} ${limits#*:}
done

# shellcheck disable=SC2034 # read by stop_backend
for backend in $backends; do stop_backend; done
cat /run/queues-*.out

check control_frontend in_guest "frontend 2 1 32"
insmod /lib/modules/xen-blkback.ko max_queues=4
truncate -s 64M /run/disk.img
losetup /dev/loop0 /run/disk.img
add_disk vbd a /dev/loop0 physical-device 7:0 hotplug-status connected
check control_attach put_disks
check control_disk in_guest "until_disk xvda"
check control_verify in_guest "verify xvda"
