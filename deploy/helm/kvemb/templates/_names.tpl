{{/* Names, labels and addresses. 40 characters leave room for "-memcached-12" in what has to be a DNS label. */}}
{{- define "kvemb.name" -}}
{{- if contains "kvemb" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-kvemb" (.Release.Name | trunc 34 | trimSuffix "-") }}{{ end }}
{{- end }}

{{- define "kvemb.api" -}}
{{ .Values.cluster | default (include "kvemb.name" .) }}
{{- end }}

{{- define "kvemb.labels" -}}
{{ include "kvemb.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{/* What pods are found by; goes with a component. It never changes, as a StatefulSet's selector may not. Templates of pods have these labels alone: with those
     of a release of the chart in them, every release would restart shards, and be refused for a Job. */}}
{{- define "kvemb.selector" -}}
app.kubernetes.io/name: kvemb
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvemb.image" -}}
{{ .Values.image.repository }}{{ if .Values.image.digest }}@{{ .Values.image.digest }}{{ else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{/* NAME-0.NAME.NAMESPACE.svc.DOMAIN:PORT of every pod of a StatefulSet and its headless service of the same name: what replicas says, as a list.
     Full names have five dots, which is where resolvers in pods ask for them first, and not after three others. */}}
{{- define "kvemb.addresses" -}}
{{- $found := list }}
{{- range $number := until (int .replicas) }}
{{- $found = append $found (printf "%s-%d.%s.%s.svc.%s:%d" $.service $number $.service $.root.Release.Namespace $.root.Values.clusterDomain (int $.port)) }}
{{- end }}
{{- toJson $found }}
{{- end }}

{{- define "kvemb.shardService" -}}
{{ include "kvemb.name" . }}-shard
{{- end }}

{{- define "kvemb.nodeService" -}}
{{ include "kvemb.name" . }}-{{ .Values.storage.kind }}
{{- end }}

{{- define "kvemb.nodePort" -}}
{{ if eq .Values.storage.kind "memcached" }}11211{{ else }}6379{{ end }}
{{- end }}

{{/* Whether this chart runs the nodes. */}}
{{- define "kvemb.ownNodes" -}}
{{ if not .Values.storage.nodes }}true{{ end }}
{{- end }}

{{- define "kvemb.shardsTls" -}}
{{ if .Values.tls.shardSecret }}true{{ end }}
{{- end }}

{{/* Values that do not go together, said at once and with the way out. */}}
{{- define "kvemb.check" -}}
{{- $storage := .Values.storage }}
{{- $own := include "kvemb.ownNodes" . }}
{{- if not (or .Values.tls.shardSecret .Values.shards.insecure) }}
{{- fail "tls.shardSecret: missing: gradients, and orders to erase or load, would go over the network in the clear. Name a Secret (docs/kubernetes.md), or, on a network that no other machine reaches, set shards.insecure=true" }}
{{- end }}
{{- if not (or $storage.tls.secret $storage.insecure) }}
{{- fail "storage.tls.secret: missing: rows and passwords would go over the network in the clear. Name a Secret (docs/kubernetes.md), or, on a network that no other machine reaches, set storage.insecure=true" }}
{{- end }}
{{- if and .Values.tls.tokenSecret (not .Values.tls.shardSecret) }}
{{- fail "tls.tokenSecret: a token goes over TLS only: name tls.shardSecret too" }}
{{- end }}
{{- if and (or .Values.tls.trainerSecret .Values.tls.adminSecret) .Values.tls.tokenSecret }}
{{- fail "tls.tokenSecret: shards ask either for the token or for certificates: leave out tls.trainerSecret and tls.adminSecret, or the token" }}
{{- end }}
{{- if and .Values.tls.shardSecret (not .Values.tls.tokenSecret) }}
{{- if and .Values.trainer.enabled (not .Values.tls.trainerSecret) }}{{ fail "tls.trainerSecret: missing: without a certificate the trainer is refused by the shards" }}{{ end }}
{{- if not .Values.tls.adminSecret }}{{ fail "tls.adminSecret: missing: without a certificate the shards refuse backups, the toolbox, and what lets shards leave and join when shards.replicas changes" }}{{ end }}
{{- end }}
{{- if and $own (eq $storage.kind "redis-cluster") }}
{{- fail "storage.nodes: missing: the chart puts no Redis Cluster together; give the addresses of one, or another storage.kind" }}
{{- end }}
{{- if and $own (ne $storage.kind "memcached") (not $storage.password.secret) }}
{{- fail "storage.password.secret: missing: the chart's own nodes do not run without a password. kubectl create secret generic kvemb-storage --from-literal=password=$(openssl rand -hex 24), and set storage.password.secret=kvemb-storage" }}
{{- end }}
{{- if and (eq $storage.kind "memcached") $storage.password.secret }}
{{- fail "storage.password.secret: memcached nodes take no passwords but client certificates (storage.tls)" }}
{{- end }}
{{- if and $own $storage.tls.secret (not $storage.tls.nodesSecret) }}
{{- fail "storage.tls.nodesSecret: missing: the chart's own nodes need a certificate to serve with" }}
{{- end }}
{{- if and .Values.backup.url (hasPrefix "/checkpoints" .Values.backup.url) (not .Values.checkpoints.claim) }}
{{- fail "checkpoints.claim: missing: backup.url is on the volume /checkpoints, which is this claim's" }}
{{- end }}
{{- $elsewhere := and (contains "://" .Values.backup.url) (not (hasPrefix "file://" .Values.backup.url)) }}
{{- if and $elsewhere .Values.networkPolicy.enabled (not .Values.networkPolicy.egress) (ne $storage.kind "redis-cluster") }}{{/* whose policy lets everything out */}}
{{- fail (printf "networkPolicy.egress: missing: shards and backups may reach storage, shards and DNS alone, and no backup would get to %s. Allow the way there (docs/kubernetes.md), say networkPolicy.egress[0].ports[0].port=443" .Values.backup.url) }}
{{- end }}
{{- end }}
