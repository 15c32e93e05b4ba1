#!/usr/bin/env bash
# Fuzzes the emulator with libFuzzer, under the address and undefined-behaviour sanitizers. Wants clang with its runtime
# (Debian and Ubuntu: clang libclang-rt-dev, or libclang-rt-VERSION-dev).
#
#   scripts/fuzz.sh [--seconds N] [uverbs|wqe|link|cm ...]   each target for N seconds (60), beginning with its corpus
#   scripts/fuzz.sh --record                              records real traffic of the test suite, for the corpus of uverbs
#   scripts/fuzz.sh --merge                               adds what was found or recorded to tests/emulator_c/fuzz/corpus,
#                                                         as far as it reaches code that nothing there does
#
# What a run finds stays in build/fuzz-corpus and is where the next one begins. An input that failed is kept in
# build/fuzz-findings. `tox -e fuzz` calls this with meson and the test suite on PATH.
set -euo pipefail

cd "$(dirname "$0")/.."
seconds=60
action=run
targets=()
while [ $# -gt 0 ]; do
    case $1 in
    --seconds)
        seconds=${2:?}
        shift
        ;;
    --record | --merge) action=${1#--} ;;
    uverbs | wqe | link | cm) targets+=("$1") ;;
    *)
        echo "usage: $0 [--seconds N | --record | --merge] [uverbs|wqe|link|cm ...]" >&2
        exit 2
        ;;
    esac
    shift
done
[ ${#targets[@]} -gt 0 ] || targets=(uverbs wqe link cm)

committed=tests/emulator_c/fuzz/corpus
found=build/fuzz-corpus
findings=build/fuzz-findings
mkdir -p $findings
common=(-Dfuzzers=true -Demulator_tests=true -Dextension=false -Dwerror=false)

set_up() {
    if [ -e "$1/build.ninja" ]; then
        meson setup --reconfigure "$@" >/dev/null
    else
        meson setup "$@" >/dev/null
    fi
}

build_targets() {
    command -v clang >/dev/null || {
        echo "fuzzing wants clang and its runtime: apt-get install clang libclang-rt-dev (or libclang-rt-VERSION-dev)" >&2
        exit 1
    }
    export CC=clang
    set_up build/fuzz "${common[@]}" -Db_sanitize=address,undefined -Db_lundef=false -Dc_args=-fsanitize=fuzzer-no-link
    meson compile -C build/fuzz "${targets[@]/#/fuzz_}"
}

export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1

case $action in
run)
    build_targets
    for target in "${targets[@]}"; do
        mkdir -p $found/"$target"
        echo "== $target, $seconds s"
        build/fuzz/tests/emulator_c/fuzz_"$target" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=2500 -max_len=12000 \
            -print_final_stats=1 -verbosity=0 -artifact_prefix=$findings/"$target"- \
            $found/"$target" $committed/"$target"
    done
    ;;
record)
    set_up build/record "${common[@]}"
    meson compile -C build/record aiordma_emulator_recording
    mkdir -p $found/uverbs
    AIORDMA_FUZZ_RECORD=$PWD/$found/uverbs \
        AIORDMA_EMULATOR_LIBRARY=$PWD/build/record/tests/emulator_c/libaiordma_emulator_recording.so \
        pytest -q -k "not fork and not preload and not uvloop and not trio" tests/emulated/test_uverbs_*.py \
        tests/emulated/test_mlx5_{devx_*,dc,umr,memcpy,raw_wqe,dci_pool}.py
    ;;
merge)
    build_targets
    for target in "${targets[@]}"; do
        mkdir -p $found/"$target"
        build/fuzz/tests/emulator_c/fuzz_"$target" -merge=1 -use_counters=0 -max_len=12000 -verbosity=0 \
            $committed/"$target" $found/"$target"
    done
    du -sh $committed/*
    ;;
esac
