//! Stand-ins for kubelets: they keep Nodes and Leases alive, turn bound pods Running and Ready, and finish deletions.
//!
//! Right for whatever the API server sees (reconciling, ownership, scaling, status, admission, events); wrong for whatever
//! happens in a container (probes, signals, DNS, volumes).

use crate::http::{Api, MERGE, STRATEGIC};
use anyhow::{Context, Result};
use jiff::Timestamp;
use serde_json::{Value, json};
use std::collections::HashSet;
use std::thread;
use std::time::Duration;

const LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases";
/// A node is given up after 20 s of silence.
const RENEWAL: Duration = Duration::from_secs(5);
/// After an error.
const AGAIN: Duration = Duration::from_millis(500);

/// Stands in for the kubelets of these nodes, until it is ended.
pub fn run(api: &Api, nodes: &[String]) {
    thread::scope(|scope| {
        for (number, node) in nodes.iter().enumerate() {
            scope.spawn(move || {
                loop {
                    if let Err(error) = renew(api, node) {
                        println!("{node}: {error:#}");
                    }
                    thread::sleep(RENEWAL);
                }
            });
            scope.spawn(move || {
                let mut kubelet = Kubelet { api, node, number: number + 1, started: HashSet::new() };
                loop {
                    if let Err(error) = kubelet.serve() {
                        println!("{node}: {error:#}");
                        thread::sleep(AGAIN);
                    }
                }
            });
        }
    });
}

fn renew(api: &Api, node: &str) -> Result<()> {
    let lease = json!({
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
        "metadata": {"name": node, "namespace": "kube-node-lease"},
        "spec": {"holderIdentity": node, "leaseDurationSeconds": 40, "renewTime": now(true)},
    });
    let path = format!("{LEASES}/{node}");
    if api.find(&path)?.is_none() { api.create(LEASES, &lease) } else { api.patch(&path, MERGE, &lease) }.map(drop)
}

struct Kubelet<'a> {
    api: &'a Api,
    node: &'a str,
    /// Decides its pods' addresses.
    number: usize,
    /// Uids of the pods that were turned Running.
    started: HashSet<String>,
}

impl Kubelet<'_> {
    /// Reports the node, then follows its pods until the API server ends the watch.
    fn serve(&mut self) -> Result<()> {
        self.register()?;
        let pods = format!("/api/v1/pods?fieldSelector=spec.nodeName%3D{}", self.node);
        let list = self.api.get(&pods)?;
        for pod in list["items"].as_array().context("no list of pods")? {
            self.handle(pod)?;
        }
        let version = list["metadata"]["resourceVersion"].as_str().context("a list without a version")?;
        let watch = format!("{pods}&watch=1&resourceVersion={version}&timeoutSeconds=240");
        self.api.watch(&watch, |event| match event["type"].as_str() {
            Some("ADDED" | "MODIFIED") => self.handle(&event["object"]),
            Some("DELETED") => {
                self.started.remove(event["object"]["metadata"]["uid"].as_str().unwrap_or_default());
                Ok(())
            }
            _ => Ok(()),
        })
    }

    fn register(&self) -> Result<()> {
        let name = self.node;
        let path = format!("/api/v1/nodes/{name}");
        if self.api.find(&path)?.is_none() {
            let labels = json!({
                "kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "type": "fake",
                "topology.kubernetes.io/zone": format!("zone-{name}"),
            });
            let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}});
            self.api.create("/api/v1/nodes", &node)?;
        }
        let resources = json!({"cpu": "64", "memory": "256Gi", "pods": "500", "ephemeral-storage": "1Ti"});
        let status = json!({"status": {
            "capacity": resources, "allocatable": resources,
            "addresses": [{"type": "InternalIP", "address": format!("10.98.0.{}", self.number)}],
            "nodeInfo": {
                "kubeletVersion": "fake", "osImage": "fake", "architecture": "amd64", "operatingSystem": "linux",
                "containerRuntimeVersion": "fake://0", "bootID": "", "kernelVersion": "", "kubeProxyVersion": "",
                "machineID": "", "systemUUID": ""},
            "conditions": [{
                "type": "Ready", "status": "True", "reason": "KubeletReady", "message": "a stand-in",
                "lastHeartbeatTime": now(false), "lastTransitionTime": now(false)}],
        }});
        self.api.patch(&format!("{path}/status"), STRATEGIC, &status).map(drop)
    }

    fn handle(&mut self, pod: &Value) -> Result<()> {
        let metadata = &pod["metadata"];
        let text = |name: &str| metadata[name].as_str().unwrap_or_default();
        let path = format!("/api/v1/namespaces/{}/pods/{}", text("namespace"), text("name"));
        let uid = text("uid");
        if metadata["deletionTimestamp"].is_string() {
            let options = json!({
                "apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0, "preconditions": {"uid": uid}});
            return gone(self.api.delete(&path, Some(&options)));
        }
        if pod["status"]["phase"] != "Pending" || !self.started.insert(uid.to_owned()) {
            return Ok(());
        }
        let time = now(false);
        let statuses = |list: &str, state: &Value, more: Option<bool>| -> Vec<Value> {
            let containers = pod["spec"][list].as_array().cloned().unwrap_or_default();
            let status = |it: &Value| {
                let id = format!("fake://{uid}-{}", it["name"].as_str().unwrap_or_default());
                json!({
                    "name": it["name"], "image": it["image"], "imageID": "fake", "containerID": id, "ready": true,
                    "started": more, "restartCount": 0, "state": state})
            };
            containers.iter().map(status).collect()
        };
        let ended =
            json!({"terminated": {"exitCode": 0, "reason": "Completed", "startedAt": time, "finishedAt": time}});
        let running = json!({"running": {"startedAt": time}});
        let address = format!("10.244.{}.{}", 100 + self.number, 2 + self.started.len() % 250);
        let conditions = ["Initialized", "Ready", "ContainersReady", "PodScheduled"];
        let status = json!({"metadata": {"uid": uid}, "status": {
            "phase": "Running", "podIP": address, "podIPs": [{"ip": address}],
            "hostIP": format!("10.98.0.{}", self.number), "startTime": time,
            "containerStatuses": statuses("containers", &running, Some(true)),
            "initContainerStatuses": statuses("initContainers", &ended, None),
            "conditions": conditions.map(|it| json!({"type": it, "status": "True", "lastTransitionTime": time})),
        }});
        gone(self.api.patch(&format!("{path}/status"), STRATEGIC, &status).map(drop))
    }
}

/// A pod may go, or be replaced under its name, while it is handled: that is no error.
fn gone(answer: Result<()>) -> Result<()> {
    let status = |error: &anyhow::Error| error.downcast_ref::<crate::Refused>().map(|it| it.status);
    match answer {
        Err(error) if matches!(status(&error), Some(404 | 409)) => Ok(()),
        other => other,
    }
}

/// The time as the API server writes it: in seconds, or in microseconds for leases.
fn now(fine: bool) -> String {
    let time = Timestamp::now();
    if fine { format!("{time:.6}") } else { format!("{time:.0}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_the_digits_that_the_api_server_takes() {
        assert_eq!(now(false).len(), "2026-01-31T23:59:59Z".len(), "{}", now(false));
        assert_eq!(now(true).len(), "2026-01-31T23:59:59.000000Z".len(), "{}", now(true));
    }
}
