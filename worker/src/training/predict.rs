//! Predictions with the weights of a run on this worker: those of its member, or of its newest checkpoint.

use super::engine::TABLE_CURSOR;
use super::files::CheckpointFolder;
use super::serve::Served;
use crate::shared::Shared;
use engram_memory::RunId;
use engram_proto::v1::{self, Problem, ProblemKind};
use engram_train::{Manifest, Trainer};
use std::sync::Arc;

/// Most samples of one call.
const MAX_SAMPLES: usize = 65_536;

/// Predicts samples; `None` if this worker has no weights of the run.
///
/// # Errors
/// A sample does not fit the model.
pub(crate) async fn predict(
    shared: &Arc<Shared>,
    run: RunId,
    request: &v1::PredictRequest,
) -> Result<Option<v1::PredictResponse>, Problem> {
    let invalid = |text: String| Problem::of(ProblemKind::Invalid, text);
    if request.samples.len() > MAX_SAMPLES {
        let count = request.samples.len();
        return Err(invalid(format!("samples: {count} are not allowed; allowed: up to {MAX_SAMPLES} per call")));
    }
    let served = match shared.trainings.served(run) {
        Some(served) => served,
        None => match load(shared, run).await {
            Some(served) => served,
            None => return Ok(None),
        },
    };
    if served.is_table {
        let text = "the model of this run reads the numbers of a table; allowed: runs whose source is synthetic or a buffer. model.py loads its \
                    checkpoint";
        return Err(invalid(text.to_owned()));
    }
    let Some(model) = served.model() else { return Ok(None) };
    let inputs = model.model.inputs() as u32;
    for (sample, features) in request.samples.iter().enumerate() {
        if let Some(feature) = features.features.iter().find(|feature| **feature >= inputs) {
            let text = format!("samples[{sample}]: feature {feature} is not allowed; allowed: 0 to {}", inputs - 1);
            return Err(invalid(text));
        }
    }
    let samples: Vec<Vec<u32>> = request.samples.iter().map(|it| it.features.clone()).collect();
    let updates = model.updates;
    let predict = move || model.predict(samples.iter().map(Vec::as_slice));
    let predictions = tokio::task::spawn_blocking(predict).await;
    let predictions = predictions
        .map_err(|error| Problem::of(ProblemKind::Unavailable, error.to_string()))?
        .map_err(|error| invalid(error.to_string()))?;
    Ok(Some(v1::PredictResponse { predictions, updates }))
}

/// Loads the newest checkpoint of a run.
async fn load(shared: &Arc<Shared>, run: RunId) -> Option<Arc<Served>> {
    let state_dir = shared.options.state_dir.clone();
    let load = move || {
        let (submitted_ms, checkpoint) = CheckpointFolder::newest_with_time(&state_dir, run)?;
        let Manifest { spec, cursors, .. } = checkpoint.verify().ok()?;
        let (trainer, _) = Trainer::restore(&spec, &checkpoint).ok()?;
        let served = Arc::new(Served::new(1, cursors.contains_key(TABLE_CURSOR)));
        served.set(&trainer, spec.loss.kind);
        Some((submitted_ms, served))
    };
    let (submitted_ms, served) = tokio::task::spawn_blocking(load).await.ok()??;
    shared.trainings.keep_served((run, submitted_ms), Arc::clone(&served));
    Some(served)
}
