//! Certificates: the cluster CA and its rotation, signing requests of pods, certificates of cert-manager or of the user, and the issuer
//! of service account tokens.

pub(crate) mod ca_rotation;
pub(crate) mod cert_manager;
pub mod certificate_approval;
pub(crate) mod certificate_reports;
pub(crate) mod certificates;
pub(crate) mod issuance;
pub(crate) mod provided_certificate;
pub(crate) mod provided_secret;
pub(crate) mod signing;
pub(crate) mod token_issuer;
