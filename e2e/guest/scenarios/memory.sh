# shellcheck shell=dash
# The daemon is in this guest, whose kernel limits memory by cgroups of version 2, and serves two disks, each
# with a process and a cgroup of its own. The client of one has it fill more memory than its cgroup may hold:
# its process is killed, and the other disk's client notices nothing. The program comes with all that it
# needs in an archive, as a disk.

cgroups=/sys/fs/cgroup
own=$cgroups/ringway

ringway() { chroot /host /bin/ringway "$@"; }
event() { awk -v name="$2" '$1 == name { print $2 }' "$own/$1/memory.events"; }
verify() { ringway io --read-only vhost-user:/run/a -c 'verify -P 0 0 64K'; }

# until_so COMMAND…: waits for it, for a minute.
until_so() {
    local tries=60
    until "$@" >/dev/null 2>&1; do
        tries=$((tries - 1))
        [ $tries -gt 0 ] || return 1
        sleep 1
    done
}

mkdir /host
mount -t tmpfs -o size=300m none /host
check unpacked tar -x -C /host -f /dev/vda
cp /usr/bin/busybox /host/bin/
for dir in proc sys dev tmp; do
    mkdir -p "/host/$dir"
    mount --bind "/$dir" "/host/$dir"
done
mkdir -p /host/run
cat >/host/run/disks.toml <<'END'
control = '/run/ctl'
isolate = true
[[disk]]
image = '/run/a.img'
size = '256M'
socket = '/run/a'
queues = 1
memory-max = '64M'
[[disk]]
image = '/run/b.img'
size = '4M'
socket = '/run/b'
queues = 1
END
mount -t cgroup2 none $cgroups
echo +memory >$cgroups/cgroup.subtree_control
mkdir $own
# The root of a namespace is its container's own, and the daemon may make cgroups there.
inside='/bin/busybox mount -t cgroup2 none /sys/fs/cgroup && exec /bin/ringway serve --config /run/disks.toml'
(
    echo 0 >$own/cgroup.procs
    exec chroot /host /bin/unshare --cgroup --mount /bin/busybox sh -c "$inside"
) >/tmp/serve.out 2>&1 &
check served until_so test -S /host/run/b
equals limit 67108864 "$(cat $own/disk-1/memory.max)"
equals no_limit max "$(cat $own/disk-2/memory.max)"

ringway bench vhost-user:/run/b --rw randrw --iodepth 4 --allow-write --verify --runtime 25s \
    >/tmp/neighbour.out 2>&1 &
neighbour=$!
check a_disk_of_zeroes until_so verify
# Three times as much as its limit.
refuses greedy_is_stopped chroot /host /bin/fill-memory /run/a 192
positive killed "$(event disk-1 oom_kill)"
wait $neighbour
status=$?
equals neighbour_verifies 0 $status
[ $status = 0 ] || info neighbour "$(tail -n 5 /tmp/neighbour.out | tr '\n\r' '| ')"
equals neighbour_lives 0 "$(event disk-2 oom_kill)"
check served_again until_so verify
info list "$(ringway ctl --control /run/ctl --json list | tr -d '\n')"
info log "$(grep 'killed by signal 9' /tmp/serve.out | head -n 1)"
