#!/usr/bin/env bash
# Keras, TensorFlow and JAX beside kvemb: install them into .frameworks, and run the tests of their bridges. Arguments go to pytest.
# With --install alone nothing is tested.
#
# .frameworks holds what scripts/frameworks.txt pins and nothing else, and is on the path for these tests alone. Keras takes one backend for
# a process, so its tests run once for each; all of them, and the other bridges', run beside each other.
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
for backend in torch jax tensorflow; do
    KERAS_BACKEND=$backend "$python" -m pytest tests/keras_bridge "$@" >"$logs/keras on $backend" 2>&1 &
    running["keras on $backend"]=$!
done
"$python" -m pytest tests/jax_bridge tests/tensorflow_bridge "$@" >"$logs/jax and tensorflow" 2>&1 &
running["jax and tensorflow"]=$!

failed=0
for name in "${!running[@]}"; do
    wait "${running[$name]}" || failed=1
    printf '\n-- %s\n' "$name"
    cat "$logs/$name"
done
exit $failed
