//! CA rotation under load.

use super::{Clients, NAME, READY, SECRET, WORKERS, ca, id, shown, undisturbed, worker};
use crate::cluster::Cluster;
use crate::process::until;
use anyhow::{Result, ensure};
use engram_identity::{Name, Role};
use serde_json::json;
use std::time::{Duration, Instant, SystemTime};

/// Two steps of at least twenty seconds, plus the delays of kubelets that update ConfigMaps, on a busy machine.
const DONE: Duration = Duration::from_secs(300);

pub(super) fn follows(cluster: &Cluster) -> Result<String> {
    let old = ca(cluster)?;
    let clients = Clients::start(cluster, 3)?;
    let (began, since) = (Instant::now(), tokio::time::Instant::now());
    let order = json!({ "metadata": { "annotations": { "engram.dev/renew": "now" } } });
    cluster.api().patch(SECRET, "application/merge-patch+json", &order)?;
    let mut signs = old.root();
    until("the new CA to be the only one", DONE, || {
        let now = ca(cluster)?;
        if now.root() != signs {
            clients.follow(cluster)?;
            signs = now.root();
        }
        let secret = cluster.api().get(SECRET)?;
        let how_far = &secret["metadata"]["annotations"]["engram.dev/renewal"];
        let is_done = how_far.as_str().is_some_and(|text| text.starts_with("completed"));
        ensure!(is_done && signs != old.root(), "rotation in progress: {how_far}");
        let left = now.certificate().matches("BEGIN CERTIFICATE").count();
        ensure!(left == 1 && secret["data"]["next.key"].is_null(), "{left} CAs are trusted");
        Ok(Some(()))
    })?;
    let took = began.elapsed();
    let name = Name::on_kubernetes("default", NAME, id(cluster, NAME)?, Role::Client, 0);
    let of_old = old.issue(&name, SystemTime::now(), Duration::from_secs(3_600))?;
    for ordinal in 0..WORKERS {
        let pod = worker(cluster, ordinal)?;
        until("the old CA to be untrusted", READY, || {
            let refused = shown(cluster, &pod, 7443, &of_old.pem, "unknown_ca")?;
            Ok((refused == 1).then_some(()))
        })?;
    }
    let (tally, gap) = clients.close(since)?;
    ensure!(tally.acked == tally.operations, "writes failed: {tally:?}");
    // Worker 0 was killed before.
    undisturbed(cluster, |ordinal| u64::from(ordinal == 0))?;
    Ok(format!("{:.0} s, {} writes, longest wait {} ms", took.as_secs_f64(), tally.acked, gap.as_millis()))
}
