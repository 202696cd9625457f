#!/usr/bin/env bash
# Build the readers of examples/readers, and run their tests. Arguments go to pytest.
#
# Compilers and clients of Redis that are missing come from Debian's or Ubuntu's packages, where this script may install them: root, or
# passwordless sudo. npm's go into .readers.
set -euo pipefail
cd "$(dirname "$0")/.."
packages=(gcc libc6-dev libhiredis-dev libssl-dev golang-go golang-github-gomodule-redigo-dev golang-golang-x-crypto-dev)
packages+=(default-jdk-headless libbcprov-java)
command -v node >/dev/null && command -v npm >/dev/null || packages+=(nodejs npm)

missing=()
for package in "${packages[@]}"; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
    as_root=()
    [ "$(id -u)" = 0 ] || as_root=(sudo -n)
    echo "readers: installing ${missing[*]}"
    "${as_root[@]}" apt-get update -qq
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi
if ! cmp -s examples/readers/js/package.json .readers/package.json; then
    rm -rf .readers
    mkdir .readers
    cp examples/readers/js/package.json .readers/
    npm install --prefix .readers --no-audit --no-fund --silent || { rm -rf .readers && exit 1; }
fi
KVEMB_REQUIRE_READERS=1 exec .venv/bin/python -m pytest tests/readers "$@"
