//! Every call passes here first: who asks, whether they may, of which cluster; how many are under way; what is counted; and what becomes
//! of a panic.

use crate::rights::{self, Accounts};
use crate::shared::Shared;
use engram_client::trace::{self, Context};
use engram_identity::{Caller, Reason, Role};
use engram_proto::v1::{Problem, ProblemKind};
use engram_proto::{CLUSTER_KEY, TRACE_KEY};
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

/// Calls under way per listener; more are told to come again. Each holds at most one message. How many of them work at once is for
/// [`crate::admission`] to say.
const CALLS: usize = 1_024;
/// When to come again after too many calls, in milliseconds.
const RETRY_MS: u64 = 50;

/// Calls of administration, and who may make them of those that show a certificate.
const ADMINISTRATION: &str = "/engram.v1.AdminService/";
pub(crate) const ADMINISTRATORS: &[Role] = &[Role::Coordinator, Role::Client];

/// Who asks. Handlers find it among the extensions of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Principal {
    /// Name, for logs and rules.
    pub name: String,
}

impl Principal {
    /// Whoever reached the listener.
    pub fn anonymous() -> Self {
        Self { name: "anonymous".into() }
    }
}

/// Decides who may call what.
pub trait Authorizer: Send + Sync + 'static {
    /// Who asks, by what the call carries.
    fn identify(&self, headers: &HeaderMap) -> Principal;

    /// Whether `principal` may call `method`, as `/engram.v1.MemoryService/Rank`.
    fn allows(&self, principal: &Principal, method: &str) -> bool;
}

/// Lets everything pass: loopback clusters have no other users.
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

/// Puts [`EdgeService`] before the services of a listener.
#[derive(Clone)]
pub(crate) struct Edge {
    shared: Arc<Shared>,
    authorizer: Arc<dyn Authorizer>,
    callers: &'static [Role],
    /// Whose tokens are taken of who shows no certificate.
    accounts: Option<Arc<Accounts>>,
    calls: Arc<Semaphore>,
}

impl Edge {
    /// Of a listener for these roles.
    pub(crate) fn new(shared: Arc<Shared>, authorizer: Arc<dyn Authorizer>, callers: &'static [Role]) -> Self {
        Self { shared, authorizer, callers, accounts: None, calls: Arc::new(Semaphore::new(CALLS)) }
    }

    /// The same, taking tokens as well.
    pub(crate) fn with_accounts(self, accounts: Option<Arc<Accounts>>) -> Self {
        Self { accounts, ..self }
    }

    /// Who calls, and that they may call this at all: by their certificate or, without one, by their token.
    fn identify(&self, request: &Request<Body>) -> Result<Principal, Problem> {
        let (caller, method) = (Caller::of(request.extensions()), request.uri().path());
        let Some(accounts) = self.accounts.as_ref().filter(|_| caller == Caller::Anonymous) else {
            self.admit_caller(&caller, method)?;
            return Ok(self.authorizer.identify(request.headers()));
        };
        match accounts.admit(request.headers(), method, SystemTime::now()) {
            Ok(Some(account)) => Ok(Principal { name: account.to_string() }),
            Ok(None) => Ok(Principal::anonymous()),
            Err(refused) => {
                self.shared.count_refusal(refused.reason);
                tracing::debug!(reason = refused.reason.word(), method, "refused a call");
                Err(rights::problem(refused))
            }
        }
    }

    /// Whether whoever is on the other side may use this listener at all.
    fn admit_caller(&self, caller: &Caller, method: &str) -> Result<(), Problem> {
        // Where clients find administration as well, it is not for workers.
        let callers = if method.starts_with(ADMINISTRATION) { ADMINISTRATORS } else { self.callers };
        if caller.is_any(callers) {
            return Ok(());
        }
        self.shared.count_refusal(Reason::Role);
        let role =
            caller.name().map_or_else(|| "caller without a certificate".to_owned(), |name| name.role.to_string());
        let allowed: Vec<String> = callers.iter().map(ToString::to_string).collect();
        let what = if method.starts_with(ADMINISTRATION) { "administration" } else { "this listener" };
        let text = format!("{what} is not for a {role}; allowed: {}", allowed.join(", "));
        Err(Problem::of(ProblemKind::Denied, text))
    }

    /// Whether a call is let in.
    fn admit(&self, request: &mut Request<Body>) -> Result<(), Problem> {
        let method = request.uri().path();
        // Health must be told whatever the state.
        if self.shared.is_stopping() && !method.starts_with("/grpc.health.") {
            return Err(Problem::of(ProblemKind::Stopping, "this worker is stopping").retry_after(RETRY_MS));
        }
        let principal = self.identify(request)?;
        let expected = self.shared.options.cluster;
        if let Some(asked) = request.headers().get(CLUSTER_KEY)
            && asked.as_bytes() != expected.to_string().as_bytes()
        {
            let asked = asked.to_str().unwrap_or("(not text)");
            let text = format!("this worker is of cluster {expected}, not of {asked}");
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

/// Admits, counts and guards calls.
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
        let begun = Instant::now();
        let metrics = self.edge.shared.metrics.calls.clone();
        let method = metrics.method(request.uri().path());
        let refuse = |status: Status| {
            metrics.count(method, status.code(), begun.elapsed());
            let response = status.into_http();
            async move { Ok(response) }.boxed()
        };
        let room = || self.edge.shared.admission.room(metrics.name(method));
        if let Err(problem) = self.edge.admit(&mut request).and_then(|()| room()) {
            return refuse(problem.into_status());
        }
        let Ok(permit) = Arc::clone(&self.edge.calls).try_acquire_owned() else {
            let text = format!("more than {CALLS} calls are under way");
            return refuse(Problem::of(ProblemKind::Overloaded, text).retry_after(RETRY_MS).into_status());
        };
        let parent = request.headers().get(TRACE_KEY).and_then(|value| value.to_str().ok()?.parse::<Context>().ok());
        let context = parent.map_or_else(Context::new, Context::child);
        // The clone that was asked whether it is ready is the one to call.
        let ready = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, ready);
        async move {
            let _permit = permit;
            let call =
                AssertUnwindSafe(trace::within(context, async move { inner.call(request).await })).catch_unwind();
            let response = match call.await {
                Ok(response) => response?,
                Err(_) => {
                    metrics.panicked();
                    tracing::error!(method = metrics.name(method), trace = %context, "a call panicked");
                    Status::internal("the worker failed in this call; it goes on serving").into_http()
                }
            };
            metrics.count(method, code(&response), begun.elapsed());
            Ok(response)
        }
        .boxed()
    }
}

/// The code of a response: where it is an error, its head says so.
fn code(response: &Response<Body>) -> Code {
    response.headers().get("grpc-status").map_or(Code::Ok, |value| Code::from_bytes(value.as_bytes()))
}
