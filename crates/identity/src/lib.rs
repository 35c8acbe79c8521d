//! Who a process of a cluster is: certificates, their renewal, and TLS between the processes.
//!
//! Decides whom a process believes: whoever shows a certificate that the cluster's authority signed, that is valid now, and that names
//! the same cluster id. What such a process may do follows from the role in that certificate, never from a header or a field.
//!
//! - [`Authority`] signs. It is the only one with its key. A process that makes its own key sends it a [`SigningRequest`].
//! - [`Keys`] are a process's own certificate and the roots that it believes, read again while it runs: new files are taken when all of
//!   them are good, otherwise the old pair stays in use and the failure is counted.
//! - [`accept`] and [`connect`] put TLS 1.3 on connections, each with the keys of that moment, both sides with certificates. Sessions are
//!   not resumed: that would carry an old certificate past its end.
//! - [`Tokens`] says whose call it is that carries a token of a ServiceAccount, where a listener takes those.
//!
//! Invariant: on a listener for certified callers no byte of an application is read from a connection without a verified [`Name`]. Where
//! others are let in too, [`Caller`] says that they are nobody.
#![forbid(unsafe_code)]

mod accept;
mod authority;
mod dial;
mod followed;
mod given;
mod keys;
mod material;
mod name;
mod refusal;
mod request;
pub mod token;
mod validity;
mod verify;

pub use accept::{Caller, Entering, Secured, accept, accept_of};
pub use authority::{Authority, Issued, LIFETIME, Realm, renewal};
pub use dial::{connect, connect_anonymously, connect_anonymously_over};
pub use followed::Followed;
pub use given::{Given, bundle, each};
pub use keys::{Files, Keys, LOOK};
pub use material::{Callers, RootId, Roots};
pub use name::{Expected, Malformed, Name, Role, Stranger};
pub use refusal::{Reason, Refusals};
pub use request::{Asked, SigningRequest, ask};
pub use token::{Account, IssuerFiles, Tokens};

use std::path::PathBuf;

/// Why there are no certificates to work with.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file cannot be read.
    #[error("failed to read {}", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Something in a file is not what it should be.
    #[error("{what}")]
    Unusable {
        /// What, and what it should be.
        what: String,
    },
    /// The certificate names no process of a cluster.
    #[error(transparent)]
    Name(#[from] Malformed),
    /// The certificate names somebody else.
    #[error(transparent)]
    Stranger(#[from] Stranger),
    /// A certificate cannot be made.
    #[error("failed to make a certificate")]
    Sign(#[from] rcgen::Error),
}

impl Error {
    pub(crate) fn unusable(what: impl Into<String>) -> Self {
        Self::Unusable { what: what.into() }
    }
}
