//! Identity of a cluster's processes: certificates, their Renewal, and TLS between the processes.
//!
//! Decides which peers a process trusts: those with a certificate that is signed by the cluster's CA, is currently
//! valid, and names the same cluster id. What a peer may do follows from the role in that certificate, never from a
//! header or a field.
//!
//! - [`CertificateAuthority`] signs. Only it has its key. A process that creates its own key sends it a
//!   [`SigningRequest`].
//! - [`Keys`] are a process's own certificate and trusted roots, reloaded while it runs: new files are taken if all of
//!   them are valid, otherwise the old pair stays in use and the failure is counted.
//! - [`accept`] and [`connect`] put TLS 1.3 on connections, each with the current keys, both sides with certificates.
//!   Sessions are not resumed: that would extend an old certificate past its end. [`TlsSocket`] is the same for threads
//!   without a runtime.
//! - [`SharedCertificate`] secures connections between processes without certificates of the cluster, which a worker has
//!   authenticated.
//! - [`Tokens`] authenticates calls with a ServiceAccount token, where a listener accepts those.
//!
//! Invariant: on a listener that requires certificates no application byte is read from a connection without a verified
//! [`Name`]. Where other callers are accepted, too, [`Caller`] marks them as unauthenticated.
#![forbid(unsafe_code)]

mod accept;
mod ca;
mod dial;
mod keys;
mod material;
mod name;
mod provided_certificate;
mod refusal;
mod request;
mod shared;
mod socket;
pub mod token;
mod validity;
mod verify;
mod watched_files;

pub use accept::{Caller, Entering, TlsConnection, accept, accept_for_clusters};
pub use ca::{CertificateAuthority, IssuedCertificate, LIFETIME, Realm, Renewal};
pub use dial::{connect, connect_anonymously, connect_anonymously_over};
pub use keys::{Files, Keys, RELOAD_INTERVAL};
pub use material::{Callers, RootId, Roots};
pub use name::{ExpectedPeer, MalformedName, Name, Role, UnexpectedPeer};
pub use provided_certificate::{ProvidedCertificate, bundle, split_pem};
pub use refusal::{Reason, Refusals};
pub use request::{CertificateRequest, SigningRequest, create_request};
pub use shared::SharedCertificate;
pub use socket::TlsSocket;
pub use token::{Account, IssuerFiles, Tokens};
pub use watched_files::WatchedFiles;

use std::path::PathBuf;

/// Why certificates cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file cannot be read.
    #[error("failed to read {}", path.display())]
    Read {
        /// Its path.
        path: PathBuf,
        /// Cause.
        source: std::io::Error,
    },
    /// The contents of a file are invalid.
    #[error("{what}")]
    Unusable {
        /// What is wrong, and what is expected.
        what: String,
    },
    /// The certificate names no process of a cluster.
    #[error(transparent)]
    Name(#[from] MalformedName),
    /// The certificate names another process.
    #[error(transparent)]
    Stranger(#[from] UnexpectedPeer),
    /// A certificate cannot be created.
    #[error("failed to create a certificate")]
    Sign(#[from] rcgen::Error),
}

impl Error {
    pub(crate) fn unusable(what: impl Into<String>) -> Self {
        Self::Unusable { what: what.into() }
    }
}
