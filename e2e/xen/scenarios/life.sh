# shellcheck shell=dash
# What happens to a disk while it is used: its back-end is killed, stopped, replaced; it grows; it is
# trimmed; its guest dies.
start_guest u1 4 256 || return
truncate -s 64M /run/disk.img
# Persistent grants of longer rings would take most of the guest's memory.
check frontend in_guest "frontend 4 0 32"
start_backend --queues 4
check attach attach xvda /run/disk.img
check disk_is_there in_guest "until_disk xvda" || { cat /run/ringway.out; return; }
info facts "$(in_guest 'facts xvda')"

# Four writers verify what they write while back-ends come and go.
tell "hammer xvda 8"
answer 10
sleep 2
for life in 1 2 3; do
    kill_backend
    sleep 0.3
    start_backend --queues 4
    within 5 adopted || fail "adopted_$life" "$(tail -n 3 /run/ringway.out | tr '\n' '|')"
    sleep 1
done
stop_backend
sleep 0.3
start_backend --queues 4
check adopted_after_stop within 5 adopted
tell "hammered"
check data_survives_restarts answer 90
grep -c 'carrying out' /run/ringway.all | sed 's/^/RINGWAY INFO left_in_flight /'
check verify in_guest "verify xvda"

check grows ctl resize 0 96M
check guest_sees_growth in_guest "until_size xvda $((96 * 2048))"

check fills in_guest "dd if=/dev/urandom of=/dev/xvda bs=1M count=16 seek=16 oflag=direct conv=fsync"
before=$(du -k /run/disk.img | cut -f1)
check trims in_guest "blkdiscard -o 16777216 -l 16777216 /dev/xvda"
after=$(du -k /run/disk.img | cut -f1)
if [ $((before - after)) -ge 15000 ]; then ok trim_frees_space "$before to $after KiB"
else fail trim_frees_space "$before to $after KiB"; fi
flushes=$(ctl stats | grep -o '"flushes": *[0-9]*' | head -n 1 | tr -dc 0-9)
if [ "${flushes:-0}" -gt 0 ]; then ok flushes_arrive "$flushes"; else fail flushes_arrive "$(ctl stats | head -c 300)"; fi
check drain ctl drain 0

truncate -s 16M /run/second.img
check attach_read_only attach xvdb /run/second.img r
check read_only_is_there in_guest "until_disk xvdb" || cat /run/ringway.out
equals read_only 1 "$(in_guest 'cat /sys/block/xvdb/ro')"
check detach_read_only detach xvdb
check read_only_is_gone in_guest "until_gone xvdb"
check missing_image_is_refused refused_attach xvdc /run/no.img

# The guest dies with requests in flight; the back-end goes on.
tell "hammer xvda 30"
answer 10
sleep 1
check guest_dies xl destroy u1
check disks_are_forgotten within 10 no_disks
check backend_lives kill -0 "$backend"
equals records_are_gone 0 "$(find /run/ringway -type f | wc -l)"
stop_backend
