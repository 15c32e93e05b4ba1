#!/usr/bin/env bash
# Builds the emulator under the address and undefined-behaviour sanitizers, and on it runs
#
#   scripts/sanitize.sh c-tests [meson test's arguments]   the emulator's C tests
#   scripts/sanitize.sh pytest [pytest's arguments]        the Python tests, in the sanitizers' runtime
#
# and, under the thread sanitizer,
#
#   scripts/sanitize.sh threads [meson test's arguments]   the emulator's C tests
#
# `tox -e sanitize`, `tox -e sanitize-tests` and `tox -e tsan` call it with what it needs on PATH.
set -euo pipefail

cd "$(dirname "$0")/.."
what=${1:?c-tests, pytest or threads}
shift
build=build/sanitize
sanitizers=address,undefined
flags=
if [ "$what" = threads ]; then
    build=build/tsan
    sanitizers=thread
    # It doesn't know fences of their own. There is one, between processes, around a flag that is atomic.
    flags=-Wno-tsan
fi

# shellcheck disable=SC2054 # the comma is within one value
options=(
    -Db_sanitize=$sanitizers
    -Dc_args=$flags
    # The runtime of the sanitizers comes with the program, not with a library that the program loads.
    -Db_lundef=false
    -Demulator_tests=true
    -Dextension=false
)
if [ -e $build/build.ninja ]; then
    meson setup --reconfigure $build "${options[@]}" >/dev/null
else
    meson setup $build "${options[@]}"
fi
meson compile -C $build

# Undefined behaviour is a failure, not a remark.
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
export ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1
# A handler for faults that never returns (fault.c) leaves it thinking that the thread is still in one.
export TSAN_OPTIONS=halt_on_error=1:report_signal_unsafe=0

case $what in
c-tests)
    exec meson test -C $build --no-rebuild --print-errorlogs "$@"
    ;;
threads)
    # Not the fuzz targets: their memory is where this sanitizer wants none.
    exec meson test -C $build --no-rebuild --print-errorlogs --suite emulator --timeout-multiplier 4 "$@"
    ;;
pytest)
    AIORDMA_EMULATOR_LIBRARY=$PWD/$build/aiordma/emulator/src/libaiordma_emulator.so
    export AIORDMA_EMULATOR_LIBRARY
    # The interpreter keeps memory on purpose until it exits, and programs may preload the emulator ahead of the runtime.
    export ASAN_OPTIONS=$ASAN_OPTIONS:detect_leaks=0:verify_asan_link_order=0
    exec env LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)" pytest "$@"
    ;;
*)
    echo "$0: c-tests, pytest or threads, not $what" >&2
    exit 2
    ;;
esac
