#!/usr/bin/env bash
# Puts known mistakes into image/src and core/src, one at a time, and tells which of them simulated hosts find
# (docs/testing.md).
#
#   tools/faults.sh [SECONDS [NAME…]]     each has so many seconds, 60 without it, and then the calls that fail in turn;
#                                         the tree has to be clean
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
git diff --quiet -- image/src core/src || { echo "image/src or core/src has changes" >&2; exit 2; }
patch=
trap '[ -z "$patch" ] || git apply -R "$patch"' EXIT
export RUSTFLAGS="--cfg simulated" CARGO_TARGET_DIR=target/simulated
run=(cargo test --locked --quiet -p ringway-image --test simulated)
missed=0
for name; do
    git apply "$faults/${name%.patch}.patch"
    patch=$faults/${name%.patch}.patch
    "${run[@]}" --no-run
    begun=$SECONDS by=
    if ! RINGWAY_SEEDS=1000000 RINGWAY_SECONDS=$seconds "${run[@]}" c90_ >/dev/null 2>&1; then
        by=histories
    elif ! "${run[@]}" c92_ >/dev/null 2>&1; then
        by="calls in turn"
    fi
    if [ -n "$by" ]; then
        printf '%-34s found after %s s by %s\n' "${name%.patch}" "$((SECONDS - begun))" "$by"
    else
        printf '%-34s not found in %s s\n' "${name%.patch}" "$((SECONDS - begun))"
        missed=1
    fi
    git apply -R "$patch"
    patch=
done
exit "$missed"
