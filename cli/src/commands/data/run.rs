//! `engram run`: submits the runs of a manifest one after another and follows each until it is finished.

use super::graph::{self, Selection};
use super::run_report::Report;
use crate::commands::manifest;
use crate::context::Context;
use crate::error::{Exit, failure, problem};
use crate::output::{Format, Output, Table, bytes, count};
use crate::progress::Progress;
use crate::target::{Local, Target};
use anyhow::Context as _;
use engram_api::{
    Code, DataFile, Events, ExitCode, LearnerRun, LearnerRunSpec, MAX_DATA_BYTES, Manifest, ManifestEnum as _, Problem,
    RunKind, Source,
};
use engram_client::{Client, Watch};
use engram_learn::report::{self, RunReport};
use engram_learn::source::{self, Limits, Origin, SourceOptions, read_data};
use engram_learn::task_run::{TaskReport, task_run};
use engram_proto::v1::{ResumeMode, RunPhase, RunStatus, SubmitRunRequest};
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tokio::signal::unix::{SignalKind, signal};

/// Shortest interval between reads of the report with `-o json`: the report is read completely each time.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);
/// Poll interval while a run suspends or resumes.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Submit the runs of a manifest and follow them until they are finished
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram run runs.yaml                          submit and follow the runs; exit with their result
  engram run runs.yaml --report report.html     write an HTML page with charts
  engram run runs.yaml --no-wait                submit without waiting; see: engram list runs
  engram run runs.yaml --rerun                  run again what has ended; its result is replaced
  engram run workflow.yaml                      runs with dependsOn: in their order, and only what has changed
  engram run workflow/ --rerun-from evaluate    a folder of manifests: again from one run on
  engram run runs.yaml -o json                  print a JSON line per learning epoch, then the result

In Kubernetes the command creates a LearnerRun object for each run, and the operator submits it to the workers.
Ctrl-C cancels the run after its current epoch; a second Ctrl-C detaches and leaves it running.")]
pub(crate) struct Run {
    /// Manifest with one or more LearnerRuns, or a folder of manifests; `-` is stdin
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Submit the runs without waiting for them
    #[arg(long, conflicts_with = "report")]
    no_wait: bool,
    /// Run again the runs that have ended, under their names: their records and results are replaced, and their epochs are applied
    /// again
    #[arg(long)]
    rerun: bool,
    /// Run again this run and the runs that depend on it
    #[arg(long, value_name = "RUN", conflicts_with = "rerun")]
    rerun_from: Option<String>,
    /// Write an HTML report of the run; requires a manifest with one run
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,
}

pub(crate) async fn run(arguments: &Run, context: &Context) -> anyhow::Result<ExitCode> {
    let manifests = graph::read(&arguments.file)?;
    manifests.iter().for_each(|manifest| manifest::print_notes(manifest, context));
    let runs = || manifests.iter().flat_map(|manifest| &manifest.runs);
    if arguments.report.is_some() && runs().count() != 1 {
        let message =
            format!("--report requires a manifest with one run; {} has {}", arguments.file.display(), runs().count());
        return Err(problem(Code::Conflicting, message));
    }
    if arguments.report.is_some() && runs().any(|run| run.spec.kind == RunKind::Job) {
        return Err(problem(
            Code::NotSupported,
            "--report is not supported for runs of kind Job, which have no report",
        ));
    }
    let target = Target::find(context).await?;
    let client = target.connect().await?;
    manifests.iter().try_for_each(|manifest| check(manifest, &target, &client))?;
    let is_graph = arguments.rerun_from.is_some() || manifests.iter().any(|manifest| graph::is_graph(&manifest.runs));
    if is_graph {
        let selection = Selection { all: arguments.rerun, from: arguments.rerun_from.clone() };
        graph::execute_files(&manifests, (selection, arguments.no_wait), (&target, &client), context).await?;
        if let (Some(path), Some(run)) = (&arguments.report, runs().next()) {
            write_report(&Report::read(&client, &run.metadata.name).await?, path, context)?;
        }
        return Ok(ExitCode::Ok);
    }
    for manifest in &manifests {
        run_in_order(manifest, arguments, (&target, &client), context).await?;
    }
    Ok(ExitCode::Ok)
}

fn write_report(report: &Report, path: &Path, context: &Context) -> anyhow::Result<()> {
    report.write_page(path)?;
    context.output.note(format!("wrote {}", path.display()));
    Ok(())
}

/// Submits the runs of a manifest one after another.
async fn run_in_order(
    manifest: &Manifest,
    arguments: &Run,
    (target, client): (&Target, &Client),
    context: &Context,
) -> anyhow::Result<()> {
    for run in &manifest.runs {
        let name = &run.metadata.name;
        let is_new = match target {
            Target::Kubernetes(cluster) if arguments.rerun => cluster.recreate_run(run).await?,
            Target::Kubernetes(cluster) => cluster.create_run(run).await?,
            _ if arguments.rerun => submit_again(client, manifest, run).await?,
            _ => {
                let submission = submit(client, manifest, run, ResumeMode::Unfinished).await?;
                submission.note_resumed(context);
                submission.created || submission.resumed
            }
        };
        if !is_new {
            context.output.note(format!("run {name} already exists; to run it again after its end, use --rerun"));
        }
        if arguments.no_wait {
            let describe = context.output.command_line(&format!("describe run {name}"));
            context.output.note(format!("submitted run {name}; show its progress: {describe}"));
            continue;
        }
        if let Target::Kubernetes(cluster) = target {
            cluster
                .wait_for_submission(name, |reason| context.output.note(format!("run {name} is waiting: {reason}")))
                .await?;
        }
        let report = follow(client, name, &context.output).await?;
        if let (Some(path), Some(report)) = (&arguments.report, &report) {
            write_report(report, path, context)?;
        }
    }
    Ok(())
}

/// Validates all runs before any is submitted: the name of a run that fails immediately cannot be reused.
pub(super) fn check(manifest: &Manifest, target: &Target, client: &Client) -> anyhow::Result<()> {
    if matches!(target, Target::Kubernetes(_)) {
        manifest.runs.iter().try_for_each(|run| check_reachable(&run.metadata.name, &run.spec))?;
    }
    let Target::Local(Local { folder, .. }) = target else {
        let name = client.map()?.cluster_name.clone();
        return match manifest.runs.iter().find(|run| run.spec.cluster_ref.name != name) {
            Some(run) => Err(problem(
                Code::ClusterNotFound,
                format!(
                    "run {} is for cluster {}, but the connected cluster is {name}",
                    run.metadata.name, run.spec.cluster_ref.name
                ),
            )),
            None => Ok(()),
        };
    };
    let Some(cluster) = super::created(folder)? else { return Ok(()) };
    manifest.check_runs_on(&cluster.name, &cluster.spec)?;
    manifest.runs.iter().try_for_each(|run| check_source(&absolute(manifest, &run.spec)?))
}

/// Rejects a source on this machine for a cluster in Kubernetes.
fn check_reachable(name: &str, spec: &LearnerRunSpec) -> anyhow::Result<()> {
    if let Some(DataFile { path: Some(path), input: None, .. }) = spec.data_file() {
        let message = format!(
            "run {name}: {path} is a local path, which workers in Kubernetes cannot read; use a ConfigMap (configMap), or a volume of \
             the cluster (input and path)"
        );
        return Err(problem(Code::NotSupported, message));
    }
    let path = match spec.memory.as_ref().map(|memory| &memory.source) {
        Some(Source::Events(Events { path: Some(path), input: None, .. })) => path,
        Some(Source::Git(git)) => &git.path,
        Some(Source::Example(_) | Source::Events(_) | Source::Synthetic(_)) | None => return Ok(()),
    };
    let message = format!(
        "run {name}: source {path} is a local path, which workers in Kubernetes cannot read; use a ConfigMap (events.configMap), \
         object storage (events.s3), or a volume of the cluster (events.input and path)"
    );
    Err(problem(Code::NotSupported, message))
}

/// Opens the source of a run and reads its first epoch, which reveals most errors. Object storage is not checked: the worker may have
/// other credentials and another route to it.
///
/// # Errors
/// The source cannot be read.
pub(crate) fn check_source(spec: &LearnerRunSpec) -> anyhow::Result<()> {
    if spec.kind.has_tasks() {
        return check_data(spec);
    }
    let Some(memory) = &spec.memory else { return Ok(()) };
    if matches!(memory.source, Source::Events(Events { s3: Some(_), .. })) {
        return Ok(());
    }
    let options = SourceOptions::from_manifest(&memory.source, Path::new(""));
    let result = source::open(&options, Limits::default(), 0).and_then(|mut source| source.next_epoch());
    result.map(drop).map_err(|error| super::import::source_problem(&error).into())
}

/// Reads the data file of a run of tasks and checks it with the specification.
fn check_data(spec: &LearnerRunSpec) -> anyhow::Result<()> {
    let path = spec.data_file().and_then(|file| file.path.as_deref());
    let data = path.map(|path| read_data(Path::new(path), &Origin::Disk, MAX_DATA_BYTES)).transpose();
    let data = data.map_err(|error| problem(Code::SourceUnreadable, error.to_string()))?;
    task_run(spec, data.as_deref()).map(drop).map_err(|error| problem(Code::InvalidValue, error.to_string()))
}

/// Returns the spec of a run with absolute paths.
///
/// # Errors
/// A field is not supported by local clusters, or the current directory cannot be read.
pub(crate) fn absolute(manifest: &Manifest, spec: &LearnerRunSpec) -> anyhow::Result<LearnerRunSpec> {
    let mut spec = spec.clone();
    let resolve = |path: &str| -> anyhow::Result<String> {
        let path = std::path::absolute(manifest.resolve(path)).context("failed to get the current directory")?;
        path.into_os_string().into_string().map_err(|path| {
            problem(Code::SourceUnreadable, format!("the path {} is not UTF-8", Path::new(&path).display()))
        })
    };
    if let Some(volume) = spec.snapshot.as_ref().and_then(|location| location.volume.as_ref()) {
        let message = format!(
            "spec.snapshot.volume is {volume}, which is supported in Kubernetes only; set url to object storage instead"
        );
        let help = "or write to a folder: engram snapshot create --to FOLDER";
        return Err(Problem::new(Code::NotSupported, message).help(help).into());
    }
    match spec.data_file_mut() {
        Some(DataFile { path: Some(path), input: None, .. }) => *path = resolve(path)?,
        Some(DataFile { .. }) => {
            let message =
                "configMap and input of a data file are supported in Kubernetes only; set path to a local file";
            return Err(problem(Code::NotSupported, message));
        }
        None => {}
    }
    if let Some(job) = &mut spec.job {
        job.working_dir = Some(resolve(job.working_dir.as_deref().unwrap_or("."))?);
    }
    if let Some(memory) = &mut spec.memory {
        match &mut memory.source {
            Source::Events(Events { path: Some(path), input: None, .. }) => *path = resolve(path)?,
            Source::Events(Events { s3: Some(_), .. }) => {}
            Source::Events(_) => {
                let message = "spec.memory.source.events.configMap and input are supported in Kubernetes only; set path to a local file, or s3";
                return Err(problem(Code::NotSupported, message));
            }
            Source::Git(git) => git.path = resolve(&git.path)?,
            Source::Example(_) | Source::Synthetic(_) => {}
        }
    }
    Ok(spec)
}

/// Result of a submission.
pub(crate) struct Submission {
    /// Whether the run is new.
    pub(crate) created: bool,
    /// Whether the run had ended and continues.
    pub(crate) resumed: bool,
    pub(crate) status: RunStatus,
}

impl Submission {
    /// Notes that the run continues.
    pub(crate) fn note_resumed(&self, context: &Context) {
        if self.resumed {
            let RunStatus { name, epoch, .. } = &self.status;
            context.output.note(format!("run {name} had ended after {epoch} epochs and continues with the next one"));
        }
    }
}

/// Submits a run. One that has ended continues as `resume` says, if its input has the epochs that it has learned.
pub(crate) async fn submit(
    client: &Client,
    manifest: &Manifest,
    run: &LearnerRun,
    resume: ResumeMode,
) -> anyhow::Result<Submission> {
    let spec = absolute(manifest, &run.spec)?;
    let spec_json = serde_json::to_string(&spec).context("failed to serialize the run")?;
    let (name, resume) = (run.metadata.name.clone(), resume.into());
    let reply = client.submit(SubmitRunRequest { name, spec_json, resume, ..SubmitRunRequest::default() }).await?;
    Ok(Submission { created: reply.created, resumed: reply.resumed, status: reply.status.unwrap_or_default() })
}

/// Submits a run, replacing the run of its name if that has ended. Returns `true`.
///
/// # Errors
/// The run of this name has not ended.
async fn submit_again(client: &Client, manifest: &Manifest, run: &LearnerRun) -> anyhow::Result<bool> {
    let spec = absolute(manifest, &run.spec)?;
    let spec = serde_json::to_string(&spec).context("failed to serialize the run")?;
    let (name, uid) = (&run.metadata.name, format!("{:032x}", rand::random::<u128>()));
    let status = client.submit_run_as(name, &uid, &spec, None, None).await?.status.unwrap_or_default();
    if status.uid == uid {
        return Ok(true);
    }
    Err(failure(
        ExitCode::Conflict,
        format!(
            "run {name} has not ended, so it cannot be run again: wait for it, or cancel it: engram run FILE, then Ctrl-C"
        ),
    ))
}

/// Suspends or resumes a run and waits until it does. Returns its status; the run may be finished.
pub(crate) async fn suspend(client: &Client, name: &str, suspend: bool) -> anyhow::Result<RunStatus> {
    loop {
        let status = client.suspend_run(name, suspend).await?;
        let phase = status.phase();
        let is_finished = matches!(phase, RunPhase::Succeeded | RunPhase::Failed | RunPhase::Cancelled);
        if is_finished || (phase == RunPhase::Suspended) == suspend {
            return Ok(status);
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Follows a run until it is finished, shows its progress and prints its result. Snapshots have no report. The first Ctrl-C cancels
/// the run after its current epoch, the second detaches.
///
/// # Errors
/// The run failed (with its error code) or was cancelled, or the cluster does not respond.
pub(crate) async fn follow(client: &Client, name: &str, output: &Output) -> anyhow::Result<Option<Report>> {
    let mut follower = Follower::new(client, name, output);
    let mut watch = client.watch_run(name);
    // Registered once: signals between two iterations would be lost otherwise.
    let mut interrupted = signal(SignalKind::interrupt()).context("failed to listen for Ctrl-C")?;
    let mut interrupts = 0;
    loop {
        let status = tokio::select! {
            status = next(&mut watch) => status?,
            Some(()) = interrupted.recv() => {
                interrupts += 1;
                if interrupts > 1 {
                    let describe = output.command_line(&format!("describe run {name}"));
                    follower.note(&format!("detached; run {name} continues in the cluster: {describe}"));
                    return Err(Exit(ExitCode::Interrupted).into());
                }
                follower.note(&format!("cancelling run {name} after its current epoch; press Ctrl-C again to detach"));
                client.cancel_run(name).await?;
                continue;
            }
        };
        match status {
            Some(status) => follower.show(status).await?,
            None => return follower.finish().await,
        }
    }
}

/// Like [`follow`], for callers that handle signals themselves.
pub(crate) async fn follow_to_end(client: &Client, name: &str, output: &Output) -> anyhow::Result<Option<Report>> {
    let mut follower = Follower::new(client, name, output);
    let mut watch = client.watch_run(name);
    while let Some(status) = next(&mut watch).await? {
        follower.show(status).await?;
    }
    follower.finish().await
}

async fn next(watch: &mut Watch) -> anyhow::Result<Option<RunStatus>> {
    Ok(watch.next().await?)
}

/// Returns an error for a run that failed or was cancelled.
fn check_success(status: &RunStatus, output: &Output) -> anyhow::Result<()> {
    let steps = format!("{}s", step(status));
    match status.phase() {
        RunPhase::Failed => {
            let code = Code::find(&status.code).unwrap_or(Code::RunFailed);
            let message = format!("run {} failed after {} {steps}: {}", status.name, status.epoch, status.message);
            Err(problem(code, message))
        }
        RunPhase::Cancelled => {
            let name = &status.name;
            let next = if is_snapshot(status) { "" } else { "; submitted again it continues with the next one" };
            output.note(format!("run {name} was cancelled after {} {steps}{next}", status.epoch));
            Err(Exit(ExitCode::Interrupted).into())
        }
        _ => Ok(()),
    }
}

/// Returns what the progress of a run counts.
pub(super) fn step(status: &RunStatus) -> &'static str {
    match status.kind.as_str() {
        "Snapshot" => "partition",
        "Job" => "process",
        _ if has_tasks(status) => "task",
        _ => "epoch",
    }
}

/// Returns whether a run is split into tasks.
fn has_tasks(status: &RunStatus) -> bool {
    RunKind::ALL.iter().any(|kind| kind.has_tasks() && kind.as_str() == status.kind)
}

fn is_snapshot(status: &RunStatus) -> bool {
    status.kind == "Snapshot"
}

/// Prints the result of a snapshot run.
fn print_snapshot(status: &RunStatus, output: &Output) -> anyhow::Result<()> {
    let Some(snapshot) = &status.snapshot else { return Ok(()) };
    let mut table = Table::new(&["snapshot", ">memories", ">size", ">partitions", "digest"]);
    let (memories, partitions) = (count(snapshot.memories), snapshot.partitions.to_string());
    table.row([snapshot.url.clone(), memories, bytes(snapshot.bytes), partitions, snapshot.digest.clone()]);
    let value = json!({
        "kind": "RunResult", "run": status.name, "snapshot": snapshot.url, "memories": snapshot.memories,
        "bytes": snapshot.bytes, "partitions": snapshot.partitions, "digest": snapshot.digest,
    });
    if output.format == Format::Json { print_line(&value) } else { output.object(&value, &table) }
}

/// Prints the report of a finished run.
fn print_report(status: &RunStatus, report: Report, output: &Output) -> anyhow::Result<Report> {
    match (output.format, &report) {
        (Format::Json, Report::Learning(report)) => print_line(&result(status, report))?,
        (Format::Json, Report::Tasks(report)) => print_line(&task_result(status, report))?,
        (Format::Yaml, _) => output.value(&serde_json::to_value(&report)?)?,
        _ => output.text(&report.summary())?,
    }
    Ok(report)
}

/// Shows the progress of a run.
struct Follower<'a> {
    client: &'a Client,
    name: &'a str,
    output: &'a Output,
    last: Option<RunStatus>,
    progress: Progress,
    /// With `-o json`: number of printed rows, and time of the next read.
    rows: Option<(usize, Instant)>,
}

impl<'a> Follower<'a> {
    fn new(client: &'a Client, name: &'a str, output: &'a Output) -> Self {
        let rows = (output.format == Format::Json).then(|| (0, Instant::now()));
        Self { client, name, output, last: None, progress: Progress::new(output, name, None), rows }
    }

    fn note(&self, text: &str) {
        self.progress.note(self.output, text);
    }

    async fn show(&mut self, status: RunStatus) -> anyhow::Result<()> {
        if status.epochs > 0 {
            self.progress.set_total(status.epochs);
        }
        self.progress.set(status.epoch, &describe(&status));
        let has_rows = !is_snapshot(&status) && !has_tasks(&status);
        if has_rows && self.rows.is_some_and(|(printed, due)| printed < status.epoch as usize && Instant::now() >= due)
        {
            self.print_rows().await?;
        }
        self.last = Some(status);
        Ok(())
    }

    async fn finish(mut self) -> anyhow::Result<Option<Report>> {
        let report = match self.rows {
            _ if self.last.as_ref().is_some_and(is_snapshot) => None,
            Some(_) => Some(self.print_rows().await?),
            None => Some(Report::read(self.client, self.name).await?),
        };
        let Self { name, output, last, progress, .. } = self;
        // Removes the progress bar before printing the result.
        drop(progress);
        match last {
            Some(status) => {
                check_success(&status, output)?;
                if let Some(report) = report {
                    return print_report(&status, report, output).map(Some);
                }
                print_snapshot(&status, output)?;
                Ok(None)
            }
            None => Err(problem(Code::RunUnknown, format!("run {name} not found"))),
        }
    }

    /// Prints new rows, one JSON object per line.
    async fn print_rows(&mut self) -> anyhow::Result<Report> {
        let began = Instant::now();
        let report = match Report::read(self.client, self.name).await? {
            Report::Learning(report) => report,
            report @ Report::Tasks(_) => return Ok(report),
        };
        let printed = self.rows.map_or(0, |(printed, _)| printed);
        for row in report.epochs.iter().skip(printed) {
            #[derive(Serialize)]
            struct Row<'a> {
                kind: &'static str,
                run: &'a str,
                #[serde(flatten)]
                row: &'a report::EpochRow,
            }
            print_line(&serde_json::to_value(Row { kind: "Epoch", run: self.name, row })?)?;
        }
        // Long reports take longer to read: limits reading to a tenth of the time.
        let pause = REPORT_INTERVAL.max(began.elapsed() * 10);
        self.rows = Some((report.epochs.len(), Instant::now() + pause));
        Ok(Report::Learning(report))
    }
}

/// Returns what the rates of a run count.
fn rate_units(status: &RunStatus) -> (&'static str, &'static str) {
    match status.kind.as_str() {
        "Replay" => ("steps", "samples"),
        "Federated" => ("rounds", "updates"),
        _ => ("epochs", "updates"),
    }
}

/// Describes a status, except for the number of epochs.
fn describe(status: &RunStatus) -> String {
    let mut parts = Vec::new();
    if !status.message.is_empty() {
        parts.push(status.message.clone());
    }
    if !status.label.is_empty() {
        parts.push(status.label.clone());
    }
    let (steps, changes) = rate_units(status);
    if status.epochs_per_second > 0.0 && !has_tasks(status) {
        parts.push(format!("{:.0} {steps}/s", status.epochs_per_second));
    }
    if status.updates_per_second >= 1.0 {
        parts.push(format!("{} {changes}/s", count(status.updates_per_second as u64)));
    }
    for name in ["separation", "convergence"] {
        if let Some(value) = status.metrics.get(name) {
            parts.push(format!("{name} {value:.3}"));
        }
    }
    // The map is unordered; sorts by rank.
    let rate = |(name, value): (&String, &f64)| Some((name.strip_prefix("hit_rate_")?.parse::<u32>().ok()?, *value));
    let rates: BTreeMap<u32, f64> = status.metrics.iter().filter_map(rate).collect();
    parts.extend(rates.into_iter().map(|(first, value)| format!("top {first} {value:.3}")));
    parts.join(", ")
}

/// Returns the last line of `-o json`: the report without rows and tables, which `describe run` prints.
fn result(status: &RunStatus, report: &RunReport) -> Value {
    json!({
        "kind": "RunResult",
        "run": status.name,
        "cluster": report.cluster,
        "phase": status.phase().as_str_name().trim_start_matches("RUN_PHASE_").to_lowercase(),
        "epochs": report.epochs.len(),
        "updates": report.events(),
        "memories": report.memories(),
        "elapsedSeconds": report.elapsed_s,
        "epochsPerSecond": report.epochs_per_s,
        "updatesPerSecond": report.updates_per_s,
        "prediction": report.prediction,
        "experiment": report.experiment,
        "digest": report.digest,
    })
}

/// Returns the last line of `-o json` for a run of tasks.
fn task_result(status: &RunStatus, report: &TaskReport) -> Value {
    json!({
        "kind": "RunResult",
        "run": status.name,
        "cluster": report.cluster,
        "phase": status.phase().as_str_name().trim_start_matches("RUN_PHASE_").to_lowercase(),
        "tasks": report.tasks,
        "elapsedSeconds": report.elapsed_seconds,
        "metrics": report.findings.metrics,
        "outputs": report.findings.outputs,
    })
}

/// Prints one line of JSON.
fn print_line(value: &Value) -> anyhow::Result<()> {
    use std::io::Write as _;
    Ok(writeln!(std::io::stdout().lock(), "{value}")?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hit_rates_are_sorted_by_rank() {
        let rates =
            [("hit_rate_1000", 0.6), ("hit_rate_500", 0.7), ("hit_rate_500_most_recent", 0.1), ("separation", 2.0)];
        let metrics = rates.map(|(name, value)| (name.to_owned(), value)).into_iter().collect();
        let status = RunStatus { metrics, ..RunStatus::default() };
        assert_eq!(describe(&status), "separation 2.000, top 500 0.700, top 1000 0.600");
    }
}
