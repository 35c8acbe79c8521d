{{- define "engram.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{/* Name of the objects: the release's name, followed by the chart's name unless it contains it. */}}
{{- define "engram.fullname" -}}
{{- $name := include "engram.name" . }}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains $name .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "engram.operator" -}}
{{ include "engram.fullname" . }}-operator
{{- end }}

{{/* The labels are a contract: NetworkPolicies of workers select them. */}}
{{- define "engram.selector" -}}
app.kubernetes.io/name: engram-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "engram.labels" -}}
{{ include "engram.selector" . }}
app.kubernetes.io/component: operator
app.kubernetes.io/part-of: engram
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Labels and annotations. Call with (dict "root" $ "labels" map "annotations" map). */}}
{{- define "engram.metadata" -}}
labels:
  {{- include "engram.labels" .root | nindent 2 }}
  {{- with .labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge (deepCopy (default dict .annotations)) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Repository of an image with its registry. Call with (dict "root" $ "image" values). */}}
{{- define "engram.repository" -}}
{{- $registry := .root.Values.global.imageRegistry | default .image.registry }}
{{- if $registry }}{{ $registry }}/{{ end }}{{ .image.repository }}
{{- end }}

{{- define "engram.image" -}}
{{- $tag := .image.tag | default .root.Chart.AppVersion }}
{{- include "engram.repository" . }}{{ if .image.digest }}@{{ .image.digest }}{{ else }}:{{ $tag }}{{ end }}
{{- end }}

{{- define "engram.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}{{ default (include "engram.operator" .) .Values.serviceAccount.name }}
{{- else }}{{ required "serviceAccount.name is required if serviceAccount.create is false" .Values.serviceAccount.name }}{{ end }}
{{- end }}

{{/* Pod security context; OpenShift assigns users itself. */}}
{{- define "engram.podSecurityContext" -}}
{{- $context := .Values.podSecurityContext }}
{{- if .Values.openshift }}{{ $context = omit $context "runAsUser" "runAsGroup" "fsGroup" }}{{ end }}
{{- toYaml $context }}
{{- end }}

{{/* Scrape endpoint of a monitor. */}}
{{- define "engram.endpoint" -}}
port: http
path: /metrics
interval: {{ .interval }}
scrapeTimeout: {{ .scrapeTimeout }}
honorLabels: {{ .honorLabels }}
{{- with .relabelings }}
relabelings:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .metricRelabelings }}
metricRelabelings:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Environment variables for tracing, as a YAML map; empty without an endpoint. */}}
{{- define "engram.otel" -}}
{{- with .Values.otel }}
{{- if .endpoint }}
OTEL_EXPORTER_OTLP_ENDPOINT: {{ .endpoint | quote }}
OTEL_EXPORTER_OTLP_PROTOCOL: {{ .protocol | quote }}
{{- if kindIs "bool" .insecure }}
OTEL_EXPORTER_OTLP_INSECURE: {{ .insecure | quote }}
{{- end }}
OTEL_TRACES_SAMPLER: parentbased_traceidratio
OTEL_TRACES_SAMPLER_ARG: {{ .samplerRatio | quote }}
ENGRAM_WORKER_TRACE_SAMPLE: {{ ternary 0.01 .workerSamplerRatio (kindIs "invalid" .workerSamplerRatio) | quote }}
{{- with .resourceAttributes }}
{{- $pairs := list }}
{{- range $key, $value := . }}
{{- /* Escapes commas and equals signs. */}}
{{- $pairs = append $pairs (printf "%s=%s" (urlquery $key) (urlquery $value) | replace "+" "%20") }}
{{- end }}
OTEL_RESOURCE_ATTRIBUTES: {{ join "," $pairs | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
