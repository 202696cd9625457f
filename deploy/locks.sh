#!/usr/bin/env bash
# Write deploy/locks/*.txt anew: every package of the image at one version, with the checksums of its files. Needs uv (pip install uv).
#
#   run.txt          what kvemb itself needs
#   checkpoint.txt   that and the extra `checkpoint`
#   torch.txt        that and what PyTorch's CPU wheels need; PyTorch itself is named when the image is built
#   build.txt        what builds our wheel
#   LICENCES.md      the licence of each of them
set -euo pipefail
cd "$(dirname "$0")/.."

# One version for every Python (fewest): no condition may stand in a lock, see locks/run.in.
compile() {
    local output=deploy/locks/$1
    shift
    uv pip compile --quiet --universal --fork-strategy fewest --python-version 3.11 --generate-hashes --no-annotate --no-header \
        --output-file "$output" "$@"
    sed -i '1i # Written by deploy/locks.sh.' "$output"
}

compile run.txt pyproject.toml deploy/locks/run.in
compile checkpoint.txt pyproject.toml deploy/locks/run.in --extra checkpoint --constraint deploy/locks/run.txt
compile torch.txt pyproject.toml deploy/locks/run.in deploy/locks/torch.in --extra checkpoint --constraint deploy/locks/checkpoint.txt
compile build.txt deploy/locks/build.in

packages=$(mktemp -d)
trap 'rm -rf "$packages"' EXIT
uv pip install --quiet --no-deps --target "$packages" -r deploy/locks/torch.txt
python3 deploy/licences.py "$packages"
