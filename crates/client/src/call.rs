//! One attempt of a call: its metadata, its deadline, and the classification of its failure.

use crate::error::Error;
use crate::map::Map;
use crate::network::Network;
use crate::options::Plane;
use crate::plain::SPEAKS_TLS;
use engram_memory::{ClusterId, Ordinal};
use engram_proto::v1::buffer_service_client::BufferServiceClient;
use engram_proto::v1::memory_service_client::MemoryServiceClient;
use engram_proto::v1::{Problem, ProblemKind};
use engram_proto::{CLUSTER_KEY, MAX_MESSAGE_BYTES, MAX_PEER_MESSAGE_BYTES, TRACE_KEY};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Duration;
use tonic::metadata::AsciiMetadataValue;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

/// The services of one worker, with the limits of its plane: its memories, and its buffers.
#[derive(Debug, Clone)]
pub struct Service {
    memories: MemoryServiceClient<Channel>,
    buffers: BufferServiceClient<Channel>,
}

impl Service {
    /// Returns the buffer service.
    pub const fn buffers(&mut self) -> &mut BufferServiceClient<Channel> {
        &mut self.buffers
    }
}

impl Deref for Service {
    type Target = MemoryServiceClient<Channel>;

    fn deref(&self) -> &Self::Target {
        &self.memories
    }
}

impl DerefMut for Service {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.memories
    }
}

/// Returns the services of one worker.
pub(crate) fn service(channel: Channel, plane: Plane) -> Service {
    let limit = message_limit(plane);
    Service {
        memories: MemoryServiceClient::new(channel.clone())
            .max_decoding_message_size(limit)
            .max_encoding_message_size(limit),
        buffers: BufferServiceClient::new(channel).max_decoding_message_size(limit).max_encoding_message_size(limit),
    }
}

pub(crate) fn message_limit(plane: Plane) -> usize {
    match plane {
        Plane::Client => MAX_MESSAGE_BYTES,
        Plane::Peer => MAX_PEER_MESSAGE_BYTES,
    }
}

/// Creates a request with cluster, token and deadline, as part of the current trace, if any.
pub(crate) fn request<T>(message: T, cluster: Option<ClusterId>, network: &Network, deadline: Duration) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(deadline);
    let metadata = request.metadata_mut();
    if let Some(context) = engram_trace::current() {
        metadata.insert(TRACE_KEY, ascii(&context.to_string()));
    }
    if let Some(cluster) = cluster {
        metadata.insert(CLUSTER_KEY, ascii(&cluster.to_string()));
    }
    if let Some(token) = network.authorization() {
        metadata.insert("authorization", token);
    }
    request
}

fn ascii(text: &str) -> AsciiMetadataValue {
    AsciiMetadataValue::try_from(text).expect("hex digits and dashes are ASCII")
}

/// What a worker did that has no answer for the caller.
const NO_RESPONSE: &str = "did not respond in time";

/// Why an attempt failed, and what that means for the next.
#[derive(Debug, Clone)]
pub(crate) struct Failure {
    pub(crate) problem: Problem,
    /// Another attempt may succeed.
    pub(crate) retryable: bool,
    /// The worker may have executed the request nevertheless.
    pub(crate) maybe_executed: bool,
    /// The worker that did not respond or is not primary, and the map used: its successor is worth an attempt at once.
    pub(crate) lost: Option<(Arc<Map>, Ordinal)>,
}

impl Failure {
    /// Classifies a problem that a worker returned for a part or a call.
    pub(crate) fn of(problem: Problem) -> Self {
        let (retryable, maybe_executed) = match problem.kind() {
            ProblemKind::NotPrimary
            | ProblemKind::Overloaded
            | ProblemKind::Stopping
            | ProblemKind::NotEnoughReplicas => (true, false),
            // Every write of this library is numbered and applied at most once.
            ProblemKind::Unavailable | ProblemKind::OutcomeUnknown => (true, true),
            _ => (false, false),
        };
        Self { problem, retryable, maybe_executed, lost: None }
    }

    /// Returns a retryable failure of a request that was not executed.
    pub(crate) fn unavailable(message: impl Into<String>) -> Self {
        Self {
            problem: Problem::of(ProblemKind::Unavailable, message),
            retryable: true,
            maybe_executed: false,
            lost: None,
        }
    }

    /// Returns the failure of an attempt that timed out.
    pub(crate) fn timed_out() -> Self {
        Self { maybe_executed: true, ..Self::unavailable(format!("the worker {NO_RESPONSE}")) }
    }

    /// Marks the worker that was called as lost, and names it in the message.
    pub(crate) fn lost_at(mut self, map: &Arc<Map>, owner: Ordinal) -> Self {
        let message = &mut self.problem.message;
        *message = match message.strip_prefix("the worker ").filter(|rest| *rest == NO_RESPONSE) {
            Some(rest) => format!("worker {owner} {rest}"),
            None => format!("worker {owner}: {message}"),
        };
        Self { lost: Some((Arc::clone(map), owner)), ..self }
    }

    /// Whether another worker may serve the request, now or soon. A worker that is overloaded, or lacks in-sync
    /// replicas, is still the primary, and its response says when to retry.
    pub(crate) fn should_retry_elsewhere(&self) -> bool {
        use ProblemKind::{NotPrimary, OutcomeUnknown, Stopping, Unavailable};
        matches!(self.problem.kind(), NotPrimary | OutcomeUnknown | Stopping | Unavailable)
    }

    /// Returns the problem if another attempt may succeed.
    pub(crate) fn into_retryable(self) -> Result<Problem, Error> {
        if self.retryable { Ok(self.problem) } else { Err(Error::rejected(self.problem)) }
    }
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        if let Some(problem) = Problem::from_status(&status) {
            return Self::of(problem);
        }
        let of = |kind, retryable, maybe_executed| Self {
            problem: Problem::of(kind, text(&status)),
            retryable,
            maybe_executed,
            lost: None,
        };
        match status.code() {
            // The next attempt would fail in the same way.
            _ if text(&status).contains(SPEAKS_TLS) => of(ProblemKind::Unauthenticated, false, false),
            // Connection refused: nothing can have been executed.
            _ if refused_connection(&status) => of(ProblemKind::Unavailable, true, false),
            Code::Unavailable | Code::Cancelled | Code::DeadlineExceeded | Code::Unknown | Code::Internal => {
                of(ProblemKind::Unavailable, true, true)
            }
            // The server sheds load before it reads the request.
            Code::ResourceExhausted => of(ProblemKind::Overloaded, true, false),
            Code::InvalidArgument | Code::OutOfRange => of(ProblemKind::Invalid, false, false),
            // The status may come from a proxy in front of the cluster.
            Code::PermissionDenied => of(ProblemKind::Denied, false, false),
            Code::Unauthenticated => of(ProblemKind::Unauthenticated, false, false),
            _ => of(ProblemKind::Unspecified, false, false),
        }
    }
}

/// Formats a status with the cause that the transport hides in its source.
fn text(status: &Status) -> String {
    let mut text = if status.message().is_empty() { status.code().to_string() } else { status.message().to_owned() };
    let mut source = std::error::Error::source(status);
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}

fn refused_connection(status: &Status) -> bool {
    let mut source = std::error::Error::source(status);
    while let Some(cause) = source {
        if cause.downcast_ref::<std::io::Error>().is_some_and(|io| io.kind() == std::io::ErrorKind::ConnectionRefused) {
            return true;
        }
        source = cause.source();
    }
    false
}
