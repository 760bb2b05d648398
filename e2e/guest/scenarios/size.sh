# shellcheck shell=dash
# The disk changes its size and its daemon is killed, or the other way round; another daemon serves it
# then. The kernel must learn of the size by itself.

# wait_for_sectors NAME WANTED: the kernel finds the new size within 20 seconds.
wait_for_sectors() {
    local left=200
    while [ "$(cat /sys/block/vda/size)" != "$2" ] && [ $left -gt 0 ]; do
        sleep 0.1
        left=$((left - 1))
    done
    equals "$1" "$2" "$(cat /sys/block/vda/size)"
}

describe vda
mib=1048576
equals starts_with $((64 * 2048)) "$(cat /sys/block/vda/size)"
equals grown_and_killed ok "$(ask grown_and_killed)"
wait_for_sectors learns_of_it $((96 * 2048))
check takes_data fill_range vda $((95 * mib)) $mib
equals killed_and_grown ok "$(ask killed_and_grown)"
wait_for_sectors learns_of_that $((128 * 2048))
check takes_more_data fill_range vda $((127 * mib)) $mib
equals resized_and_killed ok "$(ask resized_and_killed)"
wait_for_sectors knows_it $((160 * 2048))
check gives_it_back range_is_pattern vda $((127 * mib)) $mib
check takes_the_rest fill_range vda $((159 * mib)) $mib
