{{/* The operator's file, whole; empty where no setting is given. What other values set is refused: they become flags, which count more. */}}
{{- define "engram.config" -}}
{{- $elsewhere := dict
  "coordinator" "the chart sets it by itself"
  "http" "the chart sets it by itself"
  "pod" "the chart sets it by itself"
  "worker" "set worker.image, worker.cudaImage and imagePullSecrets instead"
  "watchNamespaces" "set watchNamespaces instead"
  "leaderElection" "set leaderElection instead"
  "logging" "set logging instead" }}
{{- /* Values that are kept from a release of before (--reuse-values) have none. */}}
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
