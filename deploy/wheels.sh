#!/usr/bin/env bash
# Bring the wheels of the image's dependencies along, for a build that can reach no package index: fills deploy/wheels, which the
# Dockerfile then uses instead of the network. Run it where pip can reach an index, with the checkout on its way to where it cannot.
#
#   deploy/wheels.sh [PYTHON_VERSION]              3.12 unless given: the Python of the base image
#   TORCH=torch==2.13.0+cpu deploy/wheels.sh       PyTorch too; where pip finds that build is pip's configuration to say
set -euo pipefail
cd "$(dirname "$0")/.."

version=${1:-3.12}
machine=$(uname -m)
options=(--quiet --no-deps --only-binary=:all: --implementation cp --python-version "$version" --dest deploy/wheels)
for glibc in 2_28 2_27 2_26 2_25 2_24 2_17; do
    options+=(--platform "manylinux_${glibc}_$machine")
done
options+=(--platform "manylinux2014_$machine")

lock=checkpoint
[ -z "${TORCH:-}" ] || lock=torch
python3 -m pip download "${options[@]}" --require-hashes -r deploy/locks/build.txt
python3 -m pip download "${options[@]}" --require-hashes -r deploy/locks/$lock.txt
[ -z "${TORCH:-}" ] || python3 -m pip download "${options[@]}" "$TORCH"
echo "wheels: $(find deploy/wheels -name '*.whl' | wc -l) in deploy/wheels, for Python $version on $machine"
