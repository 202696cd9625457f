#!/usr/bin/env bash
# Keras, TensorFlow and JAX beside kvemb: install them into .frameworks, and run the tests of their bridges. Arguments go to pytest.
# With --install alone nothing is tested.
#
# .frameworks holds what scripts/frameworks.txt pins and nothing else, and is on the path for these tests alone. Keras takes one backend for
# a process, so its tests run once for each. The contract of all bridges (tests/bridges) runs with each, too, and the other bridges' tests and
# examples of their docstrings; all of them beside each other.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$PWD/.venv/bin/python

if ! cmp -s scripts/frameworks.txt .frameworks/installed.txt; then
    rm -rf .frameworks
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps --target .frameworks -r scripts/frameworks.txt
    cp scripts/frameworks.txt .frameworks/installed.txt
fi
[ "${1-}" != --install ] || exit 0
export PYTHONPATH="$PWD/.frameworks${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1 TF_CPP_MIN_LOG_LEVEL=3
logs=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$logs"' EXIT

declare -A running
beside() { # name, arguments of pytest
    "$python" -m pytest "${@:2}" >"$logs/$1" 2>&1 &
    running[$1]=$!
}
for backend in torch jax tensorflow; do
    KERAS_BACKEND=$backend beside "Keras on $backend" tests/keras_bridge tests/bridges -k "keras_bridge or keras-$backend" "$@"
done
beside 'contract' tests/bridges -k 'not keras-' "$@"
beside 'JAX and TensorFlow' tests/jax_bridge tests/tensorflow_bridge trainer/jax trainer/keras trainer/tensorflow kvemb/{jax,keras,tensorflow}.py "$@"

failed=0
for name in "${!running[@]}"; do
    wait "${running[$name]}" || failed=1
    printf '\n-- %s\n' "$name"
    cat "$logs/$name"
done
exit $failed
