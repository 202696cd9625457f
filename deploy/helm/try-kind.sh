#!/usr/bin/env bash
# The chart in a real Kubernetes: needs kubectl and helm, and unless a cluster is given, docker and kind. The chart's own tests have no cluster.
#
#   deploy/helm/try-kind.sh            makes a cluster of kind, installs, trains, takes things away, and says whether rows are as they should be
#   CONTEXT=NAME IMAGE=registry.example.org/kvemb:0.1.0 deploy/helm/try-kind.sh
#                                      the same in the cluster that this context of your kubeconfig names, with an image that its hosts have or pull
#   deploy/helm/try-kind.sh down       deletes what was made: the cluster of kind, or the namespace kvemb-try of yours (with CONTEXT as before)
#
# Further words go to helm, e.g. --set storage.image=registry.example.org/memcached:1.6
set -euo pipefail
cd "$(dirname "$0")/../.."
cluster=${KIND_CLUSTER:-kvemb-try}
context=${CONTEXT:-kind-$cluster}
image=${IMAGE:-kvemb:try}
namespace=kvemb-try

programs=(kubectl helm)
[ -n "${CONTEXT:-}" ] || programs+=(docker kind)
for program in "${programs[@]}"; do
    command -v "$program" >/dev/null || {
        echo "try-kind: $program is not there" >&2
        exit 2
    }
done
if [ "${1:-}" = down ]; then
    [ -n "${CONTEXT:-}" ] || exec kind delete cluster --name "$cluster"
    helm uninstall kvemb --kube-context "$context" --namespace $namespace
    exec kubectl --context "$context" delete namespace $namespace
fi
kubectl() { command kubectl --context "$context" --namespace $namespace "$@"; }
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

if [ -z "${CONTEXT:-}" ]; then
    say 'a cluster of three hosts'
    kind get clusters | grep -qx "$cluster" || kind create cluster --name "$cluster" --config - <<'END'
kind: Cluster
apiVersion: kind.x-k8s.io/v1alpha4
nodes: [{role: control-plane}, {role: worker}, {role: worker}]
END

    say 'the image'
    docker build -f deploy/Dockerfile -t "$image" .
    kind load docker-image "$image" --name "$cluster"
fi

say 'the chart, with a trainer that runs the demo, where pods may do as little as Kubernetes knows'
kubectl create namespace $namespace 2>/dev/null || true
kubectl label --overwrite namespace $namespace pod-security.kubernetes.io/enforce=restricted
helm upgrade --install kvemb deploy/helm/kvemb --kube-context "$context" --namespace $namespace \
    -f deploy/helm/examples/memcached.yaml "$@" --set "image.repository=${image%:*},image.tag=${image##*:}" \
    --set toolbox.enabled=true,shards.resources.requests.cpu=100m,storage.cpu=100m,trainer.resources.requests.cpu=100m,shards.volume.size=2Gi
kubectl wait statefulset/kvemb-memcached --for 'jsonpath={.status.readyReplicas}=2' --timeout 5m  # OnDelete has no rollout to wait for
kubectl rollout status statefulset/kvemb-shard --timeout 10m
kubectl rollout status deployment/kvemb-toolbox --timeout 5m
until_well

say 'while it trains: a shard and a storage node go away, and all shards are restarted one after the other'
until kubectl logs job/kvemb-demo | grep 'pass 1/3: '; do sleep 2; done
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
