# shellcheck shell=dash
# The disk grows and shrinks while a file system on its first 32 MiB is in use. The host changes the
# size at each question; the kernel must learn of it by itself.

# wait_for_sectors NAME WANTED: the kernel finds the new size within 20 seconds.
wait_for_sectors() {
    local left=200
    while [ "$(cat /sys/block/vda/size)" != "$2" ] && [ $left -gt 0 ]; do
        sleep 0.1
        left=$((left - 1))
    done
    equals "$1" "$2" "$(cat /sys/block/vda/size)"
}

describe vda
mib=1048576
equals starts_with $((64 * 2048)) "$(cat /sys/block/vda/size)"
check mkfs /usr/sbin/mkfs.ext4 -q -F -b 4096 /dev/vda 32M
check mount mount -t ext4 /dev/vda /mnt
take 1048577 </dev/urandom >/mnt/small
(cd /mnt && sha256sum small) >/tmp/sums
# Load on the first part of the disk from here to the end.
touch /tmp/go
(while [ -f /tmp/go ]; do take 262144 </dev/urandom >/mnt/load; sync; done) &
loader=$!

refuses nothing_beyond_the_end fill_range vda $((64 * mib)) $mib
equals host_grew ok "$(ask grow)"
wait_for_sectors grows $((128 * 2048))
check new_space_takes_data fill_range vda $((127 * mib)) $mib
check new_space_gives_it_back range_is_pattern vda $((127 * mib)) $mib
check rest_of_it_is_zero range_is_zero vda $((64 * mib)) $mib
equals host_grew_by_its_file ok "$(ask grow_file)"
wait_for_sectors follows_the_file $((192 * 2048))
equals host_shrank ok "$(ask shrink)"
wait_for_sectors shrinks $((64 * 2048))
refuses nothing_beyond_the_new_end fill_range vda $((127 * mib)) $mib

rm /tmp/go
wait $loader
echo 3 >/proc/sys/vm/drop_caches
check files_unharmed sh -c 'cd /mnt && sha256sum -c /tmp/sums'
check umount umount /mnt
check fsck_is_clean /usr/sbin/fsck.ext4 -fn /dev/vda
info new_sizes "$(dmesg | grep -c 'vda.* new size:')"
