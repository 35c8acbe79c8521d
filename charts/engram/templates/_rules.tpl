{{/*
What the operator may do in the namespaces that it looks after. It makes Roles for workers, and may hand on only what it has itself.
*/}}
{{- define "engram.rules" -}}
# What people ask for.
- apiGroups: [engram.dev]
  resources: [learnerclusters, learnerruns]
  verbs: [list, watch]
# The order to replace a worker, once it is carried out.
- apiGroups: [engram.dev]
  resources: [learnerclusters]
  verbs: [patch]
# Runs whose time after their end is over.
- apiGroups: [engram.dev]
  resources: [learnerruns]
  verbs: [delete]
- apiGroups: [engram.dev]
  resources: [learnerclusters/status, learnerruns/status]
  verbs: [patch]
# What is made for a cluster blocks its deletion until it is gone itself; some API servers ask for this right then.
- apiGroups: [engram.dev]
  resources: [learnerclusters/finalizers]
  verbs: [update]
- apiGroups: [engram.dev]
  resources: [partitionmaps]
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, delete]
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [list, watch, patch, delete]
- apiGroups: [""]
  resources: [configmaps, services, serviceaccounts]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [statefulsets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [get, list, watch, create, patch, delete]
{{- if .Values.certManager.enabled }}
# What cert-manager is asked for, where a cluster says tls.mode: CertManager. The Secret that it fills is not in it.
- apiGroups: [cert-manager.io]
  resources: [certificates]
  verbs: [get, create, patch]
{{- end }}
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, patch]
{{- end }}
