//! All targets under libFuzzer; `ENGRAM_FUZZ_TARGET` selects one. A single program, since linking dominates the build time.
#![no_main]
#![allow(unsafe_code, reason = "libFuzzer calls functions by their C names")]

use std::sync::LazyLock;

static RUN: LazyLock<fn(&[u8])> = LazyLock::new(|| {
    let name = std::env::var("ENGRAM_FUZZ_TARGET").unwrap_or_default();
    let target = engram_fuzz::target(&name);
    target.unwrap_or_else(|| panic!("ENGRAM_FUZZ_TARGET: unknown target {name:?}")).run
});

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| RUN(bytes));
