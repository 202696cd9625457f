#!/usr/bin/env bash
# Run a command with a Docker engine: bash scripts/with-engine.sh COMMAND...
#
# The one that answers is used. Otherwise Debian's is installed, if this is Debian and we are root, started for the time of the command, and
# stopped. Where there is none to be had the command runs all the same, and what needs an engine skips itself.
set -euo pipefail

START_S=60
log=$(mktemp)
engine=

say() { echo "with-engine: $*"; }

answers() { docker version >/dev/null 2>&1; }

install_engine() {
    command -v apt-get >/dev/null && [ "$(id -u)" = 0 ] && [ "${KVEMB_NO_INSTALL:-0}" != 1 ] || return 1
    say 'installing docker.io, docker-compose and debootstrap'
    local policy=/usr/sbin/policy-rc.d made=
    # Debian starts a service as soon as it is installed, unless this file says no.
    if ! [ -e $policy ]; then
        made=1
        printf '#!/bin/sh\nexit 101\n' >$policy && chmod 755 $policy
    fi
    local code=0
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        docker.io docker-compose debootstrap iptables ca-certificates; } >"$log" 2>&1 </dev/null || code=$?
    [ -z "$made" ] || rm -f $policy
    [ "$code" = 0 ] || tail -n 5 "$log"
    return "$code"
}

start_engine() {
    dockerd >"$log" 2>&1 &
    engine=$!
    for _ in $(seq $((2 * START_S))); do
        answers && return
        kill -0 $engine 2>/dev/null || break
        sleep 0.5
    done
    say 'the engine does not start here; its last words:'
    tail -n 5 "$log"
    stop_engine
    return 1
}

stop_engine() {
    [ -n "$engine" ] || return 0
    kill $engine 2>/dev/null || true
    wait $engine 2>/dev/null || true
    engine=
}

trap stop_engine EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

if answers; then
    say 'using the engine that runs'
elif { { command -v dockerd && command -v docker-compose && command -v debootstrap; } >/dev/null || install_engine; } && start_engine; then
    say "started Docker $(docker version --format '{{.Server.Version}}')"
else
    say 'NO ENGINE: what needs one is skipped'
fi
"$@"
