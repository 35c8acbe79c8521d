//! Fuzz targets for everything that is decoded: log, snapshots, what peers, coordinators and clients send, maps, manifests, objects of
//! an API server, files of events, settings of workers, tokens.
//!
//! A target is a function of bytes that panics when a promise does not hold: nothing panics, nothing takes memory for what a
//! number says, what is accepted satisfies what the code behind it relies on. `cargo xtask fuzz` runs them under libFuzzer, guided
//! by coverage; the tests of this package replay the corpora in the ordinary build.
//!
//! Bytes under a checksum would be refused at once, so those targets also build them: the input then says what stands in the
//! fields, and the checksums are made right.
#![forbid(unsafe_code)]

mod beats;
mod documents;
mod events;
mod input;
mod objects;
mod pods;
mod replication;
mod requests;
mod segments;
mod snapshot;
pub mod tokens;
mod wal;
pub mod world;
// These files, not the crate: the worker would bring all its servers along.
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

/// One target.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// Its name, that of its corpus in `corpus/` and of its dictionary in `dictionaries/`.
    pub name: &'static str,
    /// Panics when something that was promised does not hold for these bytes.
    pub run: fn(&[u8]),
}

/// All targets.
pub const TARGETS: [Target; 12] = [
    Target { name: "wal_record", run: wal::record },
    Target { name: "wal_segment_recover", run: wal::recover },
    Target { name: "snapshot_manifest", run: snapshot::manifest },
    Target { name: "replication_frame", run: replication::frame },
    Target { name: "public_requests", run: requests::public },
    Target { name: "heartbeat", run: beats::heartbeat },
    Target { name: "api_object", run: objects::api },
    Target { name: "map_json", run: documents::map },
    Target { name: "manifest", run: documents::manifest },
    Target { name: "event_file", run: events::file },
    Target { name: "worker_settings", run: pods::settings },
    Target { name: "account_token", run: tokens::account },
];

/// The target of a name.
pub fn target(name: &str) -> Option<Target> {
    TARGETS.into_iter().find(|target| target.name == name)
}
