# shellcheck shell=dash
# What scenarios have at hand.  Sourced by dom0's init; runs in busybox's sh.
#
# The lines the host reads:
#   RINGWAY CHECK name ok [detail]      one judgement; the host fails on FAIL
#   RINGWAY CHECK name FAIL [detail]
#   RINGWAY INFO key value              a fact, for the host to judge
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
        ok "$name" "at $(cut -d' ' -f1 /proc/uptime) s"
    else
        fail "$name" "status $status: $(tail -n 5 /tmp/check.out | tr '\n\r' '| ')"
    fi
    return $status
}

# equals NAME WANTED FOUND
equals() {
    if [ "$2" = "$3" ]; then ok "$1" "$3"; else fail "$1" "wanted '$2', found '$3'"; fi
}

# nap SECONDS: sleeps without starting a program, which takes longer than many a thing waited for.
[ -p /run/nap ] || mkfifo /run/nap
# shellcheck disable=SC3045 # busybox has it
nap() { read -r -t "$1" _ <>/run/nap || true; }

# within SECONDS COMMAND…: repeats the command until it succeeds.
within() {
    local now end
    read -r now _ </proc/uptime
    end=$((${now%.*} + 1 + $1))
    shift
    until "$@" >/dev/null 2>&1; do
        read -r now _ </proc/uptime
        [ "${now%.*}" -lt $end ] || return 1
        nap 0.2
    done
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

# --- the guest: one PV domain that obeys lines on its console ----------------------------------

# start_guest NAME VCPUS MEMORY_MIB
start_guest() {
    guest=$1
    cat >"/run/$1.cfg" <<CONFIG
name = "$1"
type = "pv"
kernel = "/ringway/vmlinuz"
ramdisk = "/ringway/domu.cpio"
memory = $3
vcpus = $2
extra = "console=hvc0 quiet panic=-1 mitigations=off"
on_poweroff = "destroy"
on_crash = "destroy"
CONFIG
    check "create_$1" xl create "/run/$1.cfg" || return 1
    domid=$(xl domid "$1")
    console=/var/log/xen/console/guest-$1.log
    tty=$(xenstore-read "/local/domain/$domid/console/tty")
    # The line discipline of the guest is enough.
    stty -F "$tty" raw -echo
    echo 0 >/run/asked
    within 60 grep -aq '^GUEST READY' "$console" || { fail "boot_$1" "$(tail -n 3 "$console")"; return 1; }
    ok "boot_$1"
}

# tell COMMAND: the guest carries it out; its end is awaited by `answer`.
tell() {
    # In a file, because this may run in a subshell.
    echo $(($(cat /run/asked) + 1)) >/run/asked
    echo "$1" >"$tty"
}

# answer SECONDS: waits for the last command; prints what it printed, returns its status.
answer() {
    local end asked
    asked=$(cat /run/asked)
    if ! within "$1" grep -aq "^GUEST END $asked " "$console"; then
        echo "no answer in $1 s"
        return 124
    fi
    tr -d '\r' <"$console" | awk -v n="$asked" '
        $1 == "GUEST" && $2 == "BEGIN" && $3 == n { on = 1; next }
        $1 == "GUEST" && $2 == "END" && $3 == n { exit }
        on'
    end=$(tr -d '\r' <"$console" | awk -v n="$asked" '$1 == "GUEST" && $2 == "END" && $3 == n { print $4 }')
    return "$end"
}

# unanswered: the guest is still about the last command.
unanswered() { ! grep -aq "^GUEST END $(cat /run/asked) " "$console"; }

# in_guest COMMAND: both, within two minutes.
in_guest() {
    tell "$1"
    answer 120
}

# --- the back-end ------------------------------------------------------------------------------

# A list of words: what runs in the background must not be a function, whose shell would be killed.
ringway="/ringway/bin/loader --library-path /ringway/bin /ringway/bin/ringway"

# start_backend ARGUMENTS: `ringway serve --xen` in the background, until it says that it is ready.
start_backend() {
    touch /run/ringway.out
    cat /run/ringway.out >>/run/ringway.all
    : >/run/ringway.out
    # shellcheck disable=SC2086 # a list of words
    $ringway serve --xen --xen-name "${served:-$(kind)}" --control /run/ringway.sock "$@" >>/run/ringway.out 2>&1 &
    backend=$!
    within 10 grep -q '^backend/' /run/ringway.out || fail backend_starts "$(tail -n 3 /run/ringway.out | tr '\n' '|')"
    # Without being asked: it is confined.
    grep -q 'sandbox on: ' /run/ringway.out || fail sandbox "$(head -n 3 /run/ringway.out | tr '\n' '|')"
}

ctl() { $ringway ctl --control /run/ringway.sock "$@" --json; }
# front_end TRUE|FALSE: whether a front-end is connected to the first disk, as `ctl list` says it.
front_end() { ctl list | tr -d ' \n' | grep -q "\"connected\":$1"; }
# state BACK FRONT: what both sides say in the store, of disk DEVICE of the guest.
states() { # DEVICE
    echo "$(xenstore-read "/local/domain/0/backend/$(kind)/$domid/$1/state")" \
        "$(xenstore-read "/local/domain/$domid/device/vbd/$1/state")"
}
states_are() { [ "$(states "$1")" = "$2 $3" ]; }
no_disks() { ctl list | tr -d ' \n' | grep -q '"disks":\[\]'; }
adopted() { grep -q 'front-end connected.*adopted.*true' /run/ringway.out; }

kill_backend() {
    kill -9 "$backend"
    wait "$backend" 2>/dev/null
}

stop_backend() {
    local status
    kill "$backend"
    wait "$backend"
    status=$?
    [ $status = 0 ] || fail backend_stops "status $status: $(tail -n 5 /run/ringway.out | tr '\n' '|')"
}

# --- disks put into xenstore without the toolstack ---------------------------------------------
#
# One program instead of several dozen, for any number of disks. What is written is what the toolstack
# writes (xen/include/public/io/blkif.h and xenbus.h).

# by_hand TYPE…: prepares the folders of the guest and of these back-ends. What is made in a folder has
# its permissions.
by_hand() {
    for type in "$@"; do permit "$type" || return 1; done
    xenstore-write "/local/domain/$domid/device/vbd" "" &&
        xenstore-chmod "/local/domain/$domid/device/vbd" "n$domid" r0
}

permit() {
    xenstore-write "/local/domain/0/backend/$1/$domid" "" &&
        xenstore-chmod "/local/domain/0/backend/$1/$domid" n0 "r$domid"
}

# These set a variable instead of printing: a subshell is a program, too.
# device LETTER: the number of xvdLETTER, in $number.
device() {
    case $1 in
        a) number=51712 ;; b) number=51728 ;; c) number=51744 ;; d) number=51760 ;; e) number=51776 ;;
        f) number=51792 ;; g) number=51808 ;; h) number=51824 ;; i) number=51840 ;;
    esac
}

# add_disk TYPE LETTER PARAMS [KEY VALUE]…: adds to $words what is to be written for one disk.
add_disk() {
    local back front type=$1
    device "$2"
    back=/local/domain/0/backend/$1/$domid/$number
    front=/local/domain/$domid/device/vbd/$number
    words="$words $back/frontend $front $back/frontend-id $domid $back/params $3 $back/mode w"
    words="$words $back/online 1 $back/device-type disk $back/dev xvd$2 $back/type $type"
    words="$words $back/removable 0 $back/bootable 0 $front/backend $back $front/backend-id 0"
    words="$words $front/virtual-device $number $front/device-type disk"
    shift 3
    while [ $# -gt 0 ]; do
        words="$words $back/$1 $2"
        shift 2
    done
    # Last: from here on the other side looks.
    words="$words $back/state 1 $front/state 1"
}

# put_disks: all that were added, in one transaction.
put_disks() {
    local all=$words
    words=
    # shellcheck disable=SC2086 # a list of words
    xenstore-write $all
}

# take_disks TYPE LETTER…: detaches as the toolstack does, and waits until back-ends say they are done.
take_disks() {
    local orders="" folders="" states="" back
    while [ $# -gt 0 ]; do
        device "$2"
        back=/local/domain/0/backend/$1/$domid/$number
        orders="$orders $back/online 0 $back/state 5"
        states="$states $back/state"
        folders="$folders $back /local/domain/$domid/device/vbd/$number"
        shift 2
    done
    # shellcheck disable=SC2086 # lists of words, here and below
    if ! xenstore-write $orders || ! within 90 are_closed $states; then
        xenstore-read $states
        return 1
    fi
    # shellcheck disable=SC2086
    xenstore-rm $folders
}
are_closed() { ! xenstore-read "$@" | grep -q -v '^6$'; }

# --- disks -------------------------------------------------------------------------------------

# Before Xen 4.18 the toolstack does not know backendtype=tap: its disks are those of the kernel's
# back-end, which must not be loaded then.
kind() {
    if [ "$(cat /sys/hypervisor/version/minor)" -ge 18 ]; then echo vbd3; else echo vbd; fi
}

# The lines of docs/manual.md.
disk_line() { # VDEV TARGET [ACCESS]
    local type=tap
    [ "$(kind)" = vbd3 ] || type=phy
    echo "format=raw,vdev=$1,access=${3:-rw},backendtype=$type,script=block-ringway,target=$2"
}

attach() { xl block-attach "$guest" "$(disk_line "$@")" </dev/null; }
# make_anew DEVICE: the front-end's folder is removed and made again, and the back-end is told to begin
# again: closed, it would have the guest close its side. The guest sees another device.
make_anew() {
    local front=/local/domain/$domid/device/vbd/$1 key words=
    for key in backend backend-id virtual-device device-type; do
        words="$words $front/$key $(xenstore-read "$front/$key")" || return 1
    done
    xenstore-rm "$front"
    in_guest "while [ -e /sys/bus/xen/devices/vbd-$1 ]; do sleep 0.05; done" || return 1
    # A closed one is not looked at, until the guest may write to it and the back-end waits for it.
    # shellcheck disable=SC2086 # pairs of words
    xenstore-write $words "$front/state" 6 && xenstore-chmod -r "$front" "n$domid" r0 || return 1
    xenstore-write "/local/domain/0/backend/$(kind)/$domid/$1/state" 1
    within 10 states_are "$1" 2 6 && xenstore-write "$front/state" 1
}
# The toolstack waits for a disk that never comes, and gives up.
refused_attach() {
    attach "$@" &
    within 20 grep -q 'is not served' /run/ringway.out
}
detach() { xl block-detach "$guest" "$1" </dev/null; }

dmesg_trouble='BUG:|WARNING:|Oops|general protection|blocked for more than'
check_dmesg() {
    dmesg | grep -E "$dmesg_trouble" >/tmp/trouble
    if [ -s /tmp/trouble ]; then
        fail dmesg_is_clean "$(head -n 3 /tmp/trouble | tr '\n' '|')"
    else
        ok dmesg_is_clean
    fi
}
