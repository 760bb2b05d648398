# shellcheck shell=dash
# One guest, one kind of file, three back-ends: `ringway serve --xen`, QEMU's qdisk, and the kernel's
# xen-blkback on a loop device. fio in the guest measures them in turns; the front-end is as it comes.
#
# Parameters: cells (RW:BS:DEPTH, '+' between them), rounds, runtime and ramp (ms), mib of each disk, vcpus, and what
# ringway is told (options with '+' for ' '); rival: a second ringway that is told this, in place of qdisk.
mkdir -p /run/disks
mount -t tmpfs -o size=90% tmpfs /run/disks
mib=$(param mib 64)
for disk in ringway qdisk blkback; do
    dd if=/dev/zero of=/run/disks/$disk bs=1M count="$mib" 2>/dev/null || fail room_for_$disk
done
start_guest u1 "$(param vcpus 1)" 512 || return
check by_hand by_hand vbd3 qdisk vbd

# shellcheck disable=SC2034 # read by start_backend
served=vbd3
# shellcheck disable=SC2046 # a list of words
start_backend $(param options "" | tr + ' ')
rival=$(param rival "")
if [ -z "$rival" ]; then
    # shellcheck disable=SC2154 # of start_guest
    xen-qemu-system-i386 -xen-domid "$domid" -xen-attach -name u1 -M xenpv -nodefaults -no-user-config \
        -display none -monitor none >/run/rival.out 2>&1 &
    params=aio:/run/disks/qdisk
else
    # shellcheck disable=SC2046,SC2154 # lists of words
    $ringway serve --xen --xen-name qdisk --control /run/rival.sock $(echo "$rival" | tr + ' ') >/run/rival.out 2>&1 &
    params=/run/disks/qdisk
fi
rival=$!
insmod /lib/modules/xen-blkback.ko
losetup /dev/loop0 /run/disks/blkback

check front in_guest "insmod /lib/modules/xen-blkfront.ko"
add_disk vbd3 a /run/disks/ringway
add_disk qdisk b $params discard-enable 0
add_disk vbd c /dev/loop0 physical-device 7:0 hotplug-status connected
check put put_disks
for disk in xvda xvdb xvdc; do
    check $disk in_guest "until_disk $disk"
    info facts.$disk "$(in_guest "facts $disk")"
    info spoken.$disk "$(in_guest "spoken $disk")"
done
cat /run/rival.out /run/ringway.out
check load in_guest ". /ringway/speed.sh"

cells=$(param cells read:4k:1+read:4k:32 | tr + ' ')
rounds=$(param rounds 3) runtime=$(param runtime 600) ramp=$(param ramp 150)

# measured SECONDS COMMAND: what the guest says to it. Nobody looks before that: on an emulated CPU a
# look takes longer than many requests.
measured() {
    tell "$2"
    sleep "$1"
    answer 600
}

# shellcheck disable=SC2086 # a list of words
set -- $cells
say MEASURING
measured $((3 * $# * rounds * (runtime + ramp) / 1000)) \
    "speed '$cells' $rounds $runtime $ramp xvda xvdb xvdc" >/run/speed.out ||
    fail speed "$(tail -n 3 /run/speed.out)"
while read -r disk rw bs depth round iops _ _; do
    info "speed.$disk.$rw.$bs.$depth.$round" "$iops"
done </run/speed.out

ctl stats
[ ! -S /run/rival.sock ] || $ringway ctl --control /run/rival.sock stats --json
kill -9 $rival
stop_backend
