#!/usr/bin/env bash
# The chart in a real Kubernetes, on one machine: needs docker, kind, kubectl and helm. The chart's own tests have no cluster, so this is for people who have.
#
#   deploy/helm/try-kind.sh            makes a cluster of kind, installs, trains, takes things away, and says whether rows are as they should be
#   deploy/helm/try-kind.sh down       deletes it
set -euo pipefail
cd "$(dirname "$0")/../.."
cluster=${KIND_CLUSTER:-kvemb-try}
image=kvemb:try

for program in docker kind kubectl helm; do
    command -v "$program" >/dev/null || {
        echo "try-kind: $program is not there" >&2
        exit 2
    }
done
if [ "${1:-}" = down ]; then
    exec kind delete cluster --name "$cluster"
fi
kubectl() { command kubectl --context "kind-$cluster" --namespace default "$@"; }
kvemb() { kubectl exec deploy/kvemb-toolbox -- kvemb "$@"; }
say() { printf '\n== %s\n' "$*"; }
# Commands of kvemb fail while something is away; give it three minutes.
until_well() {
    for _ in $(seq 90); do
        if kvemb status >/dev/null 2>&1; then
            kvemb status
            return
        fi
        sleep 2
    done
    kvemb status || true
    echo 'try-kind: not well after three minutes' >&2
    exit 1
}

say 'a cluster of three hosts'
kind get clusters | grep -qx "$cluster" || kind create cluster --name "$cluster" --config - <<'END'
kind: Cluster
apiVersion: kind.x-k8s.io/v1alpha4
nodes: [{role: control-plane}, {role: worker}, {role: worker}]
END

say 'the image'
docker build -f deploy/Dockerfile -t "$image" .
kind load docker-image "$image" --name "$cluster"

say 'the chart, with a trainer that runs the demo'
helm upgrade --install kvemb deploy/helm/kvemb --kube-context "kind-$cluster" --namespace default -f deploy/helm/examples/memcached.yaml \
    --set image.tag=try,toolbox.enabled=true,shards.resources.requests.cpu=100m,storage.cpu=100m,trainer.resources.requests.cpu=100m,shards.volume.size=2Gi
kubectl rollout status statefulset/kvemb-memcached --timeout 5m
kubectl rollout status statefulset/kvemb-shard --timeout 10m
kubectl rollout status deployment/kvemb-toolbox --timeout 5m
until_well

say 'while it trains: a shard and a storage node go away, and all shards are restarted one after the other'
kubectl delete pod kvemb-shard-1 --force --grace-period 0
kubectl delete pod kvemb-memcached-0
until_well
kubectl rollout restart statefulset/kvemb-shard
kubectl rollout status statefulset/kvemb-shard --timeout 10m

say 'the end of the training, which compares the rows with one process'
kubectl wait --for condition=complete job/kvemb-demo --timeout 15m
kubectl logs job/kvemb-demo --tail 20
until_well
kvemb doctor || true

say "done; $0 down deletes it all"
