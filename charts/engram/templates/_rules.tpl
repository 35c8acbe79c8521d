{{/*
Permissions of the operator in watched namespaces. It creates Roles for workers, and can grant only permissions that it has itself.
*/}}
{{- define "engram.rules" -}}
# User-created objects.
- apiGroups: [engram.dev]
  resources: [learnerclusters, learnerruns]
  verbs: [list, watch]
# Removes the replace annotation once a worker has been replaced.
- apiGroups: [engram.dev]
  resources: [learnerclusters]
  verbs: [patch]
# Scales clusters with autoscaling.mode Operator.
- apiGroups: [engram.dev]
  resources: [learnerclusters/scale]
  verbs: [patch]
# Deletes runs after their time to live.
- apiGroups: [engram.dev]
  resources: [learnerruns]
  verbs: [delete]
- apiGroups: [engram.dev]
  resources: [learnerclusters/status, learnerruns/status]
  verbs: [patch]
# Required for blockOwnerDeletion on API servers with OwnerReferencesPermissionEnforcement.
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
# Runs of kind Job.
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, create, patch]
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
# Certificates of clusters with tls.mode: CertManager. Reading the resulting Secret is not included.
- apiGroups: [cert-manager.io]
  resources: [certificates]
  verbs: [get, create, patch]
{{- end }}
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, patch]
{{- end }}
