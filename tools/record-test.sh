#!/bin/sh
# What cargo calls instead of a program of tests (a runner), for tools/tests.sh: notes what it would have run.
printf '%s\t%s\t%s\t%s\n' "$CARGO_PKG_NAME" "$PWD" "$1" "${LD_LIBRARY_PATH:-}" >>"$RINGWAY_TEST_PROGRAMS"
