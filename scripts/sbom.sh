#!/usr/bin/env bash
# Write the list of what kvemb ships (CycloneDX, JSON): of the wheel, by an environment that it is installed in, and of the images, by their
# locks.
#
#   bash scripts/sbom.sh FOLDER [CYCLONEDX_PY] [PYTHON]
#
#   FOLDER         takes wheel.cdx.json, image-slim.cdx.json, image.cdx.json, image-torch.cdx.json
#   CYCLONEDX_PY   the program (pip install cyclonedx-bom); the one on the path unless given
#   PYTHON         of an environment with nothing but the wheel and what it needs; unless given, that list is left out
#
# An image has its base image's system packages besides (PYTHON_IMAGE), and the torch that TORCH names. deploy/locks/LICENCES.md has the licences.
set -euo pipefail
export PYTHONWARNINGS=ignore # of a root without edges: locks are lists
folder=$(mkdir -p "$1" && cd "$1" && pwd)
tool=${2:-cyclonedx-py} python=${3:-}
cd "$(dirname "$0")/.."

for list in slim:run image:checkpoint torch:torch; do
    name=image-${list%:*}
    "$tool" requirements --pyproject pyproject.toml --output-reproducible --of JSON -o "$folder/${name/image-image/image}.cdx.json" "deploy/locks/${list#*:}.txt"
done
[ -z "$python" ] || "$tool" environment --pyproject pyproject.toml --output-reproducible --of JSON -o "$folder/wheel.cdx.json" "$python"
ls "$folder"
