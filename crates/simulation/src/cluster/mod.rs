//! The simulated cluster around the stores: processes, network, map store, coordinator.

pub(crate) mod coordinator;
pub(crate) mod leaving;
pub(crate) mod liveness;
pub(crate) mod map;
pub(crate) mod network;
pub(crate) mod node;
