#!/usr/bin/env bash
# Runs a command of this tree in a fresh Debian 13 that has git and nothing else: it has to bring what it needs,
# the system's own Rust among it. Nothing stays but the command's output.
#
#   tools/fresh-debian.sh [COMMAND…]     ./demo, unless told otherwise
#
# Needs mmdebstrap, an archive of Debian, and root.
set -euo pipefail
cd "$(dirname "$0")/.."
command=("${@:-./demo}")

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# As it is now, committed or not, without what is deleted.
git ls-files -z --cached --others --exclude-standard |
    tar --create --null --files-from=- --ignore-failed-read --file="$work/tree.tar"
# A network may have an authority of its own, which only this host knows.
cat "${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}" >"$work/authorities.crt"

mmdebstrap --quiet --variant=minbase --include=git \
    --customize-hook="upload $work/authorities.crt /authorities.crt" \
    --customize-hook="mkdir \"\$1/ringway\"" \
    --customize-hook="tar-in $work/tree.tar /ringway" \
    --customize-hook="chroot \"\$1\" env CARGO_HTTP_CAINFO=/authorities.crt \
        sh -c 'cd /ringway && exec \"\$@\"' sh ${command[*]@Q}" \
    trixie /dev/null
