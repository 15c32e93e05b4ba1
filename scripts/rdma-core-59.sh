#!/usr/bin/env bash
# Checks that the emulated NIC attaches to a newer rdma-core than the distribution's: gets the source of rdma-core 59, which
# PyPI's pyverbs 59.0 is, builds it below build/ and runs on it
#   - writes by pyverbs and by aiordma, with the emulated NIC attached in the process (tests/conformance/smoke.py)
#   - its ibv_devinfo, with the emulated NIC preloaded
#   - its own Python tests (tests/conformance), unless AIORDMA_SMOKE_ONLY is set. Arguments go to pytest,
#     or --report, alone, has what they give written down (tests/conformance/report.py)
#
# pyverbs works only with the libibverbs of exactly its version, so that both are built, and the distribution's stay out of
# sight. Run by `tox -e rdma-core-59`, whose Python has aiordma and pytest, or by hand in such an environment.
#
# Debian and Ubuntu packages that the build needs: build-essential cmake ninja-build pkg-config python3-dev libnl-3-dev
# libnl-route-3-dev
set -euo pipefail
cd "$(dirname "$0")/.."

version=59.0
cython=3.0.12 # newer ones don't compile this pyverbs
python=$(command -v python)
top=$PWD/build/rdma-core-$version
source=$top/pyverbs-$version/rdma-core

for tool in cc cmake ninja pkg-config; do
    command -v "$tool" >/dev/null || { echo "$0: needs $tool; the packages are named at its head" >&2; exit 1; }
done

if [ ! -e "$top/.built" ]; then
    rm -rf "$top"
    mkdir -p "$top"
    "$python" -m venv "$top/venv"
    "$top/venv/bin/python" -m pip install --quiet "Cython==$cython"
    # pip asks the source distribution for its metadata, by its own build system, where the same Cython must do.
    echo "Cython==$cython" >"$top/constraints.txt"
    PIP_CONSTRAINT=$top/constraints.txt "$top/venv/bin/python" -m pip download --quiet --no-deps --no-binary pyverbs \
        --dest "$top" "pyverbs==$version"
    tar -C "$top" -xzf "$top/pyverbs-$version.tar.gz"
    # In place: programs and extensions find the libraries, and libibverbs its providers, where they are built.
    cmake -G Ninja -S "$source" -B "$top/build" -DCMAKE_BUILD_TYPE=Release -DIN_PLACE=1 -DNO_MAN_PAGES=1 -DNO_PYVERBS=0 \
        -DENABLE_RESOLVE_NEIGH=0 -DPYTHON_EXECUTABLE="$top/venv/bin/python" >"$top/cmake.log"
    ninja -C "$top/build" pyverbs/all libibverbs/all libibverbs/examples/all providers/mlx5/all >"$top/ninja.log" ||
        { tail -n 40 "$top/ninja.log" >&2; exit 1; }
    # libibverbs complains of providers that weren't built.
    find "$top/build/etc/libibverbs.d" -name '*.driver' ! -name mlx5.driver -delete
    touch "$top/.built"
fi

export LD_LIBRARY_PATH=$top/build/lib PYTHONPATH=$top/build/python PYTHONSAFEPATH=1

"$python" tests/conformance/smoke.py "$version"
"$python" -m aiordma.cli emulate -- "$top/build/bin/ibv_devinfo" | grep -E 'hca_id|board_id|state'
[ -z "${AIORDMA_SMOKE_ONLY:-}" ] || exit 0
export AIORDMA_RDMA_CORE_TESTS=$source/tests
[ "${1:-}" != --report ] || exec "$python" tests/conformance/report.py
exec "$python" -m pytest --all-modules "${@:-tests/conformance}"
