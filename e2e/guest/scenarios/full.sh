# shellcheck shell=dash
# First boot: the disk has what it promises, carries verified I/O, a file system, trim and zeroing.
# `verify` is the second boot.  Layout of vda: an ext4 file system, then 64 MiB of scratch.
#
# Parameters: ringway.queues (default: one per CPU), ringway.write_cache (back or through).

describe vda

# What the disk says about itself.
queues=$(param queues "$(nproc)")
wanted=$(seq -s ' ' 0 $((queues - 1)))
equals queues_exist "$wanted" "$(cd /sys/block/vda/mq && echo * | tr ' ' '\n' | sort -n | xargs)"
equals write_cache "write $(param write_cache back)" "$(queue vda write_cache)"
check serial_is_visible test -n "$(cat /sys/block/vda/serial)"
positive logical_block_size "$(queue vda logical_block_size)"
positive discard_max_bytes "$(queue vda discard_max_bytes)"
positive write_zeroes_max_bytes "$(queue vda write_zeroes_max_bytes)"
equals disk_is_writable 0 "$(cat /sys/block/vda/ro)"

# Verified I/O from every CPU, and every queue took part in it.
block=$(queue vda logical_block_size)
export block
check fio_verify /usr/bin/fio /ringway/scenarios/verify.fio
silent=
for q in $(seq 0 $((queues - 1))); do
    count=$(awk -v name="-req.$q" '$NF ~ name "$" { for (i = 2; i <= NF; i++)
        if ($i ~ /^[0-9]+$/) sum += $i } END { print sum + 0 }' /proc/interrupts)
    info "vda.interrupts.$q" "$count"
    [ "$count" -gt 0 ] || silent="$silent $q"
done
equals every_queue_interrupts "" "$silent"

# A file system with files of awkward sizes, and their checksums kept beside them.
sectors=$(cat /sys/block/vda/size)
scratch=$((sectors * 512 - 64 * 1048576))
check mkfs /usr/sbin/mkfs.ext4 -q -F -b 4096 -E lazy_itable_init=0 /dev/vda $((scratch / 1024))k
check mount mount -t ext4 /dev/vda /mnt
mkdir -p /mnt/dir/deep
for size in 0 1 511 512 513 4095 4096 4097 65537 1048577 8388608; do
    take $size </dev/urandom >/mnt/dir/file-$size
done
for n in $(seq 1 20); do
    take $((n * 1000)) </dev/urandom >/mnt/dir/deep/"small-$n"
done
(cd /mnt && find dir -type f | sort | xargs sha256sum) >/tmp/sums
cp /tmp/sums /mnt/SHA256SUMS
while read -r sum path; do info "sum.$path" "$sum"; done </tmp/sums

# Trim spares what is in use.  (`trim` looks at what the host gets back.)
pattern | take $((16 * 1048576)) >/mnt/big
sync
rm /mnt/big
sync
check fstrim /usr/sbin/fstrim -v /mnt
info fstrim "$(tail -n 1 /tmp/check.out)"
echo 3 >/proc/sys/vm/drop_caches
check files_unharmed_by_trim sh -c 'cd /mnt && sha256sum -c /mnt/SHA256SUMS'
check umount umount /mnt

# Zeroing a range zeroes this range and nothing beside it.
half=$((32 * 1048576))
mib=1048576
check scratch_written fill_range vda $scratch $((2 * half))
check scratch_reads_back range_is_pattern vda $scratch $((2 * half))
check zeroed /usr/sbin/blkdiscard -f -z -o $((scratch + 8 * mib)) -l $((16 * mib)) /dev/vda
check zeroed_reads_zero range_is_zero vda $((scratch + 8 * mib)) $((16 * mib))
check before_zeroed_unharmed range_is_pattern vda $scratch $((8 * mib))
check after_zeroed_unharmed range_is_pattern vda $((scratch + 24 * mib)) $((8 * mib))
# A range that begins and ends inside the host's pages.
odd=$((scratch + 26 * mib + 3 * block))
check zeroed_odd /usr/sbin/blkdiscard -f -z -o $odd -l $((block * 5)) /dev/vda
check zeroed_odd_exact sh -c "dd if=/dev/vda bs=$block skip=$((odd / block - 1)) count=7 status=none |
    tr '\\0\\245' 'zp' | fold -w $block | cut -c 1,$block | tr -d '\\n' | grep -x ppzzzzzzzzzzpp"
check discarded /usr/sbin/blkdiscard -f -o $((scratch + half)) -l $half /dev/vda
check discard_spared_its_neighbour range_is_pattern vda $((scratch + 24 * mib)) $mib
sync
