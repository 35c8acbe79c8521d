//! A real Kubernetes on one machine: etcd, the control plane and several nodes with kubelet, containerd and kube-proxy.
//!
//! A node is one process that owns a network, mount, pid and host-name namespace; whatever belongs to the node runs in there
//! and ends with it. No network namespace has an uplink, so no packet leaves the machine; there is no registry, images are
//! packed here and imported. Node 1 carries the control plane, DNS and the test's own services, is tainted when there are
//! others, and is never killed by a test.
//!
//! Invariants: every wait has a deadline; only processes that a cluster's folder names are ended, and only while they are
//! still the same processes; after [`Cluster::stop`] the machine is as it was ([`host::State`] compares).
#![forbid(unsafe_code)]

mod certificates;
mod cgroup;
mod cluster;
mod control_plane;
pub mod fake_kubelet;
mod faults;
pub mod holder;
pub mod host;
mod http;
mod image;
mod image_store;
mod kubeconfig;
mod member;
mod network;
mod node;
pub mod panics;
mod process;
pub mod programs;
pub mod provisioner;
mod requirements;
pub mod rights;
pub mod suites;
pub mod tool;

pub use cluster::{Cluster, Options};
pub use http::{Api, MERGE, Refused, STRATEGIC};
pub use image::{Content, Image, libraries_of, write_archive};
pub use process::until;
pub use requirements::Skip;

/// Name of this package's program, in images as well.
pub const PROGRAM: &str = "engram-test-cluster";
