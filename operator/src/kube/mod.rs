//! Access to the API server: kinds and requests, watches, cached lists, leadership.

pub(crate) mod api_request;
pub(crate) mod controllers;
pub(crate) mod leader;
pub mod lease;
pub(crate) mod list_cache;
pub(crate) mod resource_kinds;
pub(crate) mod written_statuses;
