#!/usr/bin/env bash
# Guests of a libvirt of their own on served disks; see inside.sh. As root: libvirtd gets folders of its
# own in place of the host's, in a mount namespace.
#
#   run.sh RINGWAY VMLINUZ INITRD
set -euo pipefail
here=$(realpath "$(dirname "$0")")
program=$(realpath "$1") kernel=$(realpath "$2") initrd=$(realpath "$3")
folder=$(mktemp -d)
chmod 711 "$folder"
trap 'rm -rf "$folder"' EXIT
# shellcheck disable=SC2016 # the inner shell's
unshare --mount --pid --fork --kill-child --mount-proc -- bash -c '
    set -e
    for path in /run /etc/libvirt /var/lib/libvirt /var/cache/libvirt /var/log/libvirt; do
        mkdir -p "$path"
        mount -t tmpfs tmpfs "$path"
    done
    # The user and the group of QEMU, where the package with the units is not installed.
    for file in group passwd; do cp "/etc/$file" "/run/$file"; done
    grep -q ^kvm: /run/group || echo "kvm:x:64054:" >>/run/group
    gid=$(sed -n "s/^kvm:[^:]*:\([0-9]*\):.*/\1/p" /run/group)
    grep -q ^libvirt-qemu: /run/group || echo "libvirt-qemu:x:64055:" >>/run/group
    grep -q ^libvirt-qemu: /run/passwd ||
        echo "libvirt-qemu:x:64055:$gid::/var/lib/libvirt:/usr/sbin/nologin" >>/run/passwd
    for file in group passwd; do mount --bind "/run/$file" "/etc/$file"; done
    exec "$@"' inside "$here/inside.sh" "$program" "$kernel" "$initrd" "$folder"
