#!/usr/bin/env bash
# Runs the fuzzers without cargo-fuzz: plain cargo of the nightly toolchain, no address sanitizer.
#
#   tools/fuzz.sh [SECONDS [TARGET…]]     60 seconds of each target, unless told otherwise
#
# What is found goes to fuzz/target/found/TARGET; the corpus in the tree only changes by hand.
set -euo pipefail
cd "$(dirname "$0")/../fuzz"

seconds=${1:-60}
shift || true
targets=("$@")
[ ${#targets[@]} -gt 0 ] || mapfile -t targets < <(basename -s .rs -a fuzz_targets/*.rs)

triple=$(rustc +nightly -vV | sed -n 's/^host: //p')
target_dir="$(realpath -m "${CARGO_TARGET_DIR:-target}")/plain-fuzz"
# What cargo-fuzz gives the compiler. With a target named, build scripts are left alone.
coverage="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4"
coverage+=" -Cllvm-args=-sanitizer-coverage-inline-8bit-counters"
coverage+=" -Cllvm-args=-sanitizer-coverage-pc-table"
coverage+=" -Cllvm-args=-sanitizer-coverage-trace-compares"
RUSTFLAGS="$coverage -Cdebug-assertions --cfg fuzzing" cargo +nightly build --release --locked \
    --target "$triple" --target-dir "$target_dir" "${targets[@]/#/--bin=}"

run() { # run TARGET
    local log="target/found/$1.log" status=0
    mkdir -p "target/found/$1"
    "$target_dir/$triple/release/$1" "target/found/$1" "corpus/$1" \
        -artifact_prefix="target/found/$1-" -max_total_time="$seconds" -max_len=1200 \
        -len_control=0 -print_final_stats=1 -verbosity=1 >"$log" 2>&1 || status=$?
    # Runs, edges and features; what went wrong.
    printf '%-9s %s\n' "$1" "$(grep -aE 'DONE|panicked|SUMMARY|ERROR' "$log" || echo "no result, see fuzz/$log")"
    return "$status"
}

# One on each core.
failed=0
for target in "${targets[@]}"; do
    while [ "$(jobs -rp | wc -l)" -ge "$(nproc)" ]; do
        wait -n || failed=1
    done
    run "$target" &
done
while [ -n "$(jobs -p)" ]; do
    wait -n || failed=1
done
exit "$failed"
