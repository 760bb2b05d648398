#!/usr/bin/env bash
# Runs the tests of the rooms without system calls under Miri, which finds undefined behaviour.
#
#   tools/miri.sh SECONDS     stops what is not finished by then, and says so: that is no failure
#
# Miri interprets on one CPU, so each crate has a process of its own, and the free CPUs are shared.
# Memory is as strong as x86's: with weak memory the Miri of May 2026 panics itself, in the tests of the
# inflight region ("cannot have empty store buffer when previous write was atomic"). loom has the rest.
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=${1:?usage: tools/miri.sh SECONDS}
export MIRIFLAGS="${MIRIFLAGS:-} -Zmiri-disable-weak-memory-emulation"
crates=(ringway-ring ringway-core ringway-scheduler)
logs=$(mktemp -d)
running=()
# timeout hands the signal on to all that it has started.
trap 'kill "${running[@]}" 2>/dev/null || true; rm -rf "$logs"' EXIT

begun=$SECONDS
status=0
timeout "$seconds" cargo +nightly miri test --locked --quiet --no-run \
    "${crates[@]/#/--package=}" || status=$?
left=$((seconds - SECONDS + begun))
if [ "$status" -eq 124 ] || { [ "$status" -eq 0 ] && [ "$left" -lt 1 ]; }; then
    printf 'warning: stopped after %d s, before the first test\n' "$seconds"
    exit 0
fi
[ "$status" -eq 0 ] || exit "$status"

for crate in "${crates[@]}"; do
    timeout "$left" cargo +nightly miri test --locked -p "$crate" >"$logs/$crate" 2>&1 &
    running+=($!)
done
failed=0
for at in "${!crates[@]}"; do
    crate=${crates[at]} status=0
    wait "${running[at]}" || status=$?
    case $status in
        0) grep '^test result' "$logs/$crate" | sed "s/^/$crate: /" ;;
        124)
            printf 'warning: %s: stopped after %d s, %d tests passed, unfinished\n' "$crate" \
                "$seconds" "$(grep -c '^test .* ok$' "$logs/$crate" || true)"
            ;;
        *)
            cat "$logs/$crate"
            printf '%s: failed under Miri\n' "$crate"
            failed=1
            ;;
    esac
done
exit $failed
