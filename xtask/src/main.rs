//! (head to be written)
fn main() {}
