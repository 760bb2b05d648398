# shellcheck shell=dash
# The disk is behind a virtual IOMMU.  Verified I/O from every CPU, requests of many pages, a file
# system.  Without the IOMMU in the kernel's hands none of it would mean anything.
describe vda
check iommu_is_on sh -c 'dmesg | grep -q "DMAR: Intel(R) Virtualization Technology for Directed I/O"'
group=$(readlink -f /sys/block/vda/device/../iommu_group)
info iommu_mode "$(cat "$group/type")"
check fio_verifies /usr/bin/fio --name=verify --filename=/dev/vda --direct=1 --ioengine=libaio \
    --rw=randwrite --bs=4k --iodepth=32 --numjobs=1 --size=3m --verify=crc32c --verify_fatal=1 \
    --do_verify=1
check large_requests_verify /usr/bin/fio --name=large --filename=/dev/vda --direct=1 \
    --ioengine=libaio --rw=write --bs=512k --iodepth=4 --offset=64m --size=8m --verify=crc32c \
    --verify_fatal=1 --do_verify=1
check mkfs /usr/sbin/mkfs.ext4 -q -F /dev/vda
check mount mount -t ext4 /dev/vda /mnt
check files_written sh -c 'dd if=/dev/urandom of=/mnt/file bs=1M count=4 conv=fsync'
sum=$(sha256sum /mnt/file | cut -d' ' -f1)
umount /mnt
check mount_again mount -t ext4 /dev/vda /mnt
equals file_is_the_same "$sum" "$(sha256sum /mnt/file | cut -d' ' -f1)"
umount /mnt
