# shellcheck shell=dash
# The host kills the daemon under verified O_DIRECT writes on a file system, 256 in flight, and starts
# another one, as often as ringway.kills says. The guest goes on each time, and nothing is wrong
# afterwards. With ringway.from_mib it leaves so much of the beginning of the disk alone.

describe vda
kills=$(param kills 3)
dev=/dev/vda
from_mib=$(param from_mib 0)
if [ "$from_mib" != 0 ]; then
    # It has started from what is before.
    modprobe dm-mod
    from=$((from_mib * 2048))
    check device_mapper /usr/sbin/dmsetup create behind \
        --table "0 $(($(cat /sys/block/vda/size) - from)) linear /dev/vda $from"
    /usr/sbin/dmsetup mknodes
    dev=/dev/mapper/behind
fi
check mkfs /usr/sbin/mkfs.ext4 -q -F -b 4096 -E lazy_itable_init=0 $dev
check mount mount -t ext4 $dev /mnt

# Again and again, until all kills are over: on a busy host each may take long.
seconds=6
export seconds
rounds() {
    until [ -e /tmp/enough ]; do
        /usr/bin/fio /ringway/scenarios/kill.fio >/tmp/fio.out 2>&1 || return
    done
}
rounds &
fio=$!

# Requests completed so far: reads and writes.
completed() { awk '{ print $1 + $5 }' /sys/block/vda/stat; }

# goes_on FROM: true once 200 more requests are done than FROM; gives up after 30 seconds.
goes_on() {
    local n
    for n in $(seq 300); do
        [ "$(completed)" -lt $(($1 + 200)) ] || return 0
        sleep 0.1
    done
    info stuck "$(cat /sys/block/vda/inflight) in flight after $n looks"
    return 1
}

check fio_begins goes_on "$(completed)"
for n in $(seq "$kills"); do
    # Not in step with anything.
    usleep $((n * 137000 % 500000))
    equals "killed_$n" ok "$(ask kill)"
    check "goes_on_$n" goes_on "$(completed)" || break
done
touch /tmp/enough
wait $fio
status=$?
equals fio_verify 0 $status
[ $status = 0 ] || info fio "$(grep -iE 'verify|error' /tmp/fio.out | head -n 3 | tr '\n' '|')"

take $((8 * 1048576)) </dev/urandom >/mnt/after
sum=$(sha256sum </mnt/after)
check umount umount /mnt
check fsck_is_clean /usr/sbin/fsck.ext4 -fn $dev
check mount_again mount -t ext4 -o ro $dev /mnt
equals file_after_the_kills "$sum" "$(sha256sum </mnt/after)"
check umount_again umount /mnt
