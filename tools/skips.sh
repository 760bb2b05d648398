#!/usr/bin/env bash
# Judges what the tests left out.
#
#   tools/skips.sh RECORD LIST [NEED…]
#
# RECORD is what the tests wrote (testkit/src/skip.rs): test, need and reason, between tabs. LIST is
# what CI may leave out, as tools/skips.txt; tests that lack a NEED named here may be left out too.
# Prints each test that was left out, wholly or in part. With CI=true one that is not allowed ends in
# status 1. Lines of the list that were not needed are told and do no harm: another host may need them.
set -euo pipefail
record=${1:?usage: tools/skips.sh RECORD LIST [NEED…]} list=${2:?usage: tools/skips.sh RECORD LIST [NEED…]}
shift 2

patterns=() needs=() used=()
while read -r pattern need reason; do
    case $pattern in '' | '#'*) continue ;; esac
    if [ -z "$reason" ]; then
        printf '%s: %s %s: say why\n' "$list" "$pattern" "$need"
        exit 1
    fi
    patterns+=("$pattern") needs+=("$need") used+=('')
done <"$list"
for need in "$@"; do
    patterns+=('*') needs+=("$need") used+=(yes)
done

allowed() { # allowed TEST NEED: marks the lines that allow it
    local at found=1
    for at in "${!patterns[@]}"; do
        # shellcheck disable=SC2053 # a pattern
        if [[ $1 == ${patterns[at]} && $2 == "${needs[at]}" ]]; then
            used[at]=yes found=0
        fi
    done
    return $found
}

refused=0
while IFS=$'\t' read -r test need why; do
    if allowed "$test" "$need"; then
        printf '  skipped, as listed: %s: %s: %s\n' "$test" "$need" "$why"
    else
        printf '  skipped: %s: %s: %s\n' "$test" "$need" "$why"
        refused=$((refused + 1))
    fi
done < <(sort -u "$record")
for at in "${!patterns[@]}"; do
    [ -n "${used[at]}" ] || printf '  not skipped here, but on the list: %s %s\n' "${patterns[at]}" "${needs[at]}"
done
if [ "$refused" -gt 0 ] && [ "${CI:-}" = true ]; then
    printf '%d skips are not in %s: make them run, or say there why they cannot\n' "$refused" "$list"
    exit 1
fi
