#!/bin/sh
# Make one Redis Cluster of the nodes given, three primaries with a replica each, unless it is made already: runs once and ends.
#
#   sh redis-cluster-create.sh HOST HOST HOST HOST HOST HOST
set -eu
export REDISCLI_AUTH="$KVEMB_STORAGE_PASSWORD"

state() { redis-cli -h "$1" cluster info | tr -d '\r'; }

# Whether a node sees every slot served and all nodes there.
whole() {
    state "$1" | grep -qx 'cluster_state:ok' && state "$1" | grep -qx "cluster_known_nodes:$#"
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

# Nodes that know one another were a cluster before; they come together again by themselves.
if ! state "$1" | grep -qx 'cluster_known_nodes:1'; then
    wait_until_whole "$@"
fi
addresses=
for host in "$@"; do
    addresses="$addresses $(getent hosts "$host" | cut -d ' ' -f 1):6379" # it takes no names
done
# shellcheck disable=SC2086  # a list
redis-cli --cluster create $addresses --cluster-replicas 1 --cluster-yes >/tmp/create.log || {
    cat /tmp/create.log >&2
    exit 1
}
wait_until_whole "$@"
