//! Authorization of coordinator calls by client certificate; read-only calls also by bearer token.
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

use crate::service::{Service, Views, first_heartbeat};
use engram_identity::token::TokenRejection;
use engram_identity::{Caller, Keys, Reason, Role};
use engram_proto::v1;
use engram_proto::v1::coordinator_service_server::CoordinatorService;
use std::sync::Arc;
use tonic::{Extensions, Request, Response, Status, Streaming};

/// Prefix of the authorization metadata of a call with a token.
const BEARER: &str = "Bearer ";

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

const ADMINISTRATORS: &[Role] = &[Role::Coordinator, Role::Client];

/// A service that checks certificates first.
#[derive(Clone)]
pub(crate) struct AuthorizedService {
    pub(crate) service: Service,
    /// `None` if the cluster has no certificates.
    pub(crate) keys: Option<Arc<Keys>>,
    /// `None` if no tokens are accepted.
    pub(crate) authorizer: Option<Arc<dyn TokenAuthorizer>>,
}

impl AuthorizedService {
    /// Returns the caller, if it belongs to this cluster.
    fn caller(&self, extensions: &Extensions) -> Result<Caller, Status> {
        let caller = Caller::of(extensions);
        let (reason, message) = match (&self.keys, &caller) {
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

    /// Serves a stream whose first heartbeat was read.
    pub(crate) fn heartbeats(
        &self,
        extensions: &Extensions,
        first: &v1::HeartbeatRequest,
        heartbeats: Streaming<v1::HeartbeatRequest>,
    ) -> Result<Response<Views>, Status> {
        let caller = self.caller(extensions)?;
        let sender = first.hello.as_ref().and_then(|hello| ordinal(hello.member.as_ref()));
        self.check_sender(&caller, sender)?;
        self.service.heartbeats(first, heartbeats)
    }

    fn count(&self, reason: Reason) {
        if let Some(keys) = &self.keys {
            keys.refusals().count(reason);
        }
    }

    /// Checks the caller's token.
    fn check_token<T>(
        &self,
        request: &Request<T>,
        accounts: &dyn TokenAuthorizer,
        query: QueryKind,
    ) -> Result<(), Status> {
        let token = request.metadata().get("authorization").and_then(|value| value.to_str().ok()?.strip_prefix(BEARER));
        let admitted = match token {
            Some(token) => accounts.authorize(token.trim(), query),
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

    /// Checks that the caller may give orders, or at least make `query`.
    fn check_admin<T>(&self, request: &Request<T>, query: Option<QueryKind>) -> Result<(), Status> {
        if let (Some(accounts), Some(query), Some(_)) = (&self.authorizer, query, &self.keys)
            && Caller::of(request.extensions()) == Caller::Anonymous
        {
            return self.check_token(request, accounts.as_ref(), query);
        }
        let caller = self.caller(request.extensions())?;
        if caller.is_any(ADMINISTRATORS) {
            return Ok(());
        }
        self.count(Reason::Role);
        let role = caller.name().map_or_else(|| caller.to_string(), |name| format!("a {}", name.role));
        Err(Status::permission_denied(format!("this call is not for {role}")))
    }

    fn check_sender(&self, caller: &Caller, sender: Option<u32>) -> Result<(), Status> {
        // A message without a sender is rejected by the service.
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

fn ordinal(member: Option<&v1::MemberId>) -> Option<u32> {
    member.map(|member| member.ordinal)
}

#[tonic::async_trait]
impl CoordinatorService for AuthorizedService {
    type HeartbeatStream = Views;

    async fn heartbeat(&self, request: Request<Streaming<v1::HeartbeatRequest>>) -> Result<Response<Views>, Status> {
        let (_, extensions, mut heartbeats) = request.into_parts();
        let first = first_heartbeat(&mut heartbeats).await?;
        self.heartbeats(&extensions, &first, heartbeats)
    }

    async fn report_death(
        &self,
        request: Request<v1::ReportDeathRequest>,
    ) -> Result<Response<v1::ReportDeathResponse>, Status> {
        let caller = self.caller(request.extensions())?;
        if !caller.is_any(&[Role::Coordinator]) {
            self.check_sender(&caller, Some(request.get_ref().ordinal))?;
        }
        self.service.report_death(request).await
    }

    async fn propose_map_changes(
        &self,
        request: Request<v1::ProposeMapChangesRequest>,
    ) -> Result<Response<v1::ProposeMapChangesResponse>, Status> {
        self.check_sender(&self.caller(request.extensions())?, ordinal(request.get_ref().member.as_ref()))?;
        self.service.propose_map_changes(request).await
    }

    async fn set_goal(&self, request: Request<v1::SetGoalRequest>) -> Result<Response<v1::SetGoalResponse>, Status> {
        self.check_admin(&request, None)?;
        self.service.set_goal(request).await
    }

    async fn get_cluster_status(
        &self,
        request: Request<v1::GetClusterStatusRequest>,
    ) -> Result<Response<v1::ClusterStatus>, Status> {
        self.check_admin(&request, Some(QueryKind::Status))?;
        self.service.get_cluster_status(request).await
    }

    async fn report_map_state(
        &self,
        request: Request<v1::ReportMapStateRequest>,
    ) -> Result<Response<v1::ReportMapStateResponse>, Status> {
        self.check_sender(&self.caller(request.extensions())?, ordinal(request.get_ref().member.as_ref()))?;
        self.service.report_map_state(request).await
    }

    async fn rebuild_map(
        &self,
        request: Request<v1::RebuildMapRequest>,
    ) -> Result<Response<v1::RebuildMapResponse>, Status> {
        let order = request.get_ref();
        let query = (!order.write && order.accept_data_loss.trim().is_empty()).then_some(QueryKind::OrderPreview);
        self.check_admin(&request, query)?;
        self.service.rebuild_map(request).await
    }

    async fn force_promote(
        &self,
        request: Request<v1::ForcePromoteRequest>,
    ) -> Result<Response<v1::ForcePromoteResponse>, Status> {
        let query = request.get_ref().accept_data_loss.trim().is_empty().then_some(QueryKind::OrderPreview);
        self.check_admin(&request, query)?;
        self.service.force_promote(request).await
    }
}
