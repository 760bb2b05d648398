#!/usr/bin/env bash
# Runs suites of others against this tree, in a Debian 13 of their own below the target directory. It is a campaign,
# and no part of ./test.
#
#   tools/suites.sh [SUITE…]     all of them, unless told otherwise
#
#   qtest      QEMU's test of vhost-user-blk, with `ringway serve` in place of qemu-storage-daemon
#   blktests   its group nbd in a guest of Debian's Linux, with `ringway nbd` and `serve --nbd` in place of nbd-server
#   iotests    QEMU's: raw cases over NBD, with `ringway nbd` in place of qemu-nbd, and short qcow2 cases, with each
#              qemu-io command at an export of `ringway nbd`. A case that fails is run with QEMU's own programs, too
#   libvirt    none of theirs: the guests of e2e/libvirt, by Debian 13's libvirt and QEMU
#
# Prints a line for each case: pass, left out (and why), or FAIL, which ends in status 1. What cases said is in
# suites/results of the target directory.
#
# RINGWAY      the program to be tested; it is built if none is named
# BLKTESTS     a folder with blktests; else it is cloned from its authors
#
# Needs root, mmdebstrap, git, the archive of Debian 13 (300 MB the first time), and 4 GB of disk. QEMU is built the
# first time for qtest, because Debian's has no qtest accelerator: some ten minutes of one core.
set -euo pipefail

# --- stand-ins: a copy of this file is called by the names of the programs that ringway takes the place of

# One value of a=b,c=d: value KEY LIST.
value() { tr ',' '\n' <<<"$2" | sed -n "s/^$1=//p" | head -n 1; }

as_storage_daemon() {
    local image='' children=()
    while [ $# -gt 0 ]; do
        case $1 in
            --blockdev) image=$(value filename "$2") ;;
            --export)
                ringway serve "$image" --format raw --fd "$(value addr.str "$2")" --queues "$(value num-queues "$2")" &
                children+=($!) ;;
        esac
        shift 2
    done
    trap 'kill "${children[@]}"' TERM
    # The first wait ends with the signal, the second with the children.
    wait || true
    wait
}

# nbd-server -p PID -C CONF, or nbd-server PORT FILE: both go on in the background.
as_nbd_server() {
    local pid_file conf file
    # By the name that the cases end it with.
    if [ "$1" = -p ]; then
        pid_file=$2 conf=$4
        file=$(sed -n 's/^exportname=//p' "$conf")
        setsid /opt/ringway/nbd-server nbd "$file" --format raw --export export --listen 127.0.0.1:10809 \
            </dev/null >/dev/null 2>&1 &
        printf '%s\n' $! >"$pid_file"
    else
        setsid /opt/ringway/nbd-server serve "$2" --format raw --nbd "127.0.0.1:$1" </dev/null >/dev/null 2>&1 &
    fi
}

# qemu-nbd as the iotests call it to serve an image; whatever else it is asked for, it does itself.
as_qemu_nbd() {
    local words=("$@") image='' socket='' format='' export='' pid_file=''
    while [ $# -gt 0 ]; do
        case $1 in
            --pid-file=*) pid_file=${1#*=} ;;
            -v | -t) ;;
            -e) shift ;;
            -k) socket=$2 && shift ;;
            -f) format=$2 && shift ;;
            -x) export=$2 && shift ;;
            -*) exec /usr/bin/qemu-nbd "${words[@]}" ;;
            *) image=$1 ;;
        esac
        shift
    done
    { [ -f "$image" ] && [ -n "$socket" ]; } || exec /usr/bin/qemu-nbd "${words[@]}"
    [ -z "$pid_file" ] || printf '%s\n' $$ >"$pid_file"
    exec ringway nbd "$image" --format "$format" --listen "unix:$socket" --export "$export" --connections 42 --quiet
}

# qemu-io at an export of `ringway nbd` where it is to open a qcow2 image and its commands are what NBD can say.
as_qemu_io() {
    local words=("$@") image='' format='' kept=() more=() place server code=0
    while [ $# -gt 0 ]; do
        case $1 in
            -f) format=$2 && shift ;;
            -c)
                case $2 in
                    *alloc* | *map* | *info* | *length* | *truncate* | *open* | *break* | *resume* | *abort* | \
                        *sigraise* | *'write -c'* | *' -b '* | *'-zu '*) exec /usr/bin/qemu-io "${words[@]}" ;;
                esac
                kept+=("$1" "$2") && shift ;;
            --cache | --aio | -t) kept+=("$1" "$2") && shift ;;
            -r) kept+=("$1") && more+=(--read-only) ;;
            -*) exec /usr/bin/qemu-io "${words[@]}" ;;
            *) image=$1 ;;
        esac
        shift
    done
    { [ -f "$image" ] && [ "$format" = qcow2 ]; } || exec /usr/bin/qemu-io "${words[@]}"
    place=$(mktemp -d)
    ringway nbd "$image" --format qcow2 --listen "unix:$place/nbd" --export '' --quiet "${more[@]}" &
    server=$!
    while [ ! -S "$place/nbd" ] && kill -0 $server 2>/dev/null; do sleep 0.05; done
    /usr/bin/qemu-io -f raw "${kept[@]}" "nbd+unix:///?socket=$place/nbd" || code=$?
    kill $server 2>/dev/null || true
    wait $server || true
    rm -rf "$place"
    return $code
}

case ${0##*/} in
    qemu-nbd) as_qemu_nbd "$@"; exit ;;
    qemu-io) as_qemu_io "$@"; exit ;;
    qemu-storage-daemon) as_storage_daemon "$@"; exit ;;
    nbd-server) as_nbd_server "$@"; exit ;;
esac

# --- the campaign

cd "$(dirname "$0")/.."
# shellcheck source=tools/prepare.sh
. tools/prepare.sh
for suite in "$@"; do
    case $suite in
        qtest | blktests | iotests | libvirt) ;;
        *) die "usage: tools/suites.sh [qtest] [blktests] [iotests] [libvirt]" ;;
    esac
done
[ $# -gt 0 ] || set -- qtest blktests iotests libvirt
need_packages mmdebstrap=mmdebstrap git=git
target=${CARGO_TARGET_DIR:-target}
mkdir -p "$target/suites/results"
top=$(realpath "$target/suites")
bed=$top/bed
exec 9>"$top/lock"
flock -n 9 || die "another tools/suites.sh is at work in $top"
if [ -z "${RINGWAY:-}" ]; then
    need_rust
    cargo build --quiet --locked --package ringway --bin ringway
    RINGWAY=$target/debug/ringway
fi

# in_bed COMMAND…: as root there, with processes of its own, which end with it.
in_bed() {
    # shellcheck disable=SC2016 # for the shell inside
    unshare --mount --pid --fork --kill-child sh -c '
        bed=$1 && shift
        mount --rbind "$bed" "$bed" && mount --rbind /dev "$bed/dev" && mount -t proc proc "$bed/proc" &&
        mount --rbind /sys "$bed/sys" &&
        mount -t tmpfs tmpfs "$bed/run" && mount -t tmpfs -o mode=1777 tmpfs "$bed/dev/shm" && exec chroot "$bed" "$@"
    ' sh "$bed" "$@" 9>&-
}

make_bed() {
    [ ! -d "$bed" ] || return 0
    say "unpacking Debian 13 below $top"
    rm -rf "$bed.new"
    # shellcheck disable=SC2016 # for the shell of mmdebstrap
    mmdebstrap --quiet --variant=minbase --aptopt='APT::Install-Recommends "false"' \
        --include=bc,bison,bsdextrautils,ca-certificates,cpio,dpkg-dev,e2fsprogs,file,flex,gawk,gcc,jq,kmod,libc6-dev \
        --include=libfdt-dev,libglib2.0-dev,libpixman-1-dev,linux-image-amd64,make,meson,ninja-build,pkgconf,procps \
        --include=psmisc,python3,python3-venv,qemu-system-x86,qemu-utils,seabios,xz-utils,zlib1g-dev \
        --setup-hook='sed -i "s/^deb \(.*\)/&\ndeb-src \1/" "$1/etc/apt/sources.list"' \
        trixie "$bed.new"
    mkdir -p "$bed.new/suites" "$bed.new/opt/ringway"
    mv "$bed.new" "$bed"
}

# The program under test, and this file under the names of others.
put_in() { # ROOT
    local name
    mkdir -p "$1/opt/ringway" "$1/suites"
    install "$RINGWAY" "$1/opt/ringway/ringway"
    ln -sf ringway "$1/opt/ringway/nbd-server"
    install tools/suites.sh "$1/suites/suites.sh"
    for name in qemu-storage-daemon nbd-server qemu-nbd qemu-io; do
        ln -sf suites.sh "$1/suites/$name"
    done
    ln -sf /opt/ringway/ringway "$1/usr/bin/ringway"
}

get_qemu() {
    [ ! -e "$bed/suites/qemu/VERSION" ] || return 0
    say "unpacking the source of Debian's QEMU"
    # shellcheck disable=SC2016 # for the shell inside
    in_bed sh -euc '
        cd /suites
        rm -rf qemu new
        apt-get update -q >/dev/null
        apt-get source -q --download-only qemu >/dev/null
        dpkg-source -x qemu_*.dsc new >/dev/null
        rm -f qemu_*
        mv new qemu
    ' >"$top/results/qemu.log" 2>&1 || die "the source of QEMU cannot be had: see $top/results/qemu.log"
}

make_qemu() {
    [ ! -x "$bed/suites/qemu/build/tests/qtest/qos-test" ] || return 0
    get_qemu
    say "building Debian's QEMU with its qtest accelerator"
    # shellcheck disable=SC2016 # for the shell inside
    in_bed sh -euc '
        rm -rf /suites/qemu/build
        mkdir /suites/qemu/build
        cd /suites/qemu/build
        ../configure --target-list=x86_64-softmmu --without-default-features --disable-docs --disable-download \
            --disable-werror --disable-install-blobs --enable-tcg --enable-tools \
            --enable-vhost-user --enable-vhost-user-blk-server --extra-cflags="-O0 -g0" >/dev/null
        ninja qemu-system-x86_64 tests/qtest/qos-test >/dev/null
    ' >"$top/results/qemu.log" 2>&1 || die "QEMU cannot be built: see $top/results/qemu.log"
}

# --- what came of it

failed=0
counts=()
tell() { # SUITE CASE pass|FAIL|out [WHY]
    local how=$3 why=${4:-}
    [ "$how" != FAIL ] || failed=1
    [ "$how" != out ] || how='left out'
    printf '%-14s %-44s %-9s %s\n' "$1" "$2" "$how" "$why"
    counts+=("$1: $how")
}

qtest() {
    local path how log
    make_qemu
    # Debian's have the firmware, which ours looks for in vain.
    printf '%s\n' '#!/bin/sh' \
        'exec /suites/qemu/build/qemu-system-x86_64 -L /usr/share/qemu -L /usr/share/seabios "$@"' \
        >"$bed/suites/qemu-system-x86_64"
    chmod +x "$bed/suites/qemu-system-x86_64"
    local environment=(QTEST_QEMU_BINARY=/suites/qemu-system-x86_64
        QTEST_QEMU_STORAGE_DAEMON_BINARY=/suites/qemu-storage-daemon)
    local test=/suites/qemu/build/tests/qtest/qos-test
    in_bed env "${environment[@]}" "$test" -l 2>/dev/null |
        sed -n 's|^# \(/.*/vhost-user-blk.*-tests/.*\)|\1|p' >"$top/results/qtest.list"
    [ -s "$top/results/qtest.list" ] || die "QEMU's qos-test has no cases of vhost-user-blk"
    while read -r path; do
        log=$top/results/qtest-$(basename "$path").log how=FAIL
        in_bed timeout 120 env "${environment[@]}" "$test" -p "$path" --tap -k >"$log" 2>&1 </dev/null && how=pass
        grep -q '^ok .*# SKIP' "$log" && how=out
        grep -q '^ok ' "$log" || how=FAIL
        tell qtest "${path##*-tests/}" "$how" "$(sed -n 's/^ok .*# SKIP//p' "$log")"
    done <"$top/results/qtest.list"
}

# Which of QEMU's cases speak of FORMAT and PROTOCOL, in the shell: cases FORMAT PROTOCOL.
cases() {
    local name file
    for file in "$bed"/suites/qemu/tests/qemu-iotests/[0-9][0-9][0-9]; do
        name=${file##*/}
        if head -n 1 "$file" | grep -q bash && grep -qE "^_supported_fmt.*($1|generic)" "$file" &&
            grep -qE "^_supported_proto.*($2|generic)" "$file"; then
            # Those of images that QEMU counts as quick, up to where they turn to what NBD knows nothing of.
            [ "$1" = raw ] || [ "$((10#$name))" -lt 110 ] || continue
            [ "$1" = raw ] || { grep -q '^# group:.*quick' "$file" && grep -q QEMU_IO "$file"; } || continue
            printf '%s\n' "$name"
        fi
    done
}

# What a case wants that is no fault: CASE REASON.
iotests_left_out() {
    sed -n "s|^$1 ||p" <<'END'
qcow2-020 it names a base by words for QEMU (json:), which are not followed
qcow2-025 it makes an export larger, which NBD cannot say
qcow2-039 what is mended in an image that was not closed is told in other words
qcow2-069 a base that is missing is refused in other words
qcow2-098 what is mended in an image that was not closed is told in other words
END
}

# One case with these programs: iotest LOG CASE FORMAT PROTOCOL VARIABLE=PROGRAM…
iotest() {
    local log=$1 name=$2 format=$3 protocol=$4
    shift 4
    in_bed env QEMU_PROG=/usr/bin/qemu-system-x86_64 QEMU_IMG_PROG=/usr/bin/qemu-img QEMU_IO_PROG=/usr/bin/qemu-io \
        QEMU_NBD_PROG=/usr/bin/qemu-nbd QSD_PROG=/usr/bin/qemu-storage-daemon TEST_DIR=/suites/scratch "$@" \
        sh -c 'cd /suites/qemu/tests/qemu-iotests && exec timeout 300 ./check "$@"' sh "-$format" "-$protocol" "$name" \
        >"$log" 2>&1 </dev/null || echo "Failures: $name" >>"$log"
    if grep -q '^Failures:' "$log"; then
        echo FAIL
    elif grep -q '^Not run:' "$log"; then
        echo out
    else
        echo pass
    fi
}

iotests() {
    local format protocol name how why log own programs
    get_qemu
    for format in raw qcow2; do
        protocol=file programs=(QEMU_IO_PROG=/suites/qemu-io)
        [ $format = qcow2 ] || protocol=nbd programs=(QEMU_NBD_PROG=/suites/qemu-nbd)
        while read -r name; do
            log=$top/results/iotests-$format-$name.log why=''
            how=$(iotest "$log" "$name" $format "$protocol" "${programs[@]}")
            [ "$how" != out ] || why=$(grep -m 1 -o 'not run.*' "$log" | tr -s ' ')
            if [ "$how" = FAIL ]; then
                own=$(iotest "$log.own" "$name" $format "$protocol" A=a)
                [ "$own" = pass ] || how=out why="QEMU's own programs do not pass it here"
                [ "$how" = out ] || why=$(iotests_left_out "$format-$name")
                [ -z "$why" ] || how=out
            fi
            tell iotests "$format $name" "$how" "$why"
        done < <(cases $format $protocol)
    done
}

libvirt() {
    local log=$top/results/libvirt.log how=FAIL
    if [ ! -x "$bed/usr/sbin/libvirtd" ]; then
        say "installing Debian 13's libvirt there"
        in_bed sh -euc 'export DEBIAN_FRONTEND=noninteractive
            apt-get update -q && apt-get install -qy --no-install-recommends \
            libvirt-daemon libvirt-daemon-driver-qemu libvirt-clients dosfstools mtools syslinux ovmf' \
            >"$log" 2>&1 </dev/null || die "libvirt cannot be installed: see $log"
    fi
    e2e/guest/build.sh "$top/e2e-guest" >"$log" 2>&1 || die "there is no guest: see $log"
    rm -rf "$bed/suites/e2e"
    mkdir "$bed/suites/e2e"
    cp -a e2e/guest e2e/libvirt "$top/e2e-guest/vmlinuz" "$top/e2e-guest/initrd.cpio" "$bed/suites/e2e"
    in_bed timeout 1200 /suites/e2e/libvirt/run.sh /opt/ringway/ringway /suites/e2e/vmlinuz /suites/e2e/initrd.cpio \
        >"$log" 2>&1 </dev/null && tail -n 1 "$log" | grep -q passed && how=pass
    tell libvirt "guests of SeaBIOS and OVMF" $how "$(in_bed libvirtd --version)"
}

blktests() {
    local guest=$top/guest release initrd=$top/guest.cpio kernel log=$top/results/blktests.log name how told
    if [ ! -d "$guest" ]; then
        say "unpacking Debian 13 for a guest"
        rm -rf "$guest.new"
        # shellcheck disable=SC2016 # for the shell of mmdebstrap
    mmdebstrap --quiet --variant=minbase --aptopt='APT::Install-Recommends "false"' \
            --include=bc,bsdextrautils,e2fsprogs,fio,gawk,iproute2,kmod,libnl-utils,nbd-client,parted,procps \
            --include=psmisc,udev,util-linux \
            trixie "$guest.new"
        mv "$guest.new" "$guest"
    fi
    if [ ! -d "$top/blktests" ]; then
        rm -rf "$top/blktests.new"
        if [ -n "${BLKTESTS:-}" ]; then
            cp -a "$BLKTESTS" "$top/blktests.new"
        else
            git clone --quiet --depth 1 https://github.com/linux-blktests/blktests "$top/blktests.new"
        fi
        mv "$top/blktests.new" "$top/blktests"
    fi
    kernel=$(find "$bed/boot" -name 'vmlinuz-*' | head -n 1)
    release=${kernel##*/vmlinuz-}
    rm -rf "$guest/blktests" "$guest/usr/lib/modules" "$bed/suites/blktests"
    cp -a "$top/blktests" "$bed/suites/blktests"
    # Programs of groups other than nbd may want what is not there.
    in_bed make --quiet -k -C /suites/blktests/src >"$log.make" 2>&1 || true
    cp -a "$bed/suites/blktests" "$guest/blktests"
    mkdir -p "$guest/usr/lib/modules/$release"
    cp "$bed/usr/lib/modules/$release/"modules.{builtin,builtin.modinfo,order} "$guest/usr/lib/modules/$release/"
    in_bed modprobe -S "$release" --show-depends -a nbd ext4 | sed -n 's/^insmod //p' | while read -r name; do
        install -D "$bed$name" "$guest/usr${name#/usr}"
    done
    chroot "$guest" depmod "$release"
    put_in "$guest"
    ln -sf /suites/nbd-server "$guest/usr/sbin/nbd-server"
    printf '127.0.0.1 localhost\n' >"$guest/etc/hosts"
    cat >"$guest/init" <<'END'
#!/bin/bash
export PATH=/usr/sbin:/usr/bin HOME=/root
mount -t proc proc /proc && mount -t sysfs sysfs /sys && mount -t devtmpfs dev /dev
mkdir -p /dev/shm && mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs /run && mount -t tmpfs tmpfs /tmp
mount -t debugfs debugfs /sys/kernel/debug
ln -sf /proc/self/fd /dev/fd
exec </dev/console >/dev/console 2>&1
ip link set lo up
/usr/lib/systemd/systemd-udevd --daemon
udevadm trigger && udevadm settle
# Plain lines, as for no terminal.
cd /blktests && ./check nbd 2>&1 | cat
find results -name '*.bad' -exec tail -n 40 {} +
echo THE END
echo b >/proc/sysrq-trigger
END
    chmod +x "$guest/init"
    mkdir -p "$bed/suites/guest"
    (cd "$guest" && find . -path ./usr/share/doc -prune -o -path ./usr/share/locale -prune -o -path ./var/cache -prune \
        -o -path ./var/lib/apt -prune -o -print) >"$top/guest.list"
    mount --bind "$guest" "$bed/suites/guest"
    in_bed sh -c 'cd /suites/guest && cpio --quiet -o -H newc' <"$top/guest.list" >"$initrd"
    umount "$bed/suites/guest"
    cp "$initrd" "$bed/suites/guest.cpio"
    in_bed timeout 900 qemu-system-x86_64 -accel tcg,thread=multi -cpu max -m 3G -smp 2 -nodefaults -no-user-config \
        -display none -serial stdio -no-reboot -machine q35 \
        -kernel "/boot/vmlinuz-$release" -initrd /suites/guest.cpio \
        -append "console=ttyS0 quiet panic=-1 tsc=reliable rdinit=/init" >"$log" 2>&1 </dev/null || true
    grep -q '^THE END' "$log" || die "the guest did not come to its end: see $log"
    told=''
    while read -r name how; do
        told=1
        case $how in
            *'[passed]'*) tell blktests "$name" pass ;;
            *'[failed]'*) tell blktests "$name" FAIL ;;
            *'[not run]'*) tell blktests "$name" out "$(grep -A 1 "^$name .*not run" "$log" | tail -n 1 | xargs)" ;;
        esac
    done < <(tr -d '\r' <"$log" | grep -E '^nbd/[0-9]+ .*\[(passed|failed|not run)\]' | sort -u)
    [ -n "$told" ] || die "blktests says nothing of any case: see $log"
}

make_bed
put_in "$bed"
say "$("$RINGWAY" --version | tr '\n' ' ')"
for suite in "$@"; do
    case $suite in
        qtest) qtest ;;
        blktests) blktests ;;
        iotests) iotests ;;
        libvirt) libvirt ;;
    esac
done
printf '%s\n' "${counts[@]}" | sort | uniq -c
exit $failed
