//! Kubernetes events of the operator. A failed event never fails anything else.

use engram_api::status::LearnerClusterStatus;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};

use crate::cluster::plan::Action;
use crate::cluster::plan::lifecycle::LifecycleEvent;
use crate::cluster::status::gpu::{GPU_FAILED, GPU_UNUSABLE};
use crate::cluster::validate::ValidatedCluster;
use crate::context::Key;
use crate::kube::api_request::request;
use crate::kube::failure::{Cause, Failure};
use crate::kube::resource_kinds::{CLAIM, CLUSTER, Kind, POD, RUN};
use crate::learner_run::RunEvent;

/// Maximum length of an event's note in the API server.
const MAX_NOTE_BYTES: usize = 1_000;

/// Publishes events of one operator; repetitions within six minutes are aggregated.
pub(crate) struct Events {
    recorder: Recorder,
}

impl Events {
    pub(crate) fn new(client: Client, pod: &str) -> Self {
        let reporter = Reporter { controller: "engram-operator".into(), instance: Some(pod.to_owned()) };
        Self { recorder: Recorder::new(client, reporter) }
    }

    /// Publishes a completed action, if it deletes or changes an object.
    pub(crate) async fn publish_action(&self, cluster: &ValidatedCluster, action: &Action) {
        let names = &cluster.names;
        let (reason, note) = match action {
            Action::Drain { .. } | Action::ClearReplaceAnnotation => return,
            Action::SetMapOwner { is_owned: true, .. } => (
                "PartitionMapOwned",
                format!("PartitionMap {} is deleted with the cluster, like its data", names.cluster),
            ),
            Action::SetMapOwner { is_owned: false, .. } => {
                ("PartitionMapKept", format!("PartitionMap {} outlives the cluster, like its data", names.cluster))
            }
            Action::DeleteObject { kind, name, .. } => ("ObjectDeleted", format!("deleted obsolete {kind} {name}")),
            Action::OrphanSet { .. } => {
                let note = "keeping its pods, because its claim template is immutable";
                ("StatefulSetRecreated", format!("recreating StatefulSet {}, {note}", names.worker()))
            }
            Action::DeletePod { ordinal, force, .. } => {
                let how = if *force { " of a lost node" } else { "" };
                ("WorkerReplaced", format!("deleted pod {}{how}", names.pod(*ordinal)))
            }
            Action::DeleteClaim { ordinal, .. } => {
                let note = "all partitions are fully replicated on other workers, or it had no volume";
                ("ClaimDeleted", format!("deleted claim {}; {note}", names.claim(*ordinal)))
            }
            Action::GrowClaim { ordinal, size_bytes, .. } => {
                let size = engram_api::Size::from_bytes(*size_bytes);
                ("ClaimExpanded", format!("expanding claim {} to {size}", names.claim(*ordinal)))
            }
            Action::MarkSuspended { suspended: true, .. } => {
                ("Suspending", "all replicas are in sync; deleting pods".into())
            }
            Action::MarkSuspended { suspended: false, .. } => ("Resumed", "all pods are ready".into()),
        };
        let key = Key { namespace: cluster.namespace.clone(), name: names.cluster.clone() };
        let related = related_object(cluster, action);
        self.publish_related(CLUSTER, &key, &cluster.uid, EventType::Normal, (reason, &note), related).await;
    }

    /// Publishes a change of the phase of a run.
    pub(crate) async fn publish_run(&self, key: &Key, uid: &str, event: &RunEvent) {
        let type_ = if event.is_warning { EventType::Warning } else { EventType::Normal };
        self.publish(RUN, key, uid, type_, event.reason, &event.note).await;
    }

    /// Publishes changes of the number of workers and of their revision.
    pub(crate) async fn publish_lifecycle(&self, key: &Key, uid: &str, events: Vec<LifecycleEvent>) {
        for (reason, note, pod) in events {
            let related = pod.map(|pod| reference(POD.name, &key.namespace, pod));
            self.publish_related(CLUSTER, key, uid, EventType::Normal, (reason, &note), related).await;
        }
    }

    /// Publishes a change of the number of workers by the autoscaler, or why it does not change it.
    pub(crate) async fn publish_scaling(&self, key: &Key, uid: &str, is_normal: bool, reason: &str, note: &str) {
        let type_ = if is_normal { EventType::Normal } else { EventType::Warning };
        self.publish(CLUSTER, key, uid, type_, reason, note).await;
    }

    /// Publishes that another operator manages the cluster, too.
    pub(crate) async fn publish_conflict(&self, key: &Key, uid: &str, note: &str) {
        self.publish(CLUSTER, key, uid, EventType::Warning, "OperatorConflict", note).await;
    }

    /// Publishes a failed reconcile.
    pub(crate) async fn publish_failure(&self, key: &Key, uid: &str, error: &impl Failure) {
        if !matches!(error.root_cause(), Cause::NotLeader) {
            self.publish(CLUSTER, key, uid, EventType::Warning, "ReconcileFailed", &error.to_string()).await;
        }
    }

    /// Publishes conditions that newly require attention.
    pub(crate) async fn publish_new_problems(
        &self,
        key: &Key,
        uid: &str,
        old: &LearnerClusterStatus,
        new: &LearnerClusterStatus,
    ) {
        use engram_api::status::{Truth, condition};
        let bad = [
            (condition::STALLED, Truth::True),
            (condition::ACCEPTED, Truth::False),
            (condition::CERTIFICATE_VALID, Truth::False),
            (condition::GPU_AVAILABLE, Truth::False),
        ];
        for (kind, bad) in bad {
            let find = |status: &LearnerClusterStatus| {
                let of_kind = status.conditions.iter().find(|entry| entry.kind == kind && entry.status == bad);
                // Missing or unrequested GPUs are not a problem.
                let is_problem = |reason: &str| [GPU_FAILED, GPU_UNUSABLE].contains(&reason);
                of_kind.filter(|entry| kind != condition::GPU_AVAILABLE || is_problem(&entry.reason)).cloned()
            };
            let Some(is) = find(new) else { continue };
            if find(old).is_none_or(|was| was.message != is.message) {
                self.publish(CLUSTER, key, uid, EventType::Warning, &is.reason, &is.message).await;
            }
        }
    }

    async fn publish(&self, kind: Kind, key: &Key, uid: &str, type_: EventType, reason: &str, note: &str) {
        self.publish_related(kind, key, uid, type_, (reason, note), None).await;
    }

    /// Publishes an event with a further object. Only events about the same objects are aggregated, and those keep the first note.
    async fn publish_related(
        &self,
        kind: Kind,
        key: &Key,
        uid: &str,
        type_: EventType,
        (reason, note): (&str, &str),
        secondary: Option<ObjectReference>,
    ) {
        let mut note = note.to_owned();
        if note.len() > MAX_NOTE_BYTES {
            note.truncate(note.floor_char_boundary(MAX_NOTE_BYTES));
        }
        let about = ObjectReference {
            api_version: Some(kind.resource().api_version),
            kind: Some(kind.name.into()),
            namespace: Some(key.namespace.clone()),
            name: Some(key.name.clone()),
            uid: Some(uid.to_owned()),
            ..ObjectReference::default()
        };
        let event = Event { type_, reason: reason.to_owned(), note: Some(note), action: "Reconcile".into(), secondary };
        if let Err(error) = request(|| "publish an event".into(), self.recorder.publish(&event, &about)).await {
            tracing::debug!(kind = kind.name, object = %key, reason, %error, "failed to publish event");
        }
    }
}

/// Returns the pod, claim or object that an action changes.
fn related_object(cluster: &ValidatedCluster, action: &Action) -> Option<ObjectReference> {
    let names = &cluster.names;
    let (kind, name) = match action {
        Action::DeletePod { ordinal, .. } => (POD.name, names.pod(*ordinal)),
        Action::DeleteClaim { ordinal, .. } | Action::GrowClaim { ordinal, .. } => (CLAIM.name, names.claim(*ordinal)),
        Action::DeleteObject { kind, name, .. } => (kind.as_str(), name.clone()),
        _ => return None,
    };
    Some(reference(kind, &cluster.namespace, name))
}

fn reference(kind: &str, namespace: &str, name: String) -> ObjectReference {
    ObjectReference {
        kind: Some(kind.to_owned()),
        namespace: Some(namespace.to_owned()),
        name: Some(name),
        ..ObjectReference::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::object::ClusterObject;
    use crate::cluster::validate::validate;
    use serde_json::json;

    #[test]
    fn events_about_two_workers_are_not_aggregated() {
        let object = json!({
            "apiVersion": "engram.dev/v1alpha1", "kind": "LearnerCluster",
            "metadata": { "name": "words", "namespace": "research", "uid": "0f6c1d52-8a53-4a0a-9d1e-2f8f5f0f7a11", "generation": 1 },
            "spec": { "workers": 3 },
        });
        let cluster = validate(&serde_json::from_value::<ClusterObject>(object).expect("an object"))
            .unwrap_or_else(|refused| panic!("{refused}"));
        let deleted = |ordinal| Action::DeletePod { ordinal, uid: "u".into(), force: false };
        let (first, second) = (related_object(&cluster, &deleted(0)), related_object(&cluster, &deleted(1)));
        assert_eq!(first.as_ref().and_then(|pod| pod.name.as_deref()), Some("words-worker-0"));
        assert_ne!(first, second);
    }
}
