#!/usr/bin/env bash
# Assembles a small Linux guest from Debian packages, without installing them.
#
#   build.sh OUTDIR     writes OUTDIR/vmlinuz and OUTDIR/initrd.cpio
#
# The work has two parts:
#   slow: download, unpack, collect libraries and modules.  Kept in the cache; its key is
#         this script and the package versions.
#   fast: init, lib.sh and scenarios/ as a second cpio behind the first one.  The kernel unpacks
#         cpio archives one after the other, so a changed scenario costs milliseconds.
#
# Settings (environment):
#   RINGWAY_GUEST_CACHE    where the slow part is kept
#                          (default: ${XDG_CACHE_HOME:-$HOME/.cache}/ringway/guest)
#   RINGWAY_GUEST_KERNEL   kernel package (default: the first of $kernels that exists)
#
# It needs no root.  It needs a Debian or Ubuntu of the amd64 architecture, because packages come
# from the machine's own apt sources.
set -euo pipefail
export LC_ALL=C

kernels="linux-image-cloud-amd64 linux-image-amd64 linux-image-virtual linux-image-generic"
packages="busybox-static fio e2fsprogs util-linux dmsetup"
# Programs the guest carries beside busybox, each with the libraries it needs.
programs="/usr/bin/fio /usr/sbin/mke2fs /usr/sbin/e2fsck /usr/sbin/fstrim
          /usr/sbin/blkdiscard /usr/sbin/blockdev /usr/sbin/dmsetup"
# Modules the guest must have (or the kernel has them built in), and those that are nice to have.
modules="virtio_pci virtio_blk ext4 crc32c_generic"
modules_optional="virtio_mmio loop nvme dm-mod dm-flakey dm-log-writes dm-delay null_blk ublk_drv"
# Pulled in by dependencies, but no program above runs or loads them.
not_needed='^(python3|libpython3|perl|libperl|dpkg$|adduser$|passwd$|debconf|tar$|libpam|media-types$)'

say() { printf 'guest/build.sh: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

[ $# -eq 1 ] || die "usage: build.sh OUTDIR"
[ "$(uname -m)" = x86_64 ] || die "the guest is amd64 only, this machine is $(uname -m)"
missing=
for tool in apt-get:apt apt-cache:apt dpkg-deb:dpkg tar:tar sha256sum:coreutils flock:util-linux \
            find:findutils awk:mawk; do
  command -v "${tool%:*}" >/dev/null || missing+=" ${tool%:*} (package ${tool#*:})"
done
[ -z "$missing" ] || die "missing on this machine:$missing"

here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
out=$(cd "$1" && pwd)
cache=${RINGWAY_GUEST_CACHE:-${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/ringway/guest}
mkdir -p "$cache"
# One build at a time: a second caller waits here and then finds the work done.
exec 9>"$cache/lock"
flock 9

digest() { sha256sum | cut -c1-16; }

# --- what to build: names and versions ------------------------------------------------------

lists=/var/lib/apt/lists
apt_options=()
set_apt() { # LISTS_DIR
  lists=$1
  # An empty status file makes apt resolve every dependency, as on a bare machine.
  apt_options=(-o Dir::State::status=/dev/null -o Dir::State::lists="$lists"
               -o APT::Architecture=amd64 -o APT::Architectures=amd64
               -o APT::Sandbox::User= -o APT::Install-Recommends=false)
}

# Package lists of our own: for machines whose lists are empty, older than the archive, or where
# we may not update them.
refresh_lists() {
  say "updating a private copy of the package lists"
  mkdir -p "$cache/lists/partial"
  set_apt "$cache/lists"
  apt-get "${apt_options[@]}" -o Dir::Cache="$cache/lists" -qq update >&2 ||
    say "apt-get update failed, see above"
}

newest_version() { # PACKAGE -> its candidate version, or nothing
  apt-cache "${apt_options[@]}" policy "$1" | awk '$1 == "Candidate:" && $2 != "(none)" { print $2 }'
}

# The kernel behind a name such as linux-image-amd64: the image and, on Ubuntu, its modules.
kernel_packages() {
  local meta dep version
  for meta in ${RINGWAY_GUEST_KERNEL:-$kernels}; do
    [ -n "$(newest_version "$meta")" ] || continue
    case $meta in
      linux-image-[0-9]*) dep=$meta ;;
      *) dep=$(apt-cache "${apt_options[@]}" show --no-all-versions "$meta" |
               grep -oE 'linux-image-[0-9][^ ,]*' | head -n 1) ;;
    esac
    version=$(newest_version "$dep")
    [ -n "$version" ] || continue
    echo "$dep=$version"
    dep=${dep/linux-image-/linux-modules-}
    version=$(newest_version "$dep")
    [ -z "$version" ] || echo "$dep=$version"
    return 0
  done
  return 1
}

# Prints "name=version" lines, or names on stderr what cannot be had.
resolve() {
  local package answer kernel missing=
  for package in $packages; do
    [ -n "$(newest_version "$package")" ] || missing+=" $package"
  done
  kernel=$(kernel_packages) || missing+=" ${RINGWAY_GUEST_KERNEL:-linux-image-cloud-amd64}"
  if [ -n "$missing" ]; then
    say "apt does not know:$missing"
    return 1
  fi
  # shellcheck disable=SC2086 # a list of words
  answer=$(apt-get "${apt_options[@]}" -s install $packages) || return 1
  awk -v drop="$not_needed" '$1 == "Inst" && $2 !~ drop { gsub(/[()]/, "", $3); print $2 "=" $3 }' \
    <<<"$answer" | sort
  echo "$kernel"
}

# --- the slow part ---------------------------------------------------------------------------

fetch() { # DIR, names on stdin
  rm -rf "$1"
  mkdir -p "$1"
  (cd "$1" && xargs apt-get "${apt_options[@]}" -qq download) >&2
}

unpack() { # DEBS ROOT
  local deb dir
  # Debian's packages may still say /lib where /usr/lib is meant.
  for dir in bin sbin lib lib64; do
    mkdir -p "$2/usr/$dir"
    ln -s "usr/$dir" "$2/$dir"
  done
  for deb in "$1"/*.deb; do
    dpkg-deb --fsys-tarfile "$deb" |
      tar -x -C "$2" --keep-directory-symlink --no-same-owner \
          --exclude='./usr/share/*' --exclude='./etc/*' --exclude='./dev/*' --exclude='./var/*'
  done
}

carry() { # SYSROOT ROOT PATH: copies one file, following links inside SYSROOT
  mkdir -p "$2$(dirname "$3")"
  cp -L "$1$3" "$2$3" || die "$3 is in none of the packages"
}

collect_programs() { # SYSROOT ROOT
  local sys=$1 root=$2 libs program library
  local loader=/usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2
  libs=$sys/usr/lib/x86_64-linux-gnu:$sys/usr/lib/x86_64-linux-gnu/ceph:$sys/usr/lib
  mkdir -p "$root"/{dev,proc,sys,tmp,mnt,usr/bin,usr/sbin,usr/lib,usr/lib64}
  for library in bin sbin lib lib64; do ln -s "usr/$library" "$root/$library"; done
  carry "$sys" "$root" /usr/bin/busybox
  carry "$sys" "$root" "$loader"
  ln -sf ../lib/x86_64-linux-gnu/ld-linux-x86-64.so.2 "$root/usr/lib64/ld-linux-x86-64.so.2"
  for program in $programs; do
    carry "$sys" "$root" "$program"
    "$sys$loader" --library-path "$libs" --list "$sys$program" |
      awk '/=> *not found/ { print "/missing/" $1 } $3 ~ /^\// { print $3 }'
  done | sort -u >"$root/../libraries"
  while read -r library; do
    library=${library#"$sys"}
    # A library with a search path of its own may have been found on the host: take ours.
    [ -e "$sys${library/#\/lib\//\/usr\/lib\/}" ] || die "no package has the library $library"
    carry "$sys" "$root" "${library/#\/lib\//\/usr\/lib\/}"
  done <"$root/../libraries"
  ln -s mke2fs "$root/usr/sbin/mkfs.ext4"
  ln -s e2fsck "$root/usr/sbin/fsck.ext4"
}

collect_modules() { # SYSROOT ROOT
  local sys=$1 root=$2 release from to name path dep bb=$1/usr/bin/busybox
  release=$(basename "$(find "$sys/usr/lib/modules" -mindepth 1 -maxdepth 1 -type d | head -n 1)")
  from=$sys/usr/lib/modules/$release
  to=$root/usr/lib/modules/$release
  find "$from" -name '*.ko.xz' -exec "$bb" unxz {} +
  if [ -n "$(find "$from" -name '*.ko.zst' -print -quit)" ]; then
    command -v unzstd >/dev/null || die "missing on this machine: unzstd (package zstd)"
    find "$from" -name '*.ko.zst' -exec unzstd -q --rm {} +
  fi
  "$bb" depmod -b "$sys" "$release"
  mkdir -p "$to"
  for name in $modules $modules_optional; do
    path=$(awk -F: -v want="$name" \
      '{ n = $1; sub(/.*\//, "", n); sub(/\.ko$/, "", n); gsub(/-/, "_", n); gsub(/-/, "_", want) }
       n == want { print $1 }' "$from/modules.dep")
    if [ -z "$path" ]; then
      case " $modules " in
        *" $name "*) grep -q "/$name\.ko" "$from/modules.builtin" ||
          die "the kernel package $release has no $name" ;;
      esac
      continue
    fi
    # modules.dep: "path: its dependencies, all of them".
    awk -F': *' -v p="$path" '$1 == p { print $1, $2 }' "$from/modules.dep" | xargs -n 1 |
      while read -r dep; do
        mkdir -p "$to/$(dirname "$dep")"
        cp "$from/$dep" "$to/$dep"
      done
  done
  cp "$from/modules.builtin" "$to/"
  "$bb" depmod -b "$root" "$release"
}

pack() { # DIR: its content as cpio on stdout, owned by root
  (cd "$1" && find . | sort | "$busybox" cpio -o -H newc -R 0:0 2>/dev/null)
}

build() { # WORK (its debs are there) NAMES_FILE DESTINATION
  local work=$1
  mkdir -p "$work/sys" "$work/root" "$work/result"
  say "unpacking $(find "$work/debs" -name '*.deb' | wc -l) packages"
  unpack "$work/debs" "$work/sys"
  busybox=$work/sys/usr/bin/busybox
  collect_programs "$work/sys" "$work/root"
  collect_modules "$work/sys" "$work/root"
  cp "$2" "$work/result/packages"
  cp "$busybox" "$work/result/busybox"
  cp "$work"/sys/boot/vmlinuz-* "$work/result/vmlinuz"
  pack "$work/root" >"$work/result/base.cpio"
  mv "$work/result" "$3"
}

# --- which cached build serves these inputs --------------------------------------------------

script=$(cat "$here/build.sh" - <<<"${RINGWAY_GUEST_KERNEL:-}" | digest)

# Asking apt takes seconds.  As long as its lists and sources are the same files, so is its answer.
apt_state() {
  # Some files may be root's alone (passwords of private archives).
  { find /var/lib/apt/lists /etc/apt -type f \( -name '*Packages*' -o -path '/etc/apt/*' \) \
      -printf '%p %s %T@\n' 2>/dev/null || true; } | sort
}
memo=$cache/memo-$script-$(apt_state | digest)

base=
if [ -s "$memo" ] && [ -s "$cache/$(cat "$memo")/vmlinuz" ]; then
  base=$cache/$(cat "$memo")
else
  names=$cache/names.new
  work=$cache/work
  rm -rf "$work"
  trap 'rm -rf "$work" "$names" "$cache/lists"' EXIT
  set_apt /var/lib/apt/lists
  found=no
  for attempt in own-lists fresh-lists; do
    if [ $attempt = fresh-lists ]; then refresh_lists; fi
    resolve >"$names" || continue
    base=$cache/$script-$(digest <"$names")
    if [ -s "$base/vmlinuz" ] || fetch "$work/debs" <"$names"; then found=yes; break; fi
    say "a package could not be downloaded"
  done
  if [ $found = yes ]; then
    [ -s "$base/vmlinuz" ] || build "$work" "$names" "$base"
    rm -rf "$work" "$names" "$cache/lists"
    find "$cache" -maxdepth 1 -name "memo-$script-*" -delete
    # Builds that nobody has used for a month.
    find "$cache" -maxdepth 1 -type d -name '????????????????-????????????????' -mtime +30 \
      -exec rm -rf {} +
    basename "$base" >"$memo"
  else
    # No network today.  An older build of the same script does the job as well.
    base=$(find "$cache" -maxdepth 1 -type d -name "$script-????????????????" -printf '%T@ %p\n' |
           sort -n | awk 'END { print $2 }')
    [ -n "$base" ] || die "could not get the packages named above.  Check the network and the" \
      "apt sources of this machine; needed are: $packages and one of: ${RINGWAY_GUEST_KERNEL:-$kernels}"
    say "using an older build, made from: $(tr '\n' ' ' <"$base/packages" | cut -c1-200)..."
  fi
fi

# --- the fast part ---------------------------------------------------------------------------

touch "$base"
busybox=$base/busybox
overlay=$(mktemp -d)
trap 'rm -rf "$overlay" "$cache/work" "$cache/names.new" "$cache/lists"' EXIT
mkdir "$overlay/ringway"
cp "$here/init" "$overlay/init"
cp "$here/lib.sh" "$overlay/ringway/"
cp -r "$here/scenarios" "$overlay/ringway/"
chmod 755 "$overlay/init"
key=$(basename "$base")-$(cd "$overlay" && find . -type f | sort | xargs sha256sum | digest)
if [ -s "$out/vmlinuz" ] && [ -s "$out/initrd.cpio" ] && [ "$(cat "$out/key" 2>/dev/null)" = "$key" ]; then
  exit 0
fi
# Written beside and renamed: a guest that boots right now keeps its files.
cp "$base/vmlinuz" "$out/vmlinuz.new"
{ cat "$base/base.cpio"; pack "$overlay"; } >"$out/initrd.cpio.new"
mv "$out/vmlinuz.new" "$out/vmlinuz"
mv "$out/initrd.cpio.new" "$out/initrd.cpio"
echo "$key" >"$out/key"
