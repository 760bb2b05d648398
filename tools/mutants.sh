#!/usr/bin/env bash
# Mutation testing: makes small mistakes in the code, one at a time, and asks whether a test notices.
# Needs `cargo install cargo-mutants --locked`.
#
#   tools/mutants.sh [FILE…]             every mutant of the files; of all in tools/mutants/files.txt
#   tools/mutants.sh --sample N SECONDS  N mutants of those files at random; stops in time, and says so
#
# A mutant meets the quick tests of its crate first; what outlives them meets all tests of its crate.
# What outlives those too must be in tools/mutants/survivors.txt, with the reason, or the status is 1.
# A mutant that never ends is caught by the time limit. All is done in a copy of the tree, below
# target/mutants, at the lowest priority; RINGWAY_SEED repeats a sample.
set -euo pipefail
cd "$(dirname "$0")/.."
list=tools/mutants/survivors.txt
usage() { sed -n 's/^#   //p' "$0" >&2; exit 2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

size='' seconds=''
if [ "${1:-}" = --sample ]; then
    [ $# -eq 3 ] || usage
    size=$2 seconds=$3
    shift 3
fi
case "${1:-}" in -*) usage ;; esac
files=("$@")
[ ${#files[@]} -gt 0 ] || mapfile -t files < <(awk '/^[^#]/ { print $1 }' tools/mutants/files.txt)
for file in "${files[@]}"; do
    [ -f "$file" ] || die "there is no file $file"
done

base="$(realpath -m "${CARGO_TARGET_DIR:-target}")/mutants"
tree=$base/tree
export CARGO_TARGET_DIR=$base/build CARGO_TERM_COLOR=never
# A mutant may want all the memory there is. In KiB.
ulimit -v $((8 << 20))
# A mutant's tests may leave out anything.
unset RINGWAY_SKIPS
begun=$SECONDS

# Only what differs is written, so that cargo builds that anew and nothing else.
copy_tree() {
    local file
    mkdir -p "$tree"
    git ls-files -z --cached --others --exclude-standard >"$base/new.list"
    while IFS= read -r -d '' file; do
        [ -f "$file" ] || continue
        cmp -s "$file" "$tree/$file" && continue
        mkdir -p "$tree/$(dirname "$file")"
        # Not with the time of the original: a mutant may have been built since.
        cp "$file" "$tree/$file"
    done <"$base/new.list"
    if [ -f "$base/old.list" ]; then
        comm -z -13 <(sort -z "$base/new.list") <(sort -z "$base/old.list") |
            (cd "$tree" && xargs -0r rm -f --)
    fi
    mv "$base/new.list" "$base/old.list"
}

mutants() { # mutants OPTION…: cargo-mutants in the copy
    nice -n 19 cargo mutants --dir "$tree" "$@"
}

# only NAME…: sets `exactly`, options that choose these mutants. cargo-mutants 27.1 lets all mutants
# pass that leave out the field of a struct, whatever their names, so files are chosen, too.
only() {
    local name
    exactly=()
    for name; do
        exactly+=(--file "${name%%:*}")
        # shellcheck disable=SC2001 # a class of characters
        exactly+=(--re "^$(sed 's/[][\.*^$+?(){}|]/\\&/g' <<<"$name")\$")
    done
}

# Without the place in the file, which moves with every edit.
unplaced() { sed 's/^\([^:]*\):[0-9]*:[0-9]*: /\1: /'; }

listed() { sed -n 's/^\([^#].*[^ ]\)  *# .*/\1/p' "$list"; }

# round OUT LIMIT CRATE quick|all OPTION…: results in OUT/mutants.out. LIMIT: seconds, or nothing.
round() {
    local out=$1 within=() crate=$3 tests=(--lib --tests) status=0
    [ -z "$2" ] || within=(timeout --foreground -s INT -k 20 "$2")
    # In the first round without the tests that take longest, most mutants die of others.
    case $4.$crate in
        quick.ring) tests+=(-- --skip c09_ --skip no_wakeup_is_lost) ;;
        quick.disk)
            tests+=(-- --skip power_cut:: --skip c02_faults_within --skip c03_writes_within)
            ;;
        quick.export | quick.transport/vhost-user)
            tests=(--lib --test session_corpus --test inflight --test queue_reset --test turns)
            ;;
    esac
    shift 4
    # Most of what all transports share is tested over one of them.
    [ "$crate" != export ] || set -- "$@" --test-package=ringway-export,ringway-vhost-user
    rm -rf "$out"
    mkdir -p "$out"
    nice -n 19 "${within[@]}" cargo mutants --dir "$tree" --in-place --output "$out" --colors never \
        --cargo-arg=--locked --minimum-test-timeout 40 "$@" -- "${tests[@]}" || status=$?
    # 2: some were missed. 3: some did not end. 124, 130: out of time.
    case $status in
        0 | 2 | 3) ;;
        124 | 130) [ ${#within[@]} -gt 0 ] || exit "$status" ;;
        *) die "cargo mutants ended with status $status, see $out/mutants.out" ;;
    esac
}

# try NAME CRATE OPTION…: both rounds; adds to $base/result, one line "KIND MUTANT" each.
try() {
    local out=$base/$1 crate=$2 limit='' kind mutant survivors=()
    shift 2
    if [ -n "$seconds" ]; then
        limit=$((seconds - SECONDS + begun))
        [ "$limit" -gt 0 ] || return 0
    fi
    round "$out.1" "$limit" "$crate" quick "$@"
    # Stopped before it began.
    [ -f "$out.1/mutants.out/unviable.txt" ] || return 0
    for kind in caught timeout unviable; do
        sed "s/^/$kind /" "$out.1/mutants.out/$kind.txt" >>"$base/result"
    done
    while IFS= read -r mutant; do
        # What is known to survive takes no time of a sample.
        if [ -n "$size" ] && listed | grep -qxF -- "$(unplaced <<<"$mutant")"; then
            printf 'missed %s\n' "$mutant" >>"$base/result"
        else
            survivors+=("$mutant")
        fi
    done <"$out.1/mutants.out/missed.txt"
    [ ${#survivors[@]} -gt 0 ] || return 0
    only "${survivors[@]}"
    round "$out.2" '' "$crate" all "${exactly[@]}"
    for kind in caught timeout unviable missed; do
        sed "s/^/$kind /" "$out.2/mutants.out/$kind.txt" >>"$base/result"
    done
}

# One line for each mutant: what became of it last.
once() { awk '{ name = $0; sub(/^[^ ]* /, "", name); last[name] = $0 } END { for (n in last) print last[n] }'; }

cargo mutants --version >/dev/null 2>&1 || die "there is no cargo-mutants: cargo install cargo-mutants --locked"
copy_tree
: >"$base/result"
if [ -n "$size" ]; then
    seed=${RINGWAY_SEED:-$(date +%s)}
    printf '%d mutants of %d files, RINGWAY_SEED=%s\n' "$size" "${#files[@]}" "$seed"
    mutants --list "${files[@]/#/--file=}" |
        awk -v seed="$seed" 'BEGIN { srand(seed) } { print rand() "\t" $0 }' | sort -n |
        awk -F '\t' -v size="$size" 'NR <= size { print $2 }' >"$base/sample"
    for crate in ring path disk export transport/vhost-user transport/xen; do
        mapfile -t chosen < <(grep "^$crate/" "$base/sample" || true)
        [ ${#chosen[@]} -gt 0 ] || continue
        only "${chosen[@]}"
        try "sample-${crate//\//_}" "$crate" "${exactly[@]}"
    done
    ran=$(once <"$base/result" | wc -l)
    [ "$ran" -ge "$size" ] || printf 'warning: stopped after %s s, %d of %d were tried\n' \
        "$seconds" "$ran" "$size"
else
    for file in "${files[@]}"; do
        try "${file//\//_}" "${file%%/src/*}" --file "$file"
    done
fi

# --- what was found: per file, then what nothing noticed

once <"$base/result" | sort >"$base/final"
awk '{ split($2, place, ":"); file[place[1]]; n[place[1], $1]++ }
    END { for (f in file) printf "%s: %d caught, %d never ended, %d missed, %d did not compile\n", f,
        n[f, "caught"], n[f, "timeout"], n[f, "missed"], n[f, "unviable"] }' "$base/final" | sort
sed -n 's/^missed //p' "$base/final" | unplaced | sort >"$base/missed"
listed | sort >"$base/listed"
status=0
while IFS= read -r mutant; do
    printf 'not noticed, and not in %s: %s\n' "$list" "$mutant"
    status=1
done < <(comm -23 "$base/missed" "$base/listed")
if [ -z "$size" ]; then
    while IFS= read -r mutant; do
        printf 'listed, but noticed: %s\n' "$mutant"
    done < <(comm -13 "$base/missed" "$base/listed" |
        grep -F -f <(printf '%s: \n' "${files[@]}") || true)
fi
exit "$status"
