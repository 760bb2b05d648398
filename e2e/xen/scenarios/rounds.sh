# shellcheck shell=dash
# The stock front-end with each number of queues, each length of ring, direct and indirect requests,
# and each way to move data: attached, verified, detached. The last round is the kernel's own
# back-end, as control.
start_guest u1 4 256 || return
truncate -s 64M /run/disk.img

# round NAME QUEUES ORDER INDIRECT PERSISTENT DATA
round() {
    local name=$1
    check "${name}_frontend" in_guest "frontend $2 $3 $4 $5" || return
    start_backend --queues 4 --xen-data "$6"
    check "${name}_attach" attach xvda /run/disk.img
    if check "${name}_disk" in_guest "until_disk xvda"; then
        info "$name.facts" "$(in_guest 'facts xvda')"
        info "$name.spoken" "$(in_guest 'spoken xvda')"
        equals "${name}_queues" "$2" "$(in_guest 'ls /sys/block/xvda/mq | wc -l' | tr -d ' ')"
        equals "${name}_ring" "$3" \
            "$(xenstore-read "/local/domain/$domid/device/vbd/51712/ring-page-order" || echo 0)"
        equals "${name}_segments" "$([ "$4" -gt 11 ] && echo "$4" || echo 11)" \
            "$(in_guest 'cat /sys/block/xvda/queue/max_segments')"
        equals "${name}_cache" "write back" "$(in_guest 'cat /sys/block/xvda/queue/write_cache')"
        check "${name}_verify" in_guest "verify xvda"
    fi
    check "${name}_detach" detach xvda
    check "${name}_gone" in_guest "until_gone xvda"
    within 5 no_disks || fail "${name}_forgotten" "$(ctl list)"
    stop_backend
    sed -n "s/^/$name: /p" /run/ringway.out
}

# A front-end with persistent grants has pages for all segments of all slots, so long rings with them
# would take more memory than the guest has.
#     name  queues order indirect persistent data
round r1    1      0     0        0          copy
round r2    4      2     64       0          copy
round r3    2      1     32       1          persistent
round r4    4      1     64       1          persistent
round r5    1      2     0        0          map
round r6    2      4     64       0          map
round r7    2      0     0        1          auto
round r8    1      4     256      0          auto

check control_frontend in_guest "frontend 2 1 32"
insmod /lib/modules/xen-blkback.ko max_queues=4
losetup /dev/loop0 /run/disk.img
check control_attach xl block-attach u1 \
    "format=raw,vdev=xvda,access=rw,backendtype=phy,script=block-loop,target=/dev/loop0" </dev/null
check control_disk in_guest "until_disk xvda"
check control_verify in_guest "verify xvda"
