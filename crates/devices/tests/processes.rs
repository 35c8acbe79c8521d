//! Grids and pipelines over members in processes of their own, one of which is killed in the middle: the bits of a single device.
#![allow(clippy::unwrap_used)] // Helpers of tests.

use engram_collective::message::Tag;
use engram_collective::transport::{Error as TransportError, Tcp, TcpOptions, Transport, Wait};
use engram_devices::members::{GridState, Member, MemberFailure, MemberGridRun, MemberPipelineRun, advance_grid};
use engram_devices::workloads::{HeatEquation, QualityBatch, advance_quality, quality_pipeline};
use engram_devices::{ComputeDevice, Error, Grid, GridRun, PipelineRun, run_grid};
use engram_kernels::partitioner::Strategy;
use engram_memory::mix64;
use engram_tropical::{Layer, Matrix};
use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{SocketAddr, TcpListener};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);
const MEMBERS: usize = 3;
const STEPS: usize = 20;
const BATCHES: usize = 20;
/// Messages of the killed member: it has passed a boundary, and not the last one.
const MESSAGES: u64 = 60;
/// Names the workload of a member process and after how many messages it halts.
const VARIABLE: &str = "ENGRAM_DEVICES_MEMBER";
/// Precedes what a member process reports: the test harness writes to the same stream.
const REPORT: &str = "member: ";

fn numbers(count: usize, key: u64) -> Vec<f32> {
    (0..count as u64).map(|index| (mix64(mix64(key) ^ index) >> 40) as f32 / (1 << 23) as f32 - 1.0).collect()
}

fn heat() -> (HeatEquation, Grid<f64>) {
    let cells = numbers(17 * 9, 1).into_iter().map(f64::from).collect();
    (HeatEquation::new(0.2, 1.5).unwrap(), Grid::new(9, cells).unwrap())
}

fn quality() -> (Layer, Vec<QualityBatch>) {
    let layer = Layer::new(Matrix::new("weights", 5, 4, numbers(20, 2)).unwrap(), numbers(4, 3)).unwrap();
    let batch = |rows: usize| QualityBatch { rows, width: 5, values: numbers(rows * 5, 10 + rows as u64) };
    (layer, (1..=BATCHES).map(batch).collect())
}

fn bits_of_cells(grid: &Grid<f64>) -> String {
    grid.cells().iter().fold(String::new(), |mut text, cell| {
        write!(text, "{:016x}", cell.to_bits()).unwrap();
        text
    })
}

fn bits_of_qualities(batches: &[QualityBatch]) -> String {
    batches.iter().flat_map(|batch| &batch.values).fold(String::new(), |mut text, value| {
        write!(text, "{:08x}", value.to_bits()).unwrap();
        text
    })
}

/// Connection of a member that halts at a message, so that it is killed in the middle of an exchange.
struct Halting {
    inner: Tcp,
    messages_left: u64,
}

impl Halting {
    fn pass(&mut self) {
        self.messages_left -= 1;
        if self.messages_left == 0 {
            report("halted");
            loop {
                std::thread::park();
            }
        }
    }
}

impl Transport for Halting {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn ranks(&self) -> usize {
        self.inner.ranks()
    }

    fn send(&mut self, to: usize, tag: Tag, payload: &[u8], wait: &mut Wait<'_>) -> Result<(), TransportError> {
        self.pass();
        self.inner.send(to, tag, payload, wait)
    }

    fn receive(&mut self, tag: Tag, into: &mut [u8], wait: &mut Wait<'_>) -> Result<(), TransportError> {
        self.pass();
        self.inner.receive(tag, into, wait)
    }
}

fn report(text: &str) {
    println!("{REPORT}{text}");
}

/// Reports an address, reads the own rank and all addresses, and connects.
fn connect(generation: u64, messages_left: u64) -> Halting {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    report(&format!("address {}", listener.local_addr().unwrap()));
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let (rank, addresses) = line.trim().split_once(' ').unwrap();
    let addresses: Vec<SocketAddr> = addresses.split(' ').map(|it| it.parse().unwrap()).collect();
    let options = TcpOptions { connect: LIMIT, shared_memory: false, ..TcpOptions::default() };
    let inner = Tcp::connect(rank.parse().unwrap(), generation, &addresses, &listener, None, options).unwrap();
    Halting { inner, messages_left }
}

/// Calls `advance`, which also returns how far it is, in one generation after the other until it has finished.
fn advance_to_the_end(messages: u64, mut advance: impl FnMut(&mut Member<'_>) -> (Result<(), Error>, usize)) {
    for generation in 1.. {
        let mut transport = connect(generation, messages);
        let devices = [ComputeDevice::new("a"), ComputeDevice::new("b")];
        let mut member = Member { transport: &mut transport, generation, devices: &devices };
        match advance(&mut member) {
            (Ok(()), _) => return,
            (Err(Error::Member { rank, failure: MemberFailure::Lost, .. }), reached) => {
                report(&format!("lost {rank} at {reached}"));
            }
            (Err(error), _) => panic!("{error}"),
        }
    }
}

#[test]
#[ignore = "a process of the other tests"]
fn member_process() {
    let Ok(settings) = std::env::var(VARIABLE) else { return };
    let (workload, messages) = settings.split_once(' ').unwrap();
    let messages = messages.parse().unwrap();
    if workload == "heat" {
        let (rule, grid) = heat();
        let mut state = GridState { grid, steps: 0 };
        let strategy = Strategy::CapabilityAware;
        let run = MemberGridRun { steps: STEPS, steps_per_exchange: 1, steps_per_boundary: 4, strategy, limit: LIMIT };
        advance_to_the_end(messages, |member| (advance_grid(member, &mut state, &rule, &run), state.steps));
        report(&bits_of_cells(&state.grid));
    } else {
        let ((layer, batches), mut results) = (quality(), Vec::new());
        let run = MemberPipelineRun { name: "quality", capacity: 2, items_per_boundary: 4, limit: LIMIT };
        advance_to_the_end(messages, |member| {
            let batches = if member.transport.rank() == 0 { &batches[..] } else { &[] };
            (advance_quality(member, &layer, batches, &mut results, &run), results.len())
        });
        report(&bits_of_qualities(&results));
    }
}

/// A member in a process of its own, which is killed when it is dropped.
struct MemberProcess {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl MemberProcess {
    fn start(workload: &str, messages: u64) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["member_process", "--exact", "--ignored", "--nocapture"]);
        command.env(VARIABLE, format!("{workload} {messages}")).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, input, output }
    }

    fn next_report(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "the member ended");
            if let Some((_, text)) = line.split_once(REPORT) {
                return text.trim().to_owned();
            }
        }
    }
}

impl Drop for MemberProcess {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn form_generation(members: &mut [MemberProcess]) {
    let address = |member: &mut MemberProcess| member.next_report().strip_prefix("address ").unwrap().to_owned();
    let addresses = members.iter_mut().map(address).collect::<Vec<_>>().join(" ");
    for (rank, member) in members.iter_mut().enumerate() {
        writeln!(member.input, "{rank} {addresses}").unwrap();
    }
}

/// Kills a member in the middle of a workload of `all` steps or items; returns the results of the others.
fn results_after_a_kill(workload: &str, killed: usize, all: usize) -> Vec<String> {
    let start = |rank| MemberProcess::start(workload, if rank == killed { MESSAGES } else { u64::MAX });
    let mut members: Vec<MemberProcess> = (0..MEMBERS).map(start).collect();
    form_generation(&mut members);
    let mut halted = members.remove(killed);
    assert_eq!(halted.next_report(), "halted");
    drop(halted);
    for (rank, member) in members.iter_mut().enumerate() {
        let report = member.next_report();
        let reached = report.strip_prefix(&format!("lost {killed} at ")).unwrap_or_else(|| panic!("{report}"));
        let reached: usize = reached.parse().unwrap();
        assert!(rank > 0 || (1..all).contains(&reached), "{killed} was killed at {reached} of {all}");
    }
    form_generation(&mut members);
    members.iter_mut().map(MemberProcess::next_report).collect()
}

#[test]
fn processes_that_are_left_finish_a_grid_with_the_bits_of_one_device() {
    let (rule, mut grid) = heat();
    let run = GridRun { steps: STEPS, steps_per_round: STEPS, strategy: Strategy::Balanced, limit: LIMIT };
    run_grid(&[ComputeDevice::new("one")], &mut grid, &rule, &run).unwrap();
    let expected = bits_of_cells(&grid);
    for killed in 0..MEMBERS {
        let results = results_after_a_kill("heat", killed, STEPS);
        assert_eq!(results, [&*expected; MEMBERS - 1], "{killed} was killed");
    }
}

#[test]
fn processes_that_are_left_finish_a_pipeline_with_the_bits_of_one_device() {
    let (layer, batches) = quality();
    let run = PipelineRun { name: "quality", capacity: 1, strategy: Strategy::Balanced, limit: LIMIT };
    let expected = quality_pipeline(&[ComputeDevice::new("one")], &layer, batches, &run).unwrap();
    // The first rank has the results, so it is never the one that is killed.
    for killed in 1..MEMBERS {
        let results = results_after_a_kill("quality", killed, BATCHES);
        assert_eq!(results, [bits_of_qualities(&expected), String::new()], "{killed} was killed");
    }
}
