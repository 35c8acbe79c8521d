//! Access to the API server: kinds and requests, watches, cached lists, leadership.

pub mod api_object;
pub(crate) mod api_request;
pub(crate) mod conditions;
pub(crate) mod controllers;
pub(crate) mod failure;
pub(crate) mod leader;
pub mod lease;
pub(crate) mod list_cache;
pub mod resource_kinds;
pub mod stored_object;
pub(crate) mod written_statuses;
