//! Settings that an operator writes for its workers, as the file that a pod reads at startup.

use crate::options::Options;
use crate::settings::{PodInfo, Settings};
use crate::world::P;
use engram_kernels::Cpu;
use engram_memory::{MAX_DIMENSION, MAX_PARTITIONS};
use engram_store::{ManualClock, Origin, SimDisk, Store};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

/// Kept small: stores with more partitions take the same path.
const MOST_PARTITIONS: u32 = 4;

/// Text as the operator's file: a worker accepts it or returns an error.
pub(crate) fn settings(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let settings = match Settings::parse(text) {
        Ok(settings) => settings,
        Err(error) => return assert!(!error.to_string().is_empty(), "the error has a text"),
    };
    for address in [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)] {
        let pod = PodInfo { cluster: "fuzz".into(), ordinal: 1, namespace: Some("ml".into()), address };
        accepted(&settings.clone().options(pod, "/state".into()));
    }
}

fn accepted(options: &Options) {
    // The pod's first process serializes them for the worker, which must read the same.
    let json = serde_json::to_string(options).expect("options can be serialized");
    let again: Options = serde_json::from_str(&json).unwrap_or_else(|error| panic!("{error}: {json}"));
    assert_eq!(serde_json::to_string(&again).expect("options can be serialized"), json);

    let shape = options.shape();
    assert!((1..=MAX_PARTITIONS).contains(&shape.partitions) && shape.features.dimension <= MAX_DIMENSION);
    let copies = options.spec.replication_factor;
    assert!((1..=3).contains(&copies) && options.min_in_sync() <= copies as usize, "{copies} copies");
    let sharers = options.bootstrap.as_ref().and_then(|bootstrap| bootstrap.workers);
    assert!(sharers.is_none_or(|workers| (1..=100).contains(&workers)), "partitions are divided between {sharers:?}");
    let mut store = match options.store() {
        Ok(store) => store,
        Err(error) => return assert!(!error.to_string().is_empty(), "the error has a text"),
    };
    assert_eq!(store.settings.check(), Ok(()), "settings are valid for the log");
    if shape.partitions <= MOST_PARTITIONS {
        store.origin = Origin { boot: 1, mount: 1 };
        store.wal.segment_bytes = 32 << 10;
        let disk = Arc::new(SimDisk::new(1));
        let opened = Store::open(disk, Arc::new(ManualClock::new(1_000_000)), Box::new(Cpu::new(1)), store);
        let (mut store, _) = opened.expect("an empty disk can be opened");
        store.turn().expect("the disk does not fail");
        assert_eq!(store.partitions().memories(), 0, "partition {P} is empty");
    }
}
