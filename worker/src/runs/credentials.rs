//! Credentials of storages that runs name by a Secret: handed over with the run, kept in memory while it goes on, and nowhere else.
//!
//! A driver that has none says so in the status of its run, and whoever looks after the run hands them over again.

use crate::shared::Shared;
use engram_api::SecretRef;
use engram_learn::run::Status;
use engram_memory::RunId;
use engram_objects::Keys;
use engram_proto::v1;
use tokio::sync::watch;

/// Whether somebody hands credentials over: in a pod, where a Secret is named.
fn are_handed_over(shared: &Shared, secret: Option<&SecretRef>) -> bool {
    shared.options.inputs.is_some() && secret.is_some()
}

/// Takes those of a run.
pub(super) fn keep(shared: &Shared, run: RunId, credentials: v1::ObjectCredentials) {
    shared.runs.credentials.send_modify(|kept| drop(kept.insert(run, keys(credentials))));
}

/// Forgets those of a run that has ended.
pub(super) fn forget(shared: &Shared, run: RunId) {
    shared.runs.credentials.send_modify(|kept| drop(kept.remove(&run)));
}

/// Forgets those of runs that went elsewhere: whoever drives one there asks for them.
pub(super) fn forget_elsewhere(shared: &Shared) {
    shared.runs.credentials.send_if_modified(|kept| {
        let before = kept.len();
        kept.retain(|run, _| shared.engine.position(super::partition(shared, *run)).is_some());
        kept.len() < before
    });
}

/// Who asks the storage of a run, where its specification names a Secret: waited for until somebody hands it over, which the status
/// asks for.
pub(super) async fn wait(
    shared: &Shared,
    run: RunId,
    secret: Option<&SecretRef>,
    status: &watch::Sender<Status>,
) -> Option<Keys> {
    if !are_handed_over(shared, secret) {
        return None;
    }
    let mut handed = shared.runs.credentials.subscribe();
    // Also where an order ends the wait: a run that is suspended asks for nothing.
    let _asked = Asked(status);
    if !handed.borrow().contains_key(&run) {
        status.send_modify(|status| {
            status.needs_credentials = true;
            status.message = "waits for the credentials of its storage".into();
        });
    }
    let found = handed.wait_for(|handed| handed.contains_key(&run)).await;
    found.expect("who keeps them is borrowed").get(&run).cloned()
}

/// Takes the question back when it goes.
struct Asked<'a>(&'a watch::Sender<Status>);

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|status| {
            status.needs_credentials = false;
            status.message.clear();
        });
    }
}

pub(super) fn keys(credentials: v1::ObjectCredentials) -> Keys {
    let v1::ObjectCredentials { access_key_id, secret_access_key, session_token } = credentials;
    let token = Some(session_token).filter(|token| !token.is_empty());
    Keys { id: access_key_id, secret: secret_access_key, token }
}
