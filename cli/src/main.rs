//! The `engram` binary.
#![forbid(unsafe_code)]

use tikv_jemallocator::Jemalloc;

/// Returns freed memory to the system within seconds: docs/decisions/0011-allocator.md.
#[global_allocator]
static ALLOCATOR: Jemalloc = Jemalloc;

fn main() -> std::process::ExitCode {
    engram_cli::main()
}
