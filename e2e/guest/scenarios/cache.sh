# shellcheck shell=dash
# The guest switches its write cache off. The host restarts the daemon, once by force and once in order;
# each time it looks whether all that the guest has written since then was durable at once.

describe vda
type=/sys/block/vda/cache_type

# Direct writes, each followed by an fsync, which sends nothing to a disk without a write cache.
write_some() {
    /usr/bin/fio --name=w --filename=/dev/vda --direct=1 --ioengine=psync --rw=randwrite --bs=4k \
        --size=4m --io_size=96k --fsync=1
}

equals offered "write back" "$(cat $type)"
check write_back write_some
equals flushed ok "$(ask flushed)"
check switch_off sh -c "echo 'write through' >$type"
equals switched "write through" "$(cat $type)"
for step in at_once killed stopped; do
    equals "$step" ok "$(ask "$step")"
    check "write_$step" write_some
    equals "durable_$step" ok "$(ask durable)"
done
check switch_on sh -c "echo 'write back' >$type"
equals on_again ok "$(ask on)"
check write_on write_some
equals volatile ok "$(ask volatile)"
equals killed_again ok "$(ask killed)"
check write_killed_on write_some
equals volatile_again ok "$(ask volatile)"
