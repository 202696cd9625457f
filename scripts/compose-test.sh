#!/usr/bin/env bash
# `make compose-test`: the tests of tests/containers, on a Docker engine that runs. What they need is made first, where it is missing:
# stand-ins for the official images (deploy/base-images.sh), the wheels of our dependencies, our image.
#
#   KVEMB_OFFICIAL_IMAGES=1    use the images that docker-compose.yml names by default, from a registry, instead of stand-ins
#
# Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! docker version >/dev/null 2>&1; then
    echo 'compose-test: no Docker engine answers, so every test is skipped; scripts/with-engine.sh installs and starts one on Debian'
elif [ "${KVEMB_OFFICIAL_IMAGES:-0}" != 1 ]; then
    bash deploy/base-images.sh
    set -a
    # shellcheck source=../deploy/stand-ins.env
    . deploy/stand-ins.env
    set +a
    if ! ls deploy/wheels/*.whl >/dev/null 2>&1; then
        bash deploy/wheels.sh "$(docker run --rm "$PYTHON_IMAGE" python -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
    fi
fi

export KVEMB_CONTAINER_TESTS=1 TESTCONTAINERS_RYUK_DISABLED=true KVEMB_IMAGE=kvemb:test
if docker version >/dev/null 2>&1; then
    for target in '' slim; do
        docker build --quiet --file deploy/Dockerfile ${PYTHON_IMAGE:+--build-arg PYTHON_IMAGE="$PYTHON_IMAGE"} ${target:+--target "$target"} \
            --tag "$KVEMB_IMAGE${target:+-$target}" . 2>build.log || {
            cat build.log >&2
            exit 1
        }
        rm -f build.log
    done
    echo "compose-test: images are ready after $SECONDS s"
fi
exec .venv/bin/python -m pytest tests/containers "$@"
