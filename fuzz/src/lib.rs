//! Fuzz targets for everything that is decoded: log, snapshots, what peers and clients send, maps, manifests, files of events.
//!
//! A target is a function of bytes that panics when a promise does not hold: nothing panics, nothing takes memory for what a
//! number says, what is accepted satisfies what the code behind it relies on. `cargo xtask fuzz` runs them under libFuzzer, guided
//! by coverage; the tests of this package replay the corpora in the ordinary build.
//!
//! Bytes under a checksum would be refused at once, so those targets also build them: the input then says what stands in the
//! fields, and the checksums are made right.
#![forbid(unsafe_code)]

mod documents;
mod events;
mod input;
mod replication;
mod requests;
mod segments;
mod snapshot;
mod wal;
pub mod world;
// The file, not the crate: the worker would bring all its servers along.
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
pub const TARGETS: [Target; 8] = [
    Target { name: "wal_record", run: wal::record },
    Target { name: "wal_segment_recover", run: wal::recover },
    Target { name: "snapshot_manifest", run: snapshot::manifest },
    Target { name: "replication_frame", run: replication::frame },
    Target { name: "public_requests", run: requests::public },
    Target { name: "map_json", run: documents::map },
    Target { name: "manifest", run: documents::manifest },
    Target { name: "event_file", run: events::file },
];

/// The target of a name.
pub fn target(name: &str) -> Option<Target> {
    TARGETS.into_iter().find(|target| target.name == name)
}
