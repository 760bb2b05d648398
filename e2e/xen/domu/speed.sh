# shellcheck shell=dash
# Measures disks in turns with fio.  Sourced by the guest's init.

# speed CELLS ROUNDS RUNTIME_MS RAMP_MS DISK…: CELLS are words RW:BS:DEPTH.  Prints one line for each
# measurement: DISK RW BS DEPTH ROUND IOPS USER% SYSTEM%.
speed() {
    local cells=$1 rounds=$2 runtime=$3 ramp=$4 cell round disk rw bs depth turn=0
    shift 4
    {
        # Times of single requests are not asked for: to take them costs as much as a request.
        echo "[global]
ioengine=libaio
direct=1
thread=1
time_based=1
runtime=${runtime}ms
ramp_time=${ramp}ms
gtod_reduce=1
norandommap=1
scramble_buffers=0
zero_buffers=1
stonewall=1"
        for round in $(seq "$rounds"); do
            for cell in $cells; do
                rw=${cell%%:*} bs=${cell#*:} depth=${cell##*:}
                bs=${bs%:*}
                # Whoever was first last time is last now.
                turn=$((turn + 1))
                # shellcheck disable=SC2046 # names of disks
                [ $((turn % 2)) = 0 ] || set -- $(reversed "$@")
                for disk in "$@"; do
                    echo "[$disk.$rw.$bs.$depth.$round]
filename=/dev/$disk
rw=rand$rw
bs=$bs
iodepth=$depth"
                done
            done
        done
    } >/run/speed.fio
    /sbin/fio --eta=never --output-format=terse --terse-version=3 --output=/run/speed.out /run/speed.fio || return 1
    awk -F';' '$1 == 3 { gsub(/\./, " ", $3); print $3, $8 + $49, $88, $89 }' /run/speed.out
}
reversed() {
    local all=
    for word in "$@"; do all="$word $all"; done
    echo "$all"
}
