//! The coordinators of clusters: one per cluster in each replica, steered by a goal that follows from the spec and the plan;
//! and clients of their workers.

pub(crate) mod coordinators;
pub(crate) mod goal;
pub(crate) mod last_valid_spec;
pub(crate) mod worker_client;

use crate::kube::failure::{Cause, Failure};
use crate::pki::certificates::CaError;
use crate::pki::provided_secret::InvalidClusterId;

/// Why the coordinator of a cluster was not updated.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SteerError {
    #[error(transparent)]
    InvalidClusterId(#[from] InvalidClusterId),
    #[error(transparent)]
    CertificateAuthority(#[from] CaError),
    /// It cannot be started, for the reason in the text.
    #[error("failed to coordinate the cluster: {0}")]
    Coordinator(String),
}

impl Failure for SteerError {
    fn root_cause(&self) -> Cause<'_> {
        match self {
            Self::InvalidClusterId(_) | Self::Coordinator(_) => Cause::Coordinator,
            Self::CertificateAuthority(error) => error.root_cause(),
        }
    }
}
