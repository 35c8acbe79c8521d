//! What a client does while a map changes under its calls, and what an answer makes it look for.

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

/// One partition, led by `primary`; every worker is at `address`.
fn told(version: u64, primary: u32, address: &str) -> v1::PartitionMapReply {
    let member = |ordinal| v1::MemberEntry {
        ordinal,
        client_address: address.to_owned(),
        incarnation: Incarnation(1).0,
        alive: true,
        ..v1::MemberEntry::default()
    };
    v1::PartitionMapReply {
        cluster: engram_proto::answers::identity(7),
        version,
        partitions: vec![v1::PartitionEntry { term: Term(version).0, primary, in_sync: vec![1, 2, 3] }],
        members: (1..=3).map(member).collect(),
        ..v1::PartitionMapReply::default()
    }
}

fn map(version: u64, primary: u32) -> Map {
    let map = Map::try_from(told(version, primary, "127.0.0.1:1")).unwrap();
    assert_eq!(map.partitions, [Placement { term: Term(version), primary: Ordinal(primary) }]);
    map
}

/// A client that is told the map, and has heard this one.
fn given(heard: Map) -> Client {
    let client = Client::given(Options::new(Vec::<String>::new()));
    client.set_map(heard);
    client
}

/// A worker that tells the map, and says what calls asked it. Who waits for news hears of it when there is some.
#[derive(Clone)]
struct Teller {
    asked: mpsc::UnboundedSender<v1::PartitionMapRequest>,
    map: watch::Receiver<v1::PartitionMapReply>,
}

/// What somebody asks who waits for longer than any call.
fn is_followers(request: &v1::PartitionMapRequest) -> bool {
    Duration::from_millis(request.wait_ms.into()) > MAP_DEADLINE
}

impl tonic::server::NamedService for Teller {
    const NAME: &'static str = "engram.v1.MemoryService";
}

impl tonic::server::UnaryService<v1::PartitionMapRequest> for Teller {
    type Response = v1::PartitionMapReply;
    type Future = BoxFuture<'static, Result<Response<Self::Response>, Status>>;

    fn call(&mut self, request: Request<v1::PartitionMapRequest>) -> Self::Future {
        let (Self { asked, mut map }, request) = (self.clone(), request.into_inner());
        if !is_followers(&request) {
            let _ = asked.send(request);
        }
        Box::pin(async move {
            let is_news = |map: &v1::PartitionMapReply| match request.known {
                0 => request.wait_ms == 0 || map.version > request.newer_than,
                known => map.stamp != known,
            };
            let told = map.wait_for(is_news).await;
            told.map(|map| Response::new(map.clone())).map_err(|_| Status::unavailable("the test is over"))
        })
    }
}

impl HttpService<http::Request<tonic::body::Body>> for Teller {
    type Response = http::Response<tonic::body::Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<tonic::body::Body>) -> Self::Future {
        assert_eq!(request.uri().path(), "/engram.v1.MemoryService/GetPartitionMap");
        let teller = self.clone();
        Box::pin(async move {
            let codec = tonic_prost::ProstCodec::default();
            Ok(tonic::server::Grpc::new(codec).unary(teller, request).await)
        })
    }
}

/// Tells this map, and what is said instead later, at an address of its own; until the task ends.
async fn teller()
-> (watch::Sender<v1::PartitionMapReply>, String, mpsc::UnboundedReceiver<v1::PartitionMapRequest>, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (asked, questions) = mpsc::unbounded_channel();
    let (news, known) = watch::channel(told(3, 1, &address));
    let server = tonic::transport::Server::builder().add_service(Teller { asked, map: known });
    let serving =
        tokio::spawn(async move { server.serve_with_incoming(TcpListenerStream::new(listener)).await.unwrap() });
    (news, address, questions, serving)
}

/// Returns when the client knows a map for which this holds.
async fn hears(client: &Client, of: impl Fn(&Map) -> bool) {
    let mut known = client.0.map.subscribe();
    let heard = known.wait_for(|map| map.as_ref().is_some_and(|map| of(map)));
    tokio::time::timeout(Duration::from_secs(60), heard).await.expect("it is not told").unwrap();
}

#[tokio::test]
async fn a_client_that_nobody_uses_hears_of_another_map_and_of_other_addresses_until_it_is_dropped() {
    let (news, address, ..) = teller().await;
    let client = Client::connect(Options::new([address.clone()])).await.unwrap();
    news.send_replace(v1::PartitionMapReply { stamp: 4, ..told(4, 2, &address) });
    hears(&client, |map| map.version == 4).await;
    let mut moved = v1::PartitionMapReply { stamp: 5, ..told(4, 2, &address) };
    moved.members[2].client_address = "127.0.0.1:3".into();
    news.send_replace(moved);
    hears(&client, |map| map.workers[&Ordinal(3)].client_address == "127.0.0.1:3").await;

    drop(client);
    let gone = async {
        // That of whoever serves is left.
        while news.receiver_count() > 1 {
            sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), gone).await.expect("somebody waits still");
}

#[tokio::test]
async fn a_client_follows_another_worker_when_the_one_that_it_followed_is_gone() {
    let ((one, first, _, serving), (other, second, ..)) = (teller().await, teller().await);
    let both = |version, stamp| {
        let mut map = v1::PartitionMapReply { stamp, ..told(version, 1, &second) };
        map.members[0].client_address.clone_from(&first);
        map
    };
    one.send_replace(both(3, 3));
    other.send_replace(both(3, 3));
    let client = Client::connect(Options::new([first.clone()])).await.unwrap();
    serving.abort();
    drop(one);
    other.send_replace(both(4, 4));
    hears(&client, |map| map.version == 4).await;
}

#[tokio::test]
async fn who_waits_for_a_worker_asks_for_a_newer_map_and_is_answered_when_there_is_one() {
    let (news, address, mut questions, _) = teller().await;

    let client = Client::connect(Options::new([address.clone()])).await.unwrap();
    assert_eq!(questions.recv().await.unwrap(), v1::PartitionMapRequest::default());
    let seen = client.map().unwrap();
    let hangs = pending::<Result<(), Failure>>();
    let given_up = client.while_owner(&seen, Ordinal(1), hangs);
    let changing = async {
        let question = questions.recv().await.unwrap();
        assert_eq!(question.newer_than, 3, "it says what it knows");
        let most = u32::try_from(MAP_DEADLINE.as_millis()).unwrap();
        assert!((1..most).contains(&question.wait_ms), "and waits at the worker: {question:?}");
        // Of another kind of news, which takes nothing from the worker.
        news.send_replace(told(4, 1, &address));
        while questions.recv().await.unwrap().newer_than != 4 {}
        news.send_replace(told(5, 2, &address));
    };
    let both = futures::future::join(given_up, changing);
    let (given_up, ()) = tokio::time::timeout(Duration::from_secs(60), both).await.expect("a hang");
    let failure = given_up.unwrap_err();
    assert!(failure.maybe_executed && failure.retryable, "{failure:?}");
    assert_eq!(failure.lost.unwrap().1, Ordinal(1));
    assert_eq!(client.map().unwrap().owner(P), Some(Ordinal(2)));
}

#[test]
fn a_call_that_was_passed_on_is_given_up_by_a_map_as_new_as_the_one_that_sent_it_there() {
    let client = given(map(5, 1));
    // Passed on to worker 2 by map 6, which this client has not heard yet.
    let mut moved = pin!(client.until_moved(6, Ordinal(2), &[P]));
    assert!(moved.as_mut().now_or_never().is_none(), "an older map says nothing of it");
    client.set_map(map(6, 2));
    assert!(moved.as_mut().now_or_never().is_none(), "it is the owner");
    client.set_map(map(7, 3));
    assert!(moved.as_mut().now_or_never().is_some());
}

/// One attempt at a part that ends so; whether the part is then known not to have been executed, and who is looked for.
async fn attempt(answer: Result<v1::WriteReply, Failure>) -> (Error, Option<Ordinal>) {
    let client = given(map(5, 1));
    let seen = client.map().unwrap();
    let answer = client.while_owner(&seen, Ordinal(1), ready(answer)).await;
    let lost = answer.as_ref().err().and_then(|failure| failure.lost.as_ref()).map(|(_, owner)| *owner);
    (write::given_up_after(&client.session(), PARTITIONS, answer).await, lost)
}

#[tokio::test]
async fn an_answer_that_says_not_executed_leaves_no_doubt_and_sends_nobody_elsewhere() {
    let says = |kind| Err(Failure::of(Problem::of(kind, "so it says")));
    for kind in [ProblemKind::Overloaded, ProblemKind::TooFewCopies] {
        let (error, lost) = attempt(says(kind)).await;
        assert!(matches!(error, Error::Deadline { .. }), "{kind:?}: {error:?}");
        assert_eq!((error.kind(), lost), (kind, None), "it leads still");
    }
    for kind in [ProblemKind::NotPrimary, ProblemKind::Stopping] {
        let (error, lost) = attempt(says(kind)).await;
        assert!(matches!(error, Error::Deadline { .. }), "{kind:?}: {error:?}");
        assert_eq!((error.kind(), lost), (kind, Some(Ordinal(1))));
    }
    for failure in [Failure::timed_out(), Failure::of(Problem::of(ProblemKind::OutcomeUnknown, "so it says"))] {
        let (error, lost) = attempt(Err(failure)).await;
        assert!(matches!(error, Error::Unknown { partition: P, seq: 1, .. }), "{error:?}");
        assert_eq!(lost, Some(Ordinal(1)));
    }
}

#[tokio::test(start_paused = true)]
async fn a_new_map_ends_the_wait_for_who_is_lost_and_not_for_who_is_busy() {
    let asks_ms = 150;
    let busy = Problem::of(ProblemKind::Overloaded, "come again").retry_after(asks_ms);
    let gone = Problem::of(ProblemKind::Unavailable, "nobody there").retry_after(asks_ms);
    let mut waited = Vec::new();
    for problem in [busy, gone] {
        let client = given(map(5, 1));
        let seen = client.map().unwrap();
        let answer = client.while_owner(&seen, Ordinal(1), ready(Err::<(), _>(Failure::of(problem)))).await;
        let (mut retry, begun) = (client.write(), Instant::now());
        client.set_map(map(6, 2));
        retry.after(&client, answer.unwrap_err()).await.unwrap();
        // By a clock that stands still while anything can go on.
        waited.push(begun.elapsed() >= Duration::from_millis(asks_ms));
    }
    assert_eq!(waited, [true, false]);
}

#[tokio::test(start_paused = true)]
async fn who_comes_again_too_often_is_told_that_no_retry_is_left() {
    let options = Options { retry_ratio: 0.0, retry_floor: 0.0, ..Options::new(Vec::<String>::new()) };
    let client = Client::given(options);
    client.set_map(map(5, 1));
    while client.budget().spend(Instant::now()) {}
    let busy = Problem::of(ProblemKind::Overloaded, "64 writes are under way").retry_after(50);
    let error = client.write().after(&client, Failure::of(busy)).await.unwrap_err();
    assert_eq!(error.kind(), ProblemKind::Overloaded);
    let told = "64 writes are under way; no retry is left in the budget, of 0 for each request and 0 a second";
    assert!(error.to_string().contains(told), "{error}");
}
