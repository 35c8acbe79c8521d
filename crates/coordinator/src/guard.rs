//! Who may ask what of a coordinator, by the certificate of whoever asks; what changes nothing, by a token as well.
//!
//! | call | whose |
//! |---|---|
//! | beats, proposals, testimony | the worker that the message is of |
//! | reports of deaths | that worker's supervisor: the same worker's, or a coordinator's |
//! | orders | a coordinator's, or a person's |
//! | status, and what an order would do | the same, or whose token gives the right ([`Asks`]) |
//!
//! Before that: of a cluster with certificates whoever asks shows one of the same cluster; of one without them nobody can, and everybody may.

use crate::service::{Service, Views, first_beat};
use engram_identity::token::Refused;
use engram_identity::{Caller, Keys, Reason, Role};
use engram_proto::v1;
use engram_proto::v1::coordinator_service_server::CoordinatorService;
use std::sync::Arc;
use tonic::{Extensions, Request, Response, Status, Streaming};

/// How the metadata of a call with a token begins.
const BEARER: &str = "Bearer ";

/// What somebody may ask who has a token and no certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asks {
    /// How the cluster stands.
    Status,
    /// What an order would do and lose; whoever gives it writes it, by rights of their own.
    Judgement,
}

/// Whose tokens are taken instead of a certificate of a cluster.
pub trait Accounts: Send + Sync + 'static {
    /// Checks that whoever carries this token may ask that.
    ///
    /// # Errors
    /// The token is not good, or its account lacks the right.
    fn admit(&self, token: &str, asks: Asks) -> Result<(), Refused>;
}

const ADMINISTRATORS: &[Role] = &[Role::Coordinator, Role::Client];

/// A service that looks at certificates first.
#[derive(Clone)]
pub(crate) struct Guarded {
    pub(crate) service: Service,
    /// Absent where the cluster has no certificates.
    pub(crate) keys: Option<Arc<Keys>>,
    /// Absent where nobody's tokens are taken.
    pub(crate) accounts: Option<Arc<dyn Accounts>>,
}

impl Guarded {
    /// Who asks, if it is somebody of this cluster.
    fn caller(&self, extensions: &Extensions) -> Result<Caller, Status> {
        let caller = Caller::of(extensions);
        let (reason, told) = match (&self.keys, &caller) {
            (None, Caller::Clear) => return Ok(caller),
            (Some(keys), Caller::Known(name)) if name.cluster == keys.name().cluster => return Ok(caller),
            (None, _) => {
                return Err(Status::permission_denied("this cluster has no certificates: call it without TLS"));
            }
            (Some(_), Caller::Clear) => (Reason::PlainText, "this cluster has certificates: call it over TLS"),
            (Some(_), Caller::Anonymous) => (Reason::NoCertificate, "this call needs a certificate of the cluster"),
            (Some(_), Caller::Known(_)) => (Reason::OtherCluster, "the certificate is of another cluster"),
        };
        self.count(reason);
        Err(Status::permission_denied(told))
    }

    /// Answers a stream whose first beat was read.
    pub(crate) fn beats(
        &self,
        extensions: &Extensions,
        first: &v1::Beat,
        beats: Streaming<v1::Beat>,
    ) -> Result<Response<Views>, Status> {
        let caller = self.caller(extensions)?;
        let says = first.hello.as_ref().and_then(|hello| ordinal(hello.member.as_ref()));
        self.sends(&caller, says)?;
        self.service.beats(first, beats)
    }

    fn count(&self, reason: Reason) {
        if let Some(keys) = &self.keys {
            keys.refusals().count(reason);
        }
    }

    /// Whether whoever asks may, by what they carry instead of a certificate.
    fn carries<T>(&self, request: &Request<T>, accounts: &dyn Accounts, asks: Asks) -> Result<(), Status> {
        let carried =
            request.metadata().get("authorization").and_then(|value| value.to_str().ok()?.strip_prefix(BEARER));
        let admitted = match carried {
            Some(token) => accounts.admit(token.trim(), asks),
            None => {
                let text =
                    "this call carries neither a certificate of the cluster nor a token of a ServiceAccount".into();
                Err(Refused { reason: Reason::NoToken, text })
            }
        };
        admitted.map_err(|Refused { reason, text }| {
            self.count(reason);
            match reason {
                Reason::TokenAccount | Reason::TokenRight => Status::permission_denied(text),
                _ => Status::unauthenticated(text),
            }
        })
    }

    /// Whether whoever asks may order things, or at least ask `asks`.
    fn administrates<T>(&self, request: &Request<T>, asks: Option<Asks>) -> Result<(), Status> {
        if let (Some(accounts), Some(asks), Some(_)) = (&self.accounts, asks, &self.keys)
            && Caller::of(request.extensions()) == Caller::Anonymous
        {
            return self.carries(request, accounts.as_ref(), asks);
        }
        let caller = self.caller(request.extensions())?;
        if caller.is_any(ADMINISTRATORS) {
            return Ok(());
        }
        self.count(Reason::Role);
        let role = caller.name().map_or_else(|| caller.to_string(), |name| format!("a {}", name.role));
        Err(Status::permission_denied(format!("this call is not for {role}")))
    }

    fn sends(&self, caller: &Caller, says: Option<u32>) -> Result<(), Status> {
        // A message without a sender is refused for that, by whoever reads it.
        let Some(says) = says else { return Ok(()) };
        if caller.is_worker(says) {
            return Ok(());
        }
        self.count(Reason::Sender);
        Err(Status::permission_denied(format!("the message is of worker {says}, the certificate of {caller}")))
    }
}

fn ordinal(member: Option<&v1::MemberId>) -> Option<u32> {
    member.map(|member| member.ordinal)
}

#[tonic::async_trait]
impl CoordinatorService for Guarded {
    type HeartbeatStream = Views;

    async fn heartbeat(&self, request: Request<Streaming<v1::Beat>>) -> Result<Response<Views>, Status> {
        let (_, extensions, mut beats) = request.into_parts();
        let first = first_beat(&mut beats).await?;
        self.beats(&extensions, &first, beats)
    }

    async fn report_death(&self, request: Request<v1::DeathReport>) -> Result<Response<v1::DeathReply>, Status> {
        let caller = self.caller(request.extensions())?;
        if !caller.is_any(&[Role::Coordinator]) {
            self.sends(&caller, Some(request.get_ref().ordinal))?;
        }
        self.service.report_death(request).await
    }

    async fn propose_map(
        &self,
        request: Request<v1::ProposeMapRequest>,
    ) -> Result<Response<v1::ProposeMapReply>, Status> {
        self.sends(&self.caller(request.extensions())?, ordinal(request.get_ref().member.as_ref()))?;
        self.service.propose_map(request).await
    }

    async fn set_goal(&self, request: Request<v1::SetGoalRequest>) -> Result<Response<v1::SetGoalReply>, Status> {
        self.administrates(&request, None)?;
        self.service.set_goal(request).await
    }

    async fn get_cluster_status(
        &self,
        request: Request<v1::ClusterStatusRequest>,
    ) -> Result<Response<v1::ClusterStatus>, Status> {
        self.administrates(&request, Some(Asks::Status))?;
        self.service.get_cluster_status(request).await
    }

    async fn testify(&self, request: Request<v1::Testimony>) -> Result<Response<v1::TestifyReply>, Status> {
        self.sends(&self.caller(request.extensions())?, ordinal(request.get_ref().member.as_ref()))?;
        self.service.testify(request).await
    }

    async fn rebuild_map(
        &self,
        request: Request<v1::RebuildMapRequest>,
    ) -> Result<Response<v1::RebuildMapReply>, Status> {
        let order = request.get_ref();
        let asks = (!order.write && order.accept_data_loss.trim().is_empty()).then_some(Asks::Judgement);
        self.administrates(&request, asks)?;
        self.service.rebuild_map(request).await
    }

    async fn force_promote(
        &self,
        request: Request<v1::ForcePromoteRequest>,
    ) -> Result<Response<v1::ForcePromoteReply>, Status> {
        let asks = request.get_ref().accept_data_loss.trim().is_empty().then_some(Asks::Judgement);
        self.administrates(&request, asks)?;
        self.service.force_promote(request).await
    }
}
