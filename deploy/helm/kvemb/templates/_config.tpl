{{/* kvemb.yaml, the same file for shards and all who use them. */}}
{{- define "kvemb.config" -}}
{{- include "kvemb.check" . }}
{{- $values := .Values }}
{{- $storage := dict "kind" $values.storage.kind }}
{{- if $values.storage.nodes }}
{{- $_ := set $storage "nodes" $values.storage.nodes }}
{{- else }}
{{- $_ := set $storage "nodes" (include "kvemb.addresses" (dict "root" . "service" (include "kvemb.nodeService" .) "replicas" $values.storage.replicas "port" (include "kvemb.nodePort" .)) | fromJsonArray) }}
{{- end }}
{{- if $values.storage.password.secret }}{{ $_ := set $storage "password_env" "KVEMB_STORAGE_PASSWORD" }}{{ end }}
{{- if and $values.storage.password.secret $values.storage.password.userKey }}{{ $_ := set $storage "username_env" "KVEMB_STORAGE_USER" }}{{ end }}
{{- if $values.storage.tls.secret }}
{{- $tls := dict "ca" "/etc/kvemb-storage-tls/ca.crt" }}
{{- if $values.storage.tls.mutual }}{{ $tls = merge $tls (dict "cert" "/etc/kvemb-storage-tls/tls.crt" "key" "/etc/kvemb-storage-tls/tls.key") }}{{ end }}
{{- $_ := set $storage "tls" $tls }}
{{- else }}{{ $_ := set $storage "insecure" true }}{{ end }}
{{- $servers := dict "data_dir" "/var/lib/kvemb" }}
{{- $_ := set $servers "shards" (include "kvemb.addresses" (dict "root" . "service" (include "kvemb.shardService" .) "replicas" $values.shards.replicas "port" 7070) | fromJsonArray) }}
{{- if $values.metrics.enabled }}{{ $_ := set $servers "metrics_port" (int $values.metrics.port) }}{{ end }}
{{- if $values.tls.tokenSecret }}
{{- $_ := set $servers "tls" (dict "ca" "/etc/kvemb-tls/ca.crt" "cert_env" "KVEMB_TLS_CERT" "key_env" "KVEMB_TLS_KEY" "token_file" "/etc/kvemb-tls/token") }}
{{- else if $values.tls.shardSecret }}
{{- $_ := set $servers "tls" (dict "ca" "/etc/kvemb-tls/ca.crt" "cert" "/etc/kvemb-tls/tls.crt" "key" "/etc/kvemb-tls/tls.key") }}
{{- else }}{{ $_ := set $servers "insecure" true }}{{ end }}
{{- toYaml (dict "cluster" (include "kvemb.api" .) "storage" (mergeOverwrite $storage (deepCopy $values.storage.options)) "parameter_servers" (mergeOverwrite $servers (deepCopy $values.shards.options)) "tables" $values.tables) }}
{{- end }}
