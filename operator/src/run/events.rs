//! Events: what people see of the operator's work with `kubectl describe`. A failed one never fails anything else.

use engram_api::status::LearnerClusterStatus;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};

use super::Key;
use super::asking::{Error, ask};
use super::kinds::CLUSTER;
use crate::plan::Action;
use crate::report::{GPU_GIVEN_UP, GPU_NOT_USED};
use crate::validate::ValidatedCluster;

/// The API server takes no longer notes.
const NOTE_MOST_BYTES: usize = 1_000;

/// Tells events of one operator; repeats of six minutes are one event.
pub(super) struct Events {
    recorder: Recorder,
}

impl Events {
    pub(super) fn new(client: Client, pod: &str) -> Self {
        let reporter = Reporter { controller: "engram-operator".into(), instance: Some(pod.to_owned()) };
        Self { recorder: Recorder::new(client, reporter) }
    }

    /// Tells that an action was carried out, where it takes something away or changes what people gave.
    pub(super) async fn done(&self, cluster: &ValidatedCluster, action: &Action) {
        let names = &cluster.names;
        let (reason, note) = match action {
            Action::Drain { .. } | Action::ForgetReplace => return,
            Action::DeleteObject { kind, name, .. } => ("ObjectDeleted", format!("{kind} {name} is no longer wanted")),
            Action::OrphanSet { .. } => {
                let note = "is made anew around its pods: its claim template cannot be changed";
                ("SetReplaced", format!("StatefulSet {} {note}", names.worker()))
            }
            Action::DeletePod { ordinal, force, .. } => {
                let how = if *force { ", whose node is lost" } else { "" };
                ("WorkerReplaced", format!("pod {}{how}", names.pod(*ordinal)))
            }
            Action::DeleteClaim { ordinal, .. } => {
                let note = "and its disk; every partition has its copies elsewhere";
                ("ClaimDeleted", format!("claim {} {note}", names.claim(*ordinal)))
            }
            Action::GrowClaim { ordinal, size_bytes, .. } => {
                let size = engram_api::Size::from_bytes(*size_bytes);
                ("ClaimGrown", format!("claim {} is to have {size}", names.claim(*ordinal)))
            }
            Action::MarkSuspended { suspended: true, .. } => {
                ("Suspending", "all copies are in sync; the pods go".into())
            }
            Action::MarkSuspended { suspended: false, .. } => ("Resumed", "all pods are back".into()),
        };
        let key = Key { namespace: cluster.namespace.clone(), name: names.cluster.clone() };
        self.tell(&key, &cluster.uid, EventType::Normal, reason, &note).await;
    }

    /// Tells that a look at a cluster failed.
    pub(super) async fn failed(&self, key: &Key, uid: &str, error: &Error) {
        if !matches!(error, Error::Deposed) {
            self.tell(key, uid, EventType::Warning, "ReconcileFailed", &error.to_string()).await;
        }
    }

    /// Tells where people have to act: conditions that were not there before.
    pub(super) async fn turned(&self, key: &Key, uid: &str, old: &LearnerClusterStatus, new: &LearnerClusterStatus) {
        use engram_api::status::{Truth, condition};
        let bad = [
            (condition::STALLED, Truth::True),
            (condition::ACCEPTED, Truth::False),
            (condition::CERTIFIED, Truth::False),
            (condition::GPU_AVAILABLE, Truth::False),
        ];
        for (kind, bad) in bad {
            let find = |status: &LearnerClusterStatus| {
                let of_kind = status.conditions.iter().find(|known| known.kind == kind && known.status == bad);
                // That nobody offers devices, or that none are wanted, is no news.
                let is_trouble = |reason: &str| [GPU_GIVEN_UP, GPU_NOT_USED].contains(&reason);
                of_kind.filter(|known| kind != condition::GPU_AVAILABLE || is_trouble(&known.reason)).cloned()
            };
            let Some(is) = find(new) else { continue };
            if find(old).is_none_or(|was| was.message != is.message) {
                self.tell(key, uid, EventType::Warning, &is.reason, &is.message).await;
            }
        }
    }

    async fn tell(&self, key: &Key, uid: &str, type_: EventType, reason: &str, note: &str) {
        let mut note = note.to_owned();
        if note.len() > NOTE_MOST_BYTES {
            note.truncate(note.floor_char_boundary(NOTE_MOST_BYTES));
        }
        let about = ObjectReference {
            api_version: Some(CLUSTER.resource().api_version),
            kind: Some(CLUSTER.name.into()),
            namespace: Some(key.namespace.clone()),
            name: Some(key.name.clone()),
            uid: Some(uid.to_owned()),
            ..ObjectReference::default()
        };
        let event =
            Event { type_, reason: reason.to_owned(), note: Some(note), action: "Reconcile".into(), secondary: None };
        if let Err(error) = ask(|| "tell an event".into(), self.recorder.publish(&event, &about)).await {
            tracing::debug!(cluster = %key, reason, %error, "an event was not told");
        }
    }
}
