//! Compiles the protocol files with a compiler written in Rust: no `protoc` is needed on the machine.

use std::{env, fs, io, path::PathBuf};

const FILES: [&str; 8] = [
    "engram/v1/memory.proto",
    "engram/v1/buffer.proto",
    "engram/v1/run.proto",
    "engram/v1/cluster.proto",
    "engram/v1/training.proto",
    "engram/v1/group.proto",
    "engram/v1/federated.proto",
    "externalscaler.proto",
];

fn main() -> io::Result<()> {
    println!("cargo::rerun-if-changed=engram");
    println!("cargo::rerun-if-changed=externalscaler.proto");
    let descriptors = protox::compile(FILES, ["."]).map_err(io::Error::other)?;
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    // For the reflection service.
    fs::write(out.join("descriptors.bin"), prost::Message::encode_to_vec(&descriptors))?;
    tonic_prost_build::configure()
        .bytes(".")
        // What is secret is in no log: it is described by hand.
        .skip_debug(["engram.v1.ObjectCredentials", "engram.v1.FederatedCaller"])
        .compile_fds(descriptors)
}
