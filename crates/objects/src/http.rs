//! HTTP transport for the object store client: hyper with timeouts.

use async_trait::async_trait;
use http_body_util::BodyExt as _;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::{Connect, HttpConnector as Tcp};
use hyper_util::rt::TokioExecutor;
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody, HttpResponse, HttpResponseBody,
    HttpService,
};
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
}

impl HttpConnector for Connector {
    fn connect(&self, _options: &ClientOptions) -> object_store::Result<HttpClient> {
        let mut tcp = Tcp::new();
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
