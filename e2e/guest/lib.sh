# shellcheck shell=dash
# What scenarios have at hand.  Sourced by /init; runs in busybox's sh.
#
# busybox prefers its own applets to programs of the same name: tools that must be the real ones
# (fio, mkfs.ext4, fstrim, blkdiscard, blockdev …) are called by full path.
#
# The lines the host reads:
#   RINGWAY CHECK name ok [detail]      one judgement; the host fails on FAIL
#   RINGWAY CHECK name FAIL [detail]
#   RINGWAY INFO key value              a fact, for the host to judge
#   RINGWAY ASK name                    the guest waits; the host acts and answers with one line
#   RINGWAY DONE                        the scenario ended by itself

say() { echo "RINGWAY $*"; }
info() { say INFO "$@"; }
ok() { say CHECK "$1" ok "$2"; }
fail() { say CHECK "$1" FAIL "$2"; }

# check NAME COMMAND…: ok when the command succeeds; its last lines are the detail when it fails.
check() {
    local name=$1 status
    shift
    "$@" >/tmp/check.out 2>&1
    status=$?
    if [ $status = 0 ]; then
        ok "$name"
    else
        fail "$name" "status $status: $(tail -n 5 /tmp/check.out | tr '\n\r' '| ')"
    fi
    return $status
}

# refuses NAME COMMAND…: ok when the command fails.
refuses() {
    local name=$1
    shift
    if "$@" >/tmp/check.out 2>&1; then
        fail "$name" "it was accepted: $*"
    else
        ok "$name" "$(tail -n 1 /tmp/check.out | tr '\n\r' '| ')"
    fi
}

# equals NAME WANTED FOUND
equals() {
    if [ "$2" = "$3" ]; then ok "$1" "$3"; else fail "$1" "wanted '$2', found '$3'"; fi
}

# positive NAME NUMBER
positive() {
    if [ "${2:-0}" -gt 0 ]; then ok "$1" "$2"; else fail "$1" "found '$2'"; fi
}

# param NAME DEFAULT: the value of ringway.NAME on the kernel command line.
param() {
    local word
    # shellcheck disable=SC2013 # words are wanted
    for word in $(cat /proc/cmdline); do
        case $word in ringway."$1"=*) echo "${word#*=}"; return ;; esac
    done
    echo "$2"
}

# ask NAME: the host does something at this point, then answers; the answer goes to stdout.
ask() {
    local answer
    say ASK "$1" >/dev/console
    # shellcheck disable=SC3045 # busybox has read -t
    read -r -t 60 answer </dev/console || answer=timeout
    echo "$answer"
}

queue() { cat "/sys/block/$1/queue/$2"; }

# feature DISK BIT: 1 when the driver negotiated this virtio feature bit, else 0.
# Bits worth knowing: 5 read-only, 9 flush, 11 write cache, 12 multi-queue, 13 discard,
# 14 write zeroes, 28 indirect descriptors, 29 event index, 34 packed ring.
feature() { cut -c $(($2 + 1)) "/sys/block/$1/device/features"; }

# Facts about a disk, for the host and for the log.
describe() {
    local disk=$1 name
    info "$disk.sectors" "$(cat "/sys/block/$disk/size")"
    info "$disk.ro" "$(cat "/sys/block/$disk/ro")"
    info "$disk.serial" "$(cat "/sys/block/$disk/serial")"
    info "$disk.mq" "$(cd "/sys/block/$disk/mq" && echo *)"
    for name in write_cache logical_block_size physical_block_size minimum_io_size optimal_io_size \
                discard_max_bytes discard_granularity write_zeroes_max_bytes max_segments \
                max_sectors_kb nr_requests; do
        info "$disk.$name" "$(queue "$disk" $name)"
    done
    info "$disk.features" "$(cat "/sys/block/$disk/device/features")"
    info "$disk.packed" "$(feature "$disk" 34)"
}

# take BYTES: so many bytes of stdin.  (busybox's head goes byte by byte.)
take() { dd bs=64k count="$1" iflag=fullblock,count_bytes status=none; }

# Pattern and zero checks on a byte range of a disk: DISK OFFSET LENGTH, all multiples of 4096.
# Counting the bytes of one value also notices a short read.
pattern() { tr '\0' '\245' </dev/zero; }
fill_range() {
    pattern | dd of="/dev/$1" bs=64k seek="$2" count="$3" iflag=fullblock,count_bytes \
        oflag=seek_bytes,direct conv=notrunc status=none
}
read_range() {
    dd if="/dev/$1" bs=64k skip="$2" count="$3" iflag=skip_bytes,count_bytes,direct status=none
}
range_is_zero() { [ "$(read_range "$1" "$2" "$3" | tr -dc '\0' | wc -c)" = "$3" ]; }
range_is_pattern() { [ "$(read_range "$1" "$2" "$3" | tr -dc '\245' | wc -c)" = "$3" ]; }

# Kernel messages that mean trouble.  A scenario that provokes some sets dmesg_expected (a regular
# expression) before it ends.
dmesg_trouble='I/O error|critical .* error|is not a head|out of range|blocked for more than'
dmesg_trouble="$dmesg_trouble|BUG:|WARNING:|Oops|general protection|EXT4-fs (error|warning)"
dmesg_trouble="$dmesg_trouble|JBD2.*[Ee]rror|device reset|request timeout"
dmesg_expected=
check_dmesg() {
    dmesg | grep -E "$dmesg_trouble" >/tmp/trouble
    if [ -n "$dmesg_expected" ]; then
        grep -vE "$dmesg_expected" /tmp/trouble >/tmp/trouble.rest
        mv /tmp/trouble.rest /tmp/trouble
    fi
    if [ -s /tmp/trouble ]; then
        fail dmesg_is_clean "$(head -n 3 /tmp/trouble | tr '\n' '|')"
    else
        ok dmesg_is_clean
    fi
}
