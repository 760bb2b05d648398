#!/usr/bin/env bash
# Makes a disk that boots: FAT from its first sector on, with a boot loader for a BIOS (syslinux) and a list
# of what the shell of EFI is to do. Behind the file system the disk is empty.
#
#   boot-disk.sh FILE MIB VMLINUZ INITRD WORDS      of 256 MiB; MIB of them are the file system's; WORDS are
#                                                   for the kernel
set -euo pipefail
file=$1 mib=$2 kernel=$3 initrd=$4 words=$5
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
PATH=$PATH:/usr/sbin:/sbin

truncate -s 256M "$file"
mkfs.vfat -F 32 -n RINGWAY "$file" $((mib * 1024)) >/dev/null 2>&1
printf 'DEFAULT linux\nLABEL linux\n KERNEL vmlinuz\n INITRD initrd\n APPEND %s\n' "$words" >"$work/syslinux.cfg"
printf 'fs0:\r\nvmlinuz initrd=initrd %s\r\n' "$words" >"$work/startup.nsh"
# Firmware reads slowly.
gzip -1 <"$initrd" >"$work/initrd.gz"
mcopy -i "$file" "$kernel" ::vmlinuz
mcopy -i "$file" "$work/initrd.gz" ::initrd
mcopy -i "$file" "$work/syslinux.cfg" ::syslinux.cfg
mcopy -i "$file" "$work/startup.nsh" ::startup.nsh
syslinux --install "$file"
