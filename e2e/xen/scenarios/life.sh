# shellcheck shell=dash disable=SC2154 # lib.sh sets what is not set here
# What happens to a disk while it is used: its back-end is killed, stopped, replaced; it grows; it is
# trimmed; its guest dies.
# With this much memory a guest is offered persistent grants for rings of one page, at first.
start_guest u1 4 320 || return
truncate -s 64M /run/disk.img
# Back-ends that have given root's rights up open it, too.
chown 1000:1000 /run/disk.img
check frontend in_guest "frontend 4 0 32"
start_backend --queues 4
check attach attach xvda /run/disk.img
check disk_is_there in_guest "until_disk xvda" || { cat /run/ringway.out; return; }
info facts "$(in_guest 'facts xvda')"
offered() { xenstore-read "/local/domain/0/backend/$(kind)/$domid/51712/feature-persistent"; }
equals persistent_is_offered 1 "$(offered)"

# The front-end is there once its rings are, and not before.
check connected_is_told within 10 front_end true

# Requests that the present back-end has found in the records of its predecessor.
left_in_flight() {
    sed -n 's/.*carrying out what a predecessor left in flight.*requests=\([0-9]*\).*/\1/p' \
        /run/ringway.out | awk '{ sum += $1 } END { print sum + 0 }'
}

# Four writers verify what they write while back-ends come and go: confined, as another user, with
# the store reached through the kernel.
# kills COUNT PREFIX: kills the back-end so often, and counts what its successor finds. On the one CPU of
# this machine a back-end is seldom met amid a request.
caught=0
kills() {
    local life requests
    for life in $(seq "$1"); do
        kill_backend
        sleep 0.3
        case $life in
            2) start_backend --queues 4 --xen-store /dev/xen/xenbus ;;
            3) start_backend --queues 4 --user 1000:1000 ;;
            *) start_backend --queues 4 ;;
        esac
        within 5 adopted || fail "$2adopted_$life" "$(tail -n 3 /run/ringway.out | tr '\n' '|')"
        # What was in flight at the kill, as the successor finds it in the records: requests of all rings.
        requests=$(left_in_flight)
        info "$2in_flight_at_kill_$life" "$requests"
        [ "$requests" -eq 0 ] || caught=$((caught + 1))
        sleep 1
    done
}
tell "hammer xvda 16"
answer 10
sleep 2
kills 6 ""
stop_backend
sleep 0.3
start_backend --queues 4 --user 1000:1000 --xen-store /dev/xen/xenbus
check adopted_after_stop within 5 adopted
tell "hammered"
check data_survives_restarts answer 90
check verify in_guest "verify xvda"
equals no_root "1000 1000" "$(awk '/^Uid:/ { u = $2 } /^Gid:/ { g = $2 } END { print u, g }' \
    "/proc/$backend/status")"
equals no_capabilities 0000000000000000 "$(awk '/^CapEff:/ { print $2 }' "/proc/$backend/status")"

# The guest lets its driver go: the disk is closed, and stays attached. Linux's driver does not begin
# again with a device that was closed; once its device is made anew, the same disk has new rings.
xenstore-write "/local/domain/$domid/memory/target" $((128 * 1024))
check unbinds in_guest "echo vbd-51712 >/sys/bus/xen/drivers/vbd/unbind"
check closed within 10 states_are 51712 6 6
check alone_is_told within 10 front_end false
check binds in_guest "echo vbd-51712 >/sys/bus/xen/drivers/vbd/bind"
check device_made_anew make_anew 51712
check comes_back within 20 states_are 51712 4 4
check disk_comes_back in_guest "until_disk xvda"
check connected_again within 10 front_end true
check verify_again in_guest "verify xvda"

# The same without persistent grants: its memory is less now, and the device is made anew.
equals persistent_is_not_offered 0 "$(offered)"
tell "hammer xvda 10"
answer 10
sleep 1
kills 3 unkept_
for more in $(seq 15); do
    [ "$caught" -eq 0 ] || break
    kills 1 "unkept_${more}_"
done
check some_kills_had_requests_in_flight test "$caught" -gt 0
tell "hammered"
check unkept_data_survives_restarts answer 90

check grows ctl resize 0 96M
check guest_sees_growth in_guest "until_size xvda $((96 * 2048))"

# What is not in the rings: its size changes while nobody serves it, and a pause outlives its daemon.
kill_backend
truncate -s 128M /run/disk.img
start_backend --queues 4
check adopted_grown within 5 adopted
check guest_sees_what_it_missed in_guest "until_size xvda $((128 * 2048))"
paused() { ctl list | tr -d ' \n' | grep -q '"state":"paused"'; }
check pauses ctl pause 0
kill_backend
start_backend --queues 4
check adopted_paused within 5 adopted
check is_paused_still paused
tell "verify xvda"
sleep 1
check answers_nobody_meanwhile unanswered
check resumes ctl resume 0
check verify_after_pause answer 90

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
chown 1000:1000 /run/second.img
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
