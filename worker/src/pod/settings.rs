//! What the operator mounts and the kubelet says, as a worker's options.
//!
//! The file is the same for all workers of a cluster; place and address come from the environment. Fields that this version does not
//! know are passed over: a newer operator looks after older workers.

use crate::options::{Listen, MapPlace, Options};
use anyhow::{Context as _, Result, bail, ensure};
use engram_api::LearnerClusterSpec;
use engram_memory::ClusterId;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};

/// Ports of the pod: for clients, other workers, the operator, and plain HTTP.
const PORTS: [u16; 4] = [7443, 7444, 7445, 9090];
/// An address of no one, beyond the pod's own network.
const FAR_AWAY: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), 9);
/// The part of a cluster's specification that a worker is told of.
const SPEC: [&str; 11] = [
    "workers",
    "replicationFactor",
    "partitions",
    "capacity",
    "learning",
    "features",
    "durability",
    "soloPolicy",
    "restartGrace",
    "maintenance",
    "gpu",
];

/// What the operator's file says.
#[derive(Debug, Clone)]
pub struct Settings {
    cluster: ClusterId,
    coordinators: Vec<String>,
    listen: Option<Listen>,
    threads: Option<usize>,
    spec: LearnerClusterSpec,
}

/// The fields beside those of the specification.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Own {
    cluster_id: String,
    coordinators: Vec<String>,
    listen: Option<Listen>,
    threads: Option<usize>,
}

/// What the kubelet says: which pod this is, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Name of the cluster.
    pub cluster: String,
    /// Place in it.
    pub ordinal: u32,
    /// Namespace of the pod, which its cluster is in too; without it this worker never writes the map itself.
    pub namespace: Option<String>,
    /// Where others reach this pod.
    pub address: IpAddr,
}

impl Settings {
    /// Reads the operator's file.
    ///
    /// # Errors
    /// It cannot be read, lacks something, or asks for what this version does not have.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("failed to read the cluster's settings from {}", path.display()))?;
        Self::parse(&text).with_context(|| format!("{} is not what it should be", path.display()))
    }

    fn parse(text: &str) -> Result<Self> {
        let value: Value = serde_json::from_str(text)?;
        let own: Own = serde_json::from_value(value.clone())?;
        let cluster = own.cluster_id.parse().ok().filter(|_| own.cluster_id.len() == 32);
        let cluster = cluster.with_context(|| format!("clusterId: '{}'; allowed: 32 hex digits", own.cluster_id))?;
        ensure!(!own.coordinators.is_empty(), "coordinators: none; allowed: at least one HOST:PORT");
        let Value::Object(fields) = value else { bail!("not an object") };
        let spec = spec(fields)?;
        let Own { coordinators, listen, threads, .. } = own;
        Ok(Self { cluster, coordinators, listen, threads, spec })
    }

    /// The options of the worker at `place`, with its disk at `state_dir`.
    pub fn options(self, place: Place, state_dir: PathBuf) -> Options {
        let everywhere: IpAddr = match place.address {
            IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let [client, peer, admin, http] = PORTS.map(|port| SocketAddr::new(everywhere, port));
        let host = match place.address {
            IpAddr::V4(address) => address.to_string(),
            IpAddr::V6(address) => format!("[{address}]"),
        };
        Options {
            cluster: self.cluster,
            cluster_name: place.cluster.clone(),
            ordinal: place.ordinal,
            state_dir,
            listen: self.listen.unwrap_or(Listen { client, peer, admin, http }),
            advertise_host: Some(host),
            coordinators: self.coordinators,
            peer_detours: BTreeMap::new(),
            map_place: place.namespace.map(|namespace| MapPlace::Object { namespace, name: place.cluster.clone() }),
            threads: self.threads,
            gpu_deadline_ms: None,
            spec: self.spec,
        }
    }
}

/// The specification among the fields. A field without a value is one that was not set.
fn spec(mut fields: Map<String, Value>) -> Result<LearnerClusterSpec> {
    fields.retain(|name, value| SPEC.contains(&name.as_str()) && !value.is_null());
    let copies = fields.get("replicationFactor").cloned().context("replicationFactor: missing")?;
    // Told in reports alone: how many there are, a worker learns from the map.
    fields.entry("workers").or_insert(copies);
    Ok(serde_json::from_value(Value::Object(fields))?)
}

impl Place {
    /// Reads `ENGRAM_CLUSTER`, `POD_NAMESPACE`, `POD_NAME` and `POD_IP`, as the pod's template sets them. Without `POD_IP`: the address
    /// of the way out.
    ///
    /// # Errors
    /// A variable is missing, or is not what it should be.
    pub fn from_environment() -> Result<Self> {
        let read = |name: &str| std::env::var(name).ok().filter(|text| !text.is_empty());
        let cluster = read("ENGRAM_CLUSTER").context("ENGRAM_CLUSTER is not set; allowed: the cluster's name")?;
        let pod = read("POD_NAME").context("POD_NAME is not set; allowed: the pod's name, as <cluster>-worker-0")?;
        let address = match read("POD_IP") {
            Some(text) => text.parse().ok().with_context(|| format!("POD_IP: '{text}'; allowed: an IP address"))?,
            None => way_out().context("POD_IP is not set, and this pod has no way out whose address could be taken")?,
        };
        Ok(Self { cluster, ordinal: ordinal_of(&pod)?, namespace: read("POD_NAMESPACE"), address })
    }
}

/// The place of a StatefulSet's pod.
fn ordinal_of(pod: &str) -> Result<u32> {
    let number = pod.rsplit_once('-').and_then(|(_, number)| number.parse().ok());
    number.with_context(|| format!("POD_NAME: '{pod}'; allowed: a name that ends in -0, -1 and so on"))
}

/// The address that packets to elsewhere would carry; none is sent.
fn way_out() -> std::io::Result<IpAddr> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    socket.connect(FAR_AWAY)?;
    Ok(socket.local_addr()?.ip())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// As the operator writes it, with a field that a later operator may add.
    fn file() -> Value {
        json!({
            "clusterId": "0f6c1d528a534a0a9d1e2f8f5f0f7a11",
            "coordinators": ["engram-coordinator.engram.svc:7440"],
            "replicationFactor": 2, "partitions": 256,
            "capacity": { "memories": 1_000_000, "policy": "Evict" },
            "learning": { "decay": 0.01, "initialWeight": 0.5, "law": "Linear", "rate": 0.05 },
            "features": { "dimension": 0, "dtype": "F16" },
            "durability": { "mode": "Sync" }, "soloPolicy": "SoloDurable", "restartGrace": "3s",
            "gpu": { "mode": "Auto", "threshold": null },
            "fieldOfALaterOperator": true,
        })
    }

    fn place(address: &str) -> Place {
        Place {
            cluster: "words".into(),
            ordinal: ordinal_of("words-worker-12").unwrap(),
            namespace: Some("research".into()),
            address: address.parse().unwrap(),
        }
    }

    #[test]
    fn the_operators_file_and_the_pods_name_make_a_worker() {
        let settings = Settings::parse(&file().to_string()).unwrap();
        let options = settings.clone().options(place("10.244.2.7"), STATE.into());
        assert_eq!((options.ordinal, options.spec.partitions, options.spec.replication_factor), (12, 256, 2));
        assert_eq!(options.listen.client.to_string(), "0.0.0.0:7443");
        assert_eq!(options.advertise_host.as_deref(), Some("10.244.2.7"));
        assert_eq!(options.coordinators, ["engram-coordinator.engram.svc:7440"]);
        let map = MapPlace::Object { namespace: "research".into(), name: "words".into() };
        assert_eq!(options.map_place, Some(map), "a worker in a pod can write the map itself");
        let options = settings.options(place("fd00::7"), STATE.into());
        assert_eq!(
            (options.listen.http.to_string().as_str(), options.advertise_host.as_deref()),
            ("[::]:9090", Some("[fd00::7]"))
        );
    }

    const STATE: &str = super::super::STATE;

    #[test]
    fn what_is_missing_or_not_there_yet_is_named() {
        let refused = |change: &dyn Fn(&mut Value)| {
            let mut file = file();
            change(&mut file);
            format!("{:#}", Settings::parse(&file.to_string()).unwrap_err())
        };
        assert!(refused(&|file| file["clusterId"] = "words".into()).contains("32 hex digits"));
        assert!(refused(&|file| file["coordinators"] = json!([])).contains("coordinators: none"));
        assert!(refused(&|file| file["replicationFactor"] = Value::Null).contains("replicationFactor: missing"));
        assert!(refused(&|file| file["gpu"]["mode"] = "Sometimes".into()).contains("Sometimes"));
        assert!(ordinal_of("words-worker").unwrap_err().to_string().contains("'words-worker'"));
    }
}
