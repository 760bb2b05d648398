# Sourced by ./demo and ./test: checks the Rust toolchain and installs missing Debian packages.
# shellcheck shell=bash

say() { printf '%s\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# Programs of the system administrator (losetup, mkfs) are not on everyone's path.
PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"

# The toolchain must be there and new enough for this workspace.
need_rust() {
    local want have
    want=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
    if ! command -v cargo >/dev/null 2>&1 && [ -x "${HOME:-}/.cargo/bin/cargo" ]; then
        PATH="$HOME/.cargo/bin:$PATH"
    fi
    command -v cargo >/dev/null 2>&1 ||
        die "there is no Rust toolchain. Install Rust $want or newer with rustup (https://rustup.rs), then run this again"
    have=$(cargo --version | awk '{print $2}')
    [ "$(printf '%s\n%s\n' "$want" "${have%%-*}" | sort -V | head -n 1)" = "$want" ] ||
        die "Rust $have is too old: this needs $want or newer. Run: rustup update stable"
}

# need_components PART…: cargo fmt, cargo clippy.
need_components() {
    local part
    for part in "$@"; do
        cargo "$part" --version >/dev/null 2>&1 ||
            die "the Rust toolchain has no $part. Run: rustup component add ${part/fmt/rustfmt}"
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

# need_packages COMMAND=PACKAGE[,PACKAGE…] …: installs what belongs to commands that are missing,
# where it may.
need_packages() {
    local missing sudo=()
    read -ra missing <<<"$(missing_packages "$@")"
    [ ${#missing[@]} -gt 0 ] || return 0
    command -v apt-get >/dev/null 2>&1 ||
        die "these programs are missing: ${missing[*]} (names of Debian packages). Install them, then run this again"
    if [ "$(id -u)" -ne 0 ]; then
        sudo -n true 2>/dev/null ||
            die "these packages are missing. Run: sudo apt-get install ${missing[*]}"
        sudo=(sudo -n)
    fi
    say "installing ${missing[*]}"
    again "${sudo[@]}" apt-get update -q >/dev/null || say "warning: apt-get update failed, going on"
    again "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get install -q -y --no-install-recommends "${missing[@]}" >/dev/null ||
        die "apt-get could not install: ${missing[*]}"
}

# again COMMAND…: up to three times, for archives that do not answer at once.
again() {
    "$@" || { sleep 5 && "$@"; } || { sleep 20 && "$@"; }
}
