#!/usr/bin/env bash
# Assembles a Xen machine from Debian packages, without installing them.
#
#   build.sh OUTDIR PROGRAM CHECK [speed]     writes OUTDIR/xen, vmlinuz, dom0.cpio
#
# PROGRAM is the `ringway` that runs in dom0, CHECK the `disk-check` that runs in the guest; both come
# with the libraries they have on this machine. With `speed` dom0 also has QEMU, and the guest has fio: 100 MB more.
#
# Xen, its tools, the kernel and every library come from the machine's own apt sources, so they fit
# each other on whatever release this is.  The result is kept in a cache; its key is the files of
# this folder and the versions of the packages.
#
# Settings (environment):
#   RINGWAY_XEN_CACHE    where results are kept
#                        (default: ${XDG_CACHE_HOME:-$HOME/.cache}/ringway/xen)
#
# It needs no root.  It needs a Debian of the amd64 architecture.  Exit status 77: not on this machine,
# or packages cannot be had.
set -euo pipefail
export LC_ALL=C

# What the toolstack's programs load from the kernel; a path below "kernel/" each.
modules_dom0="drivers/xen/xen-privcmd drivers/xen/xenfs/xenfs drivers/xen/xen-evtchn
              drivers/xen/xen-gntdev drivers/xen/xen-gntalloc drivers/block/xen-blkback/xen-blkback
              drivers/block/loop drivers/block/brd"
modules_domu="drivers/block/xen-blkfront"
programs="xenstored xenconsoled xl xen-init-dom0"
xenstore_tools="xenstore-ls xenstore-read xenstore-write xenstore-list xenstore-rm xenstore-exists
                xenstore-chmod"
packages="xenstore-utils busybox-static"
# With paths from the root, for dom0 and for the guest.
more_dom0=
more_domu=
# Pulled in by dependencies, but nothing above runs or loads them.
not_needed='^(python3|libpython3|perl|libperl|dpkg$|adduser$|passwd$|debconf|tar$|libpam|media-types$'
not_needed+='|qemu-system-data|seabios|ipxe|gstreamer|initramfs|linux-base|xen-hypervisor-common|ucf|grub|kmod$|udev$|systemd|iproute2|sensible)'

say() { printf 'xen/build.sh: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }
# Nothing is wrong, but not here.
unfit() { say "$*"; exit 77; }

case $#:${4:-} in
  3:) flavour=tests ;;
  4:speed)
    flavour=speed
    packages+=" qemu-system-xen fio"
    more_dom0=usr/libexec/xen-qemu-system-i386
    more_domu=usr/bin/fio ;;
  *) die "usage: build.sh OUTDIR PROGRAM CHECK [speed]" ;;
esac
[ "$(uname -m)" = x86_64 ] || unfit "the machine is amd64 only, this one is $(uname -m)"
missing=
for tool in apt-get:apt apt-cache:apt dpkg-deb:dpkg tar:tar xz:xz-utils sha256sum:coreutils \
            flock:util-linux find:findutils awk:mawk; do
  command -v "${tool%:*}" >/dev/null || missing+=" ${tool%:*} (package ${tool#*:})"
done
[ -z "$missing" ] || unfit "missing on this machine:$missing"

here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
out=$(cd "$1" && pwd)
cache=${RINGWAY_XEN_CACHE:-${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/ringway/xen}
mkdir -p "$cache"
# One build at a time: a second caller waits here and then finds the work done.
exec 9>"$cache/lock"
flock 9

digest() { sha256sum | cut -c1-16; }
script=$flavour-$(digest <"$here/build.sh")
work=$cache/work
trap 'rm -rf "$work" "$cache/names.new" "$cache/lists"' EXIT

# --- names and versions ----------------------------------------------------------------------

apt_options=()
set_apt() { # LISTS_DIR
  # An empty status file makes apt resolve every dependency, as on a bare machine.
  apt_options=(-o Dir::State::status=/dev/null -o Dir::State::lists="$1"
               -o APT::Architecture=amd64 -o APT::Architectures=amd64
               -o APT::Sandbox::User= -o APT::Install-Recommends=false)
}

depends() { # PACKAGE PATTERN: the first dependency that matches
  apt-cache "${apt_options[@]}" depends "$1" 2>/dev/null |
    awk -v p="$2" '$1 == "Depends:" && $2 ~ p { print $2; exit }'
}

# Prints "name=version" lines.
resolve() {
  local hypervisor utils kernel answer
  hypervisor=$(depends xen-system-amd64 '^xen-hypervisor-[0-9]')
  utils=$(depends xen-system-amd64 '^xen-utils-[0-9]')
  kernel=$(depends linux-image-amd64 '^linux-image-[0-9]')
  if [ -z "$hypervisor" ] || [ -z "$utils" ] || [ -z "$kernel" ]; then
    say "apt does not know xen-system-amd64 and linux-image-amd64"
    return 1
  fi
  # shellcheck disable=SC2086 # a list of words
  answer=$(apt-get "${apt_options[@]}" -s install "$hypervisor" "$utils" $packages "$kernel") ||
    return 1
  awk -v drop="$not_needed" '$1 == "Inst" && $2 !~ drop { gsub(/[()]/, "", $3); print $2 "=" $3 }' \
    <<<"$answer" | sort
}

# --- from packages to a machine --------------------------------------------------------------

fetch() { # DIR, names on stdin
  rm -rf "$1"
  mkdir -p "$1"
  (cd "$1" && xargs apt-get "${apt_options[@]}" -qq download) >&2
}

unpack() { # DEBS ROOT
  local deb dir
  for dir in bin sbin lib lib64; do
    mkdir -p "$2/usr/$dir"
    ln -s "usr/$dir" "$2/$dir"
  done
  for deb in "$1"/*.deb; do
    case $deb in
      # Most of the kernel's gigabyte stays where it is.
      */linux-image-*) set -- "$1" "$2" --wildcards './boot/vmlinuz-*' '*/drivers/xen/*' \
                         '*/drivers/block/*' ;;
      *) set -- "$1" "$2" --exclude=./usr/share --exclude=./etc --exclude=./dev --exclude=./var ;;
    esac
    dpkg-deb --fsys-tarfile "$deb" |
      tar -x -C "$2" --keep-directory-symlink --no-same-owner "${@:3}"
  done
}

skeleton() { # ROOT
  mkdir -p "$1"/{bin,dev,proc,sys,tmp,lib,run,ringway}
  cp "$sys/usr/bin/busybox" "$1/bin/busybox"
  # Its applets as links, because scripts of the toolstack call them by name.
  "$sys/usr/bin/busybox" --list | while read -r applet; do
    [ "$applet" = busybox ] || ln -s busybox "$1/bin/$applet"
  done
}

carry_modules() { # ROOT MODULE…
  local root=$1 name file kernel
  shift
  mkdir -p "$root/lib/modules"
  kernel=$(find "$sys/usr/lib/modules" -mindepth 2 -maxdepth 2 -name kernel)
  for name in "$@"; do
    file=$(find "$kernel/$(dirname "$name")" -name "$(basename "$name").ko*" | head -n 1)
    case $file in
      *.ko) cp "$file" "$root/lib/modules/" ;;
      *.ko.xz) xz -dc "$file" >"$root/lib/modules/$(basename "$name").ko" ;;
      *) die "the kernel package has no $name" ;;
    esac
  done
}

carry_programs() { # ROOT PROGRAM…: each with the libraries it needs, at one place
  local root=$1 program library
  local libraries=$sys/usr/lib/x86_64-linux-gnu
  local loader=$libraries/ld-linux-x86-64.so.2
  shift
  mkdir -p "$root"/{sbin,lib64,lib/x86_64-linux-gnu}
  cp -L "$loader" "$root/lib64/"
  for program in "$@"; do
    [ -e "$program" ] || die "no package has $(basename "$program")"
    cp -L "$program" "$root/sbin/"
    # Some packages keep theirs in a folder of their own.
    "$loader" --library-path "$(find "$libraries" -maxdepth 1 -type d -printf '%p:')" \
        --list "$program" |
      awk '/not found/ { print "/missing/" $1 } $3 ~ /^\// { print $3 }'
  done | sort -u >"$work/libraries"
  while read -r library; do
    case $library in
      "$libraries"/*) cp -L "$library" "$root/lib/x86_64-linux-gnu/" ;;
      *) die "no package has the library $(basename "$library")" ;;
    esac
  done <"$work/libraries"
  # Opened by name when a thread is cancelled.
  cp -L "$sys/usr/lib/x86_64-linux-gnu/libgcc_s.so.1" "$root/lib/x86_64-linux-gnu/"
}

pack() { # DIR: its content as cpio on stdout, owned by root
  (cd "$1" && find . | sort | "$sys/usr/bin/busybox" cpio -o -H newc -R 0:0 2>/dev/null)
}

build() { # NAMES_FILE DESTINATION
  local tools bin tool result=$work/result
  sys=$work/sys
  mkdir -p "$sys" "$result"
  say "unpacking $(find "$work/debs" -name '*.deb' | wc -l) packages"
  unpack "$work/debs" "$sys"
  tools=("$sys"/usr/lib/xen-*/bin)
  bin=()
  for tool in $programs; do bin+=("${tools[0]}/$tool"); done
  for tool in $xenstore_tools; do bin+=("$sys/usr/bin/$tool"); done
  for tool in $more_dom0; do bin+=("$sys/$tool"); done
  skeleton "$work/dom0"
  carry_programs "$work/dom0" "${bin[@]}"
  # shellcheck disable=SC2086 # lists of words
  carry_modules "$work/dom0" $modules_dom0
  skeleton "$work/domu"
  # shellcheck disable=SC2086
  carry_modules "$work/domu" $modules_domu
  bin=()
  for tool in $more_domu; do bin+=("$sys/$tool"); done
  [ ${#bin[@]} = 0 ] || carry_programs "$work/domu" "${bin[@]}"
  pack "$work/dom0" >"$result/dom0.cpio"
  pack "$work/domu" >"$result/domu.cpio"
  cp "$sys"/boot/vmlinuz-* "$result/vmlinuz"
  gunzip -c "$sys"/boot/xen-[0-9]*.gz >"$result/xen"
  cp "$sys/usr/bin/busybox" "$result/busybox"
  cp "$1" "$result/packages"
  mv "$result" "$2"
}

# --- which cached build serves these inputs --------------------------------------------------

# Asking apt takes seconds.  As long as its lists and sources are the same files, so is its answer.
apt_state() {
  { find /var/lib/apt/lists /etc/apt -type f \( -name '*Packages*' -o -path '/etc/apt/*' \) \
      -printf '%p %s %T@\n' 2>/dev/null || true; } | sort
}
memo=$cache/memo-$script-$(apt_state | digest)

if [ -s "$memo" ] && [ -s "$cache/$(cat "$memo")/xen" ]; then
  base=$cache/$(cat "$memo")
else
  rm -rf "$work"
  found=no
  for attempt in own fresh; do
    if [ $attempt = fresh ]; then
      # Lists of our own: the machine's may be empty, or older than the archive.
      say "updating a private copy of the package lists"
      mkdir -p "$cache/lists/partial"
      set_apt "$cache/lists"
      apt-get "${apt_options[@]}" -o Dir::Cache="$cache/lists" -qq update >&2 ||
        say "apt-get update failed, see above"
    else
      set_apt /var/lib/apt/lists
    fi
    resolve >"$cache/names.new" || continue
    base=$cache/$script-$(digest <"$cache/names.new")
    if [ -s "$base/xen" ] || fetch "$work/debs" <"$cache/names.new"; then found=yes; break; fi
    say "a package could not be downloaded"
  done
  if [ $found = yes ]; then
    [ -s "$base/xen" ] || build "$cache/names.new" "$base"
    find "$cache" -maxdepth 1 -name 'memo-*' -delete
    basename "$base" >"$memo"
  else
    # No network today.  An older build of the same script does the job as well.
    base=$(find "$cache" -maxdepth 1 -type d -name "$script-????????????????" -printf '%T@ %p\n' |
           sort -n | awk 'END { print $2 }')
    [ -n "$base" ] || unfit "could not get the packages.  Check the network and the apt sources of" \
      "this machine; needed are xen-system-amd64, linux-image-amd64, $packages"
    say "using an older build"
  fi
fi

# --- the part that changes often: init and scenarios, a second cpio behind the first one -------

overlay=$(mktemp -d)
trap 'rm -rf "$overlay" "$work" "$cache/names.new" "$cache/lists"' EXIT
with_overlay() { # NAME: base and overlay
  cat "$base/$1.cpio"
  (cd "$overlay/$1" && find . | sort | "$base/busybox" cpio -o -H newc -R 0:0 2>/dev/null)
}
for domain in dom0 domu; do
  mkdir -p "$overlay/$domain/ringway"
  cp "$here/$domain/init" "$overlay/$domain/init"
  chmod 755 "$overlay/$domain/init"
done
cp "$here/dom0/lib.sh" "$overlay/dom0/ringway/"
cp -r "$here/scenarios" "$overlay/dom0/ringway/"
cp "$here/domu/speed.sh" "$overlay/domu/ringway/"
mkdir -p "$overlay/dom0/etc/xen/scripts"
cp "$here/dom0/block-loop" "$here/../../tools/xen/block-ringway" "$overlay/dom0/etc/xen/scripts/"
chmod 755 "$overlay"/dom0/etc/xen/scripts/*
# carry_own DOMAIN PROGRAM NAME: with the libraries of this machine, which need not be those of the
# packages.
carry_own() {
  local place=$overlay/$1/ringway/bin
  mkdir -p "$place"
  cp "$2" "$place/$3"
  # Symbols are of no use there, and as large as all the rest.
  if command -v strip >/dev/null; then strip "$place/$3"; fi
  ldd "$2" | awk '$3 ~ /^\// { print $3 } $1 ~ /^\/.*\/ld-/ { print $1 }' | while read -r library; do
    case $library in
      */ld-*) cp -L "$library" "$place/loader" ;;
      *) cp -L "$library" "$place/" ;;
    esac
  done
}
carry_own dom0 "$2" ringway
carry_own domu "$3" disk-check
with_overlay domu >"$overlay/dom0/ringway/domu.cpio"
cp "$base/vmlinuz" "$overlay/dom0/ringway/vmlinuz"
# Written beside and renamed: a machine that boots right now keeps its files.
with_overlay dom0 >"$out/dom0.cpio.new"
mv "$out/dom0.cpio.new" "$out/dom0.cpio"
for file in xen vmlinuz; do
  cmp -s "$base/$file" "$out/$file" || { cp "$base/$file" "$out/$file.new"; mv "$out/$file.new" "$out/$file"; }
done
