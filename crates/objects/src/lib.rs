//! Client for S3-compatible object storage.
//!
//! Decides how requests are sent, signed, retried and abandoned; knows nothing about the objects' content. Requests are
//! signed with signature version 4 over their content, so the storage rejects bytes that changed during an upload; the caller
//! verifies downloads. Invariants: an object appears whole or not at all; a failed upload is aborted, so none of its parts
//! is kept and billed; every wait has a timeout; no error contains a credential; no setting makes a request panic; credentials of the
//! environment are sent to its own endpoint only, unless the environment's owner chose another.
#![forbid(unsafe_code)]

mod bucket;
mod endpoint;
mod environment;
mod http;
mod options;

pub use bucket::{Bucket, Object};
pub use options::{Credentials, EndpointOwner, Keys, Location, Options};

/// Failure of an object storage operation.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An address that is not a location in object storage.
    #[error("{address:?} is not an object storage location: {what}; expected s3://BUCKET or s3://BUCKET/PREFIX")]
    Address {
        /// The address.
        address: String,
        /// What is wrong with it.
        what: &'static str,
    },
    /// No credentials are configured.
    #[error(
        "no credentials for {location}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a directory with the files \
         accessKeyId and secretAccessKey"
    )]
    NoCredentials {
        /// Location that was opened.
        location: String,
    },
    /// The credentials, the region or the endpoint are invalid.
    #[error("{what}")]
    Settings {
        /// What is wrong with them.
        what: String,
    },
    /// An expected object does not exist.
    #[error("{object} does not exist")]
    NotFound {
        /// Its address.
        object: String,
    },
    /// An object is larger than expected.
    #[error("{object} is larger than {limit} bytes")]
    TooLong {
        /// Its address.
        object: String,
        /// Most bytes expected.
        limit: u64,
    },
    /// The storage rejected the request, failed or did not respond, after all retries.
    #[error("failed to {operation} {object}")]
    Storage {
        /// Operation, as a verb.
        operation: &'static str,
        /// Address of the object.
        object: String,
        /// Error of the storage or of the connection.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A local file operation failed.
    #[error("failed to {operation} {path}")]
    File {
        /// Operation, as a verb.
        operation: &'static str,
        /// Path of the file.
        path: String,
        /// Cause.
        #[source]
        source: std::io::Error,
    },
}
