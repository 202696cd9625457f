#!/usr/bin/env bash
# Other people's libraries beside kvemb, and Slurm: install them into .libraries, and run the tests that use them. Arguments go to pytest.
#
# .libraries holds what scripts/libraries.txt pins and nothing else, and is on the path for these tests alone. Slurm is Debian's.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$PWD/.venv/bin/python

if ! cmp -s scripts/libraries.txt .libraries/installed.txt; then
    rm -rf .libraries
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps --target .libraries -r scripts/libraries.txt
    cp scripts/libraries.txt .libraries/installed.txt
fi
sh scripts/servers.sh slurmctld slurmd munge
PYTHONPATH="$PWD/.libraries${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m pytest tests/libraries \
    tests/torch/test_row_checkpoints.py tests/torch/test_materialize.py "$@"
