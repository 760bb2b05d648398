# shellcheck shell=dash
# A deleted file's space goes back to the host.  The host looks at the image at both questions.

describe vda
check mkfs /usr/sbin/mkfs.ext4 -q -F -b 4096 /dev/vda
check mount mount -t ext4 /dev/vda /mnt
take 1048577 </dev/urandom >/mnt/small
(cd /mnt && sha256sum small) >/tmp/sums
pattern | take $((96 * 1048576)) >/mnt/big
sync
equals host_saw_big_file ok "$(ask big_file_written)"
rm /mnt/big
sync
check fstrim /usr/sbin/fstrim -v /mnt
trimmed=$(sed -n 's/.*(\([0-9]*\) bytes).*/\1/p' /tmp/check.out)
info fstrim_bytes "$trimmed"
check fstrim_covers_big_file test "$trimmed" -ge $((96 * 1048576))
sync
equals host_saw_trim ok "$(ask trimmed)"
echo 3 >/proc/sys/vm/drop_caches
check files_unharmed sh -c 'cd /mnt && sha256sum -c /tmp/sums'
check umount umount /mnt
check fsck_is_clean /usr/sbin/fsck.ext4 -fn /dev/vda
