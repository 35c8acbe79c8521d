//! Middleware of every call: authentication, authorization, cluster check, concurrency limit, metrics and panic handling.

pub(crate) mod authorization;
pub(crate) mod call_body;
pub(crate) mod limits;

use crate::service::connections::accept::ConnectionInfo;
use crate::shared::Shared;
use authorization::AccountAuthorizer;
use call_body::{CallPermits, RETRY_MS, RequestBody, RequestBounds, ResponseBody, too_many};
use engram_identity::{Caller, Reason, Role};
use engram_proto::v1::{Problem, ProblemKind};
use engram_proto::{CLUSTER_KEY, TRACE_KEY};
use engram_trace::{Context, Span, within};
use futures::FutureExt as _;
use futures::future::BoxFuture;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::task::{self, Poll};
use std::time::{Instant, SystemTime};
use tokio::sync::Semaphore;
use tonic::body::Body;
use tonic::codegen::http::{HeaderMap, Request, Response};
use tonic::{Code, Status};
use tower::{Layer, Service};

/// Maximum number of calls in flight per listener, until their answers were read; each holds at most one message. How many of them
/// execute at once is decided by [`crate::write::admission`].
const CALLS: usize = 1_024;
/// Maximum number of calls per listener whose request is not read completely, streams of messages included.
const UNREAD_CALLS: usize = 2_048;
/// Maximum number of calls per listener that wait for a change: some KiB each. A client library has one per worker.
const WAITING_CALLS: usize = 8_192;
/// Maximum bytes of incomplete messages per listener: 64 of the maximum size.
const REQUEST_BYTES: usize = 256 << 20;

/// Administration calls, and the certificate roles that may make them.
const ADMINISTRATION: &str = "/engram.v1.AdminService/";
const ADMINISTRATORS: &[Role] = &[Role::Coordinator, Role::Client];

/// Calls between workers, beyond the services of the peer listener: they change the state of runs that another worker drives.
const WORKER_CALLS: [&str; 10] = [
    "/engram.v1.BufferService/ChangeBuffer",
    "/engram.v1.BufferService/DrawItems",
    "/engram.v1.BufferService/GetShares",
    "/engram.v1.MemoryService/BroadcastQuality",
    "/engram.v1.RunService/AcquireTurn",
    "/engram.v1.RunService/ForgetRun",
    "/engram.v1.RunService/PutPartition",
    "/engram.v1.RunService/ReleaseTurn",
    "/engram.v1.RunService/RunTask",
    "/engram.v1.RunService/SetUpdateCounting",
];

/// Services whose calls are streams that wait.
const WAITING_SERVICES: [&str; 3] = ["/engram.v1.PeerService/", "/engram.v1.TrainingService/", "/grpc.reflection."];

/// What a call occupies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CallKind {
    /// Nothing: it is answered in every state.
    Health,
    /// It waits for a change or for messages, and executes nothing meanwhile.
    Waiting,
    /// It sends messages, each of which is admitted on its own.
    Upload,
    /// It is executed once its message was read.
    Work,
}

impl CallKind {
    fn of(method: &str) -> Self {
        match method {
            "/grpc.health.v1.Health/Check" => Self::Health,
            "/grpc.health.v1.Health/Watch"
            | "/engram.v1.MemoryService/GetPartitionMap"
            | "/engram.v1.RunService/RunTask"
            | "/engram.v1.RunService/WatchRun"
            | "/engram.v1.GroupService/JoinGroup" => Self::Waiting,
            // They wait for items and rate limiters; what they execute is admitted where it runs.
            "/engram.v1.BufferService/SampleItems" | "/engram.v1.BufferService/ConsumeItems" => Self::Waiting,
            // They wait for tasks and messages; what they change is one record for many of them.
            "/engram.v1.FederatedService/CheckIn" | "/engram.v1.FederatedService/ExchangeMasks" => Self::Waiting,
            "/engram.v1.BufferService/WriteItems" => Self::Upload,
            "/engram.v1.MemoryService/Upsert" | "/engram.v1.MemoryService/LearnEpoch" => Self::Upload,
            _ if WAITING_SERVICES.iter().any(|service| method.starts_with(service)) => Self::Waiting,
            _ => Self::Work,
        }
    }
}

/// Permits of the calls of a listener.
#[derive(Debug, Clone)]
struct CallBounds {
    requests: RequestBounds,
    unread: Arc<Semaphore>,
    waiting: Arc<Semaphore>,
}

impl CallBounds {
    fn new() -> Self {
        let semaphore = |permits| Arc::new(Semaphore::new(permits));
        let requests = RequestBounds { bytes: semaphore(REQUEST_BYTES), work: semaphore(CALLS) };
        Self { requests, unread: semaphore(UNREAD_CALLS), waiting: semaphore(WAITING_CALLS) }
    }

    /// Takes the permits of a call: wraps its request body, and returns what its response body must hold.
    fn begin(&self, listener: ListenerKind, request: &mut Request<Body>) -> Result<CallPermits, Problem> {
        let permits = CallPermits::default();
        let take = |from: &Arc<Semaphore>, what| Arc::clone(from).try_acquire_owned().map_err(|_| too_many(what));
        let kind = CallKind::of(request.uri().path());
        match kind {
            CallKind::Health => return Ok(permits),
            CallKind::Waiting => permits.lock().push(take(&self.waiting, "calls wait for a change")?),
            // Workers send what they have, or wait on purpose.
            CallKind::Work if listener == ListenerKind::Peer => {
                permits.lock().push(take(&self.requests.work, "calls are in flight")?);
            }
            CallKind::Upload | CallKind::Work => {}
        }
        if listener != ListenerKind::Peer {
            let unread = take(&self.unread, "calls are sending their requests")?;
            let work = (kind == CallKind::Work).then(|| Arc::clone(&permits));
            let body = std::mem::take(request.body_mut());
            *request.body_mut() = Body::new(RequestBody::new(body, self.requests.clone(), unread, work));
        }
        Ok(permits)
    }
}

/// Kind of a gRPC listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ListenerKind {
    /// For clients.
    Client,
    /// For workers of the same cluster.
    Peer,
    /// For administration.
    Admin,
}

impl ListenerKind {
    /// Returns the certificate roles that it accepts. Callers on a plaintext connection or on the socket have no role and are
    /// accepted.
    ///
    /// A user's certificate is valid for the whole cluster, administration included. A worker's certificate never administrates,
    /// and only workers call the peer listener.
    const fn callers(self) -> &'static [Role] {
        match self {
            Self::Client => &[Role::Worker, Role::Coordinator, Role::Client],
            Self::Peer => &[Role::Worker],
            Self::Admin => ADMINISTRATORS,
        }
    }

    /// Returns whether it serves a method at all.
    fn serves(self, method: &str) -> bool {
        self == Self::Peer || !WORKER_CALLS.contains(&method)
    }
}

/// The caller. Handlers find it in the extensions of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Principal {
    /// Name for logs and rules.
    pub name: String,
}

impl Principal {
    /// Returns an unauthenticated caller.
    pub fn anonymous() -> Self {
        Self { name: "anonymous".into() }
    }
}

/// Decides which callers may call which methods.
pub trait Authorizer: Send + Sync + 'static {
    /// Identifies the caller by the headers of the call.
    fn identify(&self, headers: &HeaderMap) -> Principal;

    /// Returns whether `principal` may call `method`, for example `/engram.v1.MemoryService/Rank`.
    fn allows(&self, principal: &Principal, method: &str) -> bool;
}

/// Allows every call: loopback clusters have no other users.
#[derive(Debug, Clone, Copy, Default)]
pub struct AllowAll;

impl Authorizer for AllowAll {
    fn identify(&self, _headers: &HeaderMap) -> Principal {
        Principal::anonymous()
    }

    fn allows(&self, _principal: &Principal, _method: &str) -> bool {
        true
    }
}

/// Wraps the services of a listener in [`EdgeService`].
#[derive(Clone)]
pub(crate) struct Edge {
    shared: Arc<Shared>,
    authorizer: Arc<dyn Authorizer>,
    listener: ListenerKind,
    /// Verifies the tokens of callers without a certificate.
    accounts: Option<Arc<AccountAuthorizer>>,
    calls: CallBounds,
}

impl Edge {
    /// Creates the middleware of a listener.
    pub(crate) fn new(shared: Arc<Shared>, authorizer: Arc<dyn Authorizer>, listener: ListenerKind) -> Self {
        Self { shared, authorizer, listener, accounts: None, calls: CallBounds::new() }
    }

    /// Accepts tokens as well.
    pub(crate) fn with_accounts(self, accounts: Option<Arc<AccountAuthorizer>>) -> Self {
        Self { accounts, ..self }
    }

    /// Authenticates the caller, by its certificate or its token, and checks that it may use the listener.
    fn identify(&self, request: &Request<Body>) -> Result<Principal, Problem> {
        let (caller, method) = (Caller::of(request.extensions()), request.uri().path());
        let Some(accounts) = self.accounts.as_ref().filter(|_| caller == Caller::Anonymous) else {
            self.admit_caller(&caller, method)?;
            return Ok(self.authorizer.identify(request.headers()));
        };
        match accounts.admit(request.headers(), method, SystemTime::now()) {
            Ok(Some(account)) => Ok(Principal { name: account.to_string() }),
            Ok(None) => Ok(Principal::anonymous()),
            Err(refusal) => {
                self.shared.setup.count_refusal(refusal.reason);
                tracing::debug!(reason = refusal.reason.as_str(), method, "rejected a call");
                Err(authorization::problem(refusal))
            }
        }
    }

    /// Checks that the caller's role may use this listener.
    fn admit_caller(&self, caller: &Caller, method: &str) -> Result<(), Problem> {
        // The client listener serves administration as well, which is not open to workers.
        let callers = if method.starts_with(ADMINISTRATION) { ADMINISTRATORS } else { self.listener.callers() };
        if caller.is_any(callers) {
            return Ok(());
        }
        self.shared.setup.count_refusal(Reason::Role);
        let role =
            caller.name().map_or_else(|| "caller without a certificate".to_owned(), |name| name.role.to_string());
        let allowed: Vec<String> = callers.iter().map(ToString::to_string).collect();
        let what = if method.starts_with(ADMINISTRATION) { "administration" } else { "this listener" };
        let text = format!("{what} is not for a {role}; allowed: {}", allowed.join(", "));
        Err(Problem::of(ProblemKind::Denied, text))
    }

    /// Admits or rejects a call.
    fn admit(&self, request: &mut Request<Body>) -> Result<(), Problem> {
        let method = request.uri().path();
        // Health checks are answered in every state.
        if self.shared.lifecycle.is_stopping() && !method.starts_with("/grpc.health.") {
            return Err(Problem::of(ProblemKind::Stopping, "this worker is stopping").retry_after(RETRY_MS));
        }
        if !self.listener.serves(method) {
            let text = format!(
                "{method} is only for workers of the cluster; runs are changed by SubmitRun, SuspendRun, CancelRun and RemoveRun"
            );
            return Err(Problem::of(ProblemKind::Denied, text));
        }
        let principal = self.identify(request)?;
        let expected = self.shared.setup.options.cluster;
        if let Some(requested) = request.headers().get(CLUSTER_KEY)
            && requested.as_bytes() != expected.to_string().as_bytes()
        {
            let requested = requested.to_str().unwrap_or("(not text)");
            let text = format!("this worker is of cluster {expected}, not of {requested}");
            return Err(Problem::of(ProblemKind::WrongCluster, text));
        }
        if !self.authorizer.allows(&principal, method) {
            let text = format!("{} may not call {method}", principal.name);
            return Err(Problem::of(ProblemKind::Denied, text));
        }
        request.extensions_mut().insert(principal);
        Ok(())
    }
}

impl<S> Layer<S> for Edge {
    type Service = EdgeService<S>;

    fn layer(&self, inner: S) -> EdgeService<S> {
        EdgeService { edge: self.clone(), inner }
    }
}

/// Admits, counts and guards the calls of a service.
#[derive(Clone)]
pub(crate) struct EdgeService<S> {
    edge: Edge,
    inner: S,
}

impl<S> Service<Request<Body>> for EdgeService<S>
where
    S: Service<Request<Body>, Response = Response<Body>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Send,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<Response<Body>, S::Error>>;

    fn poll_ready(&mut self, context: &mut task::Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let started = Instant::now();
        let metrics = self.edge.shared.metrics.calls.clone();
        let method = metrics.method(request.uri().path());
        let reject = |status: Status| {
            metrics.count(method, status.code(), started.elapsed(), None);
            let response = status.into_http();
            async move { Ok(response) }.boxed()
        };
        let info = request.extensions().get::<ConnectionInfo>().cloned();
        if let Some(info) = &info {
            request.extensions_mut().insert(info.caller.clone());
        }
        let listener = self.edge.listener;
        let check_capacity = || self.edge.shared.limits.admission().check_capacity(metrics.name(method));
        let admitted = self.edge.admit(&mut request).and_then(|()| check_capacity());
        let permits = match admitted.and_then(|()| self.edge.calls.begin(listener, &mut request)) {
            Ok(permits) => permits,
            Err(problem) => return reject(problem.into_status()),
        };
        // A connection between workers transports heartbeats as well: its end is evidence of a death.
        let answer = info.filter(|_| listener != ListenerKind::Peer).map(|info| info.stalls.begin());
        let parent = request.headers().get(TRACE_KEY).and_then(|value| value.to_str().ok()?.parse::<Context>().ok());
        let mut span = span_of(request.uri().path(), parent, &self.edge.shared);
        let context = span.context().or(parent).unwrap_or_default();
        // Calls the instance whose readiness was polled, not its clone.
        let ready = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, ready);
        async move {
            let call = AssertUnwindSafe(within(context, async move { inner.call(request).await })).catch_unwind();
            let response = match call.await {
                Ok(response) => response?,
                Err(_) => {
                    tracing::error!(method = metrics.name(method), trace = %context, "a call panicked");
                    Status::internal("the call panicked; the worker continues to serve").into_http()
                }
            };
            let code = code(&response);
            metrics.count(method, code, started.elapsed(), span.context());
            if code != Code::Ok {
                span.fail(code.description());
            }
            drop(span);
            Ok(response.map(|body| Body::new(ResponseBody::new(body, answer, permits))))
        }
        .boxed()
    }
}

/// Starts the span of a call. Calls that wait start no trace: they would last until something changes.
fn span_of(path: &str, parent: Option<Context>, shared: &Shared) -> Span {
    let starts_trace =
        matches!(CallKind::of(path), CallKind::Upload | CallKind::Work) && !path.starts_with(ADMINISTRATION);
    let Some(method) = path.strip_prefix('/').filter(|_| parent.is_some() || starts_trace) else { return Span::none() };
    if !engram_trace::is_recording() {
        return Span::none();
    }
    let mut span = Span::server(parent, method.to_owned(), starts_trace);
    span.set("rpc.system", "grpc");
    span.set("engram.worker", shared.setup.options.ordinal);
    span
}

/// Returns the status code of a response; errors have it in the headers.
fn code(response: &Response<Body>) -> Code {
    response.headers().get("grpc-status").map_or(Code::Ok, |value| Code::from_bytes(value.as_bytes()))
}
