//! Exactly-once requests: all cases, and any interleaving of repeated, reordered and late requests.

use engram_memory::outcome::{Outcome, Refusal, Reply};
use engram_memory::reference::Partition;
use engram_memory::session::{Admission, Answer, Table, WINDOW};
use engram_memory::{Command, FeatureShape, Law, Record, Request, SessionId, Settings, Shape};
use proptest::collection::vec;
use proptest::prelude::*;
use std::collections::BTreeMap;

const SESSION: SessionId = SessionId { opened_ms: 1_000, random: 5 };

fn request(seq: u64) -> Request {
    Request { session: SESSION, seq }
}

fn reply(applied: u64) -> Reply {
    Reply::Applied(Outcome { applied, ..Outcome::default() })
}

/// Processes a request: returns its reply, with `applied = seq` if it is executed.
fn arrive(table: &mut Table, seq: u64) -> Result<Reply, Refusal> {
    match table.admit(request(seq)) {
        Admission::Execute => {
            table.complete(request(seq), reply(seq));
            Ok(reply(seq))
        }
        Admission::Stored(reply) => Ok(reply),
        Admission::Refuse(refusal) => Err(refusal),
    }
}

fn table_at(seqs: impl IntoIterator<Item = u64>) -> Table {
    let mut table = Table::default();
    seqs.into_iter().for_each(|seq| assert_eq!(arrive(&mut table, seq), Ok(reply(seq))));
    table
}

#[test]
fn an_unknown_session_below_the_watermark_is_expired_for_every_seq() {
    let mut table = Table::default();
    table.expire(1_001);
    for seq in [1, 2, WINDOW, WINDOW + 1, u64::MAX] {
        assert_eq!(table.admit(request(seq)), Admission::Refuse(Refusal::SessionExpired), "seq {seq}");
        assert_eq!(table.close(request(seq)), Err(Refusal::SessionExpired), "seq {seq}");
    }
    assert!(table.is_empty());
}

#[test]
fn an_unknown_session_at_or_above_the_watermark_is_created_by_any_seq_of_the_window() {
    for first in 1..=WINDOW {
        let mut table = Table::default();
        table.expire(1_000);
        assert_eq!(table.admit(request(first)), Admission::Execute, "seq {first}");
        assert!(table.is_empty(), "admit changes nothing");
        assert_eq!(arrive(&mut table, first), Ok(reply(first)));
        assert_eq!((table.len(), table.high(SESSION)), (1, Some(first)));
    }
    let window = Refusal::OutOfWindow { window: WINDOW };
    assert_eq!(Table::default().admit(request(WINDOW + 1)), Admission::Refuse(window));
    assert_eq!(Table::default().admit(request(0)), Admission::Refuse(Refusal::AlreadyClosed));
}

#[test]
fn a_repeated_request_is_answered_within_the_window_and_closed_after_it() {
    let mut table = table_at([1, 2, 70 - 6, 100]);
    assert_eq!(table.high(SESSION), Some(100));
    // Window: 37 to 164. 64 is in it, 1 and 2 are older.
    assert_eq!(table.admit(request(64)), Admission::Stored(reply(64)));
    assert_eq!(table.admit(request(100)), Admission::Stored(reply(100)));
    for late in [1, 2, 3, 36] {
        assert_eq!(table.admit(request(late)), Admission::Refuse(Refusal::AlreadyClosed), "seq {late}");
    }
    for open in [37, 63, 99, 101, 164] {
        assert_eq!(table.admit(request(open)), Admission::Execute, "seq {open}");
    }
    assert_eq!(table.admit(request(165)), Admission::Refuse(Refusal::OutOfWindow { window: WINDOW }));
    assert_eq!(arrive(&mut table, 37), Ok(reply(37)));
    assert_eq!(table.high(SESSION), Some(100), "a late request does not move the window");
    assert_eq!(arrive(&mut table, 164), Ok(reply(164)));
    assert_eq!(table.admit(request(100)), Admission::Refuse(Refusal::AlreadyClosed), "164 moved the window past 100");
}

#[test]
fn a_closed_request_is_never_executed_and_an_executed_one_returns_its_reply() {
    let mut table = table_at([1, 3]);
    assert_eq!(table.close(request(3)), Ok(Answer::Done(reply(3))));
    assert_eq!(table.close(request(2)), Ok(Answer::Never));
    assert_eq!(arrive(&mut table, 2), Err(Refusal::AlreadyClosed), "closed, then it arrives late");
    assert_eq!(table.close(request(2)), Ok(Answer::Never), "closing again returns the same");
    // A closed seq ahead moves the window as an executed one does.
    assert_eq!(table.close(request(67)), Ok(Answer::Never));
    assert_eq!(table.high(SESSION), Some(67));
    // The state of requests older than the window is unknown: "never" would be wrong for seq 1, which was executed.
    let unknown = Err(Refusal::OutOfWindow { window: WINDOW });
    assert_eq!(
        (table.close(request(1)), table.close(request(132)), table.close(request(0))),
        (unknown.clone(), unknown.clone(), unknown)
    );
    // A request of an unknown session can be closed too.
    assert_eq!(Table::default().close(request(1)), Ok(Answer::Never));
}

#[test]
fn all_requests_of_an_expired_session_are_rejected() {
    let mut table = table_at([1, 2]);
    table.expire(1_000);
    assert_eq!(table.admit(request(2)), Admission::Stored(reply(2)), "opened at the watermark: not expired");
    table.expire(1_001);
    assert_eq!((table.len(), table.watermark_ms()), (0, 1_001));
    for seq in [1, 2, 3] {
        assert_eq!(table.admit(request(seq)), Admission::Refuse(Refusal::SessionExpired));
    }
    // Admitted before and completed after expiry: nothing is kept below the watermark.
    table.complete(request(3), reply(3));
    assert!(table.is_empty());
    table.expire(5);
    assert_eq!(table.watermark_ms(), 1_001, "the watermark never falls");
}

#[test]
fn a_request_that_closes_or_expires_itself_leaves_no_answer_outside_the_window() {
    let shape = Shape { partitions: 1, law: Law::Linear, features: FeatureShape::NONE };
    let apply =
        |partition: &mut Partition, seq, command| partition.apply(&Record { request: Some(request(seq)), command });
    let mut partition = Partition::new(shape, Settings::default());
    apply(&mut partition, 10, Command::Decay { amount: 1 });
    // Seq 5 closes 74, which moves the window past 5 itself.
    let closed = Reply::Refused(Refusal::AlreadyClosed);
    assert_eq!(apply(&mut partition, 5, Command::CloseRequest(request(74))), closed);
    let mut bytes = Vec::new();
    engram_memory::codec::encode_ledger(partition.ledger(), &mut bytes);
    assert_eq!(engram_memory::codec::decode_ledger(&bytes).as_ref(), Ok(partition.ledger()));
    // Seq 75 closes itself: both answers are the same.
    assert_eq!(apply(&mut partition, 75, Command::CloseRequest(request(75))), closed);
    assert_eq!(apply(&mut partition, 75, Command::CloseRequest(request(75))), closed);
    apply(&mut partition, 76, Command::ExpireSessions { before_ms: 1_001 });
    assert!(partition.ledger().sessions.is_empty());
}

/// Event of clients and of a network that repeats, reorders and delays.
#[derive(Debug, Clone)]
enum Event {
    /// The client sends its next requests, as far as its window allows.
    Send { client: usize, burst: usize },
    /// A sent message arrives, counted from the newest.
    Deliver { age: usize },
    /// The client closes a request, counted back from its latest.
    Close { client: usize, back: u64 },
    /// The watermark rises.
    Expire { before_ms: u64 },
}

fn arb_event() -> impl Strategy<Value = Event> {
    prop_oneof![
        20 => (0..2_usize, 1..20_usize).prop_map(|(client, burst)| Event::Send { client, burst }),
        120 => prop_oneof![4 => 0..30_usize, 1 => 0..400_usize].prop_map(|age| Event::Deliver { age }),
        10 => (0..2_usize, 0..30_u64).prop_map(|(client, back)| Event::Close { client, back }),
        1 => (0..30_u64).prop_map(|before_ms| Event::Expire { before_ms }),
    ]
}

#[derive(Debug, Clone, PartialEq)]
enum Final {
    Done,
    Never,
    /// The session expired first: unknown to the client.
    Unknown,
}

#[derive(Debug, Default)]
struct Client {
    sent: u64,
    finals: BTreeMap<u64, Final>,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn every_request_is_executed_at_most_once_and_every_acknowledged_one_exactly_once(
        events in vec(arb_event(), 1..900),
    ) {
        let sessions = [SessionId { opened_ms: 10, random: 1 }, SessionId { opened_ms: 25, random: 2 }];
        let mut clients = [Client::default(), Client::default()];
        let mut table = Table::default();
        let mut sent: Vec<(usize, u64)> = Vec::new();
        let mut executed: BTreeMap<(usize, u64), u64> = BTreeMap::new();
        let mut executions = 0;
        for event in events {
            match event {
                Event::Send { client, burst } => for _ in 0..burst {
                    let next = clients[client].sent + 1;
                    let settled = |seq| clients[client].finals.contains_key(&seq);
                    if next > WINDOW && !(1..=next - WINDOW).all(settled) {
                        break;
                    }
                    clients[client].sent = next;
                    sent.push((client, next));
                },
                Event::Deliver { age } => {
                    let Some(&(client, seq)) = sent.len().checked_sub(age + 1).and_then(|at| sent.get(at)) else { continue };
                    let arriving = Request { session: sessions[client], seq };
                    let expired = sessions[client].opened_ms < table.watermark_ms();
                    let earlier = executed.get(&(client, seq)).copied();
                    let final_state = clients[client].finals.get(&seq).cloned();
                    match table.admit(arriving) {
                        Admission::Execute => {
                            prop_assert_eq!(earlier, None, "executed twice: client {}, seq {}", client, seq);
                            prop_assert_ne!(final_state, Some(Final::Never), "executed after it was closed");
                            prop_assert!(!expired);
                            executions += 1;
                            executed.insert((client, seq), executions);
                            table.complete(arriving, reply(executions));
                            clients[client].finals.insert(seq, Final::Done);
                        }
                        Admission::Stored(stored) => {
                            prop_assert_eq!(Some(stored), earlier.map(reply), "answer of another request");
                            clients[client].finals.insert(seq, Final::Done);
                        }
                        Admission::Refuse(Refusal::SessionExpired) => {
                            prop_assert!(expired);
                            clients[client].finals.entry(seq).or_insert(Final::Unknown);
                        }
                        Admission::Refuse(refusal) => {
                            prop_assert_eq!(refusal, Refusal::AlreadyClosed, "a client within its window is never ahead");
                            prop_assert!(final_state.is_some(), "closed before the client had an answer: {}", seq);
                        }
                    }
                }
                Event::Close { client, back } => {
                    let seq = clients[client].sent.saturating_sub(back);
                    if seq == 0 {
                        continue;
                    }
                    let earlier = executed.get(&(client, seq)).copied();
                    match table.close(Request { session: sessions[client], seq }) {
                        Ok(Answer::Done(stored)) => {
                            prop_assert_eq!(Some(stored), earlier.map(reply));
                            clients[client].finals.insert(seq, Final::Done);
                        }
                        Ok(Answer::Never) => {
                            prop_assert_eq!(earlier, None, "Never for an executed request");
                            clients[client].finals.insert(seq, Final::Never);
                        }
                        Err(refusal) => {
                            prop_assert_eq!(refusal, Refusal::SessionExpired);
                            clients[client].finals.entry(seq).or_insert(Final::Unknown);
                        }
                    }
                }
                Event::Expire { before_ms } => table.expire(before_ms),
            }
            for (client, Client { finals, .. }) in clients.iter().enumerate() {
                for (seq, final_state) in finals {
                    let times = u64::from(executed.contains_key(&(client, *seq)));
                    prop_assert!(*final_state != Final::Done || times == 1);
                    prop_assert!(*final_state != Final::Never || times == 0);
                }
            }
        }
    }
}

#[test]
fn sessions_are_bounded_in_bytes_and_none_is_forgotten_above_the_watermark() {
    use engram_memory::outcome::{Rejection, RejectionReason};
    use engram_memory::session::MAX_SESSION_BYTES;
    let rejection = Rejection { id: engram_memory::MemoryId(1), reason: RejectionReason::Unknown };
    let large = Reply::Applied(Outcome { rejected: 64, rejections: vec![rejection; 64], ..Outcome::default() });
    let mut table = Table::default();
    // Several times the bound.
    let sessions = 3 * MAX_SESSION_BYTES / (WINDOW * 1_000);
    let session = |opened_ms| SessionId { opened_ms, random: 7 };
    for opened_ms in 0..sessions {
        for seq in 1..=WINDOW {
            table.complete(Request { session: session(opened_ms), seq }, large.clone());
        }
    }
    let kept = table.len() as u64;
    assert!((1..sessions / 2).contains(&kept), "{kept} of {sessions} sessions are kept");
    assert_eq!(table.watermark_ms(), sessions - kept, "the oldest are expired, not forgotten");
    let expired = Request { session: session(0), seq: 1 };
    assert_eq!(table.admit(expired), Admission::Refuse(Refusal::SessionExpired));
    assert_eq!(table.admit(Request { session: session(sessions - 1), seq: 1 }), Admission::Stored(large));
}

#[test]
fn a_session_that_no_watermark_can_expire_ends_the_eviction() {
    let mut table = Table::default();
    for random in 0..200_000 {
        table.close(Request { session: SessionId { opened_ms: u64::MAX, random }, seq: 1 }).unwrap();
    }
    assert_eq!(table.len(), 200_000);
}
