//! Files in an S3-compatible storage.
//!
//! Decides how a request is sent, signed, tried again and given up; knows nothing of what the objects hold. Requests are
//! signed with signature version 4 over their content, so that a byte that changes on the way up is refused by the storage; what
//! comes down is for the caller to check. Invariants: an object appears whole or not at all, and an upload that fails is
//! aborted, so that no part of it is kept and paid for; every wait has a limit; no error tells a credential.
#![forbid(unsafe_code)]

mod bucket;
mod http;
mod options;

pub use bucket::{Bucket, Object};
pub use options::{Credentials, Keys, Options, Place};

/// What goes wrong with a storage.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An address that is none of a place in a storage.
    #[error("{address:?} is no place in a storage: {what}; a place is s3://BUCKET or s3://BUCKET/PREFIX")]
    Address {
        /// What was given.
        address: String,
        /// What is wrong with it.
        what: &'static str,
    },
    /// Nobody has said who asks.
    #[error(
        "no credentials for {place}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a folder with the files \
         accessKeyId and secretAccessKey"
    )]
    NoCredentials {
        /// The place.
        place: String,
    },
    /// The credentials, the region or the endpoint cannot be used.
    #[error("{what}")]
    Settings {
        /// What is wrong with them.
        what: String,
    },
    /// An object that should be there is not.
    #[error("{object} is not there")]
    NotFound {
        /// Its address.
        object: String,
    },
    /// An object is larger than it should be.
    #[error("{object} is longer than {limit} bytes")]
    TooLong {
        /// Its address.
        object: String,
        /// What was expected at most.
        limit: u64,
    },
    /// The storage refused, failed or did not answer, after all tries.
    #[error("failed to {operation} {object}")]
    Storage {
        /// What was tried, as a verb.
        operation: &'static str,
        /// On what.
        object: String,
        /// What the storage, or the way to it, said.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A file of this machine failed.
    #[error("failed to {operation} {path}")]
    File {
        /// What was tried, as a verb.
        operation: &'static str,
        /// The file.
        path: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}
