# shellcheck shell=dash
# A read-only disk reads, and refuses every way to write.
# The host fills the disk before and compares it after.

describe vda
write_one() { pattern | take 4096 | dd of="$1" bs=4096 oflag=direct conv=notrunc,fsync status=none; }

equals reports_read_only 1 "$(cat /sys/block/vda/ro)"
equals blockdev_getro 1 "$(/usr/sbin/blockdev --getro /dev/vda)"
check reads read_range vda 0 $((4 * 1048576))
info read_sha256 "$(read_range vda 0 $((4 * 1048576)) | sha256sum | cut -d' ' -f1)"

refuses write write_one /dev/vda
refuses discard /usr/sbin/blkdiscard -f /dev/vda
refuses zeroing /usr/sbin/blkdiscard -f -z /dev/vda
refuses mkfs /usr/sbin/mkfs.ext4 -q -F /dev/vda
/usr/sbin/blockdev --setrw /dev/vda
refuses write_after_setrw write_one /dev/vda

# Those were refused inside the guest's kernel.  Device mapper lets writes pass to the disk, so
# these are refused by the device.
modprobe dm-mod
sectors=$(cat /sys/block/vda/size)
if /usr/sbin/dmsetup create through --table "0 $sectors linear /dev/vda 0" >/tmp/dm 2>&1; then
    /usr/sbin/dmsetup mknodes
    refuses write_by_the_device write_one /dev/mapper/through
    info device_refusals "$(dmesg | grep -c 'error, dev vda, .*(WRITE)')"
    /usr/sbin/dmsetup remove through
    info device_mapper used
else
    info device_mapper "not possible: $(tail -n 1 /tmp/dm)"
fi
check reads_after_refusals read_range vda 0 1048576
# shellcheck disable=SC2034 # read by /init: writes, discards and zeroing were refused
dmesg_expected='dev (vda|dm-0), .*op 0x[139]:'
