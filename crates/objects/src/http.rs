//! HTTP transport for the object store client: hyper with timeouts.

use crate::endpoint::local_kind;
use async_trait::async_trait;
use futures::future::BoxFuture;
use http_body_util::BodyExt as _;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::dns::{GaiResolver, Name};
use hyper_util::client::legacy::connect::{Connect, HttpConnector as Tcp};
use hyper_util::rt::TokioExecutor;
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody, HttpResponse, HttpResponseBody,
    HttpService,
};
use std::net::SocketAddr;
use std::task::{Context, Poll};
use std::time::Duration;

/// Timeout for connecting.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout until the response begins: an 8 MiB part uploads at 280 kB/s in that time.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);
/// Idle connections are closed after this.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// Creates clients without proxy and redirect support.
#[derive(Debug)]
pub(crate) struct Connector {
    /// Plain `http://`: no TLS roots are loaded, which small images lack.
    pub(crate) plaintext: bool,
    /// Whether host names that resolve to an address of this machine or of its cloud are refused.
    pub(crate) refuse_local: bool,
}

impl HttpConnector for Connector {
    fn connect(&self, _options: &ClientOptions) -> object_store::Result<HttpClient> {
        let mut tcp = Tcp::new_with_resolver(resolver(self.refuse_local));
        tcp.enforce_http(false);
        tcp.set_connect_timeout(Some(CONNECT_TIMEOUT));
        tcp.set_nodelay(true);
        let clients = || Client::builder(TokioExecutor::new()).pool_idle_timeout(IDLE_TIMEOUT).clone();
        if self.plaintext {
            return Ok(HttpClient::new(Service(clients().build(tcp))));
        }
        let builder = hyper_rustls::HttpsConnectorBuilder::new().with_native_roots();
        let builder =
            builder.map_err(|source| object_store::Error::Generic { store: "S3", source: Box::new(source) })?;
        let connector = builder.https_or_http().enable_http1().wrap_connector(tcp);
        Ok(HttpClient::new(Service(clients().build(connector))))
    }
}

pub(crate) fn resolver(refuse_local: bool) -> Resolver {
    Resolver { system: GaiResolver::new(), refuse_local }
}

/// Resolves host names; checks every address that is about to be used, so a name that changes its address later is refused, too.
#[derive(Clone)]
pub(crate) struct Resolver {
    system: GaiResolver,
    refuse_local: bool,
}

impl tower::Service<Name> for Resolver {
    type Response = std::vec::IntoIter<SocketAddr>;
    type Error = std::io::Error;
    type Future = BoxFuture<'static, std::io::Result<Self::Response>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        tower::Service::poll_ready(&mut self.system, context)
    }

    fn call(&mut self, name: Name) -> Self::Future {
        let (host, refuse_local) = (name.to_string(), self.refuse_local);
        let addresses = tower::Service::call(&mut self.system, name);
        Box::pin(async move {
            let addresses: Vec<SocketAddr> = addresses.await?.collect();
            let local = addresses.iter().find_map(|address| local_kind(address.ip()));
            match local.filter(|_| refuse_local) {
                Some(kind) => Err(std::io::Error::other(RefusedAddress { host, kind })),
                None => Ok(addresses.into_iter()),
            }
        })
    }
}

/// A host name resolved to an address that is not allowed.
#[derive(Debug, thiserror::Error)]
#[error(
    "{host} resolves to {kind}; allowed: other addresses, and the endpoints in spec.storageEndpoints of the cluster"
)]
struct RefusedAddress {
    host: String,
    kind: &'static str,
}

struct Service<C>(Client<C, HttpRequestBody>);

impl<C> std::fmt::Debug for Service<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Service")
    }
}

#[async_trait]
impl<C: Connect + Clone + Send + Sync + 'static> HttpService for Service<C> {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let response = tokio::time::timeout(RESPONSE_TIMEOUT, self.0.request(request)).await;
        let response = response.map_err(|elapsed| HttpError::new(HttpErrorKind::Timeout, elapsed))?;
        let (parts, body) = response.map_err(|error| HttpError::new(kind(&error), error))?.into_parts();
        let body = body.map_err(|error| HttpError::new(HttpErrorKind::Interrupted, error));
        Ok(HttpResponse::from_parts(parts, HttpResponseBody::new(body)))
    }
}

/// Classifies an error for the retry policy.
fn kind(error: &hyper_util::client::legacy::Error) -> HttpErrorKind {
    if is_refused(error) {
        // Not retried.
        return HttpErrorKind::Unknown;
    }
    if error.is_connect() {
        return HttpErrorKind::Connect;
    }
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        match error.downcast_ref::<hyper::Error>() {
            Some(error) if error.is_timeout() => return HttpErrorKind::Timeout,
            Some(error) if error.is_closed() || error.is_incomplete_message() || error.is_body_write_aborted() => {
                return HttpErrorKind::Request;
            }
            _ => {}
        }
        if error.is::<std::io::Error>() {
            return HttpErrorKind::Interrupted;
        }
        cause = error.source();
    }
    HttpErrorKind::Unknown
}

/// Whether the cause of an error is [`RefusedAddress`].
fn is_refused(error: &hyper_util::client::legacy::Error) -> bool {
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        let io = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
        if error.is::<RefusedAddress>() || io.is_some_and(|inner| inner.is::<RefusedAddress>()) {
            return true;
        }
        cause = error.source();
    }
    false
}
