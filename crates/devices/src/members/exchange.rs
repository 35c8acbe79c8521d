//! Messages between the members of a run: in chunks, until a deadline, with the cause of a failure for every member.

use super::Member;
use crate::{ComputeDevice, Error};
use engram_collective::message::{MAX_PAYLOAD_BYTES, Tag};
use engram_collective::transport::{self, Wait};
use engram_kernels::profiler::Kind;
use std::fmt;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// Chunks that a member sends before it receives: transports keep a few early messages, not whole regions.
const AHEAD: usize = 2;
/// Bytes of a failure report: kind, rank, length of the message, message.
const REPORT_BYTES: usize = 256;
/// How long a member that fails tries to report it to each of the others.
const REPORT_LIMIT: Duration = Duration::from_secs(1);
/// Step of failure reports: no step of a run.
const REPORT_STEP: u64 = u64::MAX;
/// Largest item of a pipeline in bytes: more is a damaged length.
const MAX_ITEM_BYTES: u64 = 256 << 20;

/// Why a member ended a run for all others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MemberFailure {
    /// Its connection ended: it can be replaced.
    Lost,
    /// It sent nothing until the time limit.
    Stalled,
    /// It computes something else, or its computation failed, with this message.
    Failed(String),
}

impl fmt::Display for MemberFailure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lost => formatter.write_str("was lost"),
            Self::Stalled => formatter.write_str("sent nothing until the time limit"),
            Self::Failed(message) => write!(formatter, "failed: {message}"),
        }
    }
}

/// What a message contains: the phase of its tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub(super) enum Phase {
    Agreement = 1,
    State,
    RowsToAbove,
    RowsToBelow,
    Region,
    ItemLength,
    Item,
    Credit,
    Report,
}

/// A message to a rank.
pub(super) struct Outgoing<'a> {
    pub(super) to: usize,
    pub(super) phase: Phase,
    pub(super) bytes: &'a [u8],
}

/// A message from a rank, of a known length.
pub(super) struct Incoming<'a> {
    pub(super) from: usize,
    pub(super) phase: Phase,
    pub(super) bytes: &'a mut [u8],
}

/// Messages of one run.
pub(super) struct Exchange<'a, 'b> {
    member: &'a mut Member<'b>,
    what: &'static str,
    deadline: Instant,
    limit: Duration,
}

impl<'a, 'b> Exchange<'a, 'b> {
    pub(super) fn new(member: &'a mut Member<'b>, what: &'static str, limit: Duration) -> Self {
        Self { member, what, deadline: Instant::now() + limit, limit }
    }

    pub(super) fn rank(&self) -> usize {
        self.member.transport.rank()
    }

    pub(super) fn ranks(&self) -> usize {
        self.member.transport.ranks()
    }

    pub(super) const fn devices(&self) -> &'b [ComputeDevice] {
        self.member.devices
    }

    pub(super) fn speed(&self) -> u64 {
        self.member.speed()
    }

    /// Records a wait for other members, in the timeline of the first device.
    pub(super) fn waiting<T>(&mut self, name: &'static str, wait: impl FnOnce(&mut Self) -> T) -> T {
        match self.member.devices.first() {
            Some(device) => device.recorder().span(Kind::Wait, name, || wait(self)),
            None => wait(self),
        }
    }

    /// Returns the time until the deadline.
    ///
    /// # Errors
    /// The deadline has passed.
    pub(super) fn time_left(&self) -> Result<Duration, Error> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(Error::Deadline { what: self.what, limit: self.limit }) } else { Ok(left) }
    }

    /// Publishes a hash of the settings and three numbers to all members; returns the numbers of each rank.
    ///
    /// # Errors
    /// As [`exchange`](Self::exchange); a member has other settings.
    pub(super) fn agree(&mut self, settings: u64, own: [u64; 3]) -> Result<Vec<[u64; 3]>, Error> {
        let all = self.exchange_numbers([settings, own[0], own[1], own[2]])?;
        match all.iter().position(|it| it[0] != settings) {
            None => Ok(all.into_iter().map(|[_, a, b, c]| [a, b, c]).collect()),
            Some(rank) => Err(self.failure(rank, MemberFailure::Failed("its settings differ".to_owned()))),
        }
    }

    fn exchange_numbers(&mut self, own: [u64; 4]) -> Result<Vec<[u64; 4]>, Error> {
        let mut all = vec![own; self.ranks()];
        let own = own.map(u64::to_le_bytes).concat();
        let mut received = vec![vec![0; own.len()]; self.ranks()];
        let others = || (0..all.len()).filter(|&rank| rank != self.rank());
        let outgoing: Vec<Outgoing<'_>> =
            others().map(|to| Outgoing { to, phase: Phase::Agreement, bytes: &own }).collect();
        let mut incoming: Vec<Incoming<'_>> = received
            .iter_mut()
            .enumerate()
            .filter(|(from, _)| *from != self.rank())
            .map(|(from, bytes)| Incoming { from, phase: Phase::Agreement, bytes })
            .collect();
        self.exchange(0, &outgoing, &mut incoming)?;
        for (rank, bytes) in received.iter().enumerate().filter(|(rank, _)| *rank != self.rank()) {
            let words = bytes.as_chunks::<8>().0;
            all[rank] = std::array::from_fn(|index| u64::from_le_bytes(words[index]));
        }
        Ok(all)
    }

    /// Sends and receives messages of one step, chunk by chunk in turn, so that members that send to each other always make progress.
    pub(super) fn exchange(
        &mut self,
        step: u64,
        outgoing: &[Outgoing<'_>],
        incoming: &mut [Incoming<'_>],
    ) -> Result<(), Error> {
        let chunks = |bytes: &[u8]| bytes.len().div_ceil(MAX_PAYLOAD_BYTES);
        let sent = outgoing.iter().map(|it| chunks(it.bytes)).max().unwrap_or(0);
        let received = incoming.iter().map(|it| chunks(it.bytes)).max().unwrap_or(0);
        for index in 0..sent.max(received) + AHEAD {
            for message in outgoing {
                if let Some(chunk) = message.bytes.chunks(MAX_PAYLOAD_BYTES).nth(index) {
                    self.send(message.to, step, message.phase, index as u16, chunk)?;
                }
            }
            let Some(index) = index.checked_sub(AHEAD) else { continue };
            for message in &mut *incoming {
                if let Some(chunk) = message.bytes.chunks_mut(MAX_PAYLOAD_BYTES).nth(index) {
                    self.receive(message.from, step, message.phase, index as u16, chunk)?;
                }
            }
        }
        Ok(())
    }

    /// Sends an item of any length up to 256 MiB.
    pub(super) fn send_item(&mut self, to: usize, number: u64, bytes: &[u8]) -> Result<(), Error> {
        if bytes.len() as u64 > MAX_ITEM_BYTES {
            return Err(Error::argument("bytes of an item", bytes.len(), "at most 256 MiB"));
        }
        let length = (bytes.len() as u64).to_le_bytes();
        let messages =
            [Outgoing { to, phase: Phase::ItemLength, bytes: &length }, Outgoing { to, phase: Phase::Item, bytes }];
        self.exchange(number, &messages, &mut [])
    }

    /// Receives an item.
    pub(super) fn receive_item(&mut self, from: usize, number: u64) -> Result<Vec<u8>, Error> {
        let mut length = [0; 8];
        self.exchange(number, &[], &mut [Incoming { from, phase: Phase::ItemLength, bytes: &mut length }])?;
        let length = u64::from_le_bytes(length);
        if length > MAX_ITEM_BYTES {
            let message = format!("an item of {length} bytes is not allowed; allowed: at most 256 MiB");
            return Err(self.failure(from, MemberFailure::Failed(message)));
        }
        let mut bytes = vec![0; length as usize];
        self.exchange(number, &[], &mut [Incoming { from, phase: Phase::Item, bytes: &mut bytes }])?;
        Ok(bytes)
    }

    /// Allows a rank to send an item.
    pub(super) fn grant(&mut self, to: usize, number: u64) -> Result<(), Error> {
        self.exchange(number, &[Outgoing { to, phase: Phase::Credit, bytes: &[1] }], &mut [])
    }

    /// Waits until a rank allows to send an item.
    pub(super) fn wait_for_credit(&mut self, from: usize, number: u64) -> Result<(), Error> {
        self.exchange(number, &[], &mut [Incoming { from, phase: Phase::Credit, bytes: &mut [0] }])
    }

    /// Passes a result on; reports an error to all other members first.
    pub(super) fn conclude<T>(&mut self, result: Result<T, Error>) -> Result<T, Error> {
        if let Err(error) = &result {
            let own = self.rank();
            let (rank, failure) = match error {
                Error::Member { rank, failure, .. } => (*rank, failure.clone()),
                Error::Kernel { message, .. } => (own, MemberFailure::Failed(message.clone())),
                // Another member can take over its work.
                Error::NoDevice { .. } => (own, MemberFailure::Lost),
                Error::Deadline { .. } => (own, MemberFailure::Stalled),
                _ => (own, MemberFailure::Failed(error.to_string())),
            };
            let report = encode_report(rank, &failure);
            let tag = self.tag(REPORT_STEP, Phase::Report, 0, own);
            for to in (0..self.ranks()).filter(|&to| to != own) {
                // A member that does not receive the report notices the closed connection.
                wait(REPORT_LIMIT, |wait| self.member.transport.send(to, tag, &report, wait)).ok();
            }
        }
        result
    }

    fn send(&mut self, to: usize, step: u64, phase: Phase, chunk: u16, bytes: &[u8]) -> Result<(), Error> {
        let tag = self.tag(step, phase, chunk, self.rank());
        let result = wait(self.time_left()?, |wait| self.member.transport.send(to, tag, bytes, wait));
        result.map_err(|error| self.cause(to, &error))
    }

    fn receive(&mut self, from: usize, step: u64, phase: Phase, chunk: u16, bytes: &mut [u8]) -> Result<(), Error> {
        let tag = self.tag(step, phase, chunk, from);
        let result = wait(self.time_left()?, |wait| self.member.transport.receive(tag, bytes, wait));
        result.map_err(|error| self.cause(from, &error))
    }

    /// Returns the cause of an error of the connection to `rank`: what it has reported, otherwise what was observed.
    fn cause(&mut self, rank: usize, error: &transport::Error) -> Error {
        let observed = match error {
            transport::Error::Closed { .. } => MemberFailure::Lost,
            transport::Error::Stalled { .. } => return self.failure(rank, MemberFailure::Stalled),
            other => return self.failure(rank, MemberFailure::Failed(other.to_string())),
        };
        let mut report = [0; REPORT_BYTES];
        let tag = self.tag(REPORT_STEP, Phase::Report, 0, rank);
        let reported = wait(REPORT_LIMIT, |wait| self.member.transport.receive(tag, &mut report, wait));
        match reported.ok().and_then(|()| decode_report(&report)) {
            Some((rank, failure)) => self.failure(rank, failure),
            None => self.failure(rank, observed),
        }
    }

    pub(super) const fn failure(&self, rank: usize, failure: MemberFailure) -> Error {
        Error::Member { what: self.what, rank, failure }
    }

    const fn tag(&self, step: u64, phase: Phase, chunk: u16, from: usize) -> Tag {
        Tag { generation: self.member.generation, step, bucket: 0, phase: phase as u16, chunk, from: from as u16 }
    }
}

/// Hashes settings (FNV-1a over words): members that compute different things must not exchange them.
pub(super) fn hash(settings: impl IntoIterator<Item = u64>) -> u64 {
    settings.into_iter().fold(0xcbf2_9ce4_8422_2325, |hash, it| (hash ^ it).wrapping_mul(0x0000_0100_0000_01b3))
}

/// Calls `work` with a wait of at most `limit`.
fn wait<T>(limit: Duration, work: impl FnOnce(&mut Wait<'_>) -> T) -> T {
    work(&mut Wait::new(limit, &AtomicBool::new(false), &mut |_| false))
}

fn encode_report(rank: usize, failure: &MemberFailure) -> [u8; REPORT_BYTES] {
    let (kind, message) = match failure {
        MemberFailure::Lost => (0, ""),
        MemberFailure::Stalled => (1, ""),
        MemberFailure::Failed(message) => (2, message.as_str()),
    };
    let message = &message.as_bytes()[..message.floor_char_boundary(REPORT_BYTES - 4)];
    let mut bytes = [0; REPORT_BYTES];
    bytes[0] = kind;
    bytes[1..3].copy_from_slice(&(rank as u16).to_le_bytes());
    bytes[3] = message.len() as u8;
    bytes[4..4 + message.len()].copy_from_slice(message);
    bytes
}

fn decode_report(bytes: &[u8; REPORT_BYTES]) -> Option<(usize, MemberFailure)> {
    let rank = usize::from(u16::from_le_bytes([bytes[1], bytes[2]]));
    let message = bytes.get(4..4 + usize::from(bytes[3]))?;
    let failure = match bytes[0] {
        0 => MemberFailure::Lost,
        1 => MemberFailure::Stalled,
        2 => MemberFailure::Failed(String::from_utf8_lossy(message).into_owned()),
        _ => return None,
    };
    Some((rank, failure))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_survives_and_long_messages_are_cut_at_a_character() {
        for failure in [MemberFailure::Lost, MemberFailure::Stalled, MemberFailure::Failed("no memory".to_owned())] {
            assert_eq!(decode_report(&encode_report(300, &failure)), Some((300, failure)));
        }
        let long = MemberFailure::Failed("x".to_owned() + &"ä".repeat(200));
        let Some((2, MemberFailure::Failed(cut))) = decode_report(&encode_report(2, &long)) else {
            panic!("no report")
        };
        assert_eq!(cut, "x".to_owned() + &"ä".repeat(125));
        assert_eq!(decode_report(&[9; REPORT_BYTES]), None);
    }
}
