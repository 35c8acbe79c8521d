//! Connection to the worker of this container over its socket, which only its user can access, without a certificate.

use engram_proto::v1::admin_service_client::AdminServiceClient;
use hyper_util::rt::TokioIo;
use std::path::Path;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Error};
use tower::service_fn;

/// Name of the socket in the state directory.
pub(super) const NAME: &str = "admin.sock";

/// Connects to the worker behind `socket`.
///
/// # Errors
/// No worker listens there.
pub(super) async fn connect(socket: &Path) -> Result<AdminServiceClient<Channel>, Error> {
    let path = socket.to_owned();
    let connect = service_fn(move |_| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    // A socket ignores the host name.
    let channel = Endpoint::from_static("http://worker").connect_with_connector(connect).await?;
    Ok(AdminServiceClient::new(channel).max_decoding_message_size(engram_proto::MAX_PEER_MESSAGE_BYTES))
}
