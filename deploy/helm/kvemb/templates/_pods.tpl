{{/* What pods have in common. The security contexts are those of docker-compose.yml: no root, no capabilities, a read-only root. */}}
{{- define "kvemb.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ . }}
runAsGroup: {{ . }}
fsGroup: {{ . }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "kvemb.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "kvemb.pod" -}}
serviceAccountName: {{ .Values.serviceAccount.name | default (include "kvemb.name" .) }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Where a StatefulSet's pods go: hosts of their own where that goes, unless affinity is given. */}}
{{- define "kvemb.placement" -}}
{{- with .of.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .of.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .of.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- if .of.topologySpreadConstraints }}
{{- $pods := dict "labelSelector" (dict "matchLabels" (merge (include "kvemb.selector" .root | fromYaml) (dict "app.kubernetes.io/component" .component))) }}
topologySpreadConstraints:
  {{- range .of.topologySpreadConstraints }}
  - {{ toYaml (merge (deepCopy .) $pods) | nindent 4 | trim }}
  {{- end }}
{{- end }}
affinity:
{{- if .of.affinity }}
  {{- toYaml .of.affinity | nindent 2 }}
{{- else }}
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels:
              {{- include "kvemb.selector" .root | nindent 14 }}
              app.kubernetes.io/component: {{ .component }}
{{- end }}
{{- end }}

{{/* One variable of a Secret. */}}
{{- define "kvemb.fromSecret" -}}
- name: {{ .name }}
  valueFrom: {secretKeyRef: {name: {{ .secret }}, key: {{ .key }}}}
{{- end }}

{{/* The variables that kvemb.yaml names, for a shard or a client (.role: shard, trainer, admin). */}}
{{- define "kvemb.env" -}}
{{- $storage := .root.Values.storage }}
{{- $password := $storage.password }}
{{- if and (ne .role "shard") $storage.trainerPassword.secret }}{{ $password = $storage.trainerPassword }}{{ end }}
{{- if $password.secret }}
{{ include "kvemb.fromSecret" (dict "name" "KVEMB_STORAGE_PASSWORD" "secret" $password.secret "key" $password.key) }}
{{- if $storage.password.userKey }}
{{ include "kvemb.fromSecret" (dict "name" "KVEMB_STORAGE_USER" "secret" $password.secret "key" ($password.userKey | default $storage.password.userKey)) }}
{{- end }}
{{- end }}
{{- if and .root.Values.tls.tokenSecret (eq .role "shard") }}
- {name: KVEMB_TLS_CERT, value: /etc/kvemb-tls/tls.crt}
- {name: KVEMB_TLS_KEY, value: /etc/kvemb-tls/tls.key}
{{- end }}
{{- end }}

{{- define "kvemb.mounts" -}}
- {name: config, mountPath: /etc/kvemb, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- if .root.Values.tls.shardSecret }}
- {name: tls, mountPath: /etc/kvemb-tls, readOnly: true}
{{- end }}
{{- if .root.Values.storage.tls.secret }}
- {name: storage-tls, mountPath: /etc/kvemb-storage-tls, readOnly: true}
{{- end }}
{{- if and .root.Values.checkpoints.claim (ne .role "trainer") }}
- {name: checkpoints, mountPath: /checkpoints}
{{- end }}
{{- end }}

{{/* Each process has its own certificate under the same path, so that one kvemb.yaml does for all. */}}
{{- define "kvemb.volumes" -}}
{{- $tls := .root.Values.tls }}
{{- $storageTls := .root.Values.storage.tls }}
- name: config
  configMap: {name: {{ include "kvemb.name" .root }}}
- name: tmp
  emptyDir: {sizeLimit: 256Mi}
{{- if $tls.shardSecret }}
- name: tls
  projected:
    defaultMode: 0440
    sources:
      {{- if eq .role "shard" }}
      - secret: {name: {{ $tls.shardSecret }}}
      {{- else if not $tls.tokenSecret }}
      - secret: {name: {{ get $tls (printf "%sSecret" .role) }}}
      {{- end }}
      {{- if $tls.tokenSecret }}
      - secret:
          name: {{ $tls.tokenSecret }}
          items:
            - {key: token, path: token}
            {{- if ne .role "shard" }}
            - {key: ca.crt, path: ca.crt}
            {{- end }}
      {{- end }}
{{- end }}
{{- if $storageTls.secret }}
- name: storage-tls
  secret:
    secretName: {{ if eq .role "shard" }}{{ $storageTls.secret }}{{ else }}{{ $storageTls.trainerSecret | default $storageTls.secret }}{{ end }}
    defaultMode: 0440
{{- end }}
{{- if and .root.Values.checkpoints.claim (ne .role "trainer") }}
- name: checkpoints
  persistentVolumeClaim: {claimName: {{ .root.Values.checkpoints.claim }}}
{{- end }}
{{- end }}

{{/* The pod of a client: the example trainer, a backup, the toolbox. .of: its values, .command: a list. Labels are its caller's. */}}
{{- define "kvemb.client" -}}
{{ include "kvemb.pod" .root }}
securityContext: {{ include "kvemb.podSecurity" 10001 | nindent 2 }}
containers:
  - name: {{ .name }}
    image: {{ .of.image | default (include "kvemb.image" .root) }}
    imagePullPolicy: {{ .root.Values.image.pullPolicy }}
    command: {{ toJson .command }}
    {{- $env := include "kvemb.env" . | trim }}
    {{- if or $env .of.env }}
    env:
      {{- with $env }}{{ . | nindent 6 }}{{ end }}
      {{- with .of.env }}{{ toYaml . | nindent 6 }}{{ end }}
    {{- end }}
    {{- with .of.envFrom }}
    envFrom: {{ toYaml . | nindent 6 }}
    {{- end }}
    resources: {{ toYaml .resources | nindent 6 }}
    securityContext: {{ include "kvemb.containerSecurity" . | nindent 6 }}
    volumeMounts:
      {{- include "kvemb.mounts" . | nindent 6 }}
      {{- with .of.volumeMounts }}{{ toYaml . | nindent 6 }}{{ end }}
volumes:
  {{- include "kvemb.volumes" . | nindent 2 }}
  {{- with .of.volumes }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end }}
