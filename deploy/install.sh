#!/bin/sh
# A step of the image's build: sh deploy/install.sh run|kvemb|checkpoint|torch, into the environment /opt/kvemb. See the Dockerfile.
#
# The environment has no pip of its own, so that the image holds nothing that only a build needs.
set -eu

target=/opt/kvemb
PATH=/usr/local/bin:/usr/bin:/bin # the base image's Python, which has pip
quiet="--quiet --no-cache-dir --disable-pip-version-check"
if ls deploy/wheels/*.whl >/dev/null 2>&1; then
    from="--no-index --find-links deploy/wheels"
else
    from=
fi

# shellcheck disable=SC2086  # lists of options
install() { python -m pip --python "$target/bin/python" install $quiet $from --only-binary=:all: "$@"; }

case $1 in
    run)
        python -m venv --without-pip "$target"
        install --no-deps --require-hashes -r deploy/locks/run.txt
        ;;
    kvemb)
        python -m venv --without-pip /tmp/builder
        # shellcheck disable=SC2086
        python -m pip --python /tmp/builder/bin/python install $quiet $from --require-hashes -r deploy/locks/build.txt
        python -m pip --python /tmp/builder/bin/python wheel $quiet --no-index --no-deps --no-build-isolation --wheel-dir /tmp/dist .
        install --no-deps /tmp/dist/kvemb-*.whl
        cp deploy/healthcheck.py "$target/"
        rm -rf /tmp/builder /tmp/dist build
        ;;
    checkpoint)
        install --no-deps --require-hashes -r deploy/locks/checkpoint.txt
        # Headers and tests that nothing of ours reads: a third of a hundred megabytes.
        find "$target" -path '*/site-packages/*' \( -path '*/pyarrow/include' -o -path '*/pyarrow/tests' \) -prune -exec rm -rf {} +
        ;;
    torch)
        [ -n "${TORCH:-}" ] || exit 0
        install --no-deps --require-hashes -r deploy/locks/torch.txt
        install --no-deps ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH"
        ;;
esac
