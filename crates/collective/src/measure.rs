//! Measures the links between the ranks of a generation, so that all ranks choose the same algorithm for the same size.
//!
//! Every pair exchanges a few small messages and one to four larger ones, in rounds in which each rank has one partner. Then all ranks exchange
//! what they measured: each derives the same [`Network`] from the same bytes.

use crate::cost::{Algorithm, Link};
use crate::message::Tag;
use crate::split;
use crate::transport::{Error, Transport, Wait};
use std::time::{Duration, Instant};

/// Bytes of a small message.
const PING_BYTES: usize = 64;
/// Small messages per pair, at least and at most; the first one waits for the peer and does not count.
const PINGS: std::ops::Range<u16> = 5..33;
/// Time after which no further small message is sent to a peer.
const PING_BUDGET: Duration = Duration::from_millis(3);
/// Bytes of a part of a larger message, as large as those of reductions.
const PART_BYTES: usize = 256 << 10;
/// Parts of the first and of each further larger message.
const PARTS: [u16; 4] = [1, 4, 4, 4];
/// Time after which no further larger message is sent to a peer.
const EXCHANGE_BUDGET: Duration = Duration::from_millis(10);
/// Bytes of what a rank sends about one link.
const LINK_BYTES: usize = 2 * 8;
/// Bytes of what a rank sends about itself.
const OWN_BYTES: usize = 2 * 8;
/// Smallest time that counts as measured, in seconds.
const RESOLUTION: f64 = 1e-9;

/// Phases of the messages; their step is 0, which no reduction has.
const PING: u16 = 0;
const ECHO: u16 = 1;
const COMMAND: u16 = 2;
const LARGE: u16 = 3;
const TABLE: u16 = 4;

/// The links of a generation: the same on all ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct Network {
    /// Properties of the slowest link, and of the slowest rank that adds.
    pub link: Link,
    /// Bytes per second of each rank over its fastest link, in rank order. Those that differ by less than half of an octave are equal: the
    /// fastest one divided by powers of 2.
    pub bandwidths: Vec<f64>,
}

impl Network {
    /// Returns a network of equal links that was not measured.
    pub fn assumed(link: Link, ranks: usize) -> Self {
        Self { link, bandwidths: vec![1.0 / link.beta; ranks] }
    }

    /// Returns the number of ranks.
    pub const fn ranks(&self) -> usize {
        self.bandwidths.len()
    }

    /// Returns the weights of the parts of a reduction: those of ranks with more bandwidth are larger, if the algorithm allows it.
    pub fn weights(&self, algorithm: Algorithm) -> Vec<f64> {
        match algorithm {
            Algorithm::Direct => split::weights(&self.bandwidths),
            _ => vec![1.0; self.ranks()],
        }
    }

    /// Returns the predicted seconds of an all-reduce of `bytes`.
    pub fn seconds(&self, algorithm: Algorithm, bytes: usize) -> f64 {
        let ranks = self.ranks();
        if algorithm != Algorithm::Direct || ranks < 3 {
            return self.link.seconds(algorithm, ranks, bytes);
        }
        let Link { alpha, gamma, overhead, .. } = self.link;
        let (further, size) = ((ranks - 2) as f64, bytes as f64);
        let weights = split::weights(&self.bandwidths);
        let wire = weights.iter().zip(&self.bandwidths).map(|(weight, bandwidth)| (1.0 + further * weight) / bandwidth);
        let largest = weights.iter().copied().fold(0.0, f64::max);
        let added = (ranks - 1) as f64 * largest * size * gamma;
        2.0 * (alpha + further * overhead) + size * wire.fold(0.0, f64::max) + added
    }

    /// Returns the cheapest algorithm for a size; with `rank_order`, only those that add in rank order.
    pub fn choose(&self, bytes: usize, rank_order: bool) -> Algorithm {
        Algorithm::cheapest(self.ranks(), rank_order, |algorithm| self.seconds(algorithm, bytes))
    }
}

/// What the first rank of a pair measured.
#[derive(Debug, Clone, Copy, Default)]
struct Measured {
    /// Seconds of a small message.
    latency: f64,
    /// Seconds per byte while both send.
    per_byte: f64,
    /// Processor seconds to send a small message.
    overhead: f64,
}

/// Measures the links between all ranks. Every rank of the generation calls it before its first reduction.
///
/// Takes at most about 15 ms per peer, unless one 256 kB message takes longer.
///
/// # Errors
/// The failed peer; the transport must be dropped.
pub fn measure(transport: &mut dyn Transport, generation: u64, wait: &mut Wait<'_>) -> Result<Network, Error> {
    let (rank, ranks) = (transport.rank(), transport.ranks());
    if ranks < 2 {
        return Ok(Network::assumed(Link::LOOPBACK, ranks));
    }
    let mut pair = Pair { transport, generation, wait, buffer: vec![0; PART_BYTES] };
    let mut measured = vec![Measured::default(); ranks];
    for round in 0..rounds(ranks) {
        match partner(rank, round, ranks) {
            Some(peer) if rank < peer => measured[peer] = pair.lead(peer)?,
            Some(peer) => pair.follow(peer)?,
            None => {}
        }
    }
    let overhead = measured.iter().map(|it| it.overhead).fold(0.0, f64::max);
    let own = encode(&measured, addition_seconds_per_byte(), overhead);
    Ok(network(&pair.exchange(&own)?))
}

/// Rounds in which every rank meets every other once.
const fn rounds(ranks: usize) -> usize {
    ranks + ranks % 2 - 1
}

/// Returns the partner of a rank in a round by the circle method; `None` if the rank has none.
fn partner(rank: usize, round: usize, ranks: usize) -> Option<usize> {
    let circle = rounds(ranks);
    let partner = match (rank == circle, (2 * circle + round - rank % circle) % circle) {
        // The last of an even number of ranks stands in the middle: it meets the one that would meet itself.
        (true, _) => (0..circle).find(|other| 2 * other % circle == round)?,
        (false, other) if other == rank => circle,
        (false, other) => other,
    };
    (partner < ranks).then_some(partner)
}

/// The messages of one rank with its partners.
struct Pair<'a, 'b, 'c> {
    transport: &'a mut dyn Transport,
    generation: u64,
    wait: &'b mut Wait<'c>,
    buffer: Vec<u8>,
}

impl Pair<'_, '_, '_> {
    fn tag(&self, phase: u16, chunk: u16, from: usize) -> Tag {
        Tag { generation: self.generation, step: 0, bucket: 0, phase, chunk, from: from as u16 }
    }

    fn send(&mut self, to: usize, phase: u16, chunk: u16, payload: &[u8]) -> Result<(), Error> {
        let tag = self.tag(phase, chunk, self.transport.rank());
        self.transport.send(to, tag, payload, self.wait)
    }

    fn receive(&mut self, from: usize, phase: u16, chunk: u16, into: &mut [u8]) -> Result<(), Error> {
        let tag = self.tag(phase, chunk, from);
        self.transport.receive(tag, into, self.wait)
    }

    /// Measures as the first of two.
    fn lead(&mut self, peer: usize) -> Result<Measured, Error> {
        let (latencies, sends) = self.lead_pings(peer)?;
        let shortest = latencies.iter().copied().fold(f64::INFINITY, f64::min);
        let per_byte = self.lead_exchanges(peer, shortest)?;
        Ok(Measured { latency: median(latencies), per_byte, overhead: median(sends) })
    }

    /// Returns the latencies, and the times to send, in seconds.
    fn lead_pings(&mut self, peer: usize) -> Result<(Vec<f64>, Vec<f64>), Error> {
        let mut message = [0_u8; PING_BYTES];
        let (mut latencies, mut sends) = (Vec::new(), Vec::new());
        let mut since = Instant::now();
        for number in 0..PINGS.end {
            // The first byte ends the series.
            let is_last = number + 1 == PINGS.end || (number + 1 >= PINGS.start && since.elapsed() >= PING_BUDGET);
            message[0] = u8::from(is_last);
            let started = Instant::now();
            self.send(peer, PING, number, &message)?;
            let sent = started.elapsed();
            self.receive(peer, ECHO, number, &mut message)?;
            if number == 0 {
                since = Instant::now();
                continue;
            }
            latencies.push(started.elapsed().as_secs_f64() / 2.0);
            sends.push(sent.as_secs_f64());
            if is_last {
                break;
            }
        }
        Ok((latencies, sends))
    }

    /// Returns the seconds per byte of the fastest exchange, less the latency of its command: other work only adds to the time.
    fn lead_exchanges(&mut self, peer: usize, latency: f64) -> Result<f64, Error> {
        let (mut fastest, mut number, since) = (f64::INFINITY, 0, Instant::now());
        for parts in PARTS {
            if number > 0 && since.elapsed() >= EXCHANGE_BUDGET {
                break;
            }
            let started = Instant::now();
            self.send(peer, COMMAND, number, &[parts as u8])?;
            self.exchange_parts(peer, number, parts)?;
            let seconds = transfer_seconds(started.elapsed().as_secs_f64(), latency);
            fastest = fastest.min(seconds / (usize::from(parts) * PART_BYTES) as f64);
            number += 1;
        }
        // No parts: the end.
        self.send(peer, COMMAND, number, &[0])?;
        Ok(fastest)
    }

    /// Answers as the second of two.
    fn follow(&mut self, peer: usize) -> Result<(), Error> {
        let mut message = [0_u8; PING_BYTES];
        for number in 0..PINGS.end {
            self.receive(peer, PING, number, &mut message)?;
            self.send(peer, ECHO, number, &message)?;
            if message[0] == 1 {
                break;
            }
        }
        for number in 0..=PARTS.len() as u16 {
            let mut parts = [0];
            self.receive(peer, COMMAND, number, &mut parts)?;
            match parts[0] {
                0 => break,
                parts => self.exchange_parts(peer, number, parts.into())?,
            }
        }
        Ok(())
    }

    /// Sends and receives so many parts.
    fn exchange_parts(&mut self, peer: usize, number: u16, parts: u16) -> Result<(), Error> {
        let mut buffer = std::mem::take(&mut self.buffer);
        let chunk = |part: u16| number * PARTS[1] + part;
        let parts = 0..parts;
        let sent = parts.clone().try_for_each(|part| self.send(peer, LARGE, chunk(part), &buffer));
        let received = sent
            .and_then(|()| parts.into_iter().try_for_each(|part| self.receive(peer, LARGE, chunk(part), &mut buffer)));
        self.buffer = buffer;
        received
    }

    /// Sends `own` to all ranks; returns what all ranks sent, in rank order.
    fn exchange(&mut self, own: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        let (rank, ranks) = (self.transport.rank(), self.transport.ranks());
        for to in (0..ranks).filter(|to| *to != rank) {
            self.send(to, TABLE, 0, own)?;
        }
        let mut all = vec![own.to_vec(); ranks];
        for from in (0..ranks).filter(|from| *from != rank) {
            self.receive(from, TABLE, 0, &mut all[from])?;
        }
        Ok(all)
    }
}

/// Returns the part of an exchange that moves its bytes: at least half of it, so that a latency measured while the machine had other work
/// makes no link look faster than twice its speed.
fn transfer_seconds(elapsed: f64, latency: f64) -> f64 {
    (elapsed - latency).max(elapsed / 2.0).max(RESOLUTION)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default().max(RESOLUTION)
}

/// Measures how long this processor takes to add a byte of `f32` values.
fn addition_seconds_per_byte() -> f64 {
    let (mut sums, values) = (vec![0.0_f32; PART_BYTES / 4], vec![1.0_f32; PART_BYTES / 4]);
    let mut fastest = f64::INFINITY;
    for _ in 0..4 {
        let started = Instant::now();
        sums.iter_mut().zip(&values).for_each(|(sum, value)| *sum += value);
        std::hint::black_box(&mut sums);
        fastest = fastest.min(started.elapsed().as_secs_f64());
    }
    fastest.max(RESOLUTION) / PART_BYTES as f64
}

fn encode(links: &[Measured], gamma: f64, overhead: f64) -> Vec<u8> {
    let own = [gamma, overhead].into_iter();
    own.chain(links.iter().flat_map(|it| [it.latency, it.per_byte])).flat_map(f64::to_le_bytes).collect()
}

/// Derives the network from the tables of all ranks, in rank order.
fn network(tables: &[Vec<u8>]) -> Network {
    let ranks = tables.len();
    let word = |bytes: &[u8], at: usize| {
        let bytes: [u8; 8] = std::array::from_fn(|byte| bytes.get(at + byte).copied().unwrap_or_default());
        let value = f64::from_le_bytes(bytes);
        if value.is_finite() && value > 0.0 { value } else { RESOLUTION }
    };
    let per_byte = |bytes: &[u8], at: usize| word(bytes, at).max(RESOLUTION * RESOLUTION);
    let mut link = Link { alpha: 0.0, beta: 0.0, gamma: 0.0, overhead: 0.0 };
    let mut bandwidths = vec![0.0_f64; ranks];
    for (rank, table) in tables.iter().enumerate() {
        link.gamma = link.gamma.max(per_byte(table, 0));
        link.overhead = link.overhead.max(word(table, 8));
        for peer in rank + 1..ranks {
            let at = OWN_BYTES + peer * LINK_BYTES;
            let (latency, per_byte) = (word(table, at), per_byte(table, at + 8));
            link.alpha = link.alpha.max(latency);
            link.beta = link.beta.max(per_byte);
            for end in [rank, peer] {
                bandwidths[end] = bandwidths[end].max(1.0 / per_byte);
            }
        }
    }
    Network { link, bandwidths: octaves(&bandwidths) }
}

/// Divides the fastest bandwidth by powers of 2: the noise of a measurement does not make parts unequal.
fn octaves(bandwidths: &[f64]) -> Vec<f64> {
    let fastest = bandwidths.iter().copied().fold(0.0, f64::max);
    let octave = |bandwidth: f64| {
        // sqrt(1/2) is half of an octave below the fastest.
        let mut level = fastest;
        while level > bandwidth / std::f64::consts::FRAC_1_SQRT_2 {
            level /= 2.0;
        }
        level
    };
    bandwidths.iter().map(|bandwidth| octave(bandwidth.max(fastest * 1e-6))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::{Memory, memory_group};
    use proptest::prelude::*;
    use std::sync::atomic::AtomicBool;

    /// Delays what a rank sends, as a link of this bandwidth and latency would.
    struct Slow {
        inner: Memory,
        seconds_per_byte: f64,
        latency: f64,
    }

    impl Transport for Slow {
        fn rank(&self) -> usize {
            self.inner.rank()
        }

        fn ranks(&self) -> usize {
            self.inner.ranks()
        }

        fn send(&mut self, to: usize, tag: Tag, payload: &[u8], wait: &mut Wait<'_>) -> Result<(), Error> {
            std::thread::sleep(Duration::from_secs_f64(self.latency + self.seconds_per_byte * payload.len() as f64));
            self.inner.send(to, tag, payload, wait)
        }

        fn receive(&mut self, tag: Tag, into: &mut [u8], wait: &mut Wait<'_>) -> Result<(), Error> {
            self.inner.receive(tag, into, wait)
        }
    }

    /// Measures a group of threads, each with its seconds per byte and latency.
    fn measured(ranks: &[(f64, f64)]) -> Vec<Network> {
        let cancel = AtomicBool::new(false);
        let rank = |inner, (seconds_per_byte, latency)| {
            let cancel = &cancel;
            move || {
                let mut keep_waiting = |_| true;
                let mut wait = Wait::new(Duration::from_secs(1), cancel, &mut keep_waiting);
                let mut slow = Slow { inner, seconds_per_byte, latency };
                measure(&mut slow, 3, &mut wait).unwrap()
            }
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = memory_group(ranks.len())
                .into_iter()
                .zip(ranks)
                .map(|(inner, slow)| scope.spawn(rank(inner, *slow)))
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn every_rank_meets_every_other_once_and_one_at_a_time() {
        for ranks in 2..12 {
            let mut met = vec![vec![0; ranks]; ranks];
            for round in 0..rounds(ranks) {
                for (rank, met) in met.iter_mut().enumerate() {
                    let Some(peer) = partner(rank, round, ranks) else { continue };
                    assert_eq!(partner(peer, round, ranks), Some(rank), "round {round} of {ranks}");
                    met[peer] += 1;
                }
            }
            for (rank, met) in met.iter().enumerate() {
                let expected: Vec<_> = (0..ranks).map(|peer| usize::from(peer != rank)).collect();
                assert_eq!(*met, expected, "rank {rank} of {ranks}");
            }
        }
    }

    #[test]
    fn all_ranks_measure_the_same_network_and_no_rank_faster_than_it_is() {
        let per_byte = 20e-9;
        let networks = measured(&[(0.0, 0.0), (0.0, 0.0), (0.0, 0.0), (per_byte, 1e-4)]);
        assert!(networks.iter().all(|it| *it == networks[0]), "{networks:?}");
        // Other work on this machine only adds to the times: these bounds always hold.
        let Network { link, bandwidths } = &networks[0];
        assert!(link.beta >= per_byte / 2.0 && link.alpha >= 5e-5, "{link:?}");
        // Twice its speed, and half of an octave.
        assert!(bandwidths[3] <= 2.0 * 1.5 / per_byte, "{bandwidths:?}");
    }

    #[test]
    fn slow_rank_gets_a_smaller_part() {
        let fast = (1_u64 << 30) as f64;
        let per_byte = |a, b| if a == 3 || b == 3 { 20.0 / fast } else { 1.0 / fast };
        let link = |a, b| Measured { latency: 1e-5, per_byte: per_byte(a, b), overhead: 1e-6 };
        let table = |rank| encode(&(0..4).map(|peer| link(rank, peer)).collect::<Vec<_>>(), 1e-10, 1e-6);
        let network = network(&(0..4).map(table).collect::<Vec<_>>());
        assert_eq!(network.bandwidths[..3], [fast; 3]);
        // 1/20 is nearest to 1/16 of the fastest.
        assert_eq!(network.bandwidths[3], fast / 16.0);
        let weights = network.weights(Algorithm::Direct);
        assert!(weights[3] < weights[0] / 4.0, "{weights:?}");
    }

    #[test]
    fn noisy_latency_makes_no_link_look_infinitely_fast() {
        assert_eq!(transfer_seconds(8.0, 1.0), 7.0);
        assert_eq!(transfer_seconds(8.0, 7.0), 4.0);
        assert_eq!(transfer_seconds(8.0, 16.0), 4.0);
    }

    #[test]
    fn latency_moves_the_size_from_which_parts_pay() {
        let network = |alpha: f64| Network::assumed(Link { alpha, ..Link::LOOPBACK }, 4);
        let direct_from = |alpha: f64| {
            (6..30).map(|shift| 1_usize << shift).find(|bytes| network(alpha).choose(*bytes, true) == Algorithm::Direct)
        };
        let (near, far) = (direct_from(1e-6).unwrap(), direct_from(1e-3).unwrap());
        assert!(near < far, "{near} {far}");
    }

    #[test]
    fn unequal_bandwidths_make_parts_unequal_but_noise_does_not() {
        assert_eq!(octaves(&[10.0, 8.0, 7.2]), [10.0; 3]);
        assert_eq!(octaves(&[10.0, 5.1, 1.2]), [10.0, 5.0, 1.25]);
        let unequal = Network { link: Link::LOOPBACK, bandwidths: vec![4e9, 4e9, 1e9, 1e9] };
        assert!(unequal.weights(Algorithm::Direct)[3] < 0.01);
        assert_eq!(unequal.weights(Algorithm::Ring), [1.0; 4]);
        let equal = Network { link: Link { beta: 1e-9, ..Link::LOOPBACK }, bandwidths: vec![1e9; 4] };
        let mb = 16 << 20;
        assert!(unequal.seconds(Algorithm::Direct, mb) < equal.seconds(Algorithm::Direct, mb));
    }

    proptest! {
        #[test]
        fn tables_of_any_bytes_give_finite_weights(tables in (2_usize..6).prop_flat_map(|ranks| {
            let table = proptest::collection::vec(any::<u8>(), OWN_BYTES + ranks * LINK_BYTES);
            proptest::collection::vec(table, ranks)
        })) {
            let network = network(&tables);
            let weights = network.weights(network.choose(1 << 20, true));
            prop_assert!(weights.iter().all(|it| it.is_finite() && *it >= 0.0), "{network:?} {weights:?}");
        }
    }
}
