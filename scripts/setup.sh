#!/bin/sh
# Prepare .venv for `make`: create it, install kvemb (editable) with the extras of a profile. Nothing is done when it is up to date.
#
#   sh scripts/setup.sh demo    what `kvemb demo` needs
#   sh scripts/setup.sh dev     what the tests, lint and benchmarks need, torch included
#   sh scripts/setup.sh docs    what builds the site, in .docs/venv and without kvemb, which is read there and not run
#
# Reads PYTHON (interpreter to use) and TORCH_SPEC (torch requirement of the dev profile, empty for none).
# What a person can mend is said in one line; pip's output stays in setup.log beside it and is shown only when it is news.
set -eu
cd "$(dirname "$0")/.."

die() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

version_of() {
    "$1" -c 'import sys; print("Python %d.%d" % sys.version_info[:2])' 2>/dev/null || echo 'not a working Python'
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        command -v "$PYTHON" >/dev/null 2>&1 || die "PYTHON=$PYTHON was not found; give the path of a Python 3.11 or newer"
        new_enough "$PYTHON" ||
            die "PYTHON=$PYTHON is $(version_of "$PYTHON"), kvemb needs 3.11 or newer; try: make PYTHON=/path/to/python3.12 ..."
        echo "$PYTHON"
        return
    fi
    for candidate in python3 python3.13 python3.12 python3.11 python3.14 python; do
        if command -v "$candidate" >/dev/null 2>&1 && new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    die "no Python 3.11 or newer found (python3 is $(version_of python3)); install one and run: make PYTHON=/path/to/python3.12 ..."
}

make_venv() {
    "$python" -c 'import venv, ensurepip' >/dev/null 2>&1 || die "$python has no venv module;" \
        "on Debian/Ubuntu run: apt-get install $("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')," \
        "or give another interpreter: make PYTHON=/path/to/python3.12 ..."
    rm -rf $venv
    "$python" -m venv $venv >/dev/null 2>&1 || {
        rm -rf $venv
        die "$python -m venv $venv failed; see: $python -m venv /tmp/try-venv"
    }
}

explain_pip_failure() {
    if grep -qE 'NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|ProxyError|Max retries exceeded|Network is unreachable' "$log"
    then
        die "no package index could be reached; check the network or proxy and run it again (pip's words: $log)"
    fi
    if grep -q 'No matching distribution found' "$log" && grep -q '(from versions: none)' "$log"; then
        missing=$(sed -n 's/.*No matching distribution found for //p' "$log" | head -n 1)
        die "no package index could be reached, or it does not have $missing; check the network, proxy or PIP_INDEX_URL" \
            "and run it again (pip's words: $log)"
    fi
    tail -n 30 "$log" >&2
    die "pip could not install $*; its last lines are above, all of them in $log"
}

pip_install() {
    $venv/bin/python -m pip install --disable-pip-version-check --retries 2 "$@" >"$log" 2>&1 || explain_pip_failure "$*"
}

profile=${1:-dev}
venv=.venv
case $profile in
    demo) extras=demo ;;
    dev) extras=dev,embedded ;;
    docs) venv=.docs/venv ;;
    *) die "unknown profile '$profile': demo, dev or docs" ;;
esac
log=$venv/setup.log

python=$(find_python)
# What an environment depends on. It holds absolute paths, so a moved checkout needs a new one.
base="$(pwd) $("$python" -c 'import sys; print(sys.version, sys.base_prefix)')"
want="$(cksum <pyproject.toml) ${TORCH_SPEC-}"

if ! [ -x $venv/bin/python ] || [ "$(cat $venv/kvemb-base 2>/dev/null)" != "$base" ]; then
    make_venv
    printf '%s\n' "$base" >$venv/kvemb-base
fi
# The dev profile holds all that demo needs.
for done in "$profile" dev; do
    [ "$(cat "$venv/kvemb-$done" 2>/dev/null)" = "$want" ] && exit 0
done

echo "setup: installing into $venv (profile $profile, $(version_of $venv/bin/python)); the first time takes a minute or two"
if [ "$profile" = dev ] && [ -n "${TORCH_SPEC-}" ]; then
    pip_install "$TORCH_SPEC"
fi
if [ "$profile" = docs ]; then
    # shellcheck disable=SC2046  # a list of requirements
    pip_install $("$venv/bin/python" -c 'import tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
else
    pip_install -e ".[$extras]"
fi
printf '%s\n' "$want" >"$venv/kvemb-$profile"
