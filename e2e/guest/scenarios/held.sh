# shellcheck shell=dash
# The host's file system has room for a part of what this guest writes. The guest waits; the daemon is
# killed and started again while it does; the file system grows. No error reaches the guest, and all of
# its data is right.

describe vda
/usr/bin/fio /ringway/scenarios/held.fio >/tmp/fio.out 2>&1 &
fio=$!
equals writes_are_held ok "$(ask held)"
equals killed ok "$(ask kill)"
equals held_again ok "$(ask held)"
check fio_waits kill -0 $fio
equals grown ok "$(ask grow)"
wait $fio
status=$?
equals fio_verify 0 $status
[ $status = 0 ] || info fio "$(grep -iE 'verify|error' /tmp/fio.out | head -n 3 | tr '\n' '|')"
equals none_in_flight "0 0" "$(awk '{ print $1, $2 }' /sys/block/vda/inflight)"
