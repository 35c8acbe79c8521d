//! Connections of a driver to the members of its group: one stream per worker, opened again when it breaks.

use crate::peers;
use crate::shared::Shared;
use engram_memory::Ordinal;
use engram_proto::MAX_PEER_MESSAGE_BYTES;
use engram_proto::v1::training_service_client::TrainingServiceClient;
use engram_proto::v1::{self, training_event::Event, training_order::Order};
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;

/// Interval between attempts to connect: a worker that cannot be reached announces nothing.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// Limit of an attempt, the start of the member included, which may generate its data first.
const OPEN_DEADLINE: Duration = Duration::from_secs(60);
/// Interval of keepalives: a machine that vanished is found by the group itself.
const KEEPALIVE: Duration = Duration::from_secs(2);
/// Queued orders for a member, and events of all members.
const QUEUE: usize = 256;

/// What a connection reports.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "most are events of members, and a box would be an allocation for each")]
pub(crate) enum LinkEvent {
    /// The stream is open.
    Opened,
    Event(Event),
    Closed,
    /// Nothing listens at the address of the worker: its process is dead.
    Refused,
    /// The worker rejected the run.
    Rejected(String),
}

/// Connections to all workers. Dropping it closes them.
pub(crate) struct Links {
    shared: Arc<Shared>,
    start: v1::StartTraining,
    events: mpsc::Sender<(Ordinal, LinkEvent)>,
    /// Set once: connections that end are not opened again.
    is_ending: Arc<AtomicBool>,
    open: BTreeMap<Ordinal, (mpsc::Sender<Order>, AbortHandle)>,
}

impl Links {
    /// Creates it without connections; returns it with the events of all connections.
    pub(crate) fn new(shared: &Arc<Shared>, start: v1::StartTraining) -> (Self, mpsc::Receiver<(Ordinal, LinkEvent)>) {
        let (events, received) = mpsc::channel(QUEUE);
        (Self { shared: Arc::clone(shared), start, events, is_ending: Arc::default(), open: BTreeMap::new() }, received)
    }

    /// Connects to every living worker that the map knows.
    pub(crate) fn extend(&mut self) {
        let workers: Vec<Ordinal> = {
            let view = self.shared.membership.view();
            let alive = view.members.iter().filter(|member| member.alive && !member.leaving);
            alive.map(|member| Ordinal(member.ordinal)).collect()
        };
        for ordinal in workers {
            if !self.open.contains_key(&ordinal) {
                let (orders, received) = mpsc::channel(QUEUE);
                let (shared, start, events) = (Arc::clone(&self.shared), self.start.clone(), self.events.clone());
                let is_ending = Arc::clone(&self.is_ending);
                let task = tokio::spawn(keep_open(shared, ordinal, start, events, received, is_ending)).abort_handle();
                self.open.insert(ordinal, (orders, task));
            }
        }
    }

    /// Returns the number of workers of the cluster, living or not.
    pub(crate) fn cluster_workers(&self) -> usize {
        let known = self.shared.membership.view().members.iter().filter(|member| !member.leaving).count();
        known.max(self.shared.setup.options.spec.workers as usize)
    }

    /// Returns the workers with a connection, open or not.
    pub(crate) fn workers(&self) -> usize {
        self.open.len()
    }

    /// Sends an order. It is lost if the connection is not open: what matters is repeated.
    pub(crate) fn send(&self, to: Ordinal, order: Order) {
        if let Some((orders, _)) = self.open.get(&to) {
            let _ = orders.try_send(order);
        }
    }

    /// Sends an order to all.
    pub(crate) fn send_all(&self, order: &Order) {
        self.open.keys().for_each(|ordinal| self.send(*ordinal, order.clone()));
    }

    /// Ends the members of all workers.
    pub(crate) fn end_members(&self) {
        self.is_ending.store(true, Ordering::Release);
        self.send_all(&Order::Stop(v1::StopTraining { complete: false }));
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        self.open.values().for_each(|(_, task)| task.abort());
    }
}

/// Keeps one connection open.
async fn keep_open(
    shared: Arc<Shared>,
    ordinal: Ordinal,
    start: v1::StartTraining,
    events: mpsc::Sender<(Ordinal, LinkEvent)>,
    mut orders: mpsc::Receiver<Order>,
    is_ending: Arc<AtomicBool>,
) {
    while !is_ending.load(Ordering::Acquire) {
        let outcome = connected(&shared, ordinal, &start, &events, &mut orders).await;
        let report = match outcome {
            Ok(()) => Some(LinkEvent::Closed),
            Err(status) if status.code() == tonic::Code::InvalidArgument => {
                Some(LinkEvent::Rejected(status.message().to_owned()))
            }
            Err(_) => None,
        };
        for event in report.into_iter().chain(is_refused(&shared, ordinal).await.then_some(LinkEvent::Refused)) {
            if events.send((ordinal, event)).await.is_err() {
                return;
            }
        }
        sleep(RETRY_INTERVAL).await;
    }
}

/// Runs one connection until it ends; an error if it could not be opened.
async fn connected(
    shared: &Arc<Shared>,
    ordinal: Ordinal,
    start: &v1::StartTraining,
    events: &mpsc::Sender<(Ordinal, LinkEvent)>,
    orders: &mut mpsc::Receiver<Order>,
) -> Result<(), tonic::Status> {
    let (outgoing, stream) = mpsc::channel(QUEUE);
    let first = v1::TrainingOrder { order: Some(Order::Start(start.clone())) };
    outgoing.try_send(first).expect("the queue is empty");
    let open = async {
        let mut client =
            client(shared, ordinal).await.map_err(|error| tonic::Status::unavailable(error.to_string()))?;
        client.train(ReceiverStream::new(stream)).await
    };
    let opened = timeout(OPEN_DEADLINE, open).await.map_err(|_| tonic::Status::deadline_exceeded("no answer"))??;
    let mut received = opened.into_inner();
    // Orders to the process before this one.
    while orders.try_recv().is_ok() {}
    if events.send((ordinal, LinkEvent::Opened)).await.is_err() {
        return Ok(());
    }
    loop {
        tokio::select! {
            event = received.message() => match event {
                Ok(Some(event)) => {
                    let Some(event) = event.event else { continue };
                    if events.send((ordinal, LinkEvent::Event(event))).await.is_err() {
                        return Ok(());
                    }
                }
                Ok(None) | Err(_) => return Ok(()),
            },
            Some(order) = orders.recv() => {
                if outgoing.send(v1::TrainingOrder { order: Some(order) }).await.is_err() {
                    return Ok(());
                }
            }
        }
    }
}

fn address(shared: &Shared, ordinal: Ordinal) -> Option<String> {
    let view = shared.membership.view();
    let member = view.members.iter().find(|member| member.ordinal == ordinal.0 && !member.peer_address.is_empty());
    member.map(|member| member.peer_address.clone())
}

/// Returns whether nothing listens at the address of a worker.
async fn is_refused(shared: &Shared, ordinal: Ordinal) -> bool {
    let Some(address) = address(shared, ordinal) else { return false };
    match timeout(RETRY_INTERVAL, TcpStream::connect(address)).await {
        Ok(Err(error)) => error.kind() == ErrorKind::ConnectionRefused,
        _ => false,
    }
}

/// Connects to the training service of a worker.
///
/// # Errors
/// It cannot be reached.
pub(in crate::training) async fn client(
    shared: &Shared,
    ordinal: Ordinal,
) -> anyhow::Result<TrainingServiceClient<Channel>> {
    let address =
        address(shared, ordinal).ok_or_else(|| anyhow::anyhow!("the address of worker {ordinal} is not known"))?;
    let channel = peers::connect(shared, ordinal, &address, KEEPALIVE).await.map_err(anyhow::Error::msg)?;
    Ok(TrainingServiceClient::new(channel)
        .max_decoding_message_size(MAX_PEER_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_PEER_MESSAGE_BYTES))
}
