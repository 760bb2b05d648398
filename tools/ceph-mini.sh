#!/bin/bash
# A Ceph cluster on this host for tests: one monitor and one OSD that keeps its data in memory, on loopback,
# without systemd and without keys. Gone without a trace when its folder is.
#
#   tools/ceph-mini.sh start DIR    makes it: DIR/ceph.conf, a pool 'rbd' with an image 'img' of SIZE (64M)
#   tools/ceph-mini.sh osd DIR      starts its OSD again
#   tools/ceph-mini.sh mgr DIR      adds a manager without modules, for quotas of pools
#   tools/ceph-mini.sh stop DIR     ends it; pids are in DIR/mon.a.pid, DIR/osd.0.pid and DIR/mgr.x.pid
#
# Its OSD may be stopped for two minutes and continued. Leases are of 300 seconds (heartbeat grace x lease ratio),
# renewed by half time; an OSD that stood still for longer than what is left takes its placement groups for laggy,
# and of a group without a second OSD nothing ends that: all of its requests wait until the OSD is started again
# (ceph-container issue 1682).
#
# PORT and PORT+1 (6789) are its monitor's; AUTH=cephx has clients show keys, with tickets for TICKET seconds
# (3600); STORE=bluestore keeps data in DIR through the end of the OSD; GONE_WITH=PID ends the cluster and removes
# DIR once that process has ended.
set -eu
command=$1
dir=$(realpath -m "$2")
port=${PORT:-6789}
auth=${AUTH:-none}
store=${STORE:-memstore}
ticket=${TICKET:-3600}
conf=$dir/ceph.conf

end() {
    for file in "$dir"/*.pid; do
        [ -s "$file" ] || continue
        pid=$(cat "$file")
        kill -9 "$pid" 2>/dev/null || true
        while kill -0 "$pid" 2>/dev/null; do sleep 0.05; done
        rm -f "$file"
    done
}

configure() {
    cat >"$conf" <<EOF
[global]
fsid = $1
mon host = v2:127.0.0.1:$((port + 1)),v1:127.0.0.1:$port
auth cluster required = $auth
auth service required = $auth
auth client required = $auth
auth service ticket ttl = $ticket
auth mon ticket ttl = $ticket
keyring = $dir/keyring
osd pool default size = 1
osd pool default min size = 1
osd crush chooseleaf type = 0
osd pool default pg autoscale mode = off
mon allow pool size one = true
mon allow pool delete = true
mon data avail crit = 1
mon data avail warn = 1
mon osd min down reporters = 1
mon osd down out interval = 600
osd heartbeat grace = 6
osd heartbeat interval = 1
osd pool default read lease ratio = 50
ms bind ipv6 = false
public addr = 127.0.0.1
ms async op threads = 1
run dir = $dir
admin socket =
log file = $dir/\$name.log
pid file = $dir/\$name.pid
mon data = $dir/mon
osd data = $dir/osd
mgr data = $dir/mgr
mgr initial modules =
mgr stats period = 1
mgr tick period = 1
osd objectstore = $store
memstore device bytes = 1G
bluestore block size = 2G
bluestore min alloc size = 4096
bluestore cache autotune = false
osd class update on start = false
osd op num shards = 1
osd mclock skip benchmark = true
EOF
}

start() {
    mkdir -p "$dir/mon" "$dir/osd" "$dir/mgr/modules"
    if [ -n "${GONE_WITH:-}" ]; then
        setsid "$0" gone "$dir" "$GONE_WITH" </dev/null >/dev/null 2>&1 &
    fi
    fsid=$(cat /proc/sys/kernel/random/uuid)
    configure "$fsid"
    ceph-authtool -C "$dir/keyring" --gen-key -n mon. --cap mon 'allow *' >/dev/null
    ceph-authtool "$dir/keyring" --gen-key -n client.admin --cap mon 'allow *' --cap osd 'allow *' \
        --cap mgr 'allow *' >/dev/null
    monmaptool --create --clobber --fsid "$fsid" \
        --addv a "[v2:127.0.0.1:$((port + 1)),v1:127.0.0.1:$port]" "$dir/monmap" >/dev/null
    ceph-mon -c "$conf" --mkfs -i a --monmap "$dir/monmap" --keyring "$dir/keyring"
    ceph-mon -c "$conf" -i a
    id=$(cat /proc/sys/kernel/random/uuid)
    number=$(ceph -c "$conf" --connect-timeout 30 osd new "$id")
    [ "$number" = 0 ]
    ceph -c "$conf" auth get-or-create osd.0 mon 'allow profile osd' osd 'allow *' -o "$dir/osd/keyring"
    ceph-osd -c "$conf" -i 0 --mkfs --osd-uuid "$id" --keyring "$dir/osd/keyring" 2>>"$dir/mkfs.log"
    osd
    ceph -c "$conf" osd pool create rbd 8 8
    rbd -c "$conf" pool init rbd
    rbd -c "$conf" create --size "${SIZE:-64M}" rbd/img
}

osd() {
    # One that was killed may not have let go of its data yet.
    tries=100
    until ceph-osd -c "$conf" -i 0 --keyring "$dir/osd/keyring"; do
        tries=$((tries - 1))
        [ $tries -gt 0 ]
        sleep 0.1
    done
    until ceph -c "$conf" osd stat -f json | grep -q '"num_up_osds":1'; do sleep 0.1; done
}

mgr() {
    ceph -c "$conf" auth get-or-create mgr.x mon 'allow profile mgr' osd 'allow *' -o "$dir/mgr/keyring"
    ceph-mgr -c "$conf" -i x --mgr_module_path="$dir/mgr/modules" --keyring "$dir/mgr/keyring"
}

gone() {
    tail --pid="$1" -f /dev/null
    end
    rm -rf "$dir"
}

case $command in
start) start ;;
osd) osd ;;
mgr) mgr ;;
stop) end ;;
gone) gone "$3" ;;
*)
    echo "usage: $0 start|osd|mgr|stop DIR" >&2
    exit 2
    ;;
esac
