#!/bin/sh
# See to the system servers of the tests: redis-server and memcached, and those that are named. (Valkey comes with the Python environment.)
#
#   sh scripts/servers.sh [prometheus]
#
# Missing ones are installed where this script may: apt-get there, and root or passwordless sudo. Otherwise it says which command to
# run and which tests will be skipped; where servers are required (CI=true or KVEMB_REQUIRE_SERVERS=1) that is an error.
# KVEMB_NO_INSTALL=1: never install anything. The tests start servers of their own on free ports; no service is started here.
set -eu

programs="redis-server memcached $*"

missing() {
    for server in $programs; do
        command -v "$server" >/dev/null 2>&1 || printf ' %s' "$server"
    done
}

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

may_install() {
    [ "${KVEMB_NO_INSTALL:-0}" != 1 ] && command -v apt-get >/dev/null 2>&1 || return 1
    [ "$(id -u)" = 0 ] || { command -v sudo >/dev/null 2>&1 && sudo -n true >/dev/null 2>&1; }
}

# Debian starts a service as soon as it is installed, unless this file says no. One that is already there is left alone.
policy=/usr/sbin/policy-rc.d

install_servers() {
    if ! [ -e "$policy" ]; then
        trap 'as_root rm -f "$policy"' EXIT
        trap 'exit 130' INT
        trap 'exit 143' TERM
        as_root sh -c "printf '#!/bin/sh\nexit 101\n' >$policy && chmod 755 $policy"
    fi
    log=$(mktemp)
    # shellcheck disable=SC2086  # a list of package names
    if as_root apt-get update -qq >"$log" 2>&1 &&
        as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $1 >>"$log" 2>&1; then
        rm -f "$log"
    else
        tail -n 15 "$log" >&2
        echo "servers: apt-get could not install$1; its last lines are above, all of them in $log" >&2
    fi
}

wanted=$(missing)
[ -n "$wanted" ] || exit 0

if may_install; then
    echo "servers: installing$wanted (not started as services)"
    install_servers "$wanted"
    wanted=$(missing)
    [ -n "$wanted" ] || exit 0
fi

echo "servers: not found:$wanted. To run their tests too: sudo apt-get install$wanted" >&2
if [ "${CI:-}" = true ] || [ "${KVEMB_REQUIRE_SERVERS:-}" = 1 ]; then
    echo "servers: they are required here (CI=true or KVEMB_REQUIRE_SERVERS=1)" >&2
    exit 1
fi
case $wanted in *redis-server*) echo "servers: skipped without redis-server: the tests on Redis and Redis Cluster" >&2 ;; esac
case $wanted in *memcached*) echo "servers: skipped without memcached: the tests on memcached" >&2 ;; esac
