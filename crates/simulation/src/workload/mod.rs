//! What the cluster is used for: clients, a learning run, a writer of items.

pub(crate) mod client;
pub(crate) mod epochs;
pub(crate) mod items;
