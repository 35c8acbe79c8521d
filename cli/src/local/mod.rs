//! Local clusters: a coordinator and workers as local processes under one supervisor.

pub(crate) mod admin;
pub(crate) mod certificates;
pub(crate) mod child;
pub(crate) mod detach;
pub(crate) mod endpoints;
pub(crate) mod job;
pub(crate) mod ports;
pub(crate) mod process;
pub(crate) mod state;
pub(crate) mod supervisor;
pub(crate) mod traces;

pub(crate) use endpoints::Endpoints;
