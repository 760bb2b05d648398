#!/usr/bin/env bash
# Mutation testing: makes small mistakes in the code, one at a time, and asks whether a test notices.
# Needs `cargo install cargo-mutants --locked`.
#
#   tools/mutants.sh [FILE…]             every mutant of the files; of all in tools/mutants/files.txt
#   tools/mutants.sh --sample N SECONDS  N mutants of those files at random; stops so long after the first
#                                        one, and says so
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
# A mutant may want all the memory there is: then it is what the kernel ends first. In KiB; tests map more
# than they ever touch.
ulimit -d $((64 << 20))
echo 1000 >/proc/self/oom_score_adj
# A mutant's tests may leave out anything.
unset RINGWAY_SKIPS
begun=$SECONDS
# Set once a sample has run out of time.
stopped=''

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
        quick.export)
            tests=(--lib --test session_corpus --test sessions --test turns -- --skip hazards_ --skip two_drivers::)
            ;;
        quick.transport/vhost-user)
            tests=(--lib --test session_corpus --test sessions -- --skip hazards_ --skip two_drivers::)
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
        124 | 130)
            [ ${#within[@]} -gt 0 ] || exit "$status"
            stopped=yes
            ;;
        *) die "cargo mutants ended with status $status, see $out/mutants.out" ;;
    esac
}

# try NAME CRATE OPTION…: both rounds; adds to $base/result, one line "KIND MUTANT" each.
try() {
    local out=$base/$1 crate=$2 limit='' kind mutant survivors=()
    shift 2
    if [ -n "$seconds" ]; then
        limit=$((seconds - SECONDS + begun))
        if [ "$limit" -le 0 ]; then
            stopped=yes
            return 0
        fi
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
mutants --list "${files[@]/#/--file=}" >"$base/list"
for file in "${files[@]}"; do
    grep -q "^$file:" "$base/list" || die "cargo-mutants finds no mutant in $file: leave it out"
done
if [ -n "$size" ]; then
    seed=${RINGWAY_SEED:-$(date +%s)}
    printf '%d mutants of %d files, RINGWAY_SEED=%s\n' "$size" "${#files[@]}" "$seed"
    awk -v seed="$seed" 'BEGIN { srand(seed) } { print rand() "\t" $0 }' "$base/list" | sort -n |
        awk -F '\t' -v size="$size" 'NR <= size { print $2 }' >"$base/chosen"
    # Crates as the files are named, ring/src/… is of ring; in the order of chance, as time may run out.
    mapfile -t crates < <(sed 's|/src/.*||' "$base/chosen" | awk '!seen[$0]++')
    for crate in "${crates[@]}"; do
        mapfile -t chosen < <(grep "^$crate/src/" "$base/chosen")
        if [ ! -s "$base/result" ]; then
            # What has to be built first is not counted: one is tried, whatever time that takes.
            only "${chosen[0]}"
            seconds='' try sample-first "$crate" "${exactly[@]}"
            begun=$SECONDS
            chosen=("${chosen[@]:1}")
            [ ${#chosen[@]} -gt 0 ] || continue
        fi
        only "${chosen[@]}"
        try "sample-${crate//\//_}" "$crate" "${exactly[@]}"
    done
else
    cp "$base/list" "$base/chosen"
    for file in "${files[@]}"; do
        try "${file//\//_}" "${file%%/src/*}" --file "$file"
    done
fi

# --- what was found: per file, then what nothing noticed

once <"$base/result" | sort >"$base/final"
awk '{ split($2, place, ":"); file[place[1]]; n[place[1], $1]++ }
    END { for (f in file) printf "%s: %d caught, %d never ended, %d missed, %d did not compile\n", f,
        n[f, "caught"], n[f, "timeout"], n[f, "missed"], n[f, "unviable"] }' "$base/final" | sort
# What was to be tried and was not passes for nothing.
mapfile -t untried < <(comm -23 <(sort -u "$base/chosen") <(cut -d ' ' -f 2- "$base/final" | sort -u))
if [ ${#untried[@]} -gt 0 ] && [ -n "$stopped" ]; then
    printf 'warning: stopped after %s s, %d of %d were not tried\n' "$seconds" "${#untried[@]}" \
        "$(sort -u "$base/chosen" | wc -l)"
elif [ ${#untried[@]} -gt 0 ]; then
    printf 'not tried: %s\n' "${untried[@]}"
    die "${#untried[@]} mutants were chosen and not tried, see $base"
fi
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
