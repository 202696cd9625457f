#!/bin/sh
# A storage node on Redis or Valkey, inside its container: sh redis-node.sh redis-server|valkey-server [cluster]
#
# KVEMB_TLS_FOLDER: with ca.crt, tls.crt and tls.key: it speaks TLS only. KVEMB_TLS_CLIENTS=no: it asks clients for no certificate.
#
# The password goes into a file in memory, not onto a command line. No persistence: an old snapshot is worse than an empty node, which the
# parameter servers fill again. A node of a cluster keeps its place in it (nodes.conf, on a volume), and says its name, not its address,
# which may be another one after a restart.
set -eu
: "${KVEMB_STORAGE_PASSWORD:?set KVEMB_STORAGE_PASSWORD (letters, digits, - and _) for this profile}"
case $KVEMB_STORAGE_PASSWORD in
    *[!A-Za-z0-9_-]*)
        echo 'KVEMB_STORAGE_PASSWORD: only letters, digits, - and _ here' >&2
        exit 2
        ;;
esac
umask 077
conf=${TMPDIR:-/tmp}/node.conf
cat >"$conf" <<EOF
requirepass $KVEMB_STORAGE_PASSWORD
masterauth $KVEMB_STORAGE_PASSWORD
maxmemory ${MAXMEMORY_MB:-512}mb
maxmemory-policy noeviction
save ""
appendonly no
dir /data
EOF
if [ -n "${KVEMB_TLS_FOLDER:-}" ]; then
    cat >>"$conf" <<EOF
port 0
tls-port 6379
tls-ca-cert-file $KVEMB_TLS_FOLDER/ca.crt
tls-cert-file $KVEMB_TLS_FOLDER/tls.crt
tls-key-file $KVEMB_TLS_FOLDER/tls.key
tls-auth-clients ${KVEMB_TLS_CLIENTS:-yes}
tls-cluster yes
tls-replication yes
EOF
fi
if [ "${2:-}" = cluster ]; then
    rm -f /data/*.rdb
    cat >>"$conf" <<EOF
cluster-enabled yes
cluster-config-file /data/nodes.conf
cluster-node-timeout 5000
cluster-announce-hostname $(hostname)
cluster-preferred-endpoint-type hostname
EOF
fi
exec "$1" "$conf"
