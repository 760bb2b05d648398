# shellcheck shell=dash
# The host migrates this guest under verified O_DIRECT writes on a file system, 256 in flight, some
# times in vain, and says when it has done so. Nothing is wrong afterwards.

describe vda
check mkfs /usr/sbin/mkfs.ext4 -q -F -b 4096 -E lazy_itable_init=0 /dev/vda
check mount mount -t ext4 /dev/vda /mnt

seconds=4
export seconds
rounds() {
    while [ ! -e /tmp/stop ]; do
        /usr/bin/fio /ringway/scenarios/kill.fio >/tmp/fio.out 2>&1 || return 1
        echo >>/tmp/rounds
    done
}
rounds &
fio=$!

# The answer comes from another QEMU than the one that hears the question.
for _ in $(seq 8); do
    answer=$(ask migrate)
    [ "$answer" = timeout ] || break
done
# Said once more: this QEMU's own log has no word of what the first one was told.
info vda.packed "$(feature vda 34)"
equals migrated ok "$answer"
before=$(wc -l </tmp/rounds)
sleep 5
touch /tmp/stop
wait $fio
status=$?
equals fio_verify 0 $status
[ $status = 0 ] || info fio "$(grep -iE 'verify|error' /tmp/fio.out | head -n 3 | tr '\n' '|')"
positive rounds_afterwards $(($(wc -l </tmp/rounds) - before))

take $((8 * 1048576)) </dev/urandom >/mnt/after
sum=$(sha256sum </mnt/after)
check umount umount /mnt
check fsck_is_clean /usr/sbin/fsck.ext4 -fn /dev/vda
check mount_again mount -t ext4 -o ro /dev/vda /mnt
equals file_after_the_migration "$sum" "$(sha256sum </mnt/after)"
check umount_again umount /mnt
