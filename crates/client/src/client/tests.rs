//! Behaviour of a client while the map changes under its calls.

use super::*;
use crate::map::Placement;
use crate::write;
use engram_memory::{Incarnation, Term};
use futures::FutureExt as _;
use futures::future::{BoxFuture, pending, ready};
use std::convert::Infallible;
use std::pin::pin;
use std::task::{Context, Poll};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::codegen::{Service as HttpService, http};
use tonic::{Response, Status};

const P: PartitionId = PartitionId(0);
const PARTITIONS: u32 = 1;

/// A map of one partition with this primary; every worker has the same `address`.
fn map_response(version: u64, primary: u32, address: &str) -> v1::GetPartitionMapResponse {
    let member = |ordinal| v1::MemberEntry {
        ordinal,
        client_address: address.to_owned(),
        incarnation: Incarnation(1).0,
        alive: true,
        ..v1::MemberEntry::default()
    };
    v1::GetPartitionMapResponse {
        cluster: engram_proto::answers::identity(7),
        version,
        partitions: vec![v1::PartitionEntry { term: Term(version).0, primary, in_sync: vec![1, 2, 3] }],
        members: (1..=3).map(member).collect(),
        ..v1::GetPartitionMapResponse::default()
    }
}

fn map(version: u64, primary: u32) -> Map {
    let map = Map::try_from(map_response(version, primary, "127.0.0.1:1")).unwrap();
    assert_eq!(map.partitions, [Placement { term: Term(version), primary: Ordinal(primary) }]);
    map
}

/// A client without map requests that has this map.
fn client_with(map: Map) -> Client {
    let client = Client::with_external_map(Options::new(Vec::<String>::new()));
    client.set_map(map);
    client
}

/// A worker that serves the map and records requests. A request that waits for news is answered when there is some.
#[derive(Clone)]
struct MapServer {
    requests: mpsc::UnboundedSender<v1::GetPartitionMapRequest>,
    map: watch::Receiver<v1::GetPartitionMapResponse>,
}

/// Whether a request is from the background task: it waits for longer than any call.
fn is_from_watcher(request: &v1::GetPartitionMapRequest) -> bool {
    Duration::from_millis(request.wait_ms.into()) > MAP_DEADLINE
}

impl tonic::server::NamedService for MapServer {
    const NAME: &'static str = "engram.v1.MemoryService";
}

impl tonic::server::UnaryService<v1::GetPartitionMapRequest> for MapServer {
    type Response = v1::GetPartitionMapResponse;
    type Future = BoxFuture<'static, Result<Response<Self::Response>, Status>>;

    fn call(&mut self, request: Request<v1::GetPartitionMapRequest>) -> Self::Future {
        let (Self { requests, mut map }, request) = (self.clone(), request.into_inner());
        if !is_from_watcher(&request) {
            let _ = requests.send(request);
        }
        Box::pin(async move {
            let is_news = |map: &v1::GetPartitionMapResponse| match request.known_stamp {
                0 => request.wait_ms == 0 || map.version > request.newer_than,
                stamp => map.stamp != stamp,
            };
            let news = map.wait_for(is_news).await;
            news.map(|map| Response::new(map.clone())).map_err(|_| Status::unavailable("the test is over"))
        })
    }
}

impl HttpService<http::Request<tonic::body::Body>> for MapServer {
    type Response = http::Response<tonic::body::Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<tonic::body::Body>) -> Self::Future {
        assert_eq!(request.uri().path(), "/engram.v1.MemoryService/GetPartitionMap");
        let server = self.clone();
        Box::pin(async move {
            let codec = tonic_prost::ProstCodec::default();
            Ok(tonic::server::Grpc::new(codec).unary(server, request).await)
        })
    }
}

/// Starts a server with this map at an address of its own, until the task ends.
async fn map_server() -> (
    watch::Sender<v1::GetPartitionMapResponse>,
    String,
    mpsc::UnboundedReceiver<v1::GetPartitionMapRequest>,
    JoinHandle<()>,
) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (requests, received) = mpsc::unbounded_channel();
    let (news, map) = watch::channel(map_response(3, 1, &address));
    let server = tonic::transport::Server::builder().add_service(MapServer { requests, map });
    let serving =
        tokio::spawn(async move { server.serve_with_incoming(TcpListenerStream::new(listener)).await.unwrap() });
    (news, address, received, serving)
}

/// Waits until the client has a map for which this holds.
async fn wait_for_map(client: &Client, of: impl Fn(&Map) -> bool) {
    let mut maps = client.0.map.subscribe();
    let matching = maps.wait_for(|map| map.as_ref().is_some_and(|map| of(map)));
    tokio::time::timeout(Duration::from_secs(60), matching).await.expect("the map arrives").unwrap();
}

#[tokio::test]
async fn idle_client_receives_new_maps_and_addresses_until_it_is_dropped() {
    let (news, address, ..) = map_server().await;
    let client = Client::connect(Options::new([address.clone()])).await.unwrap();
    news.send_replace(v1::GetPartitionMapResponse { stamp: 4, ..map_response(4, 2, &address) });
    wait_for_map(&client, |map| map.version == 4).await;
    let mut moved = v1::GetPartitionMapResponse { stamp: 5, ..map_response(4, 2, &address) };
    moved.members[2].client_address = "127.0.0.1:3".into();
    news.send_replace(moved);
    wait_for_map(&client, |map| map.workers[&Ordinal(3)].client_address == "127.0.0.1:3").await;

    drop(client);
    let gone = async {
        // Only the server's receiver is left.
        while news.receiver_count() > 1 {
            sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), gone).await.expect("the watch task ends");
}

#[tokio::test]
async fn client_watches_another_worker_when_its_worker_is_gone() {
    let ((one, first, _, serving), (other, second, ..)) = (map_server().await, map_server().await);
    let both = |version, stamp| {
        let mut map = v1::GetPartitionMapResponse { stamp, ..map_response(version, 1, &second) };
        map.members[0].client_address.clone_from(&first);
        map
    };
    one.send_replace(both(3, 3));
    other.send_replace(both(3, 3));
    let client = Client::connect(Options::new([first.clone()])).await.unwrap();
    serving.abort();
    drop(one);
    other.send_replace(both(4, 4));
    wait_for_map(&client, |map| map.version == 4).await;
}

#[tokio::test]
async fn call_to_a_hanging_worker_polls_for_a_newer_map() {
    let (news, address, mut requests, _) = map_server().await;

    let client = Client::connect(Options::new([address.clone()])).await.unwrap();
    assert_eq!(requests.recv().await.unwrap(), v1::GetPartitionMapRequest::default());
    let seen = client.map().unwrap();
    let hangs = pending::<Result<(), Failure>>();
    let abandoned = client.while_owner(&seen, Ordinal(1), hangs);
    let changing = async {
        let request = requests.recv().await.unwrap();
        assert_eq!(request.newer_than, 3, "it sends its version");
        let most = u32::try_from(MAP_DEADLINE.as_millis()).unwrap();
        assert!((1..most).contains(&request.wait_ms), "it waits at the worker: {request:?}");
        // A change that takes nothing from the worker.
        news.send_replace(map_response(4, 1, &address));
        while requests.recv().await.unwrap().newer_than != 4 {}
        news.send_replace(map_response(5, 2, &address));
    };
    let both = futures::future::join(abandoned, changing);
    let (abandoned, ()) = tokio::time::timeout(Duration::from_secs(60), both).await.expect("a hang");
    let failure = abandoned.unwrap_err();
    assert!(failure.maybe_executed && failure.retryable, "{failure:?}");
    assert_eq!(failure.lost.unwrap().1, Ordinal(1));
    assert_eq!(client.map().unwrap().owner(P), Some(Ordinal(2)));
}

#[test]
fn forwarded_call_is_abandoned_only_by_a_map_as_new_as_the_forwarding_one() {
    let client = client_with(map(5, 1));
    // Forwarded to worker 2 by map 6, which this client does not have yet.
    let mut moved = pin!(client.wait_until_moved(6, Ordinal(2), &[P]));
    assert!(moved.as_mut().now_or_never().is_none(), "an older map has no effect");
    client.set_map(map(6, 2));
    assert!(moved.as_mut().now_or_never().is_none(), "it is the owner");
    client.set_map(map(7, 3));
    assert!(moved.as_mut().now_or_never().is_some());
}

/// Runs one attempt at a part with this result; returns its error and the worker considered lost.
async fn attempt(response: Result<v1::WriteResponse, Failure>) -> (Error, Option<Ordinal>) {
    let client = client_with(map(5, 1));
    let seen = client.map().unwrap();
    let response = client.while_owner(&seen, Ordinal(1), ready(response)).await;
    let lost = response.as_ref().err().and_then(|failure| failure.lost.as_ref()).map(|(_, owner)| *owner);
    (write::error_after(&client.session(), PARTITIONS, response).await, lost)
}

#[tokio::test]
async fn response_of_an_unexecuted_part_has_a_certain_outcome_and_keeps_the_primary() {
    let fails_with = |kind| Err(Failure::of(Problem::of(kind, "injected")));
    for kind in [ProblemKind::Overloaded, ProblemKind::NotEnoughReplicas] {
        let (error, lost) = attempt(fails_with(kind)).await;
        assert!(matches!(error, Error::Deadline { .. }), "{kind:?}: {error:?}");
        assert_eq!((error.kind(), lost), (kind, None), "it is still the primary");
    }
    for kind in [ProblemKind::NotPrimary, ProblemKind::Stopping] {
        let (error, lost) = attempt(fails_with(kind)).await;
        assert!(matches!(error, Error::Deadline { .. }), "{kind:?}: {error:?}");
        assert_eq!((error.kind(), lost), (kind, Some(Ordinal(1))));
    }
    for failure in [Failure::timed_out(), Failure::of(Problem::of(ProblemKind::OutcomeUnknown, "injected"))] {
        let (error, lost) = attempt(Err(failure)).await;
        assert!(matches!(error, Error::OutcomeUnknown { partition: P, seq: 1, .. }), "{error:?}");
        assert!(error.to_string().contains("worker 1"), "{error}");
        assert_eq!(lost, Some(Ordinal(1)));
    }
}

#[tokio::test]
async fn writes_name_the_worker_that_does_not_open_their_session() {
    // Accepts connections, and never reads from them.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let write_deadline = Duration::from_millis(300);
    let client = Client::with_external_map(Options { write_deadline, ..Options::new(Vec::<String>::new()) });
    client.set_map(Map::try_from(map_response(5, 2, &address)).unwrap());
    let session = client.session();
    // The second one waits for the session that the first one opens.
    let (opening, waiting) = futures::future::join(session.decay(0.5), session.decay(0.5)).await;
    for error in [opening.unwrap_err(), waiting.unwrap_err()] {
        assert!(matches!(error, Error::Deadline { .. }), "{error:?}");
        assert!(error.to_string().contains("worker 2"), "{error}");
    }
}

#[tokio::test(start_paused = true)]
async fn new_map_ends_the_wait_for_a_lost_worker_but_not_for_a_busy_one() {
    let retry_after_ms = 150;
    let busy = Problem::of(ProblemKind::Overloaded, "retry later").retry_after(retry_after_ms);
    let gone = Problem::of(ProblemKind::Unavailable, "connection refused").retry_after(retry_after_ms);
    let mut waited = Vec::new();
    for problem in [busy, gone] {
        let client = client_with(map(5, 1));
        let seen = client.map().unwrap();
        let response = client.while_owner(&seen, Ordinal(1), ready(Err::<(), _>(Failure::of(problem)))).await;
        let (mut retry, started) = (client.write(), Instant::now());
        client.set_map(map(6, 2));
        retry.after(&client, response.unwrap_err()).await.unwrap();
        // Measured by a clock that only advances when nothing else can.
        waited.push(started.elapsed() >= Duration::from_millis(retry_after_ms));
    }
    assert_eq!(waited, [true, false]);
}

#[tokio::test(start_paused = true)]
async fn retry_without_budget_fails_with_that_reason() {
    let options = Options { retry_ratio: 0.0, retry_floor: 0.0, ..Options::new(Vec::<String>::new()) };
    let client = Client::with_external_map(options);
    client.set_map(map(5, 1));
    while client.budget().spend(Instant::now()) {}
    let busy = Problem::of(ProblemKind::Overloaded, "64 writes in flight").retry_after(50);
    let error = client.write().after(&client, Failure::of(busy)).await.unwrap_err();
    assert_eq!(error.kind(), ProblemKind::Overloaded);
    let text = "64 writes in flight; retry budget exhausted (0 per request and 0 per second)";
    assert!(error.to_string().contains(text), "{error}");
}
