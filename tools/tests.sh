#!/usr/bin/env bash
# Builds all programs of tests, and runs them.
#
#   tools/tests.sh build PROGRAMS                  builds them; PROGRAMS is written: what there is to run
#   tools/tests.sh run PROGRAMS LIST LOG           runs them all; LOG gets what they print
#   tools/tests.sh run PROGRAMS LIST LOG LEFT      without those that LIST leaves to ./test full, which are
#                                                  written to LEFT
#
# A program that has not ended after 20 minutes is killed, and has failed: its log names the test that hangs.
#
# LIST is as tools/tests.txt. Programs run two at a time, then those one by one that LIST wants alone. One that LIST says
# waits begins first, and has twice as many tests at a time as there are CPUs. A line of LIST that names nothing is an
# error: whoever renames a test takes its line along.
set -euo pipefail
cd "$(dirname "$0")/.."
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

build() { # build PROGRAMS
    local runner
    runner=$(rustc -vV | sed -n 's/^host: //p' | tr 'a-z-' 'A-Z_')
    : >"$1"
    # It is found by its name alone, because cargo takes a path with a blank in it for two words.
    env "PATH=$PWD/tools:$PATH" "CARGO_TARGET_${runner}_RUNNER=record-test.sh" \
        RINGWAY_TEST_PROGRAMS="$(realpath "$1")" cargo test --workspace --locked --quiet --tests
    [ -s "$1" ] || die "there are no programs of tests"
}

# --- what the list says

patterns=() words=() reasons=() used=()
read_list() { # read_list LIST
    local pattern word reason
    while read -r pattern word reason; do
        case $pattern in '' | '#'*) continue ;; esac
        case $word in alone | full | waits) ;; *) die "$1: $pattern: neither alone, full nor waits: $word" ;; esac
        [ -n "$reason" ] || die "$1: $pattern: say why"
        patterns+=("$pattern") words+=("$word") reasons+=("$reason") used+=('')
    done <"$1"
}

# --- one program

limit=1200
declare -A running=()
logs='' all_logs=''
failed=0

start() { # start NAME FOLDER PROGRAM LIBRARIES [ARGUMENT…]
    local name=$1 folder=$2 program=$3 libraries=$4
    shift 4
    (
        cd "$folder"
        export CARGO_PKG_NAME="${name%/*}" CARGO_MANIFEST_DIR="$folder" LD_LIBRARY_PATH="$libraries"
        begun=$SECONDS status=0
        timeout --kill-after=10 "$limit" "$program" "$@" </dev/null >"$logs/log" 2>&1 || status=$?
        [ "$status" -ne 124 ] || printf 'killed after %d s\n' "$limit" >>"$logs/log"
        echo $((SECONDS - begun)) >"$logs/seconds"
        exit "$status"
    ) &
    running[$!]="$name $logs"
}

# Waits until fewer than so many run, and tells of those that have ended.
finish() { # finish COUNT
    local pid status name folder
    while [ "${#running[@]}" -ge "$1" ] && [ "${#running[@]}" -gt 0 ]; do
        status=0
        wait -n -p pid "${!running[@]}" || status=$?
        read -r name folder <<<"${running[$pid]}"
        unset "running[$pid]"
        printf '%5s s  %-40s %s\n' "$(cat "$folder/seconds" 2>/dev/null || echo '?')" "$name" \
            "$(sed -n 's/^test result: \(.*\); 0 measured.*/\1/p' "$folder/log")"
        cat "$folder/log" >>"$log"
        [ "$status" -ne 0 ] || continue
        failed=$((failed + 1))
        cat "$folder/log"
        printf '%s: FAILED, status %d\n' "$name" "$status"
    done
}

# --- all of them

count() { "$1" --list --format terse "${@:2}" 2>/dev/null | grep -c ': test$' || true; }

# Sets `verdict` to what the list says of a program: alone, full, waits or any; `threads` to the number of its tests
# that run at a time; and `skipped` to the arguments that leave out its tests that only ./test full runs.
judge() { # judge NAME PROGRAM
    local at test
    verdict=any skipped=() threads=$(nproc)
    for at in "${!patterns[@]}"; do
        # shellcheck disable=SC2053 # a pattern
        [[ $1 == ${patterns[at]%%::*} ]] || continue
        if [ "${patterns[at]}" = "${patterns[at]%%::*}" ]; then
            used[at]=yes
            if [ "${words[at]}" = alone ]; then
                [ "$verdict" = full ] || verdict=alone
            elif [ "${words[at]}" = waits ]; then
                verdict=waits threads=$((2 * $(nproc)))
            elif [ -n "$left" ]; then
                verdict=full
                printf '%s: %d tests, %s\n' "$1" "$(count "$2")" "${reasons[at]}" >>"$left"
            fi
            continue
        fi
        test=${patterns[at]#*::}
        [ "${words[at]}" = full ] || die "${patterns[at]}: only programs run alone, or wait"
        [ "$(count "$2" --exact "$test")" -eq 1 ] || continue
        used[at]=yes
        [ -n "$left" ] || continue
        skipped+=(--skip "$test")
        printf '%s: 1 test, %s\n' "${patterns[at]}" "${reasons[at]}" >>"$left"
    done
    [ ${#skipped[@]} -eq 0 ] || skipped=(--exact "${skipped[@]}")
    skipped+=(--test-threads "$threads")
}

# Starts what is `number` in the plan, with at most one other.
names=() folders=() programs=() libraries=() verdicts=() arguments=()
start_next() { # start_next NUMBER MOST
    finish "$2"
    logs=$all_logs/$1
    mkdir "$logs"
    # shellcheck disable=SC2086 # names of tests have no blanks
    start "${names[$1]}" "${folders[$1]}" "${programs[$1]}" "${libraries[$1]}" ${arguments[$1]}
}

run() { # run PROGRAMS LIST LOG [LEFT]
    local package folder program library name at verdict skipped threads most=2
    log=$3 left=${4:-}
    read_list "$2"
    : >"$log"
    [ -z "$left" ] || : >"$left"
    while IFS=$'\t' read -r package folder program library; do
        name=$package/$(basename "$program" | sed 's/-[0-9a-f]*$//')
        judge "$name" "$program"
        names+=("$name") folders+=("$folder") programs+=("$program") libraries+=("$library")
        verdicts+=("$verdict") arguments+=("${skipped[*]}")
    done <"$1"
    for at in "${!patterns[@]}"; do
        [ -n "${used[at]}" ] || die "$2: ${patterns[at]} names no program or test"
    done
    all_logs=$(mktemp -d)
    trap 'rm -rf "$all_logs"' EXIT
    for verdict in waits any alone; do
        [ "$verdict" != alone ] || most=1
        for at in "${!names[@]}"; do
            [ "${verdicts[at]}" != "$verdict" ] || start_next "$at" "$most"
        done
    done
    finish 1
    [ "$failed" -eq 0 ] || die "$failed programs failed"
}

case "${1:-} $#" in
    'build 2') build "$2" ;;
    'run 4' | 'run 5') run "${@:2}" ;;
    *) sed -n 's/^#   //p' "$0" >&2 && exit 2 ;;
esac
