//! Fault injection. Node 1, which hosts the control plane and the links of the others, is never a target.

use crate::cluster::{Cluster, node_name};
use crate::http::MERGE;
use crate::kubeconfig::needs_nodes;
use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use serde_json::json;

impl Cluster {
    /// Kills all processes of a node. `add_node` brings it back with its disk.
    ///
    /// # Errors
    /// Fails for node 1, or if the node is not up.
    pub fn kill_node(&self, node: u8) -> Result<()> {
        spare_first(node)?;
        self.holder(node)?.end(Signal::SIGKILL)
    }

    /// Partitions a node: takes its link down, its processes keep running.
    ///
    /// # Errors
    /// Fails for node 1, or if the node has no link.
    pub fn partition_node(&self, node: u8) -> Result<()> {
        spare_first(node)?;
        self.ip(1, &format!("link set ve{node} down"))
    }

    /// Reverts `partition_node`. The kubelet takes up to 20 s to reconnect.
    ///
    /// # Errors
    /// Fails if the node has no link.
    pub fn heal_node(&self, node: u8) -> Result<()> {
        self.ip(1, &format!("link set ve{node} up"))
    }

    /// Kills a container's process bypassing the kubelet, like a crash.
    ///
    /// # Errors
    /// Fails if there is no such container.
    pub fn kill_container(&self, namespace: &str, pod: &str, container: &str) -> Result<()> {
        let (node, id) = self.task(namespace, pod, container)?;
        self.ctr(node, ["tasks", "kill", "-s", "SIGKILL", &id]).map(drop)
    }

    /// Kills the children of a container's first process.
    ///
    /// # Errors
    /// Fails if there is no such container, or it has one process only.
    pub fn kill_children(&self, namespace: &str, pod: &str, container: &str) -> Result<()> {
        let (node, id) = self.task(namespace, pod, container)?;
        let tasks = self.ctr(node, ["tasks", "ls"])?;
        let first = tasks.lines().find_map(|line| line.strip_prefix(&id)?.split_whitespace().next()?.parse().ok());
        let first: u32 = first.context("the container does not run")?;
        let all = self.ctr(node, ["tasks", "ps", &id])?;
        let all = all.lines().filter_map(|line| line.split_whitespace().next()?.parse().ok());
        let children: Vec<u32> = all.filter(|&process| process != first).collect();
        ensure!(!children.is_empty(), "the container has one process only");
        self.signal(node, Signal::SIGKILL, &children)
    }

    /// Freezes a container.
    ///
    /// # Errors
    /// There is no such container.
    pub fn pause_container(&self, namespace: &str, pod: &str, container: &str) -> Result<()> {
        let (node, id) = self.task(namespace, pod, container)?;
        self.ctr(node, ["tasks", "pause", &id]).map(drop)
    }

    /// Reverts `pause_container`.
    ///
    /// # Errors
    /// There is no such container.
    pub fn resume_container(&self, namespace: &str, pod: &str, container: &str) -> Result<()> {
        let (node, id) = self.task(namespace, pod, container)?;
        self.ctr(node, ["tasks", "resume", &id]).map(drop)
    }

    /// Makes a node offer GPUs that do not exist; to be repeated after a restart of its kubelet.
    ///
    /// # Errors
    /// There is no such node.
    pub fn offer_gpus(&self, node: u8, count: u32) -> Result<()> {
        if self.is_given() {
            return Err(needs_nodes("offering GPUs"));
        }
        let offer = json!({"nvidia.com/gpu": count.to_string()});
        let status = json!({"status": {"capacity": offer, "allocatable": offer}});
        self.api().patch(&format!("/api/v1/nodes/{}/status", node_name(node)), MERGE, &status).map(drop)
    }

    /// Returns the node and the id of a container.
    fn task(&self, namespace: &str, pod: &str, container: &str) -> Result<(u8, String)> {
        let pod = self.api().get(&format!("/api/v1/namespaces/{namespace}/pods/{pod}"))?;
        let node = self.node_of(&pod)?;
        let statuses = pod["status"]["containerStatuses"].as_array().cloned().unwrap_or_default();
        let status = statuses.iter().find(|it| it["name"] == container);
        let id = status.and_then(|it| it["containerID"].as_str()).and_then(|it| it.strip_prefix("containerd://"));
        Ok((node, id.context("the container does not run")?.to_owned()))
    }
}

fn spare_first(node: u8) -> Result<()> {
    ensure!(node != 1, "node 1 hosts the control plane and cannot be a target");
    Ok(())
}
