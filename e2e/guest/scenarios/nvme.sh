# shellcheck shell=dash
# The daemon is in this guest, and serves an NVMe namespace past the block layer (--engine nvme). Its client
# is in this guest, too. The program comes with all that it needs in an archive, as a disk.

ringway() { chroot /host /bin/ringway "$@"; }
served() { ringway io vhost-user:/run/v "$@"; }

# until_so COMMAND…: waits for it, for a minute.
until_so() {
    local tries=120
    until "$@" >/dev/null 2>&1; do
        tries=$((tries - 1))
        [ $tries -gt 0 ] || return 1
        sleep 0.5
    done
}
gone() { ! kill -0 "$1"; }

check nvme_module modprobe nvme
check namespace until_so test -b /dev/nvme0n1
check generic_device until_so test -c /dev/ng0n1
mkdir /host
mount -t tmpfs -o size=300m none /host
check unpacked tar -x -C /host -f /dev/vda
cp /usr/bin/busybox /host/bin/
for dir in proc sys dev tmp; do
    mkdir -p "/host/$dir"
    mount --bind "/$dir" "/host/$dir"
done
mkdir -p /host/run

serve() {
    chroot /host /bin/ringway serve /dev/ng0n1 --engine nvme --socket /run/v --queues 2 --control /run/c "$@" \
        >>/tmp/serve.out 2>&1 &
    daemon=$!
}
ready() { until_so served -c info; }
stop() { kill "$daemon"; until_so gone "$daemon"; }

# What it refuses.
refuses auto_never_takes_it ringway serve /dev/ng0n1 --socket /run/v
refuses no_block_device ringway serve /dev/nvme0n1 --engine nvme --socket /run/v
refuses no_page_cache ringway serve /dev/ng0n1 --engine nvme --cache writeback --socket /run/v
check mkfs /usr/sbin/mkfs.ext4 -q -F /dev/nvme0n1
mkdir -p /mnt/n
check mounted mount /dev/nvme0n1 /mnt/n
refuses mounted_is_refused ringway serve /dev/ng0n1 --engine nvme --socket /run/v
umount /mnt/n

serve
check served ready || info serve_log "$(tail -n 5 /tmp/serve.out | tr '\n\r' '| ')"
refuses served_cannot_be_mounted mount /dev/nvme0n1 /mnt/n
refuses served_once ringway serve /dev/ng0n1 --engine nvme --socket /run/w
info engine "$(grep -o 'engine[^,]*' /tmp/serve.out | head -n 1)"

# Data, flush, discard, zeroes.
check written served -c 'write -P 0x5a 1M 8M' -c flush -c 'verify -P 0x5a 1M 8M'
check odd_sectors served -c 'write -P 0x11 20479K 513K' -c 'verify -P 0x11 20479K 513K'
check zeroed served -c 'zero 2M 1M' -c 'verify -P 0 2M 1M' -c 'verify -P 0x5a 1M 1M' \
    -c 'verify -P 0x5a 3M 6M'
check discarded served -c 'discard 4M 4M' -c 'verify -P 0x5a 3M 1M' -c 'verify -P 0x5a 8M 1M'
# The sector at 59 MiB cannot be written: that request fails, and its neighbours do not.
refuses error_is_told served -c 'write -P 1 59M 4K'
check neighbours_of_error served -c 'write -P 0x22 60412K 4K' -c 'write -P 0x22 60420K 4K' \
    -c 'verify -P 0x22 60412K 4K' -c 'verify -P 0x22 60420K 4K'
info error "$(grep -o 'Input/output error[^"]*' /tmp/serve.out | head -n 1)"
check bench ringway bench vhost-user:/run/v --rw randrw --bs 4k --iodepth 16 --allow-write --verify \
    --offset 32M --size 8M --runtime 3s
check bench_of_long_ones ringway bench vhost-user:/run/v --rw randrw --bs 1M --iodepth 4 --allow-write \
    --verify --offset 32M --size 16M --runtime 3s

# Killed under load, of writes that are durable by themselves (FUA): its successor goes on from the record
# of what was in flight.
chroot /host /bin/survive-kills /run/v 16 /tmp/enough >/tmp/survive.out 2>&1 &
client=$!
check writes_begin until_so test -f /tmp/enough.begun
for _ in 1 2 3 4; do
    sleep 2
    kill -9 "$daemon"
    serve
done
sleep 2
touch /tmp/enough
wait $client
equals survives 0 $?
refuses no_data_is_called_lost grep -q 'written data was lost' /tmp/serve.out
info survived "$(tail -n 2 /tmp/survive.out | tr '\n\r' '| ')"
check all_is_where_it_was served -c 'verify -P 0x11 20479K 513K'

check later_write served -c 'write -P 0x33 60M 64K' -c flush -c 'verify -P 0x33 60M 64K'

# It goes and comes back by the control socket: then the helper opens it, from within its own sandbox.
ctl() { ringway ctl --control /run/c "$@"; }
check size_is_looked_at ctl resize /run/v
check drained ctl drain /run/v
check removed ctl remove /run/v
check added ctl add /dev/ng0n1 --engine nvme --socket /run/v --queues 1
refuses added_is_claimed ringway serve /dev/nvme0n1 --socket /run/w
check added_is_served served -c 'verify -P 0x33 60M 64K' -c 'write -P 0x55 62M 64K' -c flush

# What is served read-only is not written.
stop
serve --read-only
check served_read_only ready
refuses no_writes served -c 'write -P 1 0 4K'
check reads served --read-only -c 'verify -P 0x33 60M 64K'
stop

# Tools use the device itself.
check doctor ringway doctor /dev/ng0n1
info doctor_says "$(ringway doctor /dev/ng0n1 2>&1 | grep -i nvme | head -n 2 | tr '\n\r' '| ')"
check info ringway info /dev/ng0n1
check io ringway io /dev/ng0n1 -c 'write -P 0x44 61M 64K' -c 'verify -P 0x44 61M 64K' -c flush
check bare_bench ringway bench /dev/ng0n1 --engine nvme --rw randread --runtime 2s
check copied ringway copy /dev/ng0n1 /tmp/copy.img
# Past the page cache: what the block device reads now comes from the device.
check same_as_block_device cmp /tmp/copy.img /dev/nvme0n1
sync
info log "$(grep -ciE 'error|warn' /tmp/serve.out)"
info serve_tail "$(tail -n 4 /tmp/serve.out | tr '\n\r' '| ')"
