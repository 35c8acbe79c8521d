//! Answers pods that ask for a certificate: reads their token, looks at the pod, signs or says why not. [`crate::sign`] decides.

use std::sync::Arc;

use engram_identity::token::Claims;
use engram_identity::{Caller, SigningRequest};
use engram_proto::v1::certificate_service_server::{CertificateService, CertificateServiceServer};
use engram_proto::v1::{SignReply, SignRequest};
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec};
use kube::Api;
use kube::api::{ListParams, PostParams};
use tokio::sync::Semaphore;
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status};

use super::Context;
use super::asking::{Error, ask};
use super::kinds::POD;
use crate::names::{CSR_AUDIENCE, Names};
use crate::sign::{Asked, Refusal, decide, reviewed};

/// Requests at a time; who comes then comes again. Anybody who reaches the listener can have the API server asked about a token.
const AT_A_TIME: usize = 8;

/// The service.
pub(super) struct Signing {
    context: Arc<Context>,
    /// Whether the API server may be asked about tokens: that is a right in all namespaces. Who has it not verifies them by itself.
    asks: bool,
    turns: Semaphore,
}

impl Signing {
    pub(super) fn server(context: Arc<Context>, asks: bool) -> CertificateServiceServer<Self> {
        CertificateServiceServer::new(Self { context, asks, turns: Semaphore::new(AT_A_TIME) })
    }

    async fn claims(&self, token: &str) -> Result<Result<Claims, Refusal>, Error> {
        if !self.asks {
            let Some(verified) = self.context.issuers.verify(token, CSR_AUDIENCE) else {
                return Err(Error::Authority("the keys of the API server's tokens are not known yet".into()));
            };
            return Ok(verified.map_err(|refused| Refusal::Token(refused.text)));
        }
        let audiences = Some(vec![CSR_AUDIENCE.to_owned()]);
        let spec = TokenReviewSpec { audiences, token: Some(token.to_owned()) };
        let review = TokenReview { spec, ..TokenReview::default() };
        let api: Api<TokenReview> = Api::all(self.context.client.clone());
        let answer = ask(|| "have a token reviewed".to_owned(), api.create(&PostParams::default(), &review)).await?;
        Ok(reviewed(&answer.status.unwrap_or_default()))
    }

    /// The UID of the pod that has this name now.
    async fn pod(&self, namespace: &str, name: &str) -> Result<Option<String>, Error> {
        let api = POD.of(&self.context.client, namespace);
        let named = ListParams::default().fields(&format!("metadata.name={name}"));
        let found = ask(|| format!("look at Pod {name}"), api.list(&named)).await?;
        Ok(found.items.into_iter().next().and_then(|pod| pod.metadata.uid))
    }

    async fn answer(&self, request: &SigningRequest, token: &str) -> Result<String, Status> {
        let asked = request.name().map_err(|error| Status::invalid_argument(error.to_string()))?;
        let Some((key, lifetime)) = self.context.coordinators.certified(asked.cluster) else {
            // A pod may be faster than the object that announces its cluster: it comes again.
            return Err(Status::unavailable(format!("cluster {} has no certificates here", asked.cluster)));
        };
        let failed = |error: Error| {
            tracing::warn!(cluster = %key, worker = asked.ordinal, %error, "a certificate was not signed");
            Status::unavailable(error.to_string())
        };
        let cluster = Asked { namespace: key.namespace.clone(), name: key.name.clone(), id: asked.cluster };
        let names = Names { cluster: key.name.clone() };
        let decided = match self.claims(token).await.map_err(failed)? {
            Err(refusal) => Err(refusal),
            Ok(claims) => {
                let pod =
                    self.pod(&key.namespace, &names.pod(asked.ordinal.unwrap_or_default())).await.map_err(failed)?;
                decide(&asked, &claims, &cluster, pod.as_deref())
            }
        };
        if let Err(refusal) = decided {
            self.context.metrics.asked(refusal.word());
            tracing::warn!(cluster = %key, worker = asked.ordinal, %refusal, "refused a certificate");
            return Err(Status::permission_denied(refusal.to_string()));
        }
        let lifetime = self.context.certificates.lifetime(lifetime);
        let certificate = self.context.certificates.sign(request, &asked, lifetime).await.map_err(failed)?;
        self.context.metrics.asked("signed");
        tracing::info!(cluster = %key, worker = asked.ordinal, valid_s = lifetime.as_secs(), "signed a certificate");
        Ok(certificate)
    }
}

#[tonic::async_trait]
impl CertificateService for Signing {
    async fn sign(&self, request: Request<SignRequest>) -> Result<Response<SignReply>, Status> {
        if Caller::of(request.extensions()) == Caller::Clear {
            return Err(Status::permission_denied("a token is not sent in clear: call this over TLS"));
        }
        let token = bearer(request.metadata()).ok_or_else(|| {
            Status::unauthenticated("no token; needed: one with the audience engram-csr, as authorization: Bearer")
        })?;
        let asked = SigningRequest::parse(&request.get_ref().request);
        let asked = asked.map_err(|error| Status::invalid_argument(format!("request: {error}")))?;
        let Ok(_turn) = self.turns.try_acquire() else {
            return Err(Status::unavailable("others ask for certificates now; come again"));
        };
        Ok(Response::new(SignReply { certificate: self.answer(&asked, token).await? }))
    }
}

fn bearer(metadata: &MetadataMap) -> Option<&str> {
    metadata.get("authorization")?.to_str().ok()?.strip_prefix("Bearer ")
}
