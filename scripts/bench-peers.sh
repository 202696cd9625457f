#!/bin/sh
# Set up the peers of the benchmarks that cannot share our environment: TFRA, in .bench-peers/tfra (about 1 GB, CPU only).
#
#   PEER_PYTHON=python3.11    interpreter to use; TensorFlow 2.15 runs on Python 3.9 to 3.11
#
# Nothing is done when it is there. Without it the benchmarks skip TFRA's lines with a word.
set -eu
cd "$(dirname "$0")/.."

folder=.bench-peers/tfra
log=.bench-peers/setup.log
# TFRA pins nothing it needs at run time but typeguard; --no-deps keeps it from asking for another TensorFlow.
tensorflow=tensorflow-cpu==2.15.1
tfra=tensorflow-recommenders-addons==0.7.2
typeguard=typeguard==2.13.3

die() {
    printf 'bench-peers: %s\n' "$*" >&2
    exit 1
}

suits() { "$1" -c 'import sys; sys.exit(not (3, 9) <= sys.version_info[:2] <= (3, 11))' >/dev/null 2>&1; }

find_python() {
    for candidate in ${PEER_PYTHON:-python3.11 python3.10 python3.9 python3}; do
        if command -v "$candidate" >/dev/null 2>&1 && suits "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    die "TFRA needs Python 3.9 to 3.11, none was found; install one and run: make bench-peers PEER_PYTHON=/path/to/python3.11"
}

works() { TF_CPP_MIN_LOG_LEVEL=3 "$folder/bin/python" -c 'import tensorflow_recommenders_addons' >>"$log" 2>&1; }

mkdir -p .bench-peers
if [ -x "$folder/bin/python" ] && works; then
    exit 0
fi
python=$(find_python)
rm -rf "$folder"
echo "bench-peers: installing $tensorflow and $tfra into $folder"
"$python" -m venv "$folder" >"$log" 2>&1 || die "$python -m venv failed; its words are in $log"
"$folder/bin/python" -m pip install --disable-pip-version-check "$tensorflow" "$typeguard" >>"$log" 2>&1 ||
    die "pip could not install $tensorflow; its words are in $log"
"$folder/bin/python" -m pip install --disable-pip-version-check --no-deps "$tfra" >>"$log" 2>&1 ||
    die "pip could not install $tfra; its words are in $log"
works || die "TFRA is installed and does not start; its words are in $log"
