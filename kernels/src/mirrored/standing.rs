//! How the devices beside the CPU stand, for people and metrics.

/// How the devices beside the CPU stand.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Standing {
    /// What the vendors call them.
    pub name: String,
    /// They do passes over so many memories and more; `None` = no pass.
    pub threshold: Option<u64>,
    /// Passes that they did, or parts of.
    pub passes: u64,
    /// Passes that were large enough, and that the CPU did, or parts of, because a device had no memory left or failed.
    pub fallbacks: u64,
    /// Bytes of rows that they took.
    pub mirrored_bytes: u64,
    /// Bytes of their columns, features and what passes take for themselves apart.
    pub bytes: u64,
    /// Which were given up, and why; the others go on.
    pub given_up: Option<String>,
    /// Each of them.
    pub devices: Vec<Held>,
    /// Memories of partitions for which no device has room, when memories were placed last: the CPU does their part of passes.
    pub host_memories: u64,
}

/// How one device stands.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Held {
    /// What the vendor calls it.
    pub name: String,
    /// By what it is known wherever it is, as the driver says it; a name otherwise.
    pub id: String,
    /// Passes that it did its part of.
    pub passes: u64,
    /// Passes of which the CPU did its part because it had no memory left or failed.
    pub fallbacks: u64,
    /// Bytes of rows that it took.
    pub mirrored_bytes: u64,
    /// Bytes of its columns; 0 when it was given up.
    pub bytes: u64,
    /// Partitions that it holds, those without a memory left out.
    pub partitions: u64,
    /// Their memories.
    pub memories: u64,
    /// Why it was given up; it does no pass then.
    pub given_up: Option<String>,
}

impl Standing {
    /// The devices that do passes.
    pub fn at_work(&self) -> impl Iterator<Item = &Held> {
        self.devices.iter().filter(|device| device.given_up.is_none())
    }
}
