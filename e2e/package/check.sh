#!/usr/bin/env bash
# Installs, starts, upgrades, removes and purges the Debian package in a fresh Debian: a chroot in
# namespaces of its own. As root.
#
#   check.sh ROOT.tar FIRST.deb SECOND.deb
#
# ROOT.tar is made with mmdebstrap if it is not there (about a minute), and kept.
set -euo pipefail
here=$(realpath "$(dirname "$0")")
tar=$(realpath -m "$1") first=$(realpath "$2") second=$(realpath "$3")
if [ ! -f "$tar" ]; then
    mmdebstrap --quiet --format=tar --variant=minbase --include=systemd "${RINGWAY_SUITE:-bookworm}" "$tar.new"
    mv "$tar.new" "$tar"
fi
root=$(mktemp -d)
trap 'rm -rf --one-file-system "$root"' EXIT
tar -C "$root" -xf "$tar" --exclude=./dev
mkdir -p "$root/dev"
cp "$first" "$root/tmp/first.deb"
cp "$second" "$root/tmp/second.deb"
cp "$here/inside.sh" "$root/tmp/"
# Mounts and processes go with the namespaces.
# shellcheck disable=SC2016 # the inner shell's
unshare --mount --pid --fork --kill-child -- bash -c '
    set -e
    mount -t proc proc "$1/proc"
    mount --rbind /dev "$1/dev"
    mount -t tmpfs tmpfs "$1/run"
    exec chroot "$1" bash /tmp/inside.sh /tmp/first.deb /tmp/second.deb' inside "$root"
