#!/usr/bin/env bash
# Puts known mistakes into image/src, one at a time, and tells which of them simulated hosts find (docs/testing.md).
#
#   tools/faults.sh [SECONDS [NAME…]]     each has so many seconds, 60 without it; the tree has to be clean
set -euo pipefail
cd "$(dirname "$0")/.."
faults=image/tests/simulated/faults
seconds=${1:-60}
shift || true
if [ $# -eq 0 ]; then
    cd "$faults"
    set -- *.patch
    cd - >/dev/null
fi
git diff --quiet -- image/src || { echo "image/src has changes" >&2; exit 2; }
patch=
trap '[ -z "$patch" ] || git apply -R "$patch"' EXIT
missed=0
for name; do
    git apply "$faults/${name%.patch}.patch"
    patch=$faults/${name%.patch}.patch
    run=(cargo test --locked --quiet -p ringway-image --test simulated)
    export RUSTFLAGS="--cfg simulated" CARGO_TARGET_DIR=target/simulated
    "${run[@]}" --no-run
    begun=$SECONDS
    if RINGWAY_SEEDS=1000000 RINGWAY_SECONDS=$seconds "${run[@]}" c90_ >/dev/null 2>&1; then
        printf '%-32s not found in %s s\n' "${name%.patch}" "$((SECONDS - begun))"
        missed=1
    else
        printf '%-32s found after %s s\n' "${name%.patch}" "$((SECONDS - begun))"
    fi
    git apply -R "$patch"
    patch=
done
exit "$missed"
