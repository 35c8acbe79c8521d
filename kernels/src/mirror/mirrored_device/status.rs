//! Status of the devices that mirror a CPU, for display and metrics.

/// Status of all devices that mirror a CPU.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MirrorStatus {
    /// Vendor names of the working devices.
    pub name: String,
    /// Devices execute passes over at least this many memories; `None` = no pass.
    pub threshold: Option<u64>,
    /// Passes that devices executed, at least in part.
    pub passes: u64,
    /// Large passes that the CPU executed, at least in part, because a device had no memory left or failed.
    pub fallbacks: u64,
    /// Transferred bytes of rows.
    pub mirrored_bytes: u64,
    /// Bytes of their columns, without features and working memory.
    pub bytes: u64,
    /// Devices that were given up, and why; the others remain in use.
    pub given_up: Option<String>,
    /// Status of each device.
    pub devices: Vec<DeviceStatus>,
    /// Memories of partitions that fit on no device, at the last placement: the CPU executes their part of passes.
    pub host_memories: u64,
}

/// Status of one device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeviceStatus {
    /// Vendor name.
    pub name: String,
    /// Persistent identifier from the driver, or the name.
    pub id: String,
    /// Passes that it took part in.
    pub passes: u64,
    /// Passes whose part the CPU executed because the device had no memory left or failed.
    pub fallbacks: u64,
    /// Transferred bytes of rows.
    pub mirrored_bytes: u64,
    /// Bytes of its columns; 0 after it was given up.
    pub bytes: u64,
    /// Non-empty partitions that it holds.
    pub partitions: u64,
    /// Memories of those partitions.
    pub memories: u64,
    /// Why it was given up; such a device executes no pass.
    pub given_up: Option<String>,
}

impl MirrorStatus {
    /// Returns the devices in use.
    pub fn at_work(&self) -> impl Iterator<Item = &DeviceStatus> {
        self.devices.iter().filter(|device| device.given_up.is_none())
    }
}
