//! All-reduce by a library between GPUs, such as NCCL: a candidate that is formed and measured with each generation.
//!
//! A library promises no order of additions, so it is a candidate only where any order is allowed. All ranks use it or none: they agree when it is
//! formed, and after every sum. A sum that failed on one rank is repeated by all over the transport.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use crate::cost::Algorithm;
use crate::executor::Reduction;
use crate::measure::Network;
use crate::message::Tag;
use crate::transport::{Error, Transport, Wait};

/// Longest wait for all ranks to join: libraries connect GPUs within a few seconds.
const JOIN_LIMIT: Duration = Duration::from_secs(10);
/// Elements and repeats of the measured sums.
const SMALL: (usize, u64) = (1 << 10, 8);
const LARGE: (usize, u64) = (1 << 20, 4);
/// Bytes of an id that the ranks of a communicator share.
pub const ID_BYTES: usize = 128;
/// Bytes of what a rank offers: whether it has a library, the version, the GPU.
const OFFER_BYTES: usize = 1 + 4 + 16;
/// Bucket of the messages that form a communicator, and of measured sums; their step is 0, which no reduction has.
const FORM: u32 = 1;
const MEASURE: u32 = 2;
/// Phases of the messages.
const OFFER: u16 = 0;
const NAME: u16 = 1;
const JOINED: u16 = 2;
const TABLE: u16 = 3;
/// Phase in which ranks agree that a sum succeeded; schedules have fewer.
const AGREE: u16 = u16::MAX;

/// A GPU and the library that sums over it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Offer {
    /// Version of the library; ranks use the same.
    pub version: u32,
    /// Names the GPU among those of all hosts; each rank has its own.
    pub gpu: [u8; 16],
}

/// A library of this process.
pub trait Library {
    /// Returns what this rank offers.
    fn offer(&self) -> Offer;

    /// Makes the id of a new communicator.
    ///
    /// # Errors
    /// Why it failed.
    fn unique_id(&self) -> Result<[u8; ID_BYTES], String>;

    /// Joins a communicator as `(rank, ranks)`; waits for the others while `keep_waiting` returns true.
    ///
    /// # Errors
    /// Why it failed.
    fn join(
        &self,
        id: &[u8; ID_BYTES],
        rank: (usize, usize),
        keep_waiting: &mut dyn FnMut() -> bool,
    ) -> Result<Box<dyn Communicator>, String>;
}

/// One rank of a communicator.
pub trait Communicator: Send {
    /// Sums vectors of all ranks, while `keep_waiting` returns true.
    ///
    /// # Errors
    /// Why it failed; the communicator must be dropped.
    fn all_reduce(
        &mut self,
        input: &[f32],
        output: &mut [f32],
        keep_waiting: &mut dyn FnMut() -> bool,
    ) -> Result<(), String>;
}

/// A communicator of all ranks of a generation, with its measured times.
pub struct Accelerator {
    communicator: Box<dyn Communicator>,
    /// Seconds of a sum of few elements, on the slowest rank.
    pub latency: f64,
    /// Seconds per byte beyond it, on the slowest rank.
    pub per_byte: f64,
}

impl std::fmt::Debug for Accelerator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { latency, per_byte, .. } = self;
        f.debug_struct("Accelerator").field("latency", latency).field("per_byte", per_byte).finish_non_exhaustive()
    }
}

impl Accelerator {
    /// Forms and measures the communicator of a generation. Every rank calls it, with its library or the reason why it has none; the inner error is
    /// the reason why there is no communicator, which concerns all ranks.
    ///
    /// # Errors
    /// The failed peer; the transport must be dropped.
    pub fn form(
        library: Result<&dyn Library, String>,
        transport: &mut dyn Transport,
        generation: u64,
        wait: &mut Wait<'_>,
    ) -> Result<Result<Self, String>, Error> {
        let mut ranks = Ranks { transport, generation, wait };
        let own = library.as_ref().map_or_else(|_| vec![0; OFFER_BYTES], |it| encode(it.offer()));
        let offers = ranks.exchange((FORM, OFFER, 0), &own)?;
        let library = match (library, obstacle(&offers)) {
            (Ok(library), None) => library,
            (Err(reason), _) | (Ok(_), Some(reason)) => return Ok(Err(reason)),
        };
        let own = if ranks.transport.rank() == 0 { library.unique_id() } else { Ok([0; ID_BYTES]) };
        let names = ranks.exchange((FORM, NAME, 0), own.as_ref().map_or(&[0; ID_BYTES], |id| id))?;
        let id: [u8; ID_BYTES] = names[0][..].try_into().expect("the exchange has this length");
        let joined = own.and_then(|_| ranks.join(library, &id));
        let all = ranks.exchange((FORM, JOINED, 0), &[u8::from(joined.is_ok())])?;
        let communicator = match (joined, all.iter().position(|it| it[0] == 0)) {
            (Ok(communicator), None) => communicator,
            (Err(reason), _) => return Ok(Err(reason)),
            (Ok(_), Some(rank)) => return Ok(Err(format!("rank {rank} failed to join"))),
        };
        let mut own = Self { communicator, latency: 0.0, per_byte: 0.0 };
        Ok(if own.measure(&mut ranks)? { Ok(own) } else { Err("a measured sum failed".to_owned()) })
    }

    /// Returns whether it is faster than an algorithm for a size.
    pub fn is_faster(&self, network: &Network, algorithm: Algorithm, bytes: usize) -> bool {
        self.latency + self.per_byte * (bytes as f64) < network.seconds(algorithm, bytes)
    }

    /// Sums `input` of all ranks into `output`; returns whether all ranks succeeded. If not, the communicator must be dropped, on all ranks.
    ///
    /// # Errors
    /// The failed peer; the transport must be dropped.
    pub fn all_reduce(
        &mut self,
        transport: &mut dyn Transport,
        reduction: Reduction,
        input: &[f32],
        output: &mut [f32],
        wait: &mut Wait<'_>,
    ) -> Result<bool, Error> {
        let Reduction { generation, step, bucket } = reduction;
        let mut ranks = Ranks { transport, generation, wait };
        self.sum(&mut ranks, (step, bucket, 0), input, output)
    }

    fn sum(
        &mut self,
        ranks: &mut Ranks<'_, '_, '_>,
        (step, bucket, number): (u64, u32, u16),
        input: &[f32],
        output: &mut [f32],
    ) -> Result<bool, Error> {
        // A rank whose peer failed must not wait longer than its connections do.
        let (started, limit) = (Instant::now(), ranks.wait.limit());
        let mut keep_waiting = || started.elapsed() < limit && !ranks.wait.is_cancelled();
        let outcome = self.communicator.all_reduce(input, output, &mut keep_waiting);
        let all = ranks.exchange_at(step, (bucket, AGREE, number), &[u8::from(outcome.is_ok())])?;
        Ok(all.iter().all(|it| it[0] == 1))
    }

    /// Measures sums of two sizes; returns whether all succeeded.
    fn measure(&mut self, ranks: &mut Ranks<'_, '_, '_>) -> Result<bool, Error> {
        let mut number = 0;
        let mut fastest = |(elements, repeats): (usize, u64)| -> Result<Option<f64>, Error> {
            let (input, mut output) = (vec![1.0; elements], vec![0.0; elements]);
            let mut fastest = f64::INFINITY;
            for repeat in 0..=repeats {
                number += 1;
                let started = Instant::now();
                if !self.sum(ranks, (0, MEASURE, number), &input, &mut output)? {
                    return Ok(None);
                }
                // The first one warms up.
                if repeat > 0 {
                    fastest = fastest.min(started.elapsed().as_secs_f64());
                }
            }
            Ok(Some(fastest))
        };
        let Some(small) = fastest(SMALL)? else { return Ok(false) };
        let Some(large) = fastest(LARGE)? else { return Ok(false) };
        let bytes = size_of::<f32>() * (LARGE.0 - SMALL.0);
        let own = [small, (large - small).max(0.0) / bytes as f64].map(f64::to_le_bytes).concat();
        let tables = ranks.exchange((FORM, TABLE, 0), &own)?;
        let slowest = |at: usize| tables.iter().map(|it| number_at(it, at)).fold(0.0, f64::max);
        (self.latency, self.per_byte) = (slowest(0), slowest(8));
        Ok(true)
    }
}

/// Messages between all ranks.
struct Ranks<'a, 'b, 'c> {
    transport: &'a mut dyn Transport,
    generation: u64,
    wait: &'b mut Wait<'c>,
}

impl Ranks<'_, '_, '_> {
    /// Sends `own` to all ranks; returns what all ranks sent, in rank order, each of the same length.
    fn exchange(&mut self, name: (u32, u16, u16), own: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        self.exchange_at(0, name, own)
    }

    fn exchange_at(
        &mut self,
        step: u64,
        (bucket, phase, chunk): (u32, u16, u16),
        own: &[u8],
    ) -> Result<Vec<Vec<u8>>, Error> {
        let (rank, ranks, generation) = (self.transport.rank(), self.transport.ranks(), self.generation);
        let tag = |from: usize| Tag { generation, step, bucket, phase, chunk, from: from as u16 };
        for to in (0..ranks).filter(|to| *to != rank) {
            self.transport.send(to, tag(rank), own, self.wait)?;
        }
        let mut all = vec![own.to_vec(); ranks];
        for from in (0..ranks).filter(|from| *from != rank) {
            self.transport.receive(tag(from), &mut all[from], self.wait)?;
        }
        Ok(all)
    }

    fn join(&self, library: &dyn Library, id: &[u8; ID_BYTES]) -> Result<Box<dyn Communicator>, String> {
        let started = Instant::now();
        let mut keep_waiting = || started.elapsed() < JOIN_LIMIT && !self.wait.is_cancelled();
        library.join(id, (self.transport.rank(), self.transport.ranks()), &mut keep_waiting)
    }
}

fn encode(Offer { version, gpu }: Offer) -> Vec<u8> {
    [&[1][..], &version.to_le_bytes(), &gpu].concat()
}

/// Returns why ranks with these offers form no communicator, the same on all ranks.
fn obstacle(offers: &[Vec<u8>]) -> Option<String> {
    if let Some(rank) = offers.iter().position(|it| it[0] == 0) {
        return Some(format!("rank {rank} has no library or GPU"));
    }
    let version = |rank: usize| &offers[rank][1..5];
    if let Some(rank) = (1..offers.len()).find(|rank| version(*rank) != version(0)) {
        return Some(format!("rank {rank} has another version than rank 0"));
    }
    let mut gpus = BTreeSet::new();
    let shared = offers.iter().position(|it| !gpus.insert(&it[5..]))?;
    Some(format!("rank {shared} shares the GPU of another one"))
}

fn number_at(table: &[u8], at: usize) -> f64 {
    let value = f64::from_le_bytes(table[at..at + 8].try_into().expect("the exchange has this length"));
    // Of a damaged rank: never the fastest.
    if value.is_finite() && value >= 0.0 { value } else { f64::MAX }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::Link;
    use crate::transport::{Memory, memory_group};
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{Arc, Mutex};

    const PATIENT: Duration = Duration::from_secs(60);

    /// Sums over threads in the reverse order of the ranks.
    #[derive(Default)]
    struct Sums {
        parts: Mutex<Vec<Vec<Option<Vec<f32>>>>>,
        /// A rank failed.
        is_broken: AtomicBool,
    }

    struct OverThreads {
        offer: Offer,
        sums: Arc<Sums>,
        joins: bool,
        /// Number of the sum that fails on this rank.
        fails_at: usize,
    }

    struct Rank {
        sums: Arc<Sums>,
        rank: (usize, usize),
        next: usize,
        fails_at: usize,
    }

    impl Library for OverThreads {
        fn offer(&self) -> Offer {
            self.offer
        }

        fn unique_id(&self) -> Result<[u8; ID_BYTES], String> {
            Ok([9; ID_BYTES])
        }

        fn join(
            &self,
            id: &[u8; ID_BYTES],
            rank: (usize, usize),
            _: &mut dyn FnMut() -> bool,
        ) -> Result<Box<dyn Communicator>, String> {
            assert_eq!(*id, [9; ID_BYTES], "the id of rank 0");
            let own = Rank { sums: Arc::clone(&self.sums), rank, next: 0, fails_at: self.fails_at };
            if self.joins { Ok(Box::new(own)) } else { Err("out of memory".to_owned()) }
        }
    }

    impl Communicator for Rank {
        fn all_reduce(
            &mut self,
            input: &[f32],
            output: &mut [f32],
            keep_waiting: &mut dyn FnMut() -> bool,
        ) -> Result<(), String> {
            let (number, (rank, ranks)) = (self.next, self.rank);
            self.next += 1;
            if number == self.fails_at {
                self.sums.is_broken.store(true, Ordering::Release);
                return Err("remote error".to_owned());
            }
            let mut parts = self.sums.parts.lock().unwrap();
            while parts.len() <= number {
                parts.push(vec![None; ranks]);
            }
            parts[number][rank] = Some(input.to_vec());
            while !parts[number].iter().all(Option::is_some) {
                drop(parts);
                if !keep_waiting() || self.sums.is_broken.load(Ordering::Acquire) {
                    return Err("gave up".to_owned());
                }
                std::thread::yield_now();
                parts = self.sums.parts.lock().unwrap();
            }
            output.fill(0.0);
            for part in parts[number].iter().rev().flatten() {
                output.iter_mut().zip(part).for_each(|(sum, value)| *sum += value);
            }
            Ok(())
        }
    }

    /// Runs ranks as threads.
    fn over<T: Send>(ranks: usize, work: impl Fn(&mut Memory, &mut Wait<'_>) -> T + Sync) -> Vec<T> {
        let cancel = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (work, cancel) = (&work, &cancel);
            let rank = |mut transport: Memory| {
                scope.spawn(move || work(&mut transport, &mut Wait::new(PATIENT, cancel, &mut |_| true)))
            };
            let threads: Vec<_> = memory_group(ranks).into_iter().map(rank).collect();
            threads.into_iter().map(|it| it.join().unwrap()).collect()
        })
    }

    fn library(sums: &Arc<Sums>, rank: usize) -> OverThreads {
        let offer = Offer { version: 22_000, gpu: [rank as u8; 16] };
        OverThreads { offer, sums: Arc::clone(sums), joins: true, fails_at: usize::MAX }
    }

    const FIRST: Reduction = Reduction { generation: 3, step: 1, bucket: 0 };

    #[test]
    fn ranks_with_gpus_of_their_own_sum_with_the_library() {
        let sums = Arc::default();
        let outputs = over(3, |transport, wait| {
            let rank = transport.rank();
            let own = library(&sums, rank);
            let mut formed = Accelerator::form(Ok(&own), transport, 3, wait).unwrap().unwrap();
            let mut output = [0.0];
            // In another order the result is 0.
            let input = [[1e30_f32, -1e30, 1.0][2 - rank]];
            assert!(formed.all_reduce(transport, FIRST, &input, &mut output, wait).unwrap());
            (output[0], formed.latency, formed.per_byte)
        });
        assert!(outputs.iter().all(|it| *it == outputs[0]), "{outputs:?}");
        assert_eq!(outputs[0].0, 1.0);
        assert!(outputs[0].1 > 0.0 && outputs[0].2 > 0.0, "{outputs:?}");
    }

    #[test]
    fn measured_times_decide_by_size() {
        let rank = Rank { sums: Arc::default(), rank: (0, 2), next: 0, fails_at: 0 };
        let far = Accelerator { communicator: Box::new(rank), latency: 1e-4, per_byte: 1e-11 };
        let network = Network::assumed(Link::LOOPBACK, 2);
        let is_faster = |bytes| far.is_faster(&network, network.choose(bytes, false), bytes);
        assert!(!is_faster(4 << 10) && is_faster(64 << 20));
    }

    #[test]
    fn any_obstacle_of_one_rank_leaves_all_ranks_without_library() {
        let reasons = |change: &(dyn Fn(usize, &mut OverThreads) -> Result<(), String> + Sync)| {
            let sums = Arc::default();
            over(3, |transport, wait| {
                let mut own = library(&sums, transport.rank());
                let found = change(transport.rank(), &mut own);
                let found = found.map(|()| &own as &dyn Library);
                match Accelerator::form(found, transport, 3, wait).unwrap() {
                    Ok(_) => panic!("rank {} has an obstacle", transport.rank()),
                    Err(obstacle) => obstacle,
                }
            })
        };
        let absent = reasons(&|rank, _| if rank == 1 { Err("nccl: not found".to_owned()) } else { Ok(()) });
        assert_eq!(absent, ["rank 1 has no library or GPU", "nccl: not found", "rank 1 has no library or GPU"]);
        let other = reasons(&|rank, own| {
            own.offer.version += u32::from(rank == 2);
            Ok(())
        });
        assert_eq!(other, ["rank 2 has another version than rank 0"; 3]);
        let shared = reasons(&|_, own| {
            own.offer.gpu = [7; 16];
            Ok(())
        });
        assert_eq!(shared, ["rank 1 shares the GPU of another one"; 3]);
        let failed = reasons(&|rank, own| {
            own.joins = rank != 2;
            Ok(())
        });
        assert_eq!(failed, ["rank 2 failed to join", "rank 2 failed to join", "out of memory"]);
    }

    #[test]
    fn sum_that_fails_on_one_rank_fails_on_all() {
        let (sums, measured) = (Arc::default(), (SMALL.1 + LARGE.1 + 2) as usize);
        let succeeded = over(2, |transport, wait| {
            let rank = transport.rank();
            let mut own = library(&sums, rank);
            if rank == 1 {
                own.fails_at = measured + 1;
            }
            let mut formed = Accelerator::form(Ok(&own), transport, 3, wait).unwrap().unwrap();
            let mut sum = |step| {
                let reduction = Reduction { step, ..FIRST };
                formed.all_reduce(transport, reduction, &[1.0], &mut [0.0], wait).unwrap()
            };
            [sum(1), sum(2)]
        });
        assert_eq!(succeeded, [[true, false]; 2]);
    }
}
