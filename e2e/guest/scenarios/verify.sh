# shellcheck shell=dash
# Second boot: what `full` left behind is still there.

describe vda
sectors=$(cat /sys/block/vda/size)
scratch=$((sectors * 512 - 64 * 1048576))
mib=1048576

check fsck_is_clean /usr/sbin/fsck.ext4 -fn /dev/vda
check mount_read_only mount -t ext4 -o ro /dev/vda /mnt
check checksums_equal sh -c 'cd /mnt && sha256sum -c SHA256SUMS'
(cd /mnt && find dir -type f | sort | xargs sha256sum) >/tmp/sums
while read -r sum path; do info "sum.$path" "$sum"; done </tmp/sums
check umount umount /mnt
check zeroed_still_zero range_is_zero vda $((scratch + 8 * mib)) $((16 * mib))
check before_zeroed_unharmed range_is_pattern vda $scratch $((8 * mib))
check after_zeroed_unharmed range_is_pattern vda $((scratch + 24 * mib)) $mib
