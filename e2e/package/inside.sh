#!/bin/bash
# Runs in a fresh Debian, as root, with systemd's programs but without systemd: installs the package,
# starts the daemon as its units do, upgrades, removes and purges it. Prints "passed" at the end.
#
#   inside.sh FIRST.deb SECOND.deb
set -euo pipefail
first=$1 second=$2
unit=/usr/lib/systemd/system/ringway@.service
socket=/run/ringway/example/disk.sock
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8

step() { printf -- '-- %s\n' "$*"; }
fail() { printf 'FAILED: %s\n' "$*" >&2; exit 1; }
equals() { [ "$2" = "$3" ] || fail "$1: $3, not $2"; } # equals WHAT WANTED FOUND
is_gone() { for path; do [ ! -e "$path" ] || fail "$path is still there"; done; }
is_there() { for path; do [ -e "$path" ] || fail "there is no $path"; done; }
wait_for() { # wait_for COMMAND…
    for _ in $(seq 300); do
        "$@" && return
        sleep 0.1
    done
    fail "it does not happen: $*"
}

step "install"
dpkg --install "$first"
is_there /etc/ringway/example.toml /usr/share/man/man1/ringway-serve.1.gz /usr/share/man/man5/ringway.toml.5.gz \
    /usr/share/man/man7/ringway-control.7.gz /usr/share/bash-completion/completions/ringway \
    /usr/share/doc/ringway/copyright /usr/share/doc/ringway/changelog.Debian.gz
equals "groups of the user" "ringway kvm" "$(id -nG ringway)"
equals "owner of the images" "ringway:ringway 750" "$(stat -c '%U:%G %a' /var/lib/ringway)"
ringway --version

step "units"
systemd-analyze verify --man=no "$unit" "${unit%service}socket" 2>&1 | tee /tmp/verify
[ ! -s /tmp/verify ] || fail "systemd-analyze verify has something to say"
systemd-analyze security --offline=true --no-pager "$unit" | tail -n 1
systemd-analyze security --offline=true --threshold=25 --no-pager "$unit" >/dev/null ||
    fail "the unit is more exposed than 2.5"

step "discovery by managers of virtual machines"
binary=$(sed -n 's/.*"binary": "\(.*\)".*/\1/p' /usr/share/qemu/vhost-user/50-ringway.json)
"$binary" --print-capabilities | grep -q '"type":"block"' || fail "$binary is no back-end for disks"

# As systemd does it by the units: the folder, the socket with its owner, then the daemon as their user,
# when the first front-end connects.
begin() {
    install -d -m 755 -o ringway -g ringway /run/ringway/example
    local line
    line=$(sed -n 's/^ExecStart=//p' "$unit" | sed 's/%i/example/g')
    # shellcheck disable=SC2086 # it is words
    systemd-socket-activate --listen="$socket" --fdname=disk \
        setpriv --reuid=ringway --regid=ringway --init-groups --bounding-set=-all --inh-caps=-all \
        --no-new-privs $line </dev/null >>/tmp/daemon.log 2>&1 &
    daemon=$!
    wait_for test -S "$socket"
    chown ringway:kvm "$socket"
    chmod 660 "$socket"
}
is_serving() { ringway ctl --control /run/ringway/example/control.sock list >/dev/null 2>&1; }
# As the QEMU of libvirt: another user of the group.
vm() { setpriv --reuid=vm --regid=vm --init-groups ringway io "vhost-user:$socket" -c "$1"; }

step "start"
useradd --system --groups kvm vm
begin
vm "write -P 0x5a 0 64k"
wait_for is_serving
equals "user of the daemon" "ringway" "$(stat -c %U "/proc/$daemon")"
setpriv --reuid=nobody --regid=nogroup --clear-groups ringway info "vhost-user:$socket" 2>/dev/null &&
    fail "anybody may connect"
grep -q 'sandbox on:' /tmp/daemon.log || fail "no sandbox: $(cat /tmp/daemon.log)"
[ -d /run/ringway/example/state ] || fail "no folder for its state"

step "upgrade"
dpkg --install "$second"
equals "version" "$(dpkg-deb --field "$second" Version)" "$(dpkg-query --show --showformat='${Version}' ringway)"
kill -0 "$daemon" || fail "the upgrade has ended the daemon"
[[ $(readlink "/proc/$daemon/exe") == *"(deleted)" ]] || fail "the program is still the old one"
vm "read -P 0x5a 0 64k"
kill -KILL "$daemon"
wait "$daemon" || true
rm -f "$socket"
begin
vm "read -P 0x5a 0 64k"
wait_for is_serving
[[ $(readlink "/proc/$daemon/exe") != *"(deleted)" ]] || fail "the new program was not started"

step "remove"
kill -TERM "$daemon"
wait "$daemon" || fail "the daemon ends with status $?: $(tail -n 3 /tmp/daemon.log)"
echo "control = '/run/ringway/vm1/control.sock'" >/etc/ringway/vm1.toml
dpkg --remove ringway
is_gone /usr/bin/ringway "$unit" /usr/share/qemu/vhost-user/50-ringway.json
is_there /etc/ringway/example.toml /var/lib/ringway/example.img

step "purge"
dpkg --purge ringway
is_gone /etc/ringway/example.toml
# What people made is theirs.
is_there /etc/ringway/vm1.toml /var/lib/ringway/example.img
[ -z "$(find /usr -name '*ringway*')" ] || fail "files are left in /usr"
dpkg --list ringway 2>/dev/null | grep -q '^.i' && fail "it is still installed"
echo passed
