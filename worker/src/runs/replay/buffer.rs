//! What a Replay run needs of its buffer before it begins.

use crate::buffers::{Buffers, is_passing};
use crate::shared::Shared;
use engram_proto::v1::ProblemKind;
use engram_train::buffer::BufferPlan;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::sleep;

/// Interval of checks: items are appended at other workers, which do not announce it.
const CHECKS: Duration = Duration::from_millis(200);

/// Waits until the buffer has `min_size` items, and passes the reason to `show`.
///
/// # Errors
/// The buffer does not exist, does not fit the model, or can never have that many items: a message with the field, the value and what is
/// allowed.
pub(in crate::runs) async fn ready(
    shared: &Arc<Shared>,
    plan: &BufferPlan,
    min_size: u64,
    show: impl Fn(String),
) -> Result<(), String> {
    let (buffers, name) = (Buffers::of_cluster(shared), &plan.name);
    if let Some(held_out) = &plan.held_out {
        let found = loop {
            match buffers.contents(held_out).await {
                Err(problem) if is_passing(&problem) => sleep(CHECKS).await,
                found => break found,
            }
        };
        let unusable = |why: String| format!("spec.replay.source.buffer.heldOut is {held_out}: {why}");
        let (schema, ..) = found.map_err(|problem| unusable(problem.message))?;
        plan.fit(&schema).map_err(|error| unusable(error.to_string()))?;
    }
    loop {
        match buffers.contents(name).await {
            Ok((schema, capacity, items)) => {
                plan.fit(&schema).map_err(|error| error.to_string())?;
                if min_size > capacity {
                    return Err(format!(
                        "spec.replay.source.buffer.minSize is {min_size}; allowed: at most the capacity of buffer {name}, {capacity}"
                    ));
                }
                if items >= min_size {
                    return Ok(());
                }
                show(format!("waiting for items: buffer {name} has {items} of {min_size}"));
            }
            Err(problem) if problem.kind() == ProblemKind::BufferUnknown => {
                return Err(format!(
                    "spec.replay.source.buffer.name is {name}, which does not exist; allowed: a buffer that was created before the run"
                ));
            }
            Err(problem) if is_passing(&problem) => show(format!("waiting for buffer {name}: {}", problem.message)),
            Err(problem) => return Err(format!("failed to read buffer {name}: {}", problem.message)),
        }
        sleep(CHECKS).await;
    }
}
