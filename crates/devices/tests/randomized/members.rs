//! Grids and pipelines over the members of a group, in process and over TCP: the bits of a single device, also when a member is lost.
#![allow(clippy::unwrap_used)] // Helpers of tests.

use crate::{LIMIT, Random, bits, one};
use engram_collective::message::Tag;
use engram_collective::transport::{Error as TransportError, Memory, Tcp, TcpOptions, Transport, Wait, memory_group};
use engram_devices::members::{
    GridState, Item, Member, MemberFailure, MemberGridRun, MemberPipelineRun, advance_grid, advance_pipeline,
};
use engram_devices::workloads::{HeatEquation, LifeAutomaton, QualityBatch, advance_quality, quality_pipeline};
use engram_devices::{ComputeDevice, Error, Grid, GridRun, PipelineRun, Rule, Stage, run_grid};
use engram_kernels::partitioner::Strategy;
use engram_memory::mix64;
use engram_tropical::{Layer, Matrix};
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// Groups that lose a member, of each pattern.
const LOSSES: u64 = 60;

/// Calls `work` for every transport, each in a thread of its own.
fn on_each<T: Send, R: Send>(transports: Vec<T>, work: impl Fn(usize, T) -> R + Sync) -> Vec<R> {
    let work = &work;
    std::thread::scope(|scope| {
        let start = |(rank, transport)| scope.spawn(move || work(rank, transport));
        let threads: Vec<_> = transports.into_iter().enumerate().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Connects a group over the loopback interface.
fn tcp_group(ranks: usize) -> Vec<Tcp> {
    let listeners: Vec<TcpListener> = (0..ranks).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    let addresses: Vec<SocketAddr> = listeners.iter().map(|it| it.local_addr().unwrap()).collect();
    let options = TcpOptions { connect: LIMIT, shared_memory: false, ..TcpOptions::default() };
    on_each(listeners, |rank, listener| Tcp::connect(rank, 1, &addresses, &listener, None, options).unwrap())
}

/// Calls `work` on every member of a group in process, then of one over TCP.
fn over_both<R: Send>(ranks: usize, work: impl Fn(&mut dyn Transport) -> R + Sync) -> Vec<R> {
    let mut results = on_each(memory_group(ranks), |_, mut transport: Memory| work(&mut transport));
    results.extend(on_each(tcp_group(ranks), |_, mut transport: Tcp| work(&mut transport)));
    results
}

/// A member that dies after some messages: from then on nothing passes, reports included.
struct Mortal {
    inner: Memory,
    messages_left: u64,
}

impl Mortal {
    fn pass(&mut self, peer: usize) -> Result<(), TransportError> {
        self.messages_left = self.messages_left.saturating_sub(1);
        if self.messages_left == 0 { Err(TransportError::Closed { rank: peer, source: None }) } else { Ok(()) }
    }
}

impl Transport for Mortal {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn ranks(&self) -> usize {
        self.inner.ranks()
    }

    fn send(&mut self, to: usize, tag: Tag, payload: &[u8], wait: &mut Wait<'_>) -> Result<(), TransportError> {
        self.pass(to)?;
        self.inner.send(to, tag, payload, wait)
    }

    fn receive(&mut self, tag: Tag, into: &mut [u8], wait: &mut Wait<'_>) -> Result<(), TransportError> {
        self.pass(usize::from(tag.from))?;
        self.inner.receive(tag, into, wait)
    }
}

/// Returns the group with one member that dies after some messages.
fn mortal_group(ranks: usize, dies: usize, messages: u64) -> Vec<Mortal> {
    let mortal = |inner: Memory| {
        let messages_left = if inner.rank() == dies { messages } else { u64::MAX };
        Mortal { inner, messages_left }
    };
    memory_group(ranks).into_iter().map(mortal).collect()
}

/// Checks that every other member has finished or names the lost one.
fn check_cause<'a>(dies: usize, results: impl IntoIterator<Item = &'a Result<(), Error>>) {
    for (rank, result) in results.into_iter().enumerate().filter(|(rank, _)| *rank != dies) {
        let names_the_lost =
            matches!(result, Err(Error::Member { rank, failure: MemberFailure::Lost, .. }) if *rank == dies);
        assert!(result.is_ok() || names_the_lost, "rank {rank}: {result:?}");
    }
}

fn life() -> GridState<u8> {
    let cells = (0..13 * 9).map(|cell| (mix64(cell) % 2) as u8).collect();
    GridState { grid: Grid::new(9, cells).unwrap(), steps: 0 }
}

fn warm() -> GridState<f64> {
    let cells = life().grid.cells().iter().map(|&cell| f64::from(cell) / 3.0).collect();
    GridState { grid: Grid::new(9, cells).unwrap(), steps: 0 }
}

/// Returns the cells after some steps on one device.
fn alone<T: Copy + Send + Sync, R: Rule<T>>(start: &Grid<T>, rule: &R, steps: usize) -> Grid<T> {
    let mut grid = start.clone();
    let run = GridRun { steps, steps_per_round: steps, strategy: Strategy::Balanced, limit: LIMIT };
    run_grid(&one(), &mut grid, rule, &run).unwrap();
    grid
}

fn run_of(steps: usize, steps_per_exchange: usize, steps_per_boundary: usize) -> MemberGridRun {
    let (strategy, limit) = (Strategy::CapabilityAware, LIMIT);
    MemberGridRun { steps, steps_per_exchange, steps_per_boundary, strategy, limit }
}

/// Returns devices whose number and speed depend on the rank.
fn devices(rank: usize) -> Vec<ComputeDevice> {
    let device = |number| ComputeDevice::new(format!("{rank}.{number}")).with_speed(Some(1 + rank as u64));
    (0..1 + rank % 2).map(device).collect()
}

#[test]
fn grids_of_members_have_the_cells_of_one_device() {
    let heat = HeatEquation::new(0.2, 1.5).unwrap();
    let (life_expected, heat_expected) = (alone(&life().grid, &LifeAutomaton, 12), alone(&warm().grid, &heat, 12));
    assert_ne!(life_expected, life().grid);
    for ranks in 1..=4 {
        for (steps_per_exchange, steps_per_boundary) in [(1, 12), (2, 5), (3, 4), (20, 7)] {
            let run = run_of(12, steps_per_exchange, steps_per_boundary);
            let results = over_both(ranks, |transport| {
                let devices = devices(transport.rank());
                let (mut cells, mut temperatures) = (life(), warm());
                let mut member = Member { transport, generation: 1, devices: &devices };
                advance_grid(&mut member, &mut cells, &LifeAutomaton, &run).unwrap();
                let mut member = Member { generation: 2, ..member };
                advance_grid(&mut member, &mut temperatures, &heat, &run).unwrap();
                (cells, temperatures)
            });
            assert_eq!(results.len(), 2 * ranks);
            for (cells, temperatures) in results {
                assert_eq!((cells.steps, &cells.grid), (12, &life_expected), "{ranks} members, {run:?}");
                let bits = |grid: &Grid<f64>| grid.cells().iter().map(|it| it.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&temperatures.grid), bits(&heat_expected), "{ranks} members, {run:?}");
            }
        }
    }
}

#[test]
fn more_members_than_rows_and_regions_above_a_message_are_possible() {
    let narrow = GridState { grid: Grid::new(3, vec![0_u8, 1, 0, 0, 1, 0, 0, 1, 1]).unwrap(), steps: 0 };
    let expected = alone(&narrow.grid, &LifeAutomaton, 5);
    // A region of more than three messages of 1 MiB, and borders of more than one.
    let heat = HeatEquation::new(0.25, 0.0).unwrap();
    let temperatures = (0..8 * 150_000_u64).map(|cell| (mix64(cell) % 1_000) as f64).collect();
    let wide = GridState { grid: Grid::new(150_000, temperatures).unwrap(), steps: 0 };
    let wide_expected = alone(&wide.grid, &heat, 4);
    let results = over_both(4, |transport| {
        let devices = one();
        let (mut narrow, mut wide) = (narrow.clone(), wide.clone());
        let mut member = Member { transport, generation: 1, devices: &devices };
        advance_grid(&mut member, &mut narrow, &LifeAutomaton, &run_of(5, 2, 3)).unwrap();
        let mut member = Member { generation: 2, ..member };
        advance_grid(&mut member, &mut wide, &heat, &run_of(4, 2, 4)).unwrap();
        narrow.grid == expected && wide.grid == wide_expected
    });
    assert_eq!(results, [true; 8]);
}

#[test]
fn members_that_are_left_go_on_from_the_last_boundary_of_a_grid() {
    let expected = alone(&life().grid, &LifeAutomaton, 20);
    let (mut lost, mut kept) = (0, 0);
    for seed in 0..LOSSES {
        let mut random = Random(mix64(seed));
        let (ranks, run) = (2 + random.below(3) as usize, run_of(20, 1 + random.below(3) as usize, 4));
        let (dies, messages) = (random.below(ranks as u64) as usize, random.below(60));
        let ended = on_each(mortal_group(ranks, dies, messages), |rank, mut transport: Mortal| {
            let mut state = life();
            let mut member = Member { transport: &mut transport, generation: 1, devices: &devices(rank) };
            (advance_grid(&mut member, &mut state, &LifeAutomaton, &run), state)
        });
        check_cause(dies, ended.iter().map(|(result, _)| result));
        lost += usize::from(ended[dies].0.is_err());
        let mut left: Vec<GridState<u8>> = ended.into_iter().map(|(_, state)| state).collect();
        left.swap_remove(dies);
        assert!(left.iter().all(|state| state.steps % 4 == 0), "a state between boundaries");
        kept += usize::from(left.iter().any(|state| (4..20).contains(&state.steps)));
        // A new member joins at the start.
        left.push(life());
        let left = left.into_iter().zip(memory_group(ranks)).collect();
        let states = on_each(left, |rank, (mut state, mut transport): (GridState<u8>, Memory)| {
            let mut member = Member { transport: &mut transport, generation: 2, devices: &devices(rank) };
            advance_grid(&mut member, &mut state, &LifeAutomaton, &run).unwrap();
            state
        });
        assert!(states.iter().all(|state| state.steps == 20 && state.grid == expected), "seed {seed}");
    }
    assert!(lost > 30 && kept > 15, "{lost} of {LOSSES} groups lost a member, {kept} after the first boundary");
}

/// Fails at living cells of column 0.
struct Failing;

impl Rule<u8> for Failing {
    fn name(&self) -> &'static str {
        "failing"
    }

    fn outside(&self) -> Option<u8> {
        Some(0)
    }

    fn row(&self, _: &[u8], row: &[u8], _: &[u8], next: &mut [u8]) {
        assert_eq!(row[0], 0, "the first cell lives");
        next.copy_from_slice(row);
    }
}

#[test]
fn failures_of_a_member_name_it_everywhere() {
    let mut cells = vec![0_u8; 4 * 12];
    cells[4 * 10] = 1; // A row that only the last of three members has.
    let start = GridState { grid: Grid::new(4, cells).unwrap(), steps: 0 };
    let errors = on_each(memory_group(3), |_, mut transport: Memory| {
        let mut member = Member { transport: &mut transport, generation: 1, devices: &one() };
        advance_grid(&mut member, &mut start.clone(), &Failing, &run_of(3, 1, 3)).unwrap_err().to_string()
    });
    let expected = "failed to finish failing: rank 2 failed: the rule panicked";
    assert_eq!(errors[..2], [expected, expected]);
    assert!(errors[2].ends_with("the rule panicked"), "{}", errors[2]);

    // Without devices a member leaves; the others can go on.
    let errors = on_each(memory_group(2), |rank, mut transport: Memory| {
        let devices = one();
        devices[0].health().remove_after(if rank == 1 { 2 } else { 1_000 });
        let mut member = Member { transport: &mut transport, generation: 1, devices: &devices };
        advance_grid(&mut member, &mut life(), &LifeAutomaton, &run_of(9, 1, 9)).unwrap_err()
    });
    assert_eq!(errors[1], Error::NoDevice { what: "cellular automaton", devices: 1 });
    assert_eq!(errors[0].to_string(), "failed to finish cellular automaton: rank 1 was lost");
}

#[test]
fn silent_members_and_other_settings_end_a_run() {
    let mut group = memory_group(2);
    let silent = group.pop().unwrap();
    let mut transport = group.pop().unwrap();
    let mut member = Member { transport: &mut transport, generation: 1, devices: &one() };
    let run = MemberGridRun { limit: Duration::from_millis(20), ..run_of(4, 1, 4) };
    let error = advance_grid(&mut member, &mut life(), &LifeAutomaton, &run).unwrap_err();
    assert_eq!(error.to_string(), "failed to finish cellular automaton: rank 1 sent nothing until the time limit");
    drop(silent);

    let errors = on_each(memory_group(2), |rank, mut transport: Memory| {
        let mut member = Member { transport: &mut transport, generation: 1, devices: &one() };
        advance_grid(&mut member, &mut life(), &LifeAutomaton, &run_of(4 + rank, 1, 4)).unwrap_err().to_string()
    });
    assert!(errors.iter().all(|error| error.ends_with("failed: its settings differ")), "{errors:?}");
    let mut transport = memory_group(1).remove(0);
    let mut member = Member { transport: &mut transport, generation: 1, devices: &one() };
    let error = advance_grid(&mut member, &mut life(), &LifeAutomaton, &run_of(4, 0, 4)).unwrap_err();
    assert!(error.to_string().contains("steps per exchange"), "{error}");
}

/// Returns a layer, batches and their qualities on one device.
fn qualities() -> (Layer, Vec<QualityBatch>, Vec<QualityBatch>) {
    let mut random = Random(6);
    let weights = Matrix::new("weights", 5, 4, random.numbers(20)).unwrap();
    let layer = Layer::new(weights, random.numbers(4)).unwrap();
    let batches: Vec<QualityBatch> =
        (1..=20).map(|rows| QualityBatch { rows, width: 5, values: random.numbers(rows * 5) }).collect();
    let run = PipelineRun { name: "quality", capacity: 1, strategy: Strategy::Balanced, limit: LIMIT };
    let expected = quality_pipeline(&one(), &layer, batches.clone(), &run).unwrap();
    (layer, batches, expected)
}

const fn pipeline_run(capacity: usize, items_per_boundary: usize) -> MemberPipelineRun {
    MemberPipelineRun { name: "quality", capacity, items_per_boundary, limit: LIMIT }
}

#[test]
fn pipelines_of_members_have_the_results_of_one_device_in_order() {
    let (layer, batches, expected) = qualities();
    for ranks in 1..=5 {
        for (capacity, items_per_boundary) in [(1, 20), (2, 7), (30, 6)] {
            let run = pipeline_run(capacity, items_per_boundary);
            let results = over_both(ranks, |transport| {
                let batches = if transport.rank() == 0 { &batches[..] } else { &[] };
                let devices = devices(transport.rank());
                let mut member = Member { transport, generation: 1, devices: &devices };
                let mut results = Vec::new();
                advance_quality(&mut member, &layer, batches, &mut results, &run).unwrap();
                results
            });
            for (index, results) in results.iter().enumerate() {
                let expected = if index % ranks == 0 { &expected[..] } else { &[] };
                assert_eq!(results.len(), expected.len(), "{ranks} members, {run:?}");
                assert!(results.iter().zip(expected).all(|(one, other)| bits(&one.values) == bits(&other.values)));
            }
        }
    }
}

#[test]
fn members_that_are_left_go_on_from_the_last_boundary_of_a_pipeline() {
    let (layer, batches, expected) = qualities();
    let (mut lost, mut kept) = (0, 0);
    for seed in 0..LOSSES {
        let mut random = Random(mix64(seed + 1_000));
        let (ranks, run) = (2 + random.below(4) as usize, pipeline_run(1 + random.below(3) as usize, 5));
        let (dies, messages) = (1 + random.below(ranks as u64 - 1) as usize, random.below(70));
        let advance = |transport: &mut dyn Transport, generation, results: &mut Vec<QualityBatch>| {
            let batches = if transport.rank() == 0 { &batches[..] } else { &[] };
            let devices = devices(transport.rank());
            advance_quality(&mut Member { transport, generation, devices: &devices }, &layer, batches, results, &run)
        };
        let mut ended = on_each(mortal_group(ranks, dies, messages), |_, mut transport: Mortal| {
            let mut results = Vec::new();
            (advance(&mut transport, 1, &mut results), results)
        });
        check_cause(dies, ended.iter().map(|(result, _)| result));
        lost += usize::from(ended[dies].0.is_err());
        let reached = std::mem::take(&mut ended[0].1);
        assert!(reached.len() % 5 == 0 && reached == expected[..reached.len()], "a state between boundaries");
        kept += usize::from((5..20).contains(&reached.len()));
        let results = on_each(memory_group(ranks - 1), |rank, mut transport: Memory| {
            let mut results = if rank == 0 { reached.clone() } else { Vec::new() };
            advance(&mut transport, 2, &mut results).unwrap();
            results
        });
        assert_eq!(results[0], expected, "seed {seed}");
    }
    assert!(lost > 30 && kept > 10, "{lost} of {LOSSES} groups lost a member, {kept} after the first boundary");
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Number(u64);

impl Item for Number {
    fn encode(&self) -> Vec<u8> {
        self.0.to_le_bytes().to_vec()
    }

    fn decode(bytes: &[u8]) -> Result<Self, String> {
        let bytes = bytes.try_into().map_err(|_| format!("{} bytes are no number", bytes.len()))?;
        Ok(Self(u64::from_le_bytes(bytes)))
    }
}

#[test]
fn queues_between_members_are_bounded_by_credit() {
    const CAPACITY: usize = 2;
    let (waiting, most, sent) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicU64::new(0));
    let stages = [
        Stage::new("first", 1, |item: &Number| {
            most.fetch_max(waiting.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            sent.store(item.0 + 1, Ordering::SeqCst);
            Ok::<_, String>(Number(item.0 + 1))
        }),
        Stage::new("second", 1, |item: &Number| {
            // The first member is always as far ahead as it may.
            while sent.load(Ordering::SeqCst) < 40.min(item.0 + CAPACITY as u64) {
                std::thread::yield_now();
            }
            (0..200).for_each(|_| std::thread::yield_now());
            waiting.fetch_sub(1, Ordering::SeqCst);
            Ok::<_, String>(Number(item.0 * 2))
        }),
    ];
    let items: Vec<Number> = (0..40).map(Number).collect();
    let results = on_each(memory_group(2), |rank, mut transport: Memory| {
        let items = if rank == 0 { &items[..] } else { &[] };
        let mut results = Vec::new();
        let mut member = Member { transport: &mut transport, generation: 1, devices: &one() };
        advance_pipeline(&mut member, &stages, items, &mut results, &pipeline_run(CAPACITY, 40)).unwrap();
        results
    });
    assert_eq!(results[0], (0..40).map(|item| Number((item + 1) * 2)).collect::<Vec<_>>());
    // One more in the stage that has granted credit, and one that is computed and has none yet.
    let most = most.load(Ordering::SeqCst);
    assert!(most <= CAPACITY + 2, "{most} items between the stages");
}

#[test]
fn failures_of_a_stage_name_its_member_everywhere() {
    let stages = [
        Stage::new("first", 1, |item: &Number| Ok::<_, String>(*item)),
        Stage::new("parse", 1, |item: &Number| if item.0 == 7 { Err("item 7 is odd") } else { Ok(*item) }),
        Stage::new("last", 1, |item: &Number| Ok::<_, String>(*item)),
    ];
    let items: Vec<Number> = (0..40).map(Number).collect();
    let errors = on_each(memory_group(3), |rank, mut transport: Memory| {
        let items = if rank == 0 { &items[..] } else { &[] };
        let mut member = Member { transport: &mut transport, generation: 1, devices: &one() };
        advance_pipeline(&mut member, &stages, items, &mut Vec::new(), &pipeline_run(2, 40)).unwrap_err().to_string()
    });
    assert_eq!(errors[0], "failed to finish quality: rank 1 failed: item 7 is odd");
    assert_eq!(errors[1], "failed to compute parse on device one: item 7 is odd");
    assert_eq!(errors[2], errors[0]);
}
