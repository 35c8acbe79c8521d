//! Fuzz targets for everything that is decoded: logs, snapshots, messages of peers, coordinators and clients, maps, manifests, Kubernetes objects,
//! replay buffers, event files, worker settings, tokens.
//!
//! A target is a function of bytes that panics when an invariant is violated: no input panics, none causes an allocation by an unchecked length,
//! and accepted values satisfy the assumptions of the code that uses them. `cargo xtask fuzz` runs the targets under libFuzzer, guided by coverage;
//! the tests of this package replay the corpora in a plain build.
//!
//! Checksums would reject almost all inputs, so those targets also build valid containers: the input provides the fields, and the checksums are
//! computed.
#![forbid(unsafe_code)]

mod buffers;
mod documents;
mod events;
mod heartbeats;
mod input;
mod objects;
mod payloads;
mod pods;
mod replication;
mod requests;
mod segments;
mod snapshot;
pub mod tokens;
mod wal;
pub mod world;
// These files rather than the crate: the worker would link all its servers.
#[path = "../../worker/src/options.rs"]
#[allow(dead_code, unreachable_pub, reason = "the worker uses all of it, a target only what decodes")]
mod options;
#[path = "../../worker/src/pod/settings.rs"]
#[allow(dead_code, unreachable_pub, reason = "the worker uses all of it, a target only what decodes")]
mod settings;
#[path = "../../worker/src/peers/wire.rs"]
#[allow(dead_code, reason = "the worker uses all of it, a target only what decodes")]
mod wire;

pub use replication::encode_envelope;

/// A fuzz target.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// Name, also of its corpus in `corpus/` and of its dictionary in `dictionaries/`.
    pub name: &'static str,
    /// Panics if these bytes violate an invariant.
    pub run: fn(&[u8]),
}

/// All targets.
pub const TARGETS: [Target; 14] = [
    Target { name: "wal_record", run: wal::record },
    Target { name: "wal_segment_recover", run: wal::recover },
    Target { name: "snapshot_manifest", run: snapshot::manifest },
    Target { name: "payload_segment", run: payloads::segment },
    Target { name: "replication_frame", run: replication::frame },
    Target { name: "public_requests", run: requests::public },
    Target { name: "heartbeat", run: heartbeats::heartbeat },
    Target { name: "api_object", run: objects::api },
    Target { name: "map_json", run: documents::map },
    Target { name: "manifest", run: documents::manifest },
    Target { name: "event_file", run: events::file },
    Target { name: "worker_settings", run: pods::settings },
    Target { name: "buffer_messages", run: buffers::messages },
    Target { name: "account_token", run: tokens::account },
];

/// Returns the target of a name.
pub fn target(name: &str) -> Option<Target> {
    TARGETS.into_iter().find(|target| target.name == name)
}
