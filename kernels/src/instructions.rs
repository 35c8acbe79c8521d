//! Which vector instructions passes use.

/// The most that a device may use of the processor; what the processor lacks is never used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Instructions {
    /// All that this build knows and the processor has.
    #[default]
    Widest,
    /// At most AVX2.
    Avx2,
    /// What every processor of the architecture has.
    Portable,
}
