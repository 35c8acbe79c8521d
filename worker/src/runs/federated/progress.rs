//! Progress of a Federated run: status, history, report.

use crate::runs::federated::PublishedModel;
use crate::runs::federated::blobs::hexadecimal;
use crate::runs::federated::core::{Core, Step};
use engram_federated::job::Job;
use engram_federated::round::Mode;
use engram_learn::run::{FederatedRow, FederatedState, RunState};
use engram_learn::task_run::{TaskError, TaskFindings, TaskSummary, federated_page, page_row};
use std::collections::BTreeMap;

/// Records a version in the history of the run.
pub(in crate::runs::federated) fn note(state: &mut RunState, core: &Core, step: &Step, seconds: f64) {
    let rounds = core.service().rounds();
    let epsilon = core.epsilon();
    let federated = state.federated.get_or_insert_with(FederatedState::default);
    let measured = step.updates.iter().filter_map(|(_, report)| Some((report.samples as f64, report.loss?)));
    let (samples, weighted) =
        measured.fold((0.0, 0.0), |(n, sum), (samples, loss)| (n + samples, sum + samples * loss));
    let row = FederatedRow {
        version: rounds.version(),
        updates: u32::try_from(step.updates.len()).unwrap_or(u32::MAX),
        missing: step.missing,
        loss: (samples > 0.0).then(|| weighted / samples),
        epsilon,
        seconds,
    };
    for (client, report) in &step.updates {
        federated.count(client, report.samples, report.loss);
    }
    federated.note(row);
    show_model(federated, core);
    state.updates += step.updates.len() as u64;
    state.done = rounds.version();
}

/// Shows the newest model: what a reader needs to check it, also after the run.
fn show_model(federated: &mut FederatedState, core: &Core) {
    let PublishedModel { version, digest, key, signature } = core.published();
    federated.version = *version;
    federated.model = hexadecimal(digest);
    federated.model_key = hexadecimal(key);
    federated.signature = hexadecimal(signature);
}

/// Updates the figures of the status.
pub(in crate::runs::federated) fn update(state: &mut RunState, core: &Core) {
    let service = core.service();
    let rounds = service.rounds();
    let federated = state.federated.get_or_insert_with(FederatedState::default);
    federated.aborted = service.aborted();
    let mut metrics = BTreeMap::from([
        ("clients".to_owned(), service.enrolled() as f64),
        ("clients_waiting".to_owned(), rounds.waiting() as f64),
        ("clients_training".to_owned(), rounds.training() as f64),
        ("rounds_aborted".to_owned(), federated.aborted as f64),
    ]);
    if let Some(last) = federated.history.last() {
        metrics.insert("participants".to_owned(), last.updates.into());
        metrics.insert("missing".to_owned(), last.missing.into());
        metrics.extend(last.loss.map(|loss| ("loss".to_owned(), loss)));
    }
    // A round is charged when it starts, also one that is aborted.
    metrics.extend(core.epsilon().map(|epsilon| ("epsilon_spent".to_owned(), epsilon)));
    if let Some(clip) = core.clip() {
        metrics.insert("clip".to_owned(), clip);
    }
    show_model(federated, core);
    if let Some(privacy) = &core.job().privacy {
        metrics.insert("epsilon_budget".to_owned(), privacy.budget.0);
        metrics.insert("delta".to_owned(), privacy.budget.1);
    }
    (state.done, state.updates) = (rounds.version(), service.counted());
    state.metrics = metrics;
}

/// What the run waits for.
pub(in crate::runs::federated) fn message(core: &Core) -> String {
    let rounds = core.service().rounds();
    let (accepted, waiting, training) = (rounds.accepted_count(), rounds.waiting(), rounds.training());
    let number = rounds.round();
    match core.job().rounds.mode {
        Mode::Synchronous { target, .. } if training == 0 && accepted == 0 => {
            format!("waiting for clients: {waiting} of {target} are available")
        }
        Mode::Synchronous { target, .. } => {
            format!("round {number}: {accepted} of {target} updates, {training} clients train")
        }
        Mode::Poisson { .. } if training == 0 && accepted == 0 => {
            format!("waiting for clients: {waiting} are available")
        }
        Mode::Poisson { .. } => format!("round {number}: {accepted} updates, {training} clients train"),
        Mode::Cohorts { size, .. } => {
            let cohorts = rounds.open_rounds().len();
            format!("{cohorts} cohorts are masked, {training} clients train, {waiting} of {size} wait for the next one")
        }
        Mode::Buffered { buffer, .. } => format!("{accepted} of {buffer} updates, {training} clients train"),
    }
}

/// Adds what the run found to its state. Returns the row of the report page.
///
/// # Errors
/// A figure is not finite.
pub(in crate::runs::federated) fn findings(
    state: &mut RunState,
    job: &Job,
    message: &str,
) -> Result<Vec<u8>, TaskError> {
    let federated = state.federated.clone().unwrap_or_default();
    let rows = &federated.history;
    let mut verdicts = Vec::new();
    let losses: Vec<f64> = rows.iter().filter_map(|row| row.loss).collect();
    if let [first, .., last] = losses[..] {
        let text = format!("The loss that the clients measured went from {first:.4} to {last:.4}.");
        verdicts.push((last < first, text));
    }
    let missing: u64 = rows.iter().map(|row| u64::from(row.missing)).sum();
    let (versions, updates) = (federated.version, state.updates);
    let text = format!("{versions} versions of the model from {updates} updates; {missing} tasks ended without one.");
    verdicts.push((true, text));
    let spent = state.metrics.get("epsilon_spent").copied();
    if let (Some(privacy), Some(spent)) = (&job.privacy, spent) {
        let (budget, delta) = privacy.budget;
        let text = format!("Privacy spent: epsilon {spent:.3} of {budget} at delta {delta:e}, per client.");
        verdicts.push((spent <= budget, text));
    }
    if job.secure.is_some() {
        verdicts.push((true, "Updates were aggregated under masks: the workers saw their sums only.".to_owned()));
    }
    if !message.is_empty() {
        verdicts.push((false, message.to_owned()));
    }
    let loss = losses.last().map_or_else(|| "-".to_owned(), |loss| format!("{loss:.4}"));
    let seconds = state.elapsed_ms as f64 / 1_000.0;
    let rate = if seconds > 0.0 { format!("{:.2}", versions as f64 / seconds) } else { "-".to_owned() };
    let clients = state.metrics.get("clients").copied().unwrap_or_default();
    let mut tiles = vec![
        ("Loss", loss, "before the last round, on the clients' data".to_owned()),
        ("Versions", versions.to_string(), format!("{} rounds aborted", federated.aborted)),
        ("Updates", updates.to_string(), format!("{missing} tasks without one")),
        ("Clients", format!("{clients:.0}"), "enrolled".to_owned()),
        ("Versions/s", rate, "over the whole run".to_owned()),
    ];
    if let Some(spent) = spent {
        let budget = job.privacy.map_or(0.0, |privacy| privacy.budget.0);
        tiles.push(("Epsilon", format!("{spent:.3}"), format!("of {budget}")));
    }
    let strategy = job.run().strategy.kind;
    let about =
        format!("{strategy} over {} shared parameters, {} versions asked for.", job.parameters(), job.rounds.versions);
    let summary = verdicts.iter().map(|(_, text)| text.clone()).collect();
    let page = federated_page(&state.name, &about, verdicts, tiles, &federated)?;
    let metrics = BTreeMap::from([("parameters".to_owned(), job.parameters() as f64)]);
    let outputs =
        BTreeMap::from([("digest".to_owned(), federated.model.clone()), ("version".to_owned(), versions.to_string())]);
    let row = page_row(&page);
    state.metrics.extend(metrics.clone());
    state.tasks = Some(TaskSummary::new(TaskFindings { metrics, outputs, summary, page }, federated.model));
    Ok(row)
}
