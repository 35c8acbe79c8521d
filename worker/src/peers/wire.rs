//! Wire format of messages between stores.
//!
//! Received messages are checked here, once, before the store processes them: numbers that must agree do, lists have the stated
//! length, and nothing exceeds its limit. Whether a message matches the state of the replica is checked by the replica.

use engram_cluster::replica::{self, History};
use engram_memory::{DecayClock, Lsn, MAX_RECORD_BYTES, PartitionId, Term};
use engram_proto::v1::{self, peer_message};
use engram_store::peer::{Envelope, Message, StateChunk};
use engram_store::snapshot_file::MAX_CHUNK_BYTES;

/// Maximum number of runs of equal terms in one message: as many as a log distinguishes.
const MAX_RUNS: usize = 64;

/// A received message violates the protocol.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {value} is not allowed; allowed: {allowed}")]
pub(crate) struct MalformedPeerMessage {
    field: &'static str,
    value: String,
    allowed: String,
}

fn check(
    holds: bool,
    field: &'static str,
    value: &dyn ToString,
    allowed: impl FnOnce() -> String,
) -> Result<(), MalformedPeerMessage> {
    if holds { Ok(()) } else { Err(MalformedPeerMessage { field, value: value.to_string(), allowed: allowed() }) }
}

/// Encodes a message.
pub(super) fn encode(envelope: Envelope) -> v1::PeerMessage {
    let message = match envelope.body {
        Message::Replica(message, records) => encode_replica(message, records),
        Message::Release => peer_message::Message::Release(v1::PeerRelease {}),
        Message::Confirm { term, round } => peer_message::Message::Confirm(v1::PeerConfirm { term: term.0, round }),
        Message::Confirmed { term, round, promised } => {
            peer_message::Message::Confirmed(v1::PeerConfirmed { term: term.0, round, promised_term: promised.0 })
        }
        Message::PositionRequest { requested_ms } => {
            peer_message::Message::PositionRequest(v1::PeerPositionRequest { requested_ms })
        }
        Message::Position { term, lsn, requested_ms } => {
            peer_message::Message::Position(v1::PeerPosition { term: term.0, lsn: lsn.0, requested_ms })
        }
        Message::Digest { term, lsn, digest } => peer_message::Message::Digest(v1::PeerDigest {
            term: term.0,
            lsn: lsn.0,
            digest: engram_proto::answers::identity(digest),
        }),
        Message::State(piece) => peer_message::Message::StateChunk(v1::PeerStateChunk {
            term: piece.term.0,
            lsn: piece.lsn.0,
            record_term: piece.record_term.0,
            chunk_index: piece.index,
            chunks: piece.count,
            clock: piece.clock.units(),
            memories: piece.memories,
            digest: piece.digest.to_be_bytes().to_vec().into(),
            kind: piece.kind,
            data: piece.bytes,
        }),
    };
    let trace = envelope.trace.map_or_else(Default::default, |context| context.to_bytes().to_vec().into());
    v1::PeerMessage { partition: envelope.partition.0, message: Some(message), trace }
}

fn encode_replica(message: replica::Message, records: Vec<bytes::Bytes>) -> peer_message::Message {
    use replica::Message as Replica;
    let columns = |runs: &[(Lsn, Term)]| runs.iter().map(|(lsn, term)| (lsn.0, term.0)).unzip();
    match message {
        Replica::Open { term, history, commit } => {
            let (lsns, terms) = columns(history.runs());
            let (floor_lsn, floor_term) = history.floor();
            let names = v1::LogTerms { floor_lsn: floor_lsn.0, floor_term: floor_term.0, lsns, terms };
            peer_message::Message::Open(v1::PeerOpen { term: term.0, names: Some(names), commit: commit.0 })
        }
        Replica::Opened { term, end, written } => peer_message::Message::Opened(v1::PeerOpened {
            term: term.0,
            end: end.map(|end| end.0),
            written: written.0,
        }),
        Replica::Append { term, after, runs, commit } => {
            let (run_lsns, run_terms) = columns(&runs);
            peer_message::Message::Append(v1::PeerAppend {
                term: term.0,
                after: after.0,
                run_lsns,
                run_terms,
                commit: commit.0,
                records,
            })
        }
        Replica::Ack { term, written } => peer_message::Message::Ack(v1::PeerAck { term: term.0, written: written.0 }),
        Replica::NotOpen { term } => peer_message::Message::NotOpen(v1::PeerNotOpen { term: term.0 }),
        Replica::Rejected { term, promised } => {
            peer_message::Message::Rejected(v1::PeerRejected { term: term.0, promised_term: promised.0 })
        }
    }
}

/// Decodes and checks a message.
///
/// # Errors
/// The first violation of the protocol.
pub(super) fn decode(message: v1::PeerMessage, partitions: u32) -> Result<Envelope, MalformedPeerMessage> {
    let partition = message.partition;
    check(partition < partitions, "partition", &partition, || format!("0 to {}", partitions - 1))?;
    // A malformed one is of no consequence.
    let trace = engram_trace::Context::from_bytes(&message.trace);
    let message = message.message.ok_or_else(|| MalformedPeerMessage {
        field: "message",
        value: "none".into(),
        allowed: "a message of this protocol version".into(),
    })?;
    let bare = |message| Message::Replica(message, Vec::new());
    let body = match message {
        peer_message::Message::Open(open) => bare(decode_open(open)?),
        peer_message::Message::Opened(opened) => bare(decode_opened(&opened)?),
        peer_message::Message::Append(append) => decode_append(append)?,
        peer_message::Message::Ack(ack) => {
            bare(replica::Message::Ack { term: Term(ack.term), written: Lsn(ack.written) })
        }
        peer_message::Message::NotOpen(not_open) => bare(replica::Message::NotOpen { term: Term(not_open.term) }),
        peer_message::Message::Rejected(refused) => {
            let (term, promised) = (Term(refused.term), Term(refused.promised_term));
            check(promised > term, "rejected.promised_term", &promised, || format!("above the rejected term, {term}"))?;
            bare(replica::Message::Rejected { term, promised })
        }
        peer_message::Message::StateChunk(chunk) => Message::State(decode_state_chunk(chunk)?),
        peer_message::Message::Release(v1::PeerRelease {}) => Message::Release,
        peer_message::Message::Confirm(v1::PeerConfirm { term, round }) => Message::Confirm { term: Term(term), round },
        peer_message::Message::Confirmed(v1::PeerConfirmed { term, round, promised_term: promised }) => {
            Message::Confirmed { term: Term(term), round, promised: Term(promised) }
        }
        peer_message::Message::PositionRequest(v1::PeerPositionRequest { requested_ms }) => {
            Message::PositionRequest { requested_ms }
        }
        peer_message::Message::Position(v1::PeerPosition { term, lsn, requested_ms }) => {
            Message::Position { term: Term(term), lsn: Lsn(lsn), requested_ms }
        }
        peer_message::Message::Digest(message) => {
            let digest = <[u8; 16]>::try_from(message.digest.as_ref());
            check(digest.is_ok(), "digest.digest", &message.digest.len(), || "16 bytes".into())?;
            let digest = digest.map_or(0, u128::from_be_bytes);
            Message::Digest { term: Term(message.term), lsn: Lsn(message.lsn), digest }
        }
    };
    Ok(Envelope { partition: PartitionId(partition), body, trace })
}

fn decode_runs(lsns: &[u64], terms: &[u64]) -> Result<Vec<(Lsn, Term)>, MalformedPeerMessage> {
    check(lsns.len() == terms.len(), "terms", &terms.len(), || format!("as many as lsns, {}", lsns.len()))?;
    check(lsns.len() <= MAX_RUNS, "lsns", &lsns.len(), || format!("at most {MAX_RUNS} runs"))?;
    Ok(lsns.iter().zip(terms).map(|(lsn, term)| (Lsn(*lsn), Term(*term))).collect())
}

fn decode_open(open: v1::PeerOpen) -> Result<replica::Message, MalformedPeerMessage> {
    let names = open.names.unwrap_or_default();
    let runs = decode_runs(&names.lsns, &names.terms)?;
    let history = History::from_parts((Lsn(names.floor_lsn), Term(names.floor_term)), runs);
    let history = history.ok_or_else(|| MalformedPeerMessage {
        field: "open.names",
        value: format!("{:?} of terms {:?}", names.lsns, names.terms),
        allowed: "runs that ascend from their floor".into(),
    })?;
    let last = history.last();
    check(last.1.0 <= open.term, "open.names.terms", &last.1, || format!("at most the term, {}", open.term))?;
    check(open.commit <= last.0.0, "open.commit", &open.commit, || format!("at most the log's end, {}", last.0))?;
    Ok(replica::Message::Open { term: Term(open.term), history, commit: Lsn(open.commit) })
}

fn decode_opened(opened: &v1::PeerOpened) -> Result<replica::Message, MalformedPeerMessage> {
    let most = opened.end.unwrap_or(0);
    check(opened.written <= most, "opened.written", &opened.written, || format!("at most the log's end, {most}"))?;
    Ok(replica::Message::Opened { term: Term(opened.term), end: opened.end.map(Lsn), written: Lsn(opened.written) })
}

fn decode_append(append: v1::PeerAppend) -> Result<Message, MalformedPeerMessage> {
    let runs = decode_runs(&append.run_lsns, &append.run_terms)?;
    let floor = (Lsn(append.after), Term(0));
    let ascends = History::from_parts(floor, runs.clone()).is_some();
    check(ascends, "append.run_lsns", &format!("{:?}", append.run_lsns), || {
        format!("runs that ascend from {}", append.after)
    })?;
    let last = runs.last().copied().unwrap_or(floor);
    check(last.1.0 <= append.term, "append.run_terms", &last.1, || format!("at most the term, {}", append.term))?;
    let named = last.0.0 - append.after;
    check(append.records.len() as u64 == named, "append.records", &append.records.len(), || {
        format!("{named} records")
    })?;
    for record in &append.records {
        let allowed = || format!("1 to {MAX_RECORD_BYTES} bytes");
        check((1..=MAX_RECORD_BYTES).contains(&record.len()), "append.records", &record.len(), allowed)?;
    }
    let message = replica::Message::Append {
        term: Term(append.term),
        after: Lsn(append.after),
        runs,
        commit: Lsn(append.commit),
    };
    Ok(Message::Replica(message, append.records))
}

fn decode_state_chunk(chunk: v1::PeerStateChunk) -> Result<StateChunk, MalformedPeerMessage> {
    check(chunk.chunk_index < chunk.chunks, "state_chunk.chunk_index", &chunk.chunk_index, || {
        format!("below the number of chunks, {}", chunk.chunks)
    })?;
    check(chunk.record_term <= chunk.term, "state_chunk.record_term", &chunk.record_term, || {
        format!("at most the term, {}", chunk.term)
    })?;
    check(chunk.data.len() <= MAX_CHUNK_BYTES, "state_chunk.data", &chunk.data.len(), || {
        format!("at most {MAX_CHUNK_BYTES} bytes")
    })?;
    let digest = <[u8; 16]>::try_from(chunk.digest.as_ref());
    check(digest.is_ok(), "state_chunk.digest", &chunk.digest.len(), || "16 bytes".into())?;
    let clock = DecayClock::from_units(chunk.clock).ok_or_else(|| MalformedPeerMessage {
        field: "state_chunk.clock",
        value: chunk.clock.to_string(),
        allowed: "below 2^31".into(),
    })?;
    Ok(StateChunk {
        term: Term(chunk.term),
        lsn: Lsn(chunk.lsn),
        record_term: Term(chunk.record_term),
        index: chunk.chunk_index,
        count: chunk.chunks,
        clock,
        memories: chunk.memories,
        digest: digest.map_or(0, u128::from_be_bytes),
        kind: chunk.kind,
        bytes: chunk.data,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use prost::Message as _;
    use rand::rngs::StdRng;
    use rand::{Rng as _, RngExt as _, SeedableRng as _};

    const PARTITIONS: u32 = 8;

    fn history() -> History {
        History::from_parts((Lsn(4), Term(1)), vec![(Lsn(9), Term(2)), (Lsn(12), Term(5))]).unwrap()
    }

    fn sample_messages() -> Vec<Envelope> {
        let term = Term(6);
        let piece = StateChunk {
            term,
            lsn: Lsn(12),
            record_term: Term(5),
            index: 1,
            count: 3,
            clock: DecayClock::from_units(77).unwrap(),
            memories: 1_000,
            digest: u128::MAX - 3,
            kind: 2,
            bytes: Bytes::from_static(b"chunk"),
        };
        let append = |runs: Vec<(Lsn, Term)>, records: &[&'static [u8]]| {
            let message = replica::Message::Append { term, after: Lsn(12), runs, commit: Lsn(11) };
            Message::Replica(message, records.iter().copied().map(Bytes::from_static).collect())
        };
        let bare = |message| Message::Replica(message, Vec::new());
        [
            bare(replica::Message::Open { term, history: history(), commit: Lsn(11) }),
            bare(replica::Message::Opened { term, end: Some(Lsn(12)), written: Lsn(10) }),
            bare(replica::Message::Opened { term, end: None, written: Lsn(0) }),
            append(vec![(Lsn(13), Term(5)), (Lsn(15), Term(6))], &[b"a", b"bc", b"d"]),
            append(Vec::new(), &[]),
            bare(replica::Message::Ack { term, written: Lsn(12) }),
            bare(replica::Message::NotOpen { term }),
            bare(replica::Message::Rejected { term, promised: Term(7) }),
            Message::State(piece),
            Message::Digest { term, lsn: Lsn(12), digest: 5 },
            Message::Release,
            Message::Confirm { term, round: 9 },
            Message::Confirmed { term, round: 9, promised: Term(7) },
            Message::PositionRequest { requested_ms: 77 },
            Message::Position { term, lsn: Lsn(12), requested_ms: 77 },
        ]
        .into_iter()
        .zip(0..)
        .map(|(body, at)| {
            let trace = (at == 3).then_some(engram_trace::Context { trace: 5, span: 6, flags: 1 });
            Envelope { partition: PartitionId(at % PARTITIONS), body, trace }
        })
        .collect()
    }

    #[test]
    fn decoding_inverts_encoding() {
        for envelope in sample_messages() {
            let bytes = encode(envelope.clone()).encode_to_vec();
            assert!(bytes.len() <= envelope.bytes() + 128, "the counted size is close to the encoded one");
            let read = decode(v1::PeerMessage::decode(bytes.as_slice()).unwrap(), PARTITIONS);
            assert_eq!(read, Ok(envelope));
        }
    }

    #[test]
    fn contradictory_messages_are_rejected_by_field() {
        use peer_message::Message as Wire;
        let refused = |change: fn(&mut Wire), nth: usize| {
            let mut message = encode(sample_messages().swap_remove(nth));
            change(message.message.as_mut().unwrap());
            decode(message, PARTITIONS).unwrap_err().to_string()
        };
        let append = |change: fn(&mut v1::PeerAppend)| {
            let mut message = encode(sample_messages().swap_remove(3));
            match &mut message.message {
                Some(Wire::Append(append)) => change(append),
                other => panic!("{other:?}"),
            }
            decode(message, PARTITIONS).unwrap_err().to_string()
        };
        assert!(append(|it| drop(it.records.pop())).contains("append.records: 2 is not allowed; allowed: 3 records"));
        assert!(append(|it| it.run_terms.push(9)).contains("as many as lsns, 2"));
        assert!(append(|it| it.after = 20).contains("runs that ascend from 20"));
        assert!(append(|it| it.term = 5).contains("append.run_terms: 6"));
        assert!(append(|it| it.records[0] = Bytes::new()).contains("1 to 8388608 bytes"));
        assert!(append(|it| it.run_lsns[0] = 40).contains("append.run_lsns"));
        let names = |wire: &mut Wire| match wire {
            Wire::Open(open) => open.names.as_mut().unwrap().lsns[0] = 4,
            other => panic!("{other:?}"),
        };
        assert!(refused(names, 0).contains("open.names"));
        let digest = |wire: &mut Wire| match wire {
            Wire::StateChunk(chunk) => chunk.digest = Bytes::from_static(b"short"),
            other => panic!("{other:?}"),
        };
        assert!(refused(digest, 8).contains("state_chunk.digest: 5"));
        let foreign = v1::PeerMessage { partition: PARTITIONS, message: None, ..v1::PeerMessage::default() };
        assert!(decode(foreign, PARTITIONS).unwrap_err().to_string().contains("partition: 8"));
        assert!(decode(v1::PeerMessage::default(), PARTITIONS).unwrap_err().to_string().contains("message: none"));
    }

    /// Arbitrary bytes, and messages with changed bytes: whatever is accepted satisfies what the store relies on.
    #[test]
    fn arbitrary_bytes_are_rejected_or_decode_to_a_consistent_message() {
        let mut random = StdRng::seed_from_u64(7);
        let whole: Vec<Vec<u8>> =
            sample_messages().into_iter().map(|envelope| encode(envelope).encode_to_vec()).collect();
        let mut accepted = 0;
        for round in 0..60_000 {
            let mut bytes = match round % 4 {
                0 => vec![0; random.random_range(0..64)],
                _ => whole[round % whole.len()].clone(),
            };
            if round % 4 == 0 {
                random.fill_bytes(&mut bytes);
            }
            for _ in 0..random.random_range(0..4) {
                if let Some(at) = bytes.len().checked_sub(1).map(|last| random.random_range(0..=last)) {
                    bytes[at] = random.random();
                }
            }
            let Ok(message) = v1::PeerMessage::decode(bytes.as_slice()) else { continue };
            let Ok(envelope) = decode(message, PARTITIONS) else { continue };
            accepted += 1;
            assert!(envelope.partition.0 < PARTITIONS);
            match &envelope.body {
                Message::Replica(replica::Message::Append { term, after, runs, .. }, records) => {
                    assert_eq!(after.0 + records.len() as u64, runs.last().map_or(after.0, |last| last.0.0));
                    assert!(runs.iter().all(|run| run.0 > *after && run.1 <= *term));
                    assert!(runs.windows(2).all(|pair| pair[0].0 < pair[1].0 && pair[0].1 < pair[1].1));
                }
                Message::Replica(_, records) => assert!(records.is_empty()),
                Message::Digest { .. }
                | Message::Release
                | Message::Confirm { .. }
                | Message::Confirmed { .. }
                | Message::PositionRequest { .. }
                | Message::Position { .. } => {}
                Message::State(piece) => assert!(piece.index < piece.count && piece.bytes.len() <= MAX_CHUNK_BYTES),
            }
            let again = decode(encode(envelope.clone()), PARTITIONS);
            assert_eq!(again, Ok(envelope), "an accepted message can be encoded again");
        }
        assert!(accepted > 1_000, "only {accepted} of the changed messages were accepted");
    }
}
