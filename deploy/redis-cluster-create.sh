#!/bin/sh
# Make one Redis Cluster of the nodes given, three primaries with a replica each; one that was made before is brought together again, because
# containers that were stopped may come back under one another's addresses. Runs once and ends.
#
#   sh redis-cluster-create.sh HOST HOST HOST HOST HOST HOST
set -eu
export REDISCLI_AUTH="$KVEMB_STORAGE_PASSWORD"

state() { redis-cli -h "$1" cluster info | tr -d '\r'; }

# Whether every node sees all nodes, and every slot served.
whole() {
    for host in "$@"; do
        state "$host" | grep -qx 'cluster_state:ok' && state "$host" | grep -qx "cluster_known_nodes:$#" || return 1
    done
}

wait_until_whole() {
    for _ in $(seq 120); do
        if whole "$@"; then
            echo "the cluster is whole: $*"
            exit 0
        fi
        sleep 0.5
    done
    echo "the cluster did not come together: $(state "$1" | tr '\n' ' ')" >&2
    exit 1
}

address_of() { getent hosts "$1" | cut -d ' ' -f 1; } # redis takes no names here

if ! state "$1" | grep -qx 'cluster_known_nodes:1'; then
    for host in "$@"; do
        for other in "$@"; do
            redis-cli -h "$host" cluster meet "$(address_of "$other")" 6379 >/dev/null
        done
    done
    wait_until_whole "$@"
fi
addresses=
for host in "$@"; do
    addresses="$addresses $(address_of "$host"):6379"
done
# shellcheck disable=SC2086  # a list
redis-cli --cluster create $addresses --cluster-replicas 1 --cluster-yes >/tmp/create.log || {
    cat /tmp/create.log >&2
    exit 1
}
wait_until_whole "$@"
