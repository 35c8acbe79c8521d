//! Reductions over threads of this process, over TCP on the loopback interface and through shared memory.
#![allow(clippy::unwrap_used)] // Helpers of tests.

use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::{Duration, Instant};

use engram_collective::compress::{Compression, Compressor, decode};
use engram_collective::cost::Algorithm;
use engram_collective::executor::{Executor, Plan, Reduction};
use engram_collective::low_rank::LowRank;
use engram_collective::message::{self, Tag};
use engram_collective::transport::{Counters, Error, Memory, Tcp, TcpOptions, Transport, Wait, memory_group};
use engram_collective::tree::{LEAVES, LeafSums};

const FIRST: Reduction = Reduction { generation: 1, step: 1, bucket: 0 };
const PATIENT: Duration = Duration::from_secs(20);

fn listeners(ranks: usize) -> (Vec<TcpListener>, Vec<SocketAddr>) {
    let listeners: Vec<TcpListener> = (0..ranks).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    let addresses = listeners.iter().map(|it| it.local_addr().unwrap()).collect();
    (listeners, addresses)
}

/// What carries payloads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Medium {
    Sockets,
    SharedMemory,
}

const MEDIA: [Medium; 2] = [Medium::Sockets, Medium::SharedMemory];

fn options(medium: Medium) -> TcpOptions {
    TcpOptions { connect: PATIENT, shared_memory: medium == Medium::SharedMemory, ..TcpOptions::default() }
}

fn connect(rank: usize, addresses: &[SocketAddr], listener: &TcpListener, medium: Medium, streams: usize) -> Tcp {
    let options = TcpOptions { streams, ..options(medium) };
    let transport = Tcp::connect(rank, 1, addresses, listener, None, options).unwrap();
    let peers = addresses.len() - 1;
    let (shared, each) = if medium == Medium::SharedMemory { (peers, 1) } else { (0, streams) };
    assert_eq!(transport.shared_connections(), shared, "{medium:?}");
    assert_eq!(transport.streams(), if peers == 0 { 0 } else { each }, "{medium:?}");
    transport
}

/// Runs `work` on each rank in a thread, over TCP with two connections per peer.
fn over_tcp<T: Send>(ranks: usize, work: impl Fn(&mut Tcp) -> T + Sync) -> Vec<T> {
    over(Medium::Sockets, ranks, work)
}

fn over<T: Send>(medium: Medium, ranks: usize, work: impl Fn(&mut Tcp) -> T + Sync) -> Vec<T> {
    let (listeners, addresses) = listeners(ranks);
    let (work, addresses) = (&work, &addresses);
    thread::scope(|scope| {
        let threads: Vec<_> = listeners
            .into_iter()
            .enumerate()
            .map(|(rank, listener)| scope.spawn(move || work(&mut connect(rank, addresses, &listener, medium, 2))))
            .collect();
        threads.into_iter().map(|it| it.join().unwrap()).collect()
    })
}

fn over_memory<T: Send>(ranks: usize, work: impl Fn(&mut Memory) -> T + Sync) -> Vec<T> {
    let work = &work;
    thread::scope(|scope| {
        let start = |mut transport: Memory| scope.spawn(move || work(&mut transport));
        let threads: Vec<_> = memory_group(ranks).into_iter().map(start).collect();
        threads.into_iter().map(|it| it.join().unwrap()).collect()
    })
}

fn wait<T>(limit: Duration, work: impl FnOnce(&mut Wait<'_>) -> T) -> T {
    let cancel = AtomicBool::new(false);
    work(&mut Wait::new(limit, &cancel, &mut |_| false))
}

fn input(rank: usize, elements: usize) -> Vec<f32> {
    (0..elements).map(|index| ((rank * 7_919 + index * 104_729) % 1_009) as f32 * 1e-3 - 0.4).collect()
}

fn reduce(
    transport: &mut dyn Transport,
    algorithm: Algorithm,
    reduction: Reduction,
    input: &[f32],
) -> Result<Vec<f32>, Error> {
    let weights = vec![1.0; transport.ranks()];
    let plan = Plan::new(algorithm, transport.rank(), input.len(), &weights);
    let mut output = vec![f32::NAN; input.len()];
    let mut executor = Executor::new();
    wait(PATIENT, |wait| executor.all_reduce(transport, reduction, &plan, input, &mut output, wait))?;
    Ok(output)
}

fn check(algorithm: Algorithm, elements: usize, outputs: &[Vec<f32>]) {
    let ranks = outputs.len();
    let inputs: Vec<Vec<f32>> = (0..ranks).map(|rank| input(rank, elements)).collect();
    for index in 0..elements {
        let in_order = inputs[1..].iter().fold(inputs[0][index], |sum, it| sum + it[index]);
        let exact: f64 = inputs.iter().map(|it| f64::from(it[index])).sum();
        let found = outputs[0][index];
        assert!((f64::from(found) - exact).abs() < 1e-5, "{algorithm:?} of {ranks}, {index}: {found} {exact}");
        assert!(
            outputs.iter().all(|it| it[index].to_bits() == found.to_bits()),
            "{algorithm:?}: equal bits on all ranks"
        );
        assert!(
            !algorithm.adds_in_rank_order() || found.to_bits() == in_order.to_bits(),
            "{algorithm:?} in rank order"
        );
    }
}

#[test]
fn every_algorithm_gives_all_ranks_the_same_bits_of_the_sum() {
    for ranks in 1..=4 {
        for algorithm in Algorithm::ALL.into_iter().filter(|it| it.supports(ranks)) {
            // None, one, some; several chunks; more than the buffers of the sockets hold.
            for elements in [0, 1, 1_000, 200_001] {
                let work = |transport: &mut dyn Transport| {
                    let input = input(transport.rank(), elements);
                    reduce(transport, algorithm, FIRST, &input).unwrap()
                };
                check(algorithm, elements, &over_memory(ranks, |it| work(it)));
                for medium in MEDIA {
                    check(algorithm, elements, &over(medium, ranks, |it| work(it)));
                }
            }
        }
    }
    let elements = 3_000_000;
    let work = |it: &mut Tcp| {
        let input = input(it.rank(), elements);
        reduce(it, Algorithm::Direct, FIRST, &input).unwrap()
    };
    for medium in MEDIA {
        check(Algorithm::Direct, elements, &over(medium, 2, work));
    }
}

/// Returns payload bytes on the busiest direction of a socket owner, relative to the lower bound `2 (n - 1) / n S`.
fn busiest(ranks: usize, algorithm: Algorithm) -> f64 {
    let elements = 300_000;
    let counters: Vec<Counters> = over_tcp(ranks, |it| {
        let input = input(it.rank(), elements);
        reduce(it, algorithm, FIRST, &input).unwrap();
        it.counters()
    });
    let busiest = counters.iter().map(|it| it.sent.max(it.received)).max().unwrap();
    busiest as f64 / (2.0 * (ranks - 1) as f64 / ranks as f64 * 4.0 * elements as f64)
}

#[test]
fn no_socket_carries_more_than_the_bandwidth_optimal_share() {
    for ranks in 2..=4 {
        for algorithm in [Algorithm::Direct, Algorithm::Ring] {
            let share = busiest(ranks, algorithm);
            assert!((0.99..1.05).contains(&share), "{algorithm:?} of {ranks}: {share}");
        }
    }
    let baseline = busiest(4, Algorithm::GatherBroadcast);
    assert!(baseline > 1.9, "gather and broadcast must be found: {baseline}");
}

#[test]
fn buckets_that_complete_in_any_order_are_not_confused_with_any_compression() {
    let (ranks, buckets, elements) = (3, 4_u32, 777);
    let all =
        [Compression::None, Compression::BFloat16, Compression::Float16, Compression::TopK(0.1), Compression::OneBit];
    for (step, compression) in all.into_iter().enumerate() {
        let encoded = |rank: usize, bucket: u32| {
            let gradient: Vec<f32> = input(rank, elements).iter().map(|it| it * (1.0 + bucket as f32)).collect();
            Compressor::new(compression, elements).unwrap().encode(&gradient, ranks).unwrap()
        };
        let tag = |bucket: u32, from: usize| Tag {
            generation: 1,
            step: step as u64,
            bucket,
            phase: 0,
            chunk: 0,
            from: from as u16,
        };
        let work = |transport: &mut dyn Transport| {
            let rank = transport.rank();
            // Each rank completes its buckets in another order, and takes them in yet another.
            for index in 0..buckets {
                let bucket = (index * (2 * rank as u32 + 1) + rank as u32) % buckets;
                for to in (0..ranks).filter(|to| *to != rank) {
                    wait(PATIENT, |wait| transport.send(to, tag(bucket, rank), &encoded(rank, bucket), wait)).unwrap();
                }
            }
            (0..buckets).rev().for_each(|bucket| {
                for from in (0..ranks).filter(|from| *from != rank) {
                    let expected = encoded(from, bucket);
                    let mut found = vec![0; expected.len()];
                    wait(PATIENT, |wait| transport.receive(tag(bucket, from), &mut found, wait)).unwrap();
                    assert_eq!(found, expected, "{compression:?} bucket {bucket} from {from}");
                    decode(compression, &found, elements, ranks).unwrap();
                }
            });
        };
        over_memory(ranks, |it| work(it));
        for medium in MEDIA {
            over(medium, ranks, |it| work(it));
        }
    }
}

/// Adds the factors of both rounds of PowerSGD for several buckets; each rank sends and receives them in another order. Returns the sum of each bucket.
fn reduce_factors(transport: &mut dyn Transport, plan: &LowRank, buckets: u32) -> Vec<Vec<f32>> {
    let (rank, ranks) = (transport.rank(), transport.ranks());
    let basis = plan.first_basis();
    let gradient = |bucket: u32| -> Vec<f32> {
        input(rank, plan.elements()).iter().map(|it| it * (1.0 + bucket as f32)).collect()
    };
    let mut sums: Vec<Vec<f32>> = Vec::new();
    for round in 0..2_u16 {
        let own: Vec<Vec<f32>> = (0..buckets)
            .map(|bucket| match round {
                0 => plan.left(&gradient(bucket), &basis),
                _ => plan.right(&gradient(bucket), &sums[bucket as usize]),
            })
            .collect();
        let tag = |bucket: u32, from: usize| Tag {
            generation: 1,
            step: 1,
            bucket,
            phase: round,
            chunk: 0,
            from: from as u16,
        };
        for index in 0..buckets {
            let bucket = (index * (2 * rank as u32 + 1) + rank as u32) % buckets;
            for to in (0..ranks).filter(|to| *to != rank) {
                let bytes = bytemuck::cast_slice(&own[bucket as usize]);
                wait(PATIENT, |wait| transport.send(to, tag(bucket, rank), bytes, wait)).unwrap();
            }
        }
        let mut added = vec![Vec::new(); buckets as usize];
        for bucket in (0..buckets).map(|it| (it + rank as u32) % buckets) {
            let mut sum = vec![0.0; own[bucket as usize].len()];
            for from in 0..ranks {
                let mut part = own[bucket as usize].clone();
                if from != rank {
                    let bytes = bytemuck::cast_slice_mut(&mut part);
                    wait(PATIENT, |wait| transport.receive(tag(bucket, from), bytes, wait)).unwrap();
                }
                sum.iter_mut().zip(&part).for_each(|(sum, value)| *sum += value);
            }
            if round == 0 {
                plan.orthonormalize(&mut sum);
                added[bucket as usize] = sum;
            } else {
                added[bucket as usize] = plan.expand(&sums[bucket as usize], &sum);
            }
        }
        sums = added;
    }
    sums
}

#[test]
fn both_rounds_of_factors_are_not_confused_when_buckets_complete_in_any_order() {
    // Factors of both rounds have the same length, so that only the tags distinguish them.
    let plan = LowRank::new([(0..900, &[30, 30][..])], 1);
    let alone = |bucket: usize| {
        // The ranks of `input` have matrices of other values, which one rank adds here.
        let gradients: Vec<Vec<f32>> =
            (0..3).map(|rank| input(rank, 900).iter().map(|it| it * (1.0 + bucket as f32)).collect()).collect();
        let add = |parts: Vec<Vec<f32>>| {
            let mut sum = vec![0.0; parts[0].len()];
            parts.iter().for_each(|part| sum.iter_mut().zip(part).for_each(|(sum, value)| *sum += value));
            sum
        };
        let mut left = add(gradients.iter().map(|it| plan.left(it, &plan.first_basis())).collect());
        plan.orthonormalize(&mut left);
        let right = add(gradients.iter().map(|it| plan.right(it, &left)).collect());
        plan.expand(&left, &right)
    };
    let expected: Vec<Vec<f32>> = (0..4).map(alone).collect();
    let check = |sums: Vec<Vec<Vec<f32>>>| assert!(sums.iter().all(|it| *it == expected));
    check(over_memory(3, |it| reduce_factors(it, &plan, 4)));
    MEDIA.into_iter().for_each(|medium| check(over(medium, 3, |it| reduce_factors(it, &plan, 4))));
}

#[test]
fn ended_connection_is_reported_as_the_failure_of_its_peer() {
    let leave = |transport: &mut Tcp| {
        let rank = transport.rank();
        // Rank 2 leaves before the reduction: its sockets close when the thread ends.
        (rank < 2).then(|| reduce(transport, Algorithm::Direct, FIRST, &input(rank, 500_000)))
    };
    for result in MEDIA.into_iter().flat_map(|medium| over(medium, 3, leave)).flatten() {
        let error = result.unwrap_err();
        // The other survivor may end first, since a failed transport is dropped.
        assert!(matches!(error, Error::Closed { rank: 0..=2, .. }), "{error:?}");
    }
}

#[test]
fn silent_peer_is_reported_once_per_limit_while_receiving_and_while_sending() {
    for medium in MEDIA {
        silent_peer(medium, Algorithm::Direct, 100);
        // More than the buffers of the sockets hold, sent before anything is received.
        silent_peer(medium, Algorithm::GatherBroadcast, 10_000_000);
    }
}

fn silent_peer(medium: Medium, algorithm: Algorithm, elements: usize) {
    let (listeners, addresses) = listeners(2);
    // Rank 1 only sends in a gather.
    let rank = usize::from(algorithm == Algorithm::GatherBroadcast);
    let silent = AtomicBool::new(true);
    thread::scope(|scope| {
        scope.spawn(|| {
            let transport = connect(1 - rank, &addresses, &listeners[1 - rank], medium, 2);
            while silent.load(std::sync::atomic::Ordering::Acquire) {
                thread::park_timeout(Duration::from_millis(1));
            }
            drop(transport);
        });
        let mut transport = connect(rank, &addresses, &listeners[rank], medium, 2);
        let mut suspected = 0;
        let cancel = AtomicBool::new(false);
        let mut keep_waiting = |peer: usize| {
            assert_eq!(peer, 1 - rank);
            suspected += 1;
            suspected < 3
        };
        let limit = Duration::from_millis(100);
        let plan = Plan::new(algorithm, rank, elements, &[1.0, 1.0]);
        let (input, mut output) = (vec![1.0; elements], vec![0.0; elements]);
        let start = Instant::now();
        let mut wait = Wait::new(limit, &cancel, &mut keep_waiting);
        let result = Executor::new().all_reduce(&mut transport, FIRST, &plan, &input, &mut output, &mut wait);
        assert!(matches!(result, Err(Error::Stalled { rank: peer, .. }) if peer == 1 - rank), "{result:?}");
        assert!(start.elapsed() >= 3 * limit);
        assert_eq!(suspected, 3);
        silent.store(false, std::sync::atomic::Ordering::Release);
    });
}

#[test]
fn cancelled_reduction_returns_at_once_and_is_repeated_by_the_survivors_from_kept_inputs() {
    MEDIA.into_iter().for_each(cancelled_reduction);
}

fn cancelled_reduction(medium: Medium) {
    let elements = 50_000;
    let (listeners, addresses) = listeners(3);
    let cancel = AtomicBool::new(false);
    let repeated: Vec<Vec<f32>> = thread::scope(|scope| {
        let (addresses, listeners, cancel) = (&addresses, &listeners, &cancel);
        let threads: Vec<_> = (0..2)
            .map(|rank| {
                scope.spawn(move || {
                    let input = input(rank, elements);
                    let mut transport = connect(rank, addresses, &listeners[rank], medium, 1);
                    let plan = Plan::new(Algorithm::Direct, rank, elements, &[1.0; 3]);
                    let mut output = vec![0.0; elements];
                    let mut suspect = |rank: usize| {
                        // The membership service removes the suspect and fences the generation.
                        assert_eq!(rank, 2);
                        cancel.store(true, std::sync::atomic::Ordering::Release);
                        true
                    };
                    let mut wait = Wait::new(Duration::from_millis(50), cancel, &mut suspect);
                    let result =
                        Executor::new().all_reduce(&mut transport, FIRST, &plan, &input, &mut output, &mut wait);
                    assert!(matches!(result, Err(Error::Cancelled | Error::Closed { .. })), "{result:?}");
                    drop(transport);
                    let (listener, addresses) = (&listeners[rank], &addresses[..2]);
                    let mut transport = Tcp::connect(rank, 2, addresses, listener, None, options(medium)).unwrap();
                    let reduction = Reduction { generation: 2, ..FIRST };
                    reduce(&mut transport, Algorithm::Direct, reduction, &input).unwrap()
                })
            })
            .collect();
        // Rank 2 connects, and then hangs until the others have given up.
        let hanging = scope.spawn(move || {
            let transport = connect(2, addresses, &listeners[2], medium, 1);
            while !cancel.load(std::sync::atomic::Ordering::Acquire) {
                thread::park_timeout(Duration::from_millis(1));
            }
            drop(transport);
        });
        let repeated = threads.into_iter().map(|it| it.join().unwrap()).collect();
        hanging.join().unwrap();
        repeated
    });
    check(Algorithm::Direct, elements, &repeated);
}

#[test]
fn flipped_bit_is_found_before_it_is_added() {
    flipped_bit(&[0]);
    // It requests shared memory, and declines the offer as a process of another host does: the socket is used.
    flipped_bit(&[1, 0]);
}

/// `request` is the end of a hello, and the reply to an offer.
fn flipped_bit(request: &[u8]) {
    let (listeners, addresses) = listeners(2);
    let tag = Tag { generation: 1, step: 1, bucket: 0, phase: 0, chunk: 0, from: 1 };
    let mut socket = TcpStream::connect(addresses[0]).unwrap();
    // A connection as rank 1 opens it: magic, generation, rank, number of the connection, request of shared memory.
    socket.write_all(b"engrred2").unwrap();
    socket.write_all(&1_u64.to_le_bytes()).unwrap();
    socket.write_all(&[1, 0, 0, 0]).unwrap();
    socket.write_all(request).unwrap();
    let mut payload = vec![7; 40];
    let header = message::header(tag, &payload);
    payload[20] ^= 4;
    socket.write_all(&header).unwrap();
    socket.write_all(&payload).unwrap();
    let options = TcpOptions { checksum_local: true, connect: PATIENT, ..TcpOptions::default() };
    let mut transport = Tcp::connect(0, 1, &addresses, &listeners[0], None, options).unwrap();
    assert_eq!(transport.shared_connections(), 0);
    let mut found = vec![0; 40];
    let result = wait(PATIENT, |wait| transport.receive(tag, &mut found, wait));
    assert!(matches!(result, Err(Error::Message { rank: 1, source: message::Error::Checksum(_) })), "{result:?}");
}

#[test]
fn partition_invariant_sums_have_the_same_bits_on_any_number_of_ranks() {
    let elements = 1_500;
    let gradient = |leaf: usize| -> Vec<f32> {
        (0..elements)
            .map(|index| ((leaf * 31 + index * 17) as f32 * 0.37).sin() * 10_f32.powi((leaf % 7) as i32))
            .collect()
    };
    let sums = |leaves: Range<usize>| {
        let mut sums = LeafSums::new(leaves.clone());
        leaves.for_each(|leaf| sums.push(gradient(leaf)));
        sums.finish()
    };
    let run = |ends: &[usize]| -> Vec<Vec<f32>> {
        let starts = std::iter::once(&0).chain(ends);
        let leaves: Vec<Range<usize>> = starts.zip(ends).map(|(start, end)| *start..*end).collect();
        over_memory(leaves.len(), |transport| {
            let own = sums(leaves[transport.rank()].clone());
            let mut output = vec![0.0; elements];
            wait(PATIENT, |wait| {
                Executor::new().all_reduce_invariant(transport, FIRST, &leaves, &own, &mut output, wait).unwrap();
            });
            output
        })
    };
    let single = &run(&[LEAVES])[0];
    let mut plain_sums_differ = false;
    for ends in
        [&[32, 64][..], &[1, 64], &[13, 50, 64], &[0, 7, 64], &[5, 21, 43, 64], &[63, 63, 63, 64], &[9, 20, 31, 47, 64]]
    {
        assert!(run(ends).iter().all(|it| it == single), "{ends:?}");
        let starts = std::iter::once(&0).chain(ends);
        let local =
            |range: Range<usize>| range.map(gradient).reduce(|a, b| a.iter().zip(&b).map(|(a, b)| a + b).collect());
        let parts = starts.zip(ends).filter_map(|(start, end)| local(*start..*end));
        let plain = parts.reduce(|a, b| a.iter().zip(&b).map(|(a, b)| a + b).collect()).unwrap();
        plain_sums_differ |= plain != *single;
    }
    assert!(plain_sums_differ, "the order of additions must matter for this input");
}
