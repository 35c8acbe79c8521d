//! Patterns over the members of a group: each has one logical device, and TCP connections to the others over the loopback interface.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use anyhow::{Context, Result, anyhow, ensure};
use engram_devices::members::transport::{Tcp, TcpOptions};
use engram_devices::members::{GridState, Member, MemberGridRun, MemberPipelineRun, Pod, advance_grid};
use engram_devices::workloads::advance_quality;
use engram_devices::{ComputeDevice, Grid, Rule};
use engram_kernels::partitioner::Strategy;

use super::patterns::{BATCHES, LIMIT, Outcome, Run, STEPS, on_one, qualities_on_one, quality_batches, quality_layer};

/// Steps between two exchanges of borders.
const STEPS_PER_EXCHANGE: usize = 4;

/// Groups by number of members, connected once.
#[derive(Default)]
struct Groups {
    connected: Mutex<BTreeMap<usize, Vec<Tcp>>>,
    generation: AtomicU64,
}

impl Groups {
    /// Calls `work` for every member, each with one device and in a thread of its own. Returns whether all results are as expected.
    fn run(&self, devices: &[ComputeDevice], work: impl Fn(&mut Member<'_>) -> Result<bool> + Sync) -> Result<Outcome> {
        let generation = self.generation.fetch_add(1, Ordering::Relaxed) + 1;
        let mut groups = self.connected.lock().unwrap_or_else(PoisonError::into_inner);
        // After an error the connections must not be used again.
        let mut group = groups.remove(&devices.len()).map_or_else(|| connect(devices.len()), Ok)?;
        let work = &work;
        let results: Result<Vec<bool>> = thread::scope(|scope| {
            let mut threads = Vec::new();
            for (transport, device) in group.iter_mut().zip(devices) {
                let devices = std::slice::from_ref(device);
                threads.push(scope.spawn(move || work(&mut Member { transport, generation, devices })));
            }
            threads.into_iter().map(|it| it.join().map_err(|_| anyhow!("a member panicked"))?).collect()
        });
        let is_same = results?.into_iter().all(|it| it);
        groups.insert(devices.len(), group);
        Ok(Outcome::new(is_same, &[]))
    }
}

/// Connects some ranks by sockets: members of one host would otherwise exchange payloads through shared memory.
fn connect(ranks: usize) -> Result<Vec<Tcp>> {
    let bind = |_| TcpListener::bind("127.0.0.1:0").context("failed to bind the address of a member");
    let listeners: Vec<TcpListener> = (0..ranks).map(bind).collect::<Result<_>>()?;
    let addresses: Vec<SocketAddr> = listeners.iter().map(TcpListener::local_addr).collect::<std::io::Result<_>>()?;
    let options = TcpOptions { connect: LIMIT, shared_memory: false, checksum_local: true, ..TcpOptions::default() };
    thread::scope(|scope| {
        let addresses = &addresses;
        let start = |(rank, listener)| scope.spawn(move || Tcp::connect(rank, 1, addresses, listener, None, options));
        let threads: Vec<_> = listeners.iter().enumerate().map(start).collect();
        threads.into_iter().map(|it| Ok(it.join().map_err(|_| anyhow!("a connection panicked"))??)).collect()
    })
}

/// Returns a run that advances a grid.
///
/// # Errors
/// When the grid cannot be advanced on one device.
pub(super) fn grid<T, R>(start: Grid<T>, rule: R) -> Result<Run>
where
    T: Pod + PartialEq + Send + Sync,
    R: Rule<T> + 'static,
{
    let expected = on_one(&start, &rule)?;
    let run = MemberGridRun {
        steps: STEPS,
        steps_per_exchange: STEPS_PER_EXCHANGE,
        steps_per_boundary: STEPS,
        strategy: Strategy::CapabilityAware,
        limit: LIMIT,
    };
    let groups = Groups::default();
    Ok(Box::new(move |devices| {
        groups.run(devices, |member| {
            let mut state = GridState { grid: start.clone(), steps: 0 };
            advance_grid(member, &mut state, &rule, &run)?;
            Ok(state.grid == expected)
        })
    }))
}

/// Returns a run of the pipeline of tropical layer, softmax and quality.
///
/// # Errors
/// When it cannot be run on one device.
pub(super) fn pipeline() -> Result<Run> {
    let (layer, batches) = (quality_layer()?, quality_batches());
    let expected = qualities_on_one(&layer, &batches)?;
    ensure!(expected.len() == BATCHES, "{} results of {BATCHES} batches", expected.len());
    let run = MemberPipelineRun { name: "quality", capacity: 4, items_per_boundary: BATCHES, limit: LIMIT };
    let groups = Groups::default();
    Ok(Box::new(move |devices| {
        groups.run(devices, |member| {
            let is_first = member.transport.rank() == 0;
            let mut results = Vec::new();
            let batches = if is_first { &batches[..] } else { &[] };
            advance_quality(member, &layer, batches, &mut results, &run)?;
            Ok(!is_first || results == expected)
        })
    }))
}
