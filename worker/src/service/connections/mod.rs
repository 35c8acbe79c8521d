//! Connections of the listeners: accepted within a bound, ended when they stall, and the HTTP pages.

pub(crate) mod accept;
pub(crate) mod http;
pub(crate) mod listeners;
pub(crate) mod stalls;
