//! Writes the reference page of the command line to standard output, for `cargo xtask generate`.

fn main() {
    print!("{}", engram_cli::reference());
}
