//! The `engram` binary.
#![forbid(unsafe_code)]

use mimalloc::MiMalloc;

/// Returns freed memory to the system within seconds: docs/decisions/0011-allocator.md.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

fn main() -> std::process::ExitCode {
    engram_cli::main()
}
