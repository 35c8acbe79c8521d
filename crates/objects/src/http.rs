//! The way of a request: hyper, as everywhere in Engram, with limits on how long anything may take.

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

/// How long a storage may take to accept a connection.
const CONNECT: Duration = Duration::from_secs(5);
/// How long it may take until it begins to answer: a part of 8 MiB goes up at 280 kB/s in that time.
const ANSWER: Duration = Duration::from_secs(30);
/// Connections without work are closed after this.
const IDLE: Duration = Duration::from_secs(30);

/// Makes clients that know no proxy and follow no redirect.
#[derive(Debug)]
pub(crate) struct Connector {
    /// Over `http://`: nobody's certificate is looked at, and so no roots are needed, which small images lack.
    pub(crate) in_clear: bool,
}

impl HttpConnector for Connector {
    fn connect(&self, _options: &ClientOptions) -> object_store::Result<HttpClient> {
        let mut tcp = Tcp::new();
        tcp.enforce_http(false);
        tcp.set_connect_timeout(Some(CONNECT));
        tcp.set_nodelay(true);
        let clients = || Client::builder(TokioExecutor::new()).pool_idle_timeout(IDLE).clone();
        if self.in_clear {
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
        let answer = tokio::time::timeout(ANSWER, self.0.request(request)).await;
        let answer = answer.map_err(|late| HttpError::new(HttpErrorKind::Timeout, late))?;
        let (parts, body) = answer.map_err(|error| HttpError::new(kind(&error), error))?.into_parts();
        let body = body.map_err(|error| HttpError::new(HttpErrorKind::Interrupted, error));
        Ok(HttpResponse::from_parts(parts, HttpResponseBody::new(body)))
    }
}

/// Whether the same request may be sent again.
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
