//! Credentials of storages that runs name by a Secret: supplied with the run, and kept only in memory while it runs.
//!
//! A driver without credentials reports it in the run's status, and the operator supplies them again.

use crate::shared::Shared;
use engram_api::SecretRef;
use engram_learn::run::Status;
use engram_memory::RunId;
use engram_objects::Keys;
use engram_proto::v1;
use tokio::sync::watch;

/// Returns whether credentials are supplied: in a pod, if a Secret is named.
fn are_supplied(shared: &Shared, secret: Option<&SecretRef>) -> bool {
    shared.setup.options.inputs.is_some() && secret.is_some()
}

/// Stores the credentials of a run.
pub(in crate::runs) fn keep(shared: &Shared, run: RunId, credentials: v1::ObjectCredentials) {
    shared.runs.credentials.send_modify(|kept| drop(kept.insert(run, keys(credentials))));
}

/// Removes the credentials of a run that has ended.
pub(in crate::runs) fn forget(shared: &Shared, run: RunId) {
    shared.runs.credentials.send_modify(|kept| drop(kept.remove(&run)));
}

/// Removes the credentials of runs that moved to other workers, which request them again.
pub(in crate::runs) fn forget_elsewhere(shared: &Shared) {
    shared.runs.credentials.send_if_modified(|kept| {
        let before = kept.len();
        kept.retain(|run, _| shared.engine.position(crate::runs::partition(shared, *run)).is_some());
        kept.len() < before
    });
}

/// Returns the credentials of a run's storage, if its specification names a Secret. Waits until they are supplied, which the status
/// requests.
pub(in crate::runs) async fn wait(
    shared: &Shared,
    run: RunId,
    secret: Option<&SecretRef>,
    status: &watch::Sender<Status>,
) -> Option<Keys> {
    if !are_supplied(shared, secret) {
        return None;
    }
    let mut supplied = shared.runs.credentials.subscribe();
    // Withdrawn also if an order ends the wait: a suspended run requests nothing.
    let _request = CredentialsRequest(status);
    if !supplied.borrow().contains_key(&run) {
        status.send_modify(|status| {
            status.needs_credentials = true;
            status.message = "waiting for the credentials of its storage".into();
        });
    }
    let result = supplied.wait_for(|supplied| supplied.contains_key(&run)).await;
    result.expect("the sender is borrowed").get(&run).cloned()
}

/// Withdraws the request when dropped.
struct CredentialsRequest<'a>(&'a watch::Sender<Status>);

impl Drop for CredentialsRequest<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|status| {
            status.needs_credentials = false;
            status.message.clear();
        });
    }
}

pub(in crate::runs) fn keys(credentials: v1::ObjectCredentials) -> Keys {
    let v1::ObjectCredentials { access_key_id, secret_access_key, session_token } = credentials;
    let token = Some(session_token).filter(|token| !token.is_empty());
    Keys { id: access_key_id, secret: secret_access_key, token }
}
