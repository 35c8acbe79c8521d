//! The `engram` binary.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    engram_cli::main()
}
