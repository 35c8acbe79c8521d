//! Messages between the members of a training group, and what is measured of their links.

pub(super) mod accelerator;
pub(super) mod connections;
pub(super) mod links;
pub(super) mod network;
pub(super) mod remote;
pub(super) mod secure;
pub(super) mod transfer;
