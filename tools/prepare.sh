# Sourced by ./demo and ./test: checks the Rust toolchain and installs missing Debian packages.
# shellcheck shell=bash

say() { printf '%s\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# Programs of the system administrator (losetup, mkfs) are not on everyone's path.
PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"

# at_least WANTED VERSION: VERSION is WANTED or newer.
at_least() {
    [ "$(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n 1)" = "$1" ]
}

# The toolchain must be new enough for this workspace. That of the system is installed, if there is none and it
# will do.
need_rust() {
    local want have offered=''
    want=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
    if ! command -v cargo >/dev/null 2>&1 && [ -x "${HOME:-}/.cargo/bin/cargo" ]; then
        PATH="$HOME/.cargo/bin:$PATH"
    fi
    have=$(cargo --version 2>/dev/null | sed 's/^cargo \([0-9.]*\).*/\1/' || true)
    at_least "$want" "$have" && return
    command -v rustup >/dev/null 2>&1 &&
        die "this needs Rust $want or newer, and ${have:-none} is the default here. Run: rustup update stable && rustup default stable"
    if command -v apt-get >/dev/null 2>&1; then
        update_packages
        offered=$(LC_ALL=C apt-cache policy cargo | sed -n 's/^ *Candidate: \([0-9.]*\).*/\1/p')
    fi
    at_least "$want" "$offered" ||
        die "this needs Rust $want or newer; here is ${have:-none}, and this system has ${offered:-none} to install. Two ways
out: install rustup (https://rustup.rs), which has the newest Rust on any system, or use a system that has a newer one, such
as Debian 13. Then run this again"
    # Cargo gets crates by HTTPS.
    install_packages cargo rustc ca-certificates
}

# need_components PART…: cargo fmt, cargo clippy.
need_components() {
    local part package
    for part in "$@"; do
        cargo "$part" --version >/dev/null 2>&1 && continue
        command -v rustup >/dev/null 2>&1 &&
            die "the Rust toolchain has no $part. Run: rustup component add ${part/fmt/rustfmt}"
        case $part in
            fmt) package=rustfmt ;;
            *) package=rust-$part ;;
        esac
        need_packages "cargo-$part=$package"
    done
}

# missing_packages COMMAND=PACKAGE[,PACKAGE…] …: prints what belongs to commands that are missing, or to
# files, if there are paths for commands.
missing_packages() {
    local pair missing=()
    for pair in "$@"; do
        command -v "${pair%%=*}" >/dev/null 2>&1 || [ -f "${pair%%=*}" ] || missing+=("${pair#*=}")
    done
    printf '%s' "${missing[*]//,/ }"
}

# need_packages COMMAND=PACKAGE[,PACKAGE…] …: installs what belongs to commands that are missing.
need_packages() {
    local missing
    read -ra missing <<<"$(missing_packages "$@")"
    [ ${#missing[@]} -gt 0 ] || return 0
    command -v apt-get >/dev/null 2>&1 ||
        die "these programs are missing: ${missing[*]} (names of Debian packages). Install them, then run this again"
    update_packages
    install_packages "${missing[@]}"
}

# as_root COMMAND…: fails where that may not be done.
as_root() {
    if [ "$(id -u)" -eq 0 ]; then
        "$@"
    else
        sudo -n "$@"
    fi
}

# What there is to install, once.
update_packages() {
    [ -z "${packages_updated:-}" ] || return 0
    packages_updated=1
    as_root true 2>/dev/null || return 0
    again as_root apt-get update -q >/dev/null || say "warning: apt-get update failed, going on"
}

# install_packages PACKAGE…: where it may.
install_packages() {
    as_root true 2>/dev/null || die "these packages are missing. Run: sudo apt-get install $*"
    say "installing $*"
    again as_root env DEBIAN_FRONTEND=noninteractive \
        apt-get install -q -y --no-install-recommends "$@" >/dev/null ||
        die "apt-get could not install: $*"
}

# again COMMAND…: up to three times, for archives that do not answer at once.
again() {
    "$@" || { sleep 5 && "$@"; } || { sleep 20 && "$@"; }
}
