{{/* The operator's configuration file; empty without settings. Fails on settings of other values: those become flags, which take precedence. */}}
{{- define "engram.config" -}}
{{- $elsewhere := dict
  "coordinator" "set by the chart"
  "http" "set by the chart"
  "pod" "set by the chart"
  "worker" "set worker.image, worker.cudaImage and imagePullSecrets instead"
  "watchNamespaces" "set watchNamespaces instead"
  "leaderElection" "set leaderElection instead"
  "logging" "set logging instead" }}
{{- /* Values reused from an older release (--reuse-values) have none. */}}
{{- $config := default dict .Values.config }}
{{- range $field, $instead := $elsewhere }}
{{- if hasKey $config $field }}
{{- fail (printf "config.%s: %s" $field $instead) }}
{{- end }}
{{- end }}
{{- with $config }}
{{- toYaml (merge (dict "apiVersion" "operator.engram.dev/v1alpha1" "kind" "OperatorConfiguration") .) }}
{{- end }}
{{- end }}
