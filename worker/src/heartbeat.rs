//! Beats to the coordinators, from a thread of its own: a busy service must not look like a dead worker.
//!
//! A beat carries progress, not presence; the map and the members come back on the same stream, at once and at every change.

use crate::shared::Shared;
use engram_coordinator::wire;
use engram_proto::answers::identity;
use engram_proto::v1::coordinator_service_client::CoordinatorServiceClient;
use engram_proto::v1::{Beat, Hello};
use futures::future::join_all;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Endpoint;

/// Between beats: a sixth of the silence after which a worker is suspected.
const BEAT: Duration = Duration::from_millis(200);
/// Between attempts to reach a coordinator: at first, and at most.
const RECONNECT: Duration = Duration::from_millis(100);
const RECONNECT_MOST: Duration = Duration::from_secs(2);
/// How long a connection may take to come up.
const CONNECT_DEADLINE: Duration = Duration::from_secs(2);
/// Version of the protocol between members that this build speaks.
const PROTOCOL: u32 = 1;

/// Where others find this worker.
#[derive(Debug, Clone)]
pub(crate) struct Reachable {
    pub(crate) client: String,
    pub(crate) peer: String,
    pub(crate) http: String,
}

/// Starts the thread; it ends when the worker stops.
pub(crate) fn start(shared: Arc<Shared>, reachable: Reachable) -> std::io::Result<JoinHandle<()>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    std::thread::Builder::new().name("engram-heartbeat".into()).spawn(move || {
        runtime.block_on(async {
            let mut stopping = shared.stopping.subscribe();
            let beats = shared.options.coordinators.iter().map(|address| beat(&shared, address, &reachable));
            tokio::select! {
                _ = join_all(beats) => {}
                // An error means that the worker is gone, which ends this as well.
                _ = stopping.wait_for(|stopping| *stopping) => {}
            }
        });
    })
}

/// Keeps a stream to one coordinator.
async fn beat(shared: &Shared, address: &str, reachable: &Reachable) {
    let mut wait = RECONNECT;
    loop {
        match stream(shared, address, reachable).await {
            Ok(()) => wait = RECONNECT,
            Err(reason) => {
                tracing::debug!(coordinator = address, reason, "no heartbeat stream");
                wait = (wait * 2).min(RECONNECT_MOST);
            }
        }
        // Jitter, so that workers do not come back to a restarted coordinator in one moment.
        tokio::time::sleep(wait.mul_f64(rand::random_range(0.5..1.0))).await;
    }
}

/// One stream, until it breaks; `Ok` when anything was heard on it.
async fn stream(shared: &Shared, address: &str, reachable: &Reachable) -> Result<(), String> {
    let endpoint = Endpoint::from_shared(format!("http://{address}")).map_err(|error| error.to_string())?;
    let channel = endpoint
        .connect_timeout(CONNECT_DEADLINE)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(Duration::from_secs(2))
        .keep_alive_timeout(Duration::from_secs(2))
        .connect()
        .await
        .map_err(|error| error.to_string())?;
    let mut client =
        CoordinatorServiceClient::new(channel).max_decoding_message_size(engram_proto::MAX_PEER_MESSAGE_BYTES);
    // One beat may wait: a newer one says more.
    let (beats, outgoing) = mpsc::channel(1);
    let hello = Hello {
        cluster: identity(shared.options.cluster.0),
        member: Some(wire::member_id_to_proto(&shared.member)),
        protocol_min: PROTOCOL,
        protocol_max: PROTOCOL,
        client_address: reachable.client.clone(),
        peer_address: reachable.peer.clone(),
        http_address: reachable.http.clone(),
    };
    beats.try_send(Beat { hello: Some(hello), ..progress(shared) }).map_err(|error| error.to_string())?;
    let replies =
        client.heartbeat(ReceiverStream::new(outgoing)).await.map_err(|status| status.message().to_owned())?;
    let mut replies = replies.into_inner();
    let mut ticks = tokio::time::interval(BEAT);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut heard = false;
    loop {
        tokio::select! {
            _ = ticks.tick() => {
                if let Err(mpsc::error::TrySendError::Closed(_)) = beats.try_send(progress(shared)) {
                    return Ok(());
                }
            }
            reply = replies.message() => match reply {
                Ok(Some(reply)) => {
                    heard = true;
                    shared.hear(&reply);
                }
                Ok(None) if heard => return Ok(()),
                Ok(None) => return Err("the stream ended".into()),
                Err(_) if heard => return Ok(()),
                Err(status) => return Err(status.message().to_owned()),
            },
        }
    }
}

fn progress(shared: &Shared) -> Beat {
    let stats = shared.engine.stats();
    Beat {
        hello: None,
        map_version: shared.view.borrow().version(),
        applied_records: stats.applied_records,
        loop_lag_ms: shared.loop_lag_ms.load(Ordering::Relaxed),
        memories: stats.memories,
        ready: shared.is_ready(),
    }
}
