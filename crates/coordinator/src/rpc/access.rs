//! Authorization of coordinator calls by client certificate; read-only calls also by bearer token.
//!
//! A layer in front of the service notes the [`Credentials`] of each call. Whether they suffice depends on the cluster and the sender that the
//! message names, so the service asks the [`Access`] of that cluster:
//!
//! | call | allowed for |
//! |---|---|
//! | heartbeats, proposals, map state reports | the worker that the message is from |
//! | death reports | that worker's supervisor: the same worker's certificate, or a coordinator's |
//! | orders | coordinators and clients |
//! | status, and previews of orders | the same, or a token with the right ([`QueryKind`]) |
//!
//! In a cluster with certificates, every caller presents one of the same cluster; in a cluster without certificates
//! every caller is allowed.

use engram_identity::token::TokenRejection;
use engram_identity::{Caller, Keys, Reason, Role};
use std::sync::Arc;
use tonic::{Extensions, Request, Status};

/// Prefix of the authorization metadata of a call with a token.
const BEARER: &str = "Bearer ";
const ADMINISTRATORS: &[Role] = &[Role::Coordinator, Role::Client];

/// What a caller with a token and without a certificate may query.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueryKind {
    /// The status of the cluster.
    Status,
    /// What an order would do and lose; the caller writes the map with its own permissions.
    OrderPreview,
}

/// Authorizes bearer tokens in place of a certificate of a cluster.
pub trait TokenAuthorizer: Send + Sync + 'static {
    /// Checks that the bearer of this token may make a query.
    ///
    /// # Errors
    /// The token is invalid, or its account lacks the permission.
    fn authorize(&self, token: &str, asks: QueryKind) -> Result<(), TokenRejection>;
}

/// What a caller presents.
#[derive(Clone)]
pub(super) struct Credentials {
    caller: Caller,
    token: Option<String>,
}

impl Credentials {
    /// Notes the credentials of a call among its extensions: the function of the layer.
    // The signature is that of an interceptor.
    #[expect(clippy::unnecessary_wraps)]
    pub(super) fn note(mut request: Request<()>) -> Result<Request<()>, Status> {
        let token = request.metadata().get("authorization").and_then(|value| value.to_str().ok()?.strip_prefix(BEARER));
        let token = token.map(|token| token.trim().to_owned());
        let caller = Caller::of(request.extensions());
        request.extensions_mut().insert(Self { caller, token });
        Ok(request)
    }

    /// Returns the credentials of a call that has passed the layer.
    pub(super) fn of(extensions: &Extensions) -> Result<&Self, Status> {
        extensions.get().ok_or_else(|| Status::internal("the call has not passed the layer of credentials"))
    }
}

/// What a call needs.
#[derive(Debug, Clone, Copy)]
pub(super) enum Right {
    /// The sender of a message is this worker. A message without a sender is rejected by its handler.
    Sender(Option<u32>),
    /// Reporting the death of a process of this worker.
    DeathReport(u32),
    /// Giving orders.
    Order,
    /// Making a query.
    Query(QueryKind),
}

/// Who may call the coordinator of a cluster.
#[derive(Clone, Default)]
pub(crate) struct Access {
    /// `None` if the cluster has no certificates.
    keys: Option<Arc<Keys>>,
    /// `None` if no tokens are accepted.
    authorizer: Option<Arc<dyn TokenAuthorizer>>,
}

impl Access {
    /// Allows certificates of these keys; any caller if there are none.
    pub(crate) fn new(keys: Option<Arc<Keys>>) -> Self {
        Self { keys, authorizer: None }
    }

    pub(crate) const fn keys(&self) -> Option<&Arc<Keys>> {
        self.keys.as_ref()
    }

    pub(crate) fn set_authorizer(&mut self, accounts: Arc<dyn TokenAuthorizer>) {
        self.authorizer = Some(accounts);
    }

    /// Checks that a call with these credentials may do what needs `right`.
    pub(super) fn check(&self, credentials: &Credentials, right: Right) -> Result<(), Status> {
        match right {
            Right::Sender(sender) => self.check_sender(self.member(credentials)?, sender),
            Right::DeathReport(ordinal) => {
                let caller = self.member(credentials)?;
                if caller.is_any(&[Role::Coordinator]) { Ok(()) } else { self.check_sender(caller, Some(ordinal)) }
            }
            Right::Order => self.check_administrator(credentials),
            Right::Query(query) => match (&self.authorizer, &self.keys) {
                (Some(accounts), Some(_)) if credentials.caller == Caller::Anonymous => {
                    self.check_token(credentials.token.as_deref(), accounts.as_ref(), query)
                }
                _ => self.check_administrator(credentials),
            },
        }
    }

    /// Returns the caller, if it belongs to this cluster.
    fn member<'a>(&self, credentials: &'a Credentials) -> Result<&'a Caller, Status> {
        let caller = &credentials.caller;
        let (reason, message) = match (&self.keys, caller) {
            (None, Caller::Plaintext) => return Ok(caller),
            (Some(keys), Caller::Authenticated(name)) if name.cluster == keys.name().cluster => return Ok(caller),
            (None, _) => {
                return Err(Status::permission_denied("this cluster has no certificates: call it without TLS"));
            }
            (Some(_), Caller::Plaintext) => (Reason::PlainText, "this cluster has certificates: call it over TLS"),
            (Some(_), Caller::Anonymous) => (Reason::NoCertificate, "this call needs a certificate of the cluster"),
            (Some(_), Caller::Authenticated(_)) => (Reason::OtherCluster, "the certificate is of another cluster"),
        };
        self.count(reason);
        Err(Status::permission_denied(message))
    }

    fn count(&self, reason: Reason) {
        if let Some(keys) = &self.keys {
            keys.refusals().count(reason);
        }
    }

    fn check_token(&self, token: Option<&str>, accounts: &dyn TokenAuthorizer, query: QueryKind) -> Result<(), Status> {
        let admitted = match token {
            Some(token) => accounts.authorize(token, query),
            None => {
                let text = "the call has neither a certificate of the cluster nor a ServiceAccount token".into();
                Err(TokenRejection { reason: Reason::NoToken, text })
            }
        };
        admitted.map_err(|TokenRejection { reason, text }| {
            self.count(reason);
            match reason {
                Reason::TokenAccount | Reason::TokenRight => Status::permission_denied(text),
                _ => Status::unauthenticated(text),
            }
        })
    }

    fn check_administrator(&self, credentials: &Credentials) -> Result<(), Status> {
        let caller = self.member(credentials)?;
        if caller.is_any(ADMINISTRATORS) {
            return Ok(());
        }
        self.count(Reason::Role);
        let role = caller.name().map_or_else(|| caller.to_string(), |name| format!("a {}", name.role));
        Err(Status::permission_denied(format!("this call is not for {role}")))
    }

    fn check_sender(&self, caller: &Caller, sender: Option<u32>) -> Result<(), Status> {
        let Some(sender) = sender else { return Ok(()) };
        if caller.is_worker(sender) {
            return Ok(());
        }
        self.count(Reason::Sender);
        Err(Status::permission_denied(format!(
            "the message is from worker {sender}, but the certificate is of {caller}"
        )))
    }
}
