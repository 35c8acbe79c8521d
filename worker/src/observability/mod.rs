//! What can be seen of a worker: metrics, recordings of devices, panics, pressure on processors and disk.

pub(crate) mod cpu_pressure;
pub(crate) mod disk_space;
pub mod metrics;
pub(crate) mod panics;
pub(crate) mod profile;
