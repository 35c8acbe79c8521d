//! Beats to the coordinators and to partners, from a thread of its own: a busy service must not look like a dead worker.
//!
//! A beat carries progress, not presence; the map and the members come back on the same stream, at once and at every change.

use crate::peers;
use crate::roster;
use crate::shared::Shared;
use crate::trouble;
use engram_identity::Keys;
use engram_proto::v1::coordinator_service_client::CoordinatorServiceClient;
use engram_proto::v1::{Beat, Certified, Hello};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Endpoint;

/// Between beats: a sixth of the silence after which a worker is suspected.
const BEAT: Duration = Duration::from_millis(200);
/// Between attempts to reach a coordinator: at first, and at most.
const RECONNECT: Duration = Duration::from_millis(100);
const RECONNECT_MOST: Duration = Duration::from_secs(2);
/// How long a connection may take to come up.
const CONNECT_DEADLINE: Duration = Duration::from_secs(2);
/// A connection without an answer to a ping is given up after these: a coordinator that hangs must be missed soon, since this
/// worker acts by itself when there is none.
const KEEPALIVE: Duration = Duration::from_millis(500);
const KEEPALIVE_DEADLINE: Duration = Duration::from_secs(1);

/// Work that waits is told when nothing has moved for so long: a read of many millions of memories takes its time, and a disk may be
/// slow without being dead.
const STILL: Duration = Duration::from_secs(3);

/// Starts the thread; it ends when the worker stops.
pub(crate) fn start(shared: Arc<Shared>) -> std::io::Result<JoinHandle<()>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    std::thread::Builder::new().name("engram-heartbeat".into()).spawn(move || {
        runtime.block_on(run(shared));
    })
}

/// Beats until the worker stops.
pub(crate) async fn run(shared: Arc<Shared>) {
    let mut stopping = shared.stopping.subscribe();
    tokio::select! {
        () = beat_all(&shared) => {}
        () = roster::follow(Arc::clone(&shared)) => {}
        () = peers::beat_partners(Arc::clone(&shared)) => {}
        () = turn(&shared) => {}
        // An error means that the worker is gone, which ends this as well.
        _ = stopping.wait_for(|stopping| *stopping) => {}
    }
}

/// Leaves a trace of this thread's turns: whether beats are heard is not its fault, whether they are sent is.
async fn turn(shared: &Shared) {
    loop {
        shared.turned_ms.store(shared.elapsed_ms(), Ordering::Relaxed);
        tokio::time::sleep(BEAT).await;
    }
}

/// Beats to all coordinators, whoever they are by now.
async fn beat_all(shared: &Arc<Shared>) {
    let mut roster = shared.roster.subscribe();
    let (mut beating, mut to) = (JoinSet::new(), BTreeSet::new());
    loop {
        for address in roster.borrow_and_update().iter().filter(|address| to.insert(String::clone(address))) {
            beating.spawn(beat(Arc::clone(shared), address.clone()));
        }
        tokio::select! {
            changed = roster.changed() => if changed.is_err() { return },
            Some(ended) = beating.join_next() => match ended {
                Ok(address) => drop(to.remove(&address)),
                // A worker that does not beat is dead to the others, and shall be.
                Err(error) => if error.is_panic() { std::panic::resume_unwind(error.into_panic()) },
            },
        }
    }
}

/// Keeps a stream to one coordinator, and returns its address when it is a coordinator no more.
async fn beat(shared: Arc<Shared>, address: String) -> String {
    let mut wait = RECONNECT;
    while shared.roster.now().contains(&address) {
        let ended = stream(&shared, &address).await;
        shared.hand_over(&address, &[]);
        match ended {
            Ok(()) => wait = RECONNECT,
            Err(reason) => {
                tracing::debug!(coordinator = address, reason, "no heartbeat stream");
                wait = (wait * 2).min(RECONNECT_MOST);
            }
        }
        // Jitter, so that workers do not come back to a restarted coordinator in one moment.
        tokio::time::sleep(wait.mul_f64(rand::random_range(0.5..1.0))).await;
    }
    address
}

/// One stream, until it breaks; `Ok` when anything was heard on it.
async fn stream(shared: &Shared, address: &str) -> Result<(), String> {
    let endpoint = Endpoint::from_shared(format!("http://{address}")).map_err(|error| error.to_string())?;
    let endpoint = endpoint
        .connect_timeout(CONNECT_DEADLINE)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(KEEPALIVE)
        .keep_alive_timeout(KEEPALIVE_DEADLINE);
    let channel = shared.to_coordinators().connect(endpoint).await.map_err(|error| error.to_string())?;
    let mut client =
        CoordinatorServiceClient::new(channel).max_decoding_message_size(engram_proto::MAX_PEER_MESSAGE_BYTES);
    // One beat may wait: a newer one says more.
    let (beats, outgoing) = mpsc::channel(1);
    let mut progress = Progress::new();
    let hello = Hello { seen_version: shared.seen_version(), ..shared.greeter.hello() };
    beats.try_send(Beat { hello: Some(hello), ..progress.beat(shared) }).map_err(|error| error.to_string())?;
    let replies =
        client.heartbeat(ReceiverStream::new(outgoing)).await.map_err(|status| status.message().to_owned())?;
    let mut replies = replies.into_inner();
    let mut ticks = tokio::time::interval(BEAT);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut heard = false;
    let _heard = shared.coordinators.heard();
    loop {
        tokio::select! {
            _ = ticks.tick() => {
                if let Err(mpsc::error::TrySendError::Closed(_)) = beats.try_send(progress.beat(shared)) {
                    return Ok(());
                }
            }
            reply = replies.message() => match reply {
                Ok(Some(reply)) => {
                    heard = true;
                    shared.hear(address, reply);
                }
                Ok(None) if heard => return Ok(()),
                Ok(None) => return Err("the stream ended".into()),
                Err(_) if heard => return Ok(()),
                Err(status) => return Err(status.message().to_owned()),
            },
        }
    }
}

/// Whom this process believes, and who signed for it.
fn certified(keys: &Keys) -> Certified {
    Certified { believed: keys.believed().iter().map(|root| root.0).collect(), root: keys.root().0 }
}

/// Whether the store gets on with its work: a process that beats while its disk or its engine hangs serves nobody.
struct Progress {
    /// Rises whenever something moved, or nothing waits.
    turns: u64,
    moved: Instant,
    /// Log writes seen finished.
    writes: u64,
    /// Answers of the engine: those asked for, each with a beat, those that came, and those seen with the last beat.
    asked: u64,
    answered: Arc<AtomicU64>,
    seen: u64,
}

impl Progress {
    fn new() -> Self {
        Self { turns: 0, moved: Instant::now(), writes: 0, asked: 0, answered: Arc::default(), seen: 0 }
    }

    fn beat(&mut self, shared: &Shared) -> Beat {
        let stats = shared.engine.stats();
        let answered = self.answered.load(Ordering::Acquire);
        let log_waits = stats.waiting_records > 0 && stats.write_us.count == self.writes;
        let engine_waits = self.asked > answered && self.seen == answered;
        (self.writes, self.seen) = (stats.write_us.count, answered);
        if !log_waits && !engine_waits {
            self.turns += 1;
            self.moved = Instant::now();
        }
        if self.asked == answered && shared.engine.ping(Arc::clone(&self.answered)) {
            self.asked += 1;
        }
        Beat {
            hello: None,
            map_version: shared.view.borrow().version(),
            applied_records: stats.applied_records,
            loop_lag_ms: shared.loop_lag_ms.load(Ordering::Relaxed),
            memories: stats.memories,
            ready: shared.is_ready(),
            suspects: shared.witness().suspects(),
            queued: self.moved.elapsed() >= STILL,
            turns: self.turns,
            leaving: shared.is_leaving(),
            unled: stats.unled.iter().map(|partition| partition.0).collect(),
            bootstrap: shared.bootstrap.told(),
            certified: shared.keys.as_deref().map(certified),
            gpu_trouble: trouble::of_gpu(shared.options.spec.gpu.mode, shared.device.without(), stats.gpu.as_ref()),
        }
    }
}
