#!/usr/bin/env bash
# QEMU and NBD tools of a newer Debian than this machine's, for what its users meet today: the packages are
# unpacked below a folder, nothing is installed, and no root is needed.
#
#   unpack.sh DIR [SUITE]     DIR/bin has qemu-system-x86_64, qemu-img, qemu-io, qemu-nbd, qemu-storage-daemon,
#                             nbdcopy, nbdinfo and nbdkit, DIR/plugins those of nbdkit; SUITE: trixie
#
# Of backports (trixie-backports) everything is theirs that they have. It takes half a minute and 180 MB
# once; what is there already is taken as it is.
set -euo pipefail
dir=$(realpath -m "$1") suite=${2:-trixie}
[ $# -le 2 ] || { printf 'usage: unpack.sh DIR [SUITE]\n' >&2; exit 2; }
mkdir -p "$(dirname "$dir")"
# One at a time: a second caller finds the work done.
exec 9>"$dir.lock"
flock 9
[ ! -x "$dir/bin/qemu-storage-daemon" ] || exit 0

# Half of it, left by somebody who was killed.
rm -rf "$dir" "$dir.new"
stable=${suite%-backports}
set -- "$stable" "$dir.new"
if [ "$suite" != "$stable" ]; then
    set -- --aptopt="APT::Default-Release \"$suite\"" "$@"
    for of in "$stable" "$suite"; do
        set -- "$@" "deb http://deb.debian.org/debian $of main"
    done
fi
mmdebstrap --quiet --variant=extract --include=qemu-system-x86,qemu-utils,libnbd-bin,nbdkit "$@" >&2
mkdir "$dir.new/bin"
ln -s usr/lib/x86_64-linux-gnu/nbdkit/plugins "$dir.new/plugins"
# Its own loader and libraries, since those of this machine are older; and its own modules and firmware.
for program in qemu-system-x86_64 qemu-img qemu-io qemu-nbd nbdcopy nbdinfo nbdkit qemu-storage-daemon; do
    firmware=
    [ $program != qemu-system-x86_64 ] || firmware="-L \"\$root/usr/share/qemu\" -L \"\$root/usr/share/seabios\""
    cat >"$dir.new/bin/$program" <<END
#!/bin/sh
root=\$(dirname "\$(dirname "\$(realpath "\$0")")")
export QEMU_MODULE_DIR="\$root/usr/lib/x86_64-linux-gnu/qemu"
exec "\$root/usr/lib64/ld-linux-x86-64.so.2" --library-path "\$root/usr/lib/x86_64-linux-gnu" \\
    "\$root/usr/bin/$program" $firmware "\$@"
END
    chmod +x "$dir.new/bin/$program"
done
"$dir.new/bin/qemu-system-x86_64" --version >&2
mv "$dir.new" "$dir"
