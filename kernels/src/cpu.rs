//! (being written)
/// x
pub struct Cpu;
