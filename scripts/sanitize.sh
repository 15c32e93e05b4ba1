#!/usr/bin/env bash
# Builds the emulator and its C tests under the address and undefined-behaviour sanitizers and runs them.
# meson and ninja must be on PATH: `tox -e sanitize` sees to that. Arguments go to `meson test`.
set -euo pipefail

cd "$(dirname "$0")/.."
build=build/sanitize

# shellcheck disable=SC2054 # the comma is within one value
options=(
    -Db_sanitize=address,undefined
    # Sanitized objects have undefined symbols that only the final program brings.
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
meson test -C $build --no-rebuild --print-errorlogs "$@"
