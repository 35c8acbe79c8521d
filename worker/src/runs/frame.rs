//! What the drivers of runs have in common: why they stop, how a run ends, how its record is written.

use crate::runs::record::Recorder;
use crate::shared::Shared;
use engram_api::{Code, Problem};
use engram_learn::run::{ClusterError, LogError, Order, Phase, RunLog as _, RunState, Status};
use engram_memory::RunId;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::sync::watch;

/// Interval between attempts to write the record: its partition may be another worker's, which does not announce that it can be written.
pub(in crate::runs) const RETRY_INTERVAL: Duration = Duration::from_millis(200);

/// Why a driver stops before its run is complete.
pub(in crate::runs) enum Interruption {
    /// Another driver has the run.
    Superseded,
    Ordered(Order),
    Failed {
        code: String,
        message: String,
    },
}

pub(in crate::runs) fn failed(code: Code, message: impl Into<String>) -> Interruption {
    Interruption::Failed { code: code.id().into(), message: message.into() }
}

impl From<Problem> for Interruption {
    fn from(problem: Problem) -> Self {
        failed(problem.code(), problem.message())
    }
}

/// Completes with an order that ends the driver.
pub(in crate::runs) async fn ordered(orders: &mut watch::Receiver<Order>) -> Order {
    let order = orders.wait_for(|order| *order != Order::Continue).await.ok().map(|order| *order);
    match order {
        Some(order) => order,
        // The sender lives as long as the driver is known.
        None => std::future::pending().await,
    }
}

/// Waits for a future, or for an order that ends the driver.
pub(in crate::runs) async fn unless_ordered<T>(
    orders: &watch::Receiver<Order>,
    future: impl Future<Output = T>,
) -> Result<T, Interruption> {
    let mut orders = orders.clone();
    tokio::select! {
        order = ordered(&mut orders) => Err(Interruption::Ordered(order)),
        output = future => Ok(output),
    }
}

/// Sets the phase of a run whose driver stops. Returns what the run has found, if it is complete; `None` for a driver that another one replaced, which
/// writes nothing.
pub(in crate::runs) fn conclude<T>(state: &mut RunState, result: Result<T, Interruption>) -> Option<Option<T>> {
    let mut found = None;
    let (phase, code, message) = match result {
        Ok(it) => {
            found = Some(it);
            (Phase::Succeeded, String::new(), String::new())
        }
        Err(Interruption::Superseded) => return None,
        Err(Interruption::Ordered(Order::Cancel)) => (Phase::Cancelled, String::new(), "cancelled".to_owned()),
        Err(Interruption::Ordered(_)) => {
            state.suspended = true;
            (state.phase, String::new(), String::new())
        }
        Err(Interruption::Failed { code, message }) => (Phase::Failed, code, message),
    };
    if phase.is_final() {
        state.end(phase, &code, message, SystemTime::now());
    } else {
        (state.code, state.message) = (String::new(), message);
    }
    Some(found)
}

/// Shows the state of a run whose driver stops.
pub(in crate::runs) fn show_end(status: &watch::Sender<Status>, state: &RunState) {
    status.send_modify(|status| {
        status.phase = state.reported_phase();
        (status.code, status.message) = (state.code.clone(), state.message.clone());
        (status.outputs, status.elapsed_s) = (state.outputs(), state.elapsed_ms as f64 / 1_000.0);
        status.metrics.extend(state.metrics.clone());
    });
}

/// Writes the record of a run, with retries, and counts its version.
pub(in crate::runs) async fn write_record(
    shared: &Arc<Shared>,
    (run, version): (RunId, &mut u64),
    state: &RunState,
    row: Option<Vec<u8>>,
) -> Result<(), Interruption> {
    let recorder = Recorder { shared: Arc::clone(shared) };
    loop {
        match recorder.record(run, *version, state.encode(), row.clone()).await {
            Ok(()) => {
                *version += 1;
                return Ok(());
            }
            // A write whose result was lost ends here as well: the next driver reads the record again.
            Err(LogError::Superseded) => return Err(Interruption::Superseded),
            Err(LogError::Cluster(ClusterError::Temporary(_))) => tokio::time::sleep(RETRY_INTERVAL).await,
            Err(LogError::Cluster(ClusterError::Permanent { code, message })) => {
                return Err(Interruption::Failed { code: code.into(), message });
            }
        }
    }
}
