//! Predictions with the weights of a run on this worker: those of its member, or of its newest checkpoint.

use crate::shared::Shared;
use crate::training::checkpoint::files::CheckpointFolder;
use crate::training::serving::serve::Served;
use engram_memory::RunId;
use engram_neural::Model;
use engram_proto::v1::{self, Problem, ProblemKind};
use engram_train::job::Rows;
use engram_train::table::TableColumns;
use engram_train::{Ensemble, Manifest, Prediction};
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
    let Some(model) = served.model() else { return Ok(None) };
    let rows = match &served.table {
        Some(table) => table_rows(table, request),
        None => feature_rows(&model.models[0], request),
    };
    let rows = rows.map_err(invalid)?;
    let target = served.table.as_ref().map_or_else(String::new, |table| table.target.clone());
    let updates = model.updates;
    let predict = move || model.predict(&rows);
    let predictions = tokio::task::spawn_blocking(predict).await;
    let Prediction { values, deviations, members } = predictions
        .map_err(|error| Problem::of(ProblemKind::Unavailable, error.to_string()))?
        .map_err(|error| invalid(error.to_string()))?;
    let members = members.into_iter().filter(|_| request.members);
    let members = members.map(|predictions| v1::MemberPredictions { predictions }).collect();
    Ok(Some(v1::PredictResponse { predictions: values, updates, target, deviations, members }))
}

/// Returns the inputs of samples with named columns.
fn table_rows(table: &TableColumns, request: &v1::PredictRequest) -> Result<Rows, String> {
    if request.columns.is_empty() {
        let known: Vec<&str> = table.columns.iter().map(|column| column.name.as_str()).collect();
        let known = known.join(", ");
        return Err(format!(
            "the model reads the numbers of a table; required: a header line with the columns {known}"
        ));
    }
    let samples: Vec<&[f32]> = request.samples.iter().map(|sample| &sample.values[..]).collect();
    table.rows(&request.columns, &samples)
}

/// Returns the inputs of samples given by their features.
fn feature_rows(model: &Model, request: &v1::PredictRequest) -> Result<Rows, String> {
    if let Some(column) = request.columns.first() {
        return Err(format!(
            "column {column} is not allowed; allowed: numbers of features, since the model reads no table"
        ));
    }
    let inputs = model.inputs() as u32;
    for (sample, features) in request.samples.iter().enumerate() {
        if let Some(feature) = features.features.iter().find(|feature| **feature >= inputs) {
            return Err(format!("samples[{sample}]: feature {feature} is not allowed; allowed: 0 to {}", inputs - 1));
        }
    }
    Ok(Rows::of_features(model, request.samples.iter().map(|sample| &sample.features[..])))
}

/// Loads the newest checkpoint of a run.
async fn load(shared: &Arc<Shared>, run: RunId) -> Option<Arc<Served>> {
    let state_dir = shared.setup.options.state_dir.clone();
    let load = move || {
        let (submitted_ms, checkpoint) = CheckpointFolder::newest_with_time(&state_dir, run)?;
        let manifest = checkpoint.verify().ok()?;
        let models = manifest.models();
        let Manifest { spec, table, .. } = manifest;
        let (trained, _) = Ensemble::restore(&spec, models, &checkpoint).ok()?;
        let served = Arc::new(Served::new(1, table));
        served.set(&trained, spec.loss.kind);
        Some((submitted_ms, served))
    };
    let (submitted_ms, served) = tokio::task::spawn_blocking(load).await.ok()??;
    shared.trainings.keep_served((run, submitted_ms), Arc::clone(&served));
    Some(served)
}
