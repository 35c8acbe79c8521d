//! Runs of kind `Job`: executed on a local cluster, and listed with the runs of the workers.

use super::list::status_object;
use super::run::step;
use crate::context::Context;
use crate::error::{failure, problem};
use crate::local::certificates;
use crate::local::job::{Job, JobPhase, JobPlan, JobRecord};
use crate::output::{Output, Table};
use crate::target::{Local, Target};
use anyhow::Context as _;
use engram_api::status::JobStatus;
use engram_api::{Code, ExitCode, JobRun, LearnerRun, ManifestEnum as _};
use engram_learn::run::spec_fingerprint;
use engram_proto::v1::RunStatus;
use serde_json::json;
use std::time::Duration;

/// Poll interval of the record of a job that another command executes; a file does not notify.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// A run of kind `Job`, and its processes.
pub(super) struct JobEntry {
    pub(super) status: RunStatus,
    pub(super) job: JobStatus,
}

/// Returns the runs of kind `Job`, which workers do not know.
///
/// # Errors
/// Records or objects cannot be read.
pub(super) async fn entries(target: &Target) -> anyhow::Result<Vec<JobEntry>> {
    match target {
        Target::Remote(..) => Ok(Vec::new()),
        Target::Local(local) => {
            let entry = |record: JobRecord| JobEntry { status: record.run_status(), job: record.status };
            Ok(JobRecord::all(&local.folder)?.into_iter().map(entry).collect())
        }
        Target::Kubernetes(cluster) => {
            let jobs = cluster.jobs().await?;
            Ok(jobs.into_iter().map(|(status, job)| JobEntry { status, job }).collect())
        }
    }
}

/// Executes a run, or follows it if another command does. Calls `on_progress` with each new status; returns the last one.
///
/// # Errors
/// The cluster is not a local one, or a process cannot be started.
pub(super) async fn execute_job(
    local: Option<&Local>,
    run: &LearnerRun,
    job: &JobRun,
    mut on_progress: impl FnMut(&RunStatus),
) -> anyhow::Result<RunStatus> {
    let name = &run.metadata.name;
    let Some(local) = local else {
        let message = format!(
            "run {name} is of kind Job, whose processes run on a local cluster or in Kubernetes, not with --address"
        );
        return Err(problem(Code::NotSupported, message));
    };
    if let Some(record) = JobRecord::read(&local.folder, name)?.filter(|it| it.phase == JobPhase::Running) {
        return follow(local, record, on_progress).await;
    }
    let spec = serde_json::to_value(run.spec.without_order()).context("failed to serialize the run")?;
    let plan = JobPlan {
        state_dir: local.folder.clone(),
        record: JobRecord::new(name, spec_fingerprint(&spec), job.replicas),
        run: job.clone(),
        backoff_limit: run.spec.backoff_limit,
        variables: variables(local, name, job),
    };
    let mut running = Job::start(plan)?;
    loop {
        let status = running.updates.borrow_and_update().run_status();
        on_progress(&status);
        if running.updates.borrow().phase != JobPhase::Running {
            return Ok(status);
        }
        running.updates.changed().await.with_context(|| format!("failed to record the state of run {name}"))?;
    }
}

/// Follows a run that another command executes.
async fn follow(
    local: &Local,
    mut record: JobRecord,
    mut on_progress: impl FnMut(&RunStatus),
) -> anyhow::Result<RunStatus> {
    loop {
        let status = record.run_status();
        on_progress(&status);
        if record.phase != JobPhase::Running {
            return Ok(status);
        }
        tokio::time::sleep(POLL_INTERVAL).await;
        let newest = JobRecord::read(&local.folder, &record.name)?;
        record = newest.with_context(|| format!("the record of run {} was deleted", record.name))?;
    }
}

/// Returns the variables of every process of a run.
fn variables(local: &Local, name: &str, job: &JobRun) -> Vec<(String, String)> {
    let addresses = local.endpoints.workers.iter().map(|worker| worker.client.to_string());
    let mut variables = vec![
        ("ENGRAM_ADDRESS", addresses.collect::<Vec<_>>().join(",")),
        ("ENGRAM_RUN", name.to_owned()),
        ("ENGRAM_GROUP", job.group(name).to_owned()),
        ("ENGRAM_WORLD_SIZE", job.replicas.to_string()),
    ];
    if local.endpoints.tls {
        let files = certificates::client(&local.folder);
        variables.extend([
            ("ENGRAM_CERTIFICATE_AUTHORITY", files.trust_bundle.display().to_string()),
            ("ENGRAM_CLIENT_CERTIFICATE", files.certificate.display().to_string()),
            ("ENGRAM_CLIENT_KEY", files.key.display().to_string()),
        ]);
    }
    variables.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// Prints a run of kind `Job`. Returns `false` if there is none of this name.
///
/// # Errors
/// Records or objects cannot be read.
pub(super) async fn describe_job(target: &Target, name: &str, context: &Context) -> anyhow::Result<bool> {
    let Some(JobEntry { status, job }) = entries(target).await?.into_iter().find(|it| it.status.name == name) else {
        return Ok(false);
    };
    print_job(target, &status, &job, &context.output)?;
    Ok(true)
}

fn print_job(target: &Target, status: &RunStatus, job: &JobStatus, output: &Output) -> anyhow::Result<()> {
    let folder = match target {
        Target::Local(local) => Some(JobRecord::folder(&local.folder, &status.name)),
        _ => None,
    };
    let mut object = status_object(status);
    object["job"] = serde_json::to_value(job).context("failed to serialize the processes")?;
    if output.is_structured() {
        return output.value(&json!({ "status": object }));
    }
    let mut text = format!(
        "{}: {}, {} {}/{}: {} active, {} failed\n",
        status.name,
        super::list::phase(status),
        step(status),
        status.epoch,
        status.epochs,
        job.active,
        job.failed
    );
    if !status.message.is_empty() {
        text.push_str(&format!("  {} {}\n", status.code, engram_api::printable(&status.message)));
    }
    if let Some(folder) = folder {
        text.push_str(&format!("  logs: {}/INDEX.log\n", folder.display()));
    }
    output.text(&text)?;
    let mut table = Table::new(&[">process", "state", ">restarts", ">exit code", "reason", "last line"]);
    for process in &job.processes {
        let tail = process.log_tail.as_ref().and_then(|tail| tail.lines().last());
        table.row([
            process.index.to_string(),
            process.phase.as_str().to_owned(),
            process.restarts.to_string(),
            process.exit_code.map_or_else(|| "-".into(), |code| code.to_string()),
            process.reason.clone().unwrap_or_else(|| "-".into()),
            engram_api::printable_line(tail.unwrap_or_default()).to_string(),
        ]);
    }
    output.object(&object, &table)
}

/// Removes the record of a job of a local cluster. Returns `false` if there is none.
///
/// # Errors
/// The run has not ended.
pub(super) fn delete(target: &Target, name: &str) -> anyhow::Result<bool> {
    let Target::Local(local) = target else { return Ok(false) };
    let Some(record) = JobRecord::read(&local.folder, name)? else { return Ok(false) };
    if record.phase == JobPhase::Running {
        let message =
            format!("run {name} has not ended; press Ctrl-C where it is executed, process {}", record.supervisor.pid);
        return Err(failure(ExitCode::Usage, message));
    }
    record.remove(&local.folder)?;
    Ok(true)
}
