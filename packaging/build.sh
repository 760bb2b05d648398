#!/usr/bin/env bash
# Builds the Debian package with cargo-deb (cargo install cargo-deb --locked).
#
#   packaging/build.sh                          the release, into target/debian/
#   packaging/build.sh PROGRAM OUT [REVISION]   around a ringway that is built already, whatever its
#                                               profile, into the file OUT
set -euo pipefail
cd "$(dirname "$0")/.."
# Where ringway/Cargo.toml looks for it.
stage=target/packaging

cargo deb --version >/dev/null 2>&1 || {
    echo "error: there is no cargo-deb. Run: cargo install cargo-deb --locked" >&2
    exit 1
}
if [ $# -eq 0 ]; then
    cargo build --release --locked -p ringway
    program=${CARGO_TARGET_DIR:-target}/release/ringway
else
    program=$(realpath "$1")
fi

rm -rf "$stage"
mkdir -p "$stage"
"$program" man "$stage"
for shell in bash zsh fish; do
    "$program" completions "$shell" >"$stage/$shell"
done

strip -o "$stage/ringway" "$program"
options=(--quiet --no-build -p ringway --deb-revision "${3:-1}")
[ $# -eq 0 ] || options+=(--fast --output "$(realpath -m "$2")")
cargo deb "${options[@]}"
