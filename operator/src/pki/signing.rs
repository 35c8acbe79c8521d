//! The certificate service: authenticates pods by token, and signs requests that [`crate::pki::certificate_approval`] approves.

use std::sync::Arc;

use engram_identity::token::Claims;
use engram_identity::{Caller, SigningRequest};
use engram_proto::v1::certificate_service_server::{CertificateService, CertificateServiceServer};
use engram_proto::v1::{SignRequest, SignResponse};
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec};
use kube::Api;
use kube::api::{ListParams, PostParams};
use tokio::sync::Semaphore;
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status};

use crate::context::Context;
use crate::kube::api_request::{RequestError, request};
use crate::kube::resource_kinds::POD;
use crate::names::{CSR_AUDIENCE, Names};
use crate::pki::certificate_approval::{CertificateCluster, Refusal, approve, claims_of_review};
use crate::pki::certificates::CaError;

/// Maximum number of concurrent requests; further ones fail and are retried. Bounds the TokenReviews that unauthenticated callers can cause.
const MAX_CONCURRENT_REQUESTS: usize = 8;

/// The service.
pub(crate) struct Signing {
    context: Arc<Context>,
    /// Whether the operator may create TokenReviews, a cluster-scoped permission. Otherwise it verifies tokens locally.
    reviews_tokens: bool,
    turns: Semaphore,
}

impl Signing {
    pub(crate) fn server(context: Arc<Context>, reviews_tokens: bool) -> CertificateServiceServer<Self> {
        CertificateServiceServer::new(Self { context, reviews_tokens, turns: Semaphore::new(MAX_CONCURRENT_REQUESTS) })
    }

    async fn claims(&self, token: &str) -> Result<Result<Claims, Refusal>, CaError> {
        if !self.reviews_tokens {
            let Some(verified) = self.context.issuers.verify(token, CSR_AUDIENCE) else {
                return Err(CaError::Unavailable("the keys of the token issuer are not read yet".into()));
            };
            return Ok(verified.map_err(|refused| Refusal::Token(refused.text)));
        }
        let audiences = Some(vec![CSR_AUDIENCE.to_owned()]);
        let spec = TokenReviewSpec { audiences, token: Some(token.to_owned()) };
        let review = TokenReview { spec, ..TokenReview::default() };
        let api: Api<TokenReview> = Api::all(self.context.client.clone());
        let answer = request(|| "create a TokenReview".to_owned(), api.create(&PostParams::default(), &review)).await?;
        Ok(claims_of_review(&answer.status.unwrap_or_default()))
    }

    /// Returns the UID of the current pod of this name.
    async fn pod(&self, namespace: &str, name: &str) -> Result<Option<String>, RequestError> {
        let api = POD.of(&self.context.client, namespace);
        let named = ListParams::default().fields(&format!("metadata.name={name}"));
        let found = request(|| format!("read Pod {name}"), api.list(&named)).await?;
        Ok(found.items.into_iter().next().and_then(|pod| pod.metadata.uid))
    }

    async fn answer(&self, request: &SigningRequest, token: &str) -> Result<String, Status> {
        let name = request.name().map_err(|error| Status::invalid_argument(error.to_string()))?;
        let Some((key, lifetime)) = self.context.coordinators.cluster_of_issuer(name.cluster) else {
            // The pod may start before this operator coordinates its cluster: it retries.
            return Err(Status::unavailable(format!(
                "this operator does not sign certificates of cluster {}",
                name.cluster
            )));
        };
        let failed = |error: CaError| {
            tracing::warn!(cluster = %key, worker = name.ordinal, %error, "failed to sign a certificate");
            Status::unavailable(error.to_string())
        };
        let cluster = CertificateCluster { namespace: key.namespace.clone(), name: key.name.clone(), id: name.cluster };
        let names = Names { cluster: key.name.clone() };
        let decided = match self.claims(token).await.map_err(failed)? {
            Err(refusal) => Err(refusal),
            Ok(claims) => {
                let pod = self
                    .pod(&key.namespace, &names.pod(name.ordinal.unwrap_or_default()))
                    .await
                    .map_err(|error| failed(error.into()))?;
                approve(&name, &claims, &cluster, pod.as_deref())
            }
        };
        if let Err(refusal) = decided {
            self.context.metrics.count_certificate_request(refusal.label());
            tracing::warn!(cluster = %key, worker = name.ordinal, %refusal, "denied a certificate request");
            return Err(Status::permission_denied(refusal.to_string()));
        }
        let lifetime = self.context.certificates.lifetime(lifetime);
        let certificate = self.context.certificates.sign(request, &name, lifetime).await.map_err(failed)?;
        self.context.metrics.count_certificate_request("signed");
        tracing::info!(cluster = %key, worker = name.ordinal, valid_s = lifetime.as_secs(), "signed a certificate");
        Ok(certificate)
    }
}

#[tonic::async_trait]
impl CertificateService for Signing {
    async fn sign(&self, request: Request<SignRequest>) -> Result<Response<SignResponse>, Status> {
        if Caller::of(request.extensions()) == Caller::Plaintext {
            return Err(Status::permission_denied("tokens must not be sent in plaintext: use TLS"));
        }
        let token = bearer(request.metadata()).ok_or_else(|| {
            Status::unauthenticated("missing bearer token; required: a token with the audience engram-csr")
        })?;
        let name = SigningRequest::parse(&request.get_ref().request);
        let name = name.map_err(|error| Status::invalid_argument(format!("request: {error}")))?;
        let Ok(_turn) = self.turns.try_acquire() else {
            return Err(Status::unavailable("too many concurrent certificate requests; retry"));
        };
        Ok(Response::new(SignResponse { certificate: self.answer(&name, token).await? }))
    }
}

fn bearer(metadata: &MetadataMap) -> Option<&str> {
    metadata.get("authorization")?.to_str().ok()?.strip_prefix("Bearer ")
}
