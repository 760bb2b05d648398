# shellcheck shell=dash
# A guest of libvirt that has started from the disk vda. It asks nothing: it works and says so, until
# the host has done what ringway.wants says: `kill`, `grow` (vda), `hotplug` (vdb comes and goes).

mib=1048576
wants=$(param wants none)
# Behind the file system from which it has started.
scratch=$(($(param from_mib 160) * mib))
describe vda
first=$(cat /sys/block/vda/size)

# A round: 1 MiB is written past the page cache, read back, judged, and zeroed again.
n=0
round() {
    if ! fill_range vda $scratch $((1 * mib)) || ! range_is_pattern vda $scratch $((1 * mib)) ||
        ! pattern_goes vda; then
        fail round "after $n rounds"
        return 1
    fi
    n=$((n + 1))
    # Also from within a check.
    info rounds $n >/dev/console
}
pattern_goes() {
    dd if=/dev/zero of="/dev/$1" bs=64k seek=$scratch count=$((1 * mib)) iflag=fullblock,count_bytes \
        oflag=seek_bytes,direct conv=notrunc status=none && range_is_zero "$1" $scratch $((1 * mib))
}
# until_true COMMAND…: rounds until it is.
until_true() {
    local left=400
    until "$@"; do
        round || return 1
        left=$((left - 1))
        [ $left -gt 0 ] || return 1
        sleep 0.1
    done
}
has_grown() { [ "$(cat /sys/block/vda/size)" -gt "$first" ]; }
has_second() { [ -b /dev/vdb ]; }
has_no_second() { [ ! -e /sys/block/vdb ]; }
after() { [ $n -ge "$1" ]; }

check rounds until_true after 3
for want in $(echo "$wants" | tr , ' '); do
    info ready_for "$want"
    case $want in
        # The host has seen rounds after it.
        kill) check goes_on_after_the_kill until_true after $((n + 12)) ;;
        grow) check vda_has_grown until_true has_grown ;;
        hotplug)
            check vdb_comes until_true has_second
            check vdb_takes_data fill_range vdb 0 $((8 * mib))
            check vdb_gives_it_back range_is_pattern vdb 0 $((8 * mib))
            info ready_for unplug
            check vdb_goes until_true has_no_second
            ;;
    esac
done
info sectors_at_end "$(cat /sys/block/vda/size)"
