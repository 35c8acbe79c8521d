//! The cluster with fake kubelets: enough for whatever only the API server sees.

use super::Check;
use super::helpers::{recreated, spread};
use crate::cluster::Cluster;
use anyhow::{Result, ensure};
use serde_json::json;

pub(super) fn checks() -> Vec<Check> {
    vec![
        Check { name: "an anti-affine StatefulSet of three is Ready without a container", run: spread },
        Check { name: "a deleted pod comes back without a container", run: recreated },
        Check { name: "a set that shrinks ends its pods", run: shrinks },
    ]
}

fn shrinks(cluster: &Cluster) -> Result<String> {
    let set = "/apis/apps/v1/namespaces/default/statefulsets/sp";
    cluster.api().patch(set, crate::MERGE, &json!({"spec": {"replicas": 1}}))?;
    cluster.kubectl(["wait", "--for=delete", "pod/sp-2", "--timeout=50s"])?;
    ensure!(cluster.api().find("/api/v1/namespaces/default/pods/sp-0")?.is_some(), "the first pod has gone as well");
    Ok(String::new())
}
