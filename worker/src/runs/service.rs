//! `RunService`: the client listener forwards requests for other workers, the peer listener rejects them.

use super::identity::{self, Relation};
use super::{RunOverview, Runs, credentials, input, phase_to_wire, record, snapshot, specification, task, turn};
use crate::authorization;
use crate::local_files;
use crate::service::Plane;
use crate::shared::Shared;
use crate::training;
use engram_api::{MANAGED_BY, Requirement};
use engram_identity::Caller;
use engram_learn::run::{Order, Phase, RunState, RunningTask, Status as RunProgress, report};
use engram_learn::task_run::TaskReport;
use engram_memory::run::{MAX_PARTITION_BYTES, MAX_RUNS};
use engram_memory::{Command, PartitionId, Record, Refusal, RunId, Settings};
use engram_proto::answers;
use engram_proto::v1::run_service_server::RunService;
use engram_proto::v1::{self, Problem, ProblemKind};
use engram_train::job::Job;
use futures::stream::{BoxStream, StreamExt as _};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

/// Maximum size of a run's specification in bytes.
const MAX_SPEC_BYTES: usize = 64 << 10;
/// Method whose permission a run requires if workers access a storage for it.
const STORAGE_METHOD: &str = "/engram.v1.AdminService/CreateSnapshot";
/// Queued statuses of a client that does not read; the newest is sent once there is space.
const STATUS_QUEUE: usize = 4;
/// Polling interval while a watched run is suspended.
const SUSPENDED_POLL_INTERVAL: Duration = Duration::from_millis(500);

/// `RunService` of one worker.
#[derive(Clone)]
pub(crate) struct RunEndpoint {
    pub(crate) shared: Arc<Shared>,
    pub(crate) plane: Plane,
}

type Statuses = BoxStream<'static, Result<v1::RunStatus, Status>>;
type TaskReports = BoxStream<'static, Result<v1::RunTaskResponse, Status>>;

#[tonic::async_trait]
impl RunService for RunEndpoint {
    type WatchRunStream = Statuses;
    type RunTaskStream = TaskReports;

    async fn submit_run(
        &self,
        request: Request<v1::SubmitRunRequest>,
    ) -> Result<Response<v1::SubmitRunResponse>, Status> {
        self.admit_stored(&request).map_err(Problem::into_status)?;
        let message = request.into_inner();
        // A worker that forwards a request has checked it.
        if self.plane == Plane::Client {
            self.check_files(&message).map_err(Problem::into_status)?;
        }
        let run = self.run_id(&message.name)?;
        if !self.is_here(run)? {
            return self.shared.peers.submit(message).await.map(Response::new).map_err(client_status);
        }
        let reply = self.submit(run, message).await.map_err(Problem::into_status)?;
        Ok(Response::new(reply))
    }

    async fn watch_run(&self, request: Request<v1::WatchRunRequest>) -> Result<Response<Self::WatchRunStream>, Status> {
        let name = request.into_inner().name;
        let run = self.run_id(&name)?;
        if !self.is_here(run)? {
            let watch = self.shared.peers.watch_run(&name);
            let statuses = futures::stream::unfold(watch, |mut watch| async move {
                let next = watch.next().await.map_err(client_status).transpose()?;
                Some((next, watch))
            });
            return Ok(Response::new(statuses.boxed()));
        }
        let overview = self.overview(run, &name).await.map_err(Problem::into_status)?;
        let (statuses, stream) = mpsc::channel(STATUS_QUEUE);
        let live = self.shared.runs.watch(run).filter(|_| !overview.status.phase.is_final());
        match live {
            Some((_, updates)) => {
                tokio::spawn(stream_statuses(self.clone(), run, overview, updates, statuses));
            }
            None if overview.status.phase == Phase::Suspended => {
                let status = status_to_wire(&self.shared, &overview);
                statuses.try_send(Ok(status)).expect("the queue is empty");
                let service = self.clone();
                tokio::spawn(async move { service.wait_while_suspended(run, &overview.name, &statuses).await });
            }
            None => {
                let status = status_to_wire(&self.shared, &overview);
                statuses.try_send(Ok(status)).expect("the queue is empty");
            }
        }
        Ok(Response::new(ReceiverStream::new(stream).boxed()))
    }

    async fn cancel_run(&self, request: Request<v1::CancelRunRequest>) -> Result<Response<v1::RunStatus>, Status> {
        let v1::CancelRunRequest { name, uid } = request.into_inner();
        let run = self.run_id(&name)?;
        if !self.is_here(run)? {
            let forwarded = self.shared.peers.cancel_run_as(&name, &uid).await;
            return forwarded.map(Response::new).map_err(client_status);
        }
        let overview = self.overview(run, &name).await.map_err(Problem::into_status)?;
        if !uid.is_empty() && uid != overview.uid {
            return Ok(Response::new(status_to_wire(&self.shared, &overview)));
        }
        if !self.shared.runs.order(run, Order::Cancel) {
            self.end_suspended(run).await.map_err(Problem::into_status)?;
        }
        Ok(Response::new(status_to_wire(&self.shared, &overview)))
    }

    async fn remove_run(
        &self,
        request: Request<v1::RemoveRunRequest>,
    ) -> Result<Response<v1::RemoveRunResponse>, Status> {
        let v1::RemoveRunRequest { name, uid } = request.into_inner();
        let run = self.run_id(&name)?;
        let removed = if self.is_here(run)? {
            self.remove(run, &name, &uid).await.map_err(Problem::into_status)?
        } else {
            self.shared.peers.remove_run(&name, &uid).await.map_err(client_status)?
        };
        Ok(Response::new(v1::RemoveRunResponse { removed }))
    }

    async fn forget_run(
        &self,
        request: Request<v1::ForgetRunRequest>,
    ) -> Result<Response<v1::ForgetRunResponse>, Status> {
        let run = run_from_wire(&request.into_inner().run)?;
        Runs::forget_epochs(&self.shared, run).await.map_err(Problem::into_status)?;
        Ok(Response::new(v1::ForgetRunResponse {}))
    }

    async fn suspend_run(&self, request: Request<v1::SuspendRunRequest>) -> Result<Response<v1::RunStatus>, Status> {
        let v1::SuspendRunRequest { name, suspend, uid } = request.into_inner();
        let run = self.run_id(&name)?;
        if !self.is_here(run)? {
            let forwarded = self.shared.peers.suspend_run_as(&name, &uid, suspend).await;
            return forwarded.map(Response::new).map_err(client_status);
        }
        let overview = self.overview(run, &name).await.map_err(Problem::into_status)?;
        if !uid.is_empty() && uid != overview.uid {
            return Ok(Response::new(status_to_wire(&self.shared, &overview)));
        }
        self.suspend(run, suspend).await.map_err(Problem::into_status)?;
        let overview = self.overview(run, &name).await.map_err(Problem::into_status)?;
        Ok(Response::new(status_to_wire(&self.shared, &overview)))
    }

    async fn list_runs(&self, request: Request<v1::ListRunsRequest>) -> Result<Response<v1::ListRunsResponse>, Status> {
        if !request.into_inner().local && self.plane == Plane::Client {
            let runs = self.shared.peers.list_runs().await.map_err(client_status)?;
            return Ok(Response::new(v1::ListRunsResponse { runs }));
        }
        let overview = Runs::list(&self.shared).await.map_err(Problem::into_status)?;
        let runs = overview.iter().map(|overview| status_to_wire(&self.shared, overview)).collect();
        Ok(Response::new(v1::ListRunsResponse { runs }))
    }

    async fn get_report(
        &self,
        request: Request<v1::GetReportRequest>,
    ) -> Result<Response<v1::GetReportResponse>, Status> {
        let name = request.into_inner().name;
        let run = self.run_id(&name)?;
        if !self.is_here(run)? {
            let report_json = self.shared.peers.report(&name).await.map_err(client_status)?;
            return Ok(Response::new(v1::GetReportResponse { report_json }));
        }
        let report_json = self.report(run, &name).await.map_err(Problem::into_status)?;
        Ok(Response::new(v1::GetReportResponse { report_json }))
    }

    async fn predict(&self, request: Request<v1::PredictRequest>) -> Result<Response<v1::PredictResponse>, Status> {
        let message = request.into_inner();
        let run = self.run_id(&message.name)?;
        if !self.is_here(run)? {
            return self.shared.peers.predict(message).await.map(Response::new).map_err(client_status);
        }
        let overview = self.overview(run, &message.name).await.map_err(Problem::into_status)?;
        let predicted = training::predict(&self.shared, run, &message).await.map_err(Problem::into_status)?;
        let missing = || {
            let (name, kind) = (&message.name, &overview.kind);
            let text = format!("name: run {name:?} of kind {kind} has no weights on worker {}", self.shared.ordinal());
            Problem::of(ProblemKind::Invalid, text).into_status()
        };
        predicted.map(Response::new).ok_or_else(missing)
    }

    async fn acquire_turn(
        &self,
        request: Request<v1::AcquireTurnRequest>,
    ) -> Result<Response<v1::AcquireTurnResponse>, Status> {
        let message = request.into_inner();
        let run = run_from_wire(&message.run)?;
        let position = (message.submitted_ms, message.name.as_str());
        let result = turn::acquire(&self.shared, run, position).await.map_err(Problem::into_status)?;
        Ok(Response::new(match result {
            Ok(()) => v1::AcquireTurnResponse { granted: true, holder: message.name, runs_ahead: 0 },
            Err(denied) => v1::AcquireTurnResponse { granted: false, holder: denied.holder, runs_ahead: denied.ahead },
        }))
    }

    async fn release_turn(
        &self,
        request: Request<v1::ReleaseTurnRequest>,
    ) -> Result<Response<v1::ReleaseTurnResponse>, Status> {
        let run = run_from_wire(&request.into_inner().run)?;
        turn::release(&self.shared, run).await.map_err(Problem::into_status)?;
        Ok(Response::new(v1::ReleaseTurnResponse {}))
    }

    async fn set_update_counting(
        &self,
        request: Request<v1::SetUpdateCountingRequest>,
    ) -> Result<Response<v1::SetUpdateCountingResponse>, Status> {
        let versions = self.count(request.into_inner().enabled).await.map_err(Problem::into_status)?;
        Ok(Response::new(v1::SetUpdateCountingResponse { versions }))
    }

    async fn put_partition(
        &self,
        request: Request<v1::PutPartitionRequest>,
    ) -> Result<Response<v1::PutPartitionResponse>, Status> {
        let message = request.into_inner();
        let partition = PartitionId(message.partition);
        if self.shared.engine.position(partition).is_none() {
            return Err(self.shared.not_primary(partition).into_status());
        }
        let reply = match snapshot::put(&self.shared, message).await {
            Ok(Some(entry)) => v1::PutPartitionResponse {
                entry_json: serde_json::to_string(&entry).expect("an entry has string keys only"),
                ..v1::PutPartitionResponse::default()
            },
            Ok(None) => return Err(self.shared.not_primary(partition).into_status()),
            Err(error) => put_problem(&error)?,
        };
        Ok(Response::new(reply))
    }

    async fn run_task(&self, request: Request<v1::RunTaskRequest>) -> Result<Response<Self::RunTaskStream>, Status> {
        let reports = task::start(&self.shared, request.into_inner()).map_err(Problem::into_status)?;
        Ok(Response::new(ReceiverStream::new(reports).boxed()))
    }
}

impl RunEndpoint {
    fn run_id(&self, name: &str) -> Result<RunId, Status> {
        if engram_api::is_name(name) {
            return Ok(RunState::run_id(self.shared.options.cluster, name));
        }
        let text = format!("name: {name:?} is not allowed; allowed: a-z 0-9 -, a letter first, at most 45 characters");
        Err(Problem::of(ProblemKind::Invalid, text).into_status())
    }

    /// Checks permissions beyond the right to learn: a snapshot contains all memories, and workers may access a storage under their
    /// own identity, so a client that may only learn can request neither. It must not supply credentials either, which could
    /// replace those of another client's run.
    fn admit_stored(&self, request: &Request<v1::SubmitRunRequest>) -> Result<(), Problem> {
        let Some(accounts) = self.shared.accounts.as_ref().filter(|_| self.plane == Plane::Client) else {
            return Ok(());
        };
        if Caller::of(request.extensions()) != Caller::Anonymous {
            return Ok(());
        }
        let spec: serde_json::Value = serde_json::from_str(&request.get_ref().spec_json).unwrap_or_default();
        let is_stored = spec["kind"] == "Snapshot"
            || !spec["memory"]["source"]["events"]["s3"].is_null()
            || !spec["replay"]["checkpoint"]["location"].is_null()
            || request.get_ref().credentials.is_some();
        if !is_stored {
            return Ok(());
        }
        let admission = accounts.admit(request.metadata().as_ref(), STORAGE_METHOD, SystemTime::now());
        admission.map(drop).map_err(|refused| {
            self.shared.count_refusal(refused.reason);
            authorization::problem(refused)
        })
    }

    /// Checks the paths in a specification, which workers open with the rights of the cluster's owner.
    fn check_files(&self, message: &v1::SubmitRunRequest) -> Result<(), Problem> {
        // Pods have volumes only, which the manifest names.
        if self.shared.options.inputs.is_some() {
            return Ok(());
        }
        // An invalid specification is rejected by the worker that has the run.
        let spec: serde_json::Value = serde_json::from_str(&message.spec_json).unwrap_or_default();
        let source = &spec["memory"]["source"];
        let files = self.shared.options.local_files.as_ref();
        let parsed = serde_json::from_value::<engram_api::LearnerRunSpec>(spec.clone());
        if let Some(path) = parsed.as_ref().ok().and_then(|spec| spec.data_file()?.path.as_deref()) {
            local_files::check(files, "path of the data file", path, &message.owner_key)?;
        }
        for kind in ["events", "git"] {
            let named = source[kind]["path"].as_str();
            // The default is the current folder, which is that of the client.
            let Some(path) = named.or((kind == "git" && !source[kind].is_null()).then_some(".")) else { continue };
            let field = format!("spec.memory.source.{kind}.path");
            local_files::check(files, &field, path, &message.owner_key)?;
        }
        Ok(())
    }

    /// Returns whether this worker has the record of a run; an error on the peer listener if it has not.
    fn is_here(&self, run: RunId) -> Result<bool, Status> {
        let partition = super::partition(&self.shared, run);
        let here = self.shared.engine.position(partition).is_some();
        if here || self.plane == Plane::Client {
            Ok(here)
        } else {
            Err(self.shared.not_primary(partition).into_status())
        }
    }

    async fn submit(&self, run: RunId, mut message: v1::SubmitRunRequest) -> Result<v1::SubmitRunResponse, Problem> {
        let (spec, is_supplied) = self.check_spec(&message)?;
        identity::check(&message.uid)?;
        let mut state = RunState::new(message.name.clone(), spec);
        state.uid.clone_from(&message.uid);
        state.suspended = state.spec["suspend"] == true;
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        state.submitted_ms = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
        let partition = super::partition(&self.shared, run);
        let mut recorded = record::load(&self.shared, partition, run).await?;
        // An unreadable record is reported below.
        let previous = recorded.as_ref().and_then(|entry| RunState::of(entry).ok());
        match previous.map(|previous| (identity::relation(&previous, &state), previous)) {
            Some((Relation::Same | Relation::Replaces, previous)) if resumes(&message, &previous, &state) => {
                return self.resume_ended(run, message, is_supplied).await;
            }
            Some((Relation::Same, previous)) => specification::check_same(&message.name, &previous.spec, &state.spec)?,
            Some((Relation::Blocked, _)) => {
                let overview = self.overview(run, &message.name).await?;
                let status = Some(status_to_wire(&self.shared, &overview));
                return Ok(v1::SubmitRunResponse { status, created: false, resumed: false });
            }
            Some((Relation::Replaces, _)) => {
                Runs::make_room(&self.shared, run, &state).await?;
                recorded = record::load(&self.shared, partition, run).await?;
            }
            None => {}
        }
        if let Some(supplied) = message.credentials.take() {
            credentials::keep(&self.shared, run, supplied);
        }
        let is_new = recorded.is_none();
        if is_new && state.uid.is_empty() && state.spec["managedBy"] != MANAGED_BY {
            // A run that is submitted after its record was removed must not continue the epochs of its predecessor.
            state.uid = format!("{:032x}", rand::random::<u128>());
        }
        if is_new && is_supplied {
            input::keep(&self.shared, run, state.identity(run), supplied_input(&message)?).await?;
        }
        let created = is_new && self.create(run, &state).await?;
        if created && !state.suspended {
            Runs::drive(&self.shared, run, state, 1);
        }
        let overview = self.overview(run, &message.name).await?;
        let status = Some(status_to_wire(&self.shared, &overview));
        Ok(v1::SubmitRunResponse { status, created, resumed: false })
    }

    /// Records a new run. Returns whether no other call has recorded it meanwhile.
    async fn create(&self, run: RunId, state: &RunState) -> Result<bool, Problem> {
        let partition = super::partition(&self.shared, run);
        let command = Command::RunRecord { run, expected: 0, state: state.encode(), row: None };
        match record::write(&self.shared, partition, command).await? {
            Ok(()) => Ok(true),
            Err(Refusal::RunFull { .. }) => {
                let text = format!(
                    "partition {} has no room for the record of run {:?}: a partition keeps {MAX_RUNS} runs of {} MiB together; remove \
                     runs that have ended (engram list runs, engram delete run NAME), or lower spec.maintenance.runHistoryLimit",
                    partition.0,
                    state.name,
                    MAX_PARTITION_BYTES >> 20
                );
                Err(Problem::of(ProblemKind::RunFull, text))
            }
            Err(_) => Ok(false),
        }
    }

    /// Continues a run that has ended with its next epoch.
    async fn resume_ended(
        &self,
        run: RunId,
        mut message: v1::SubmitRunRequest,
        is_supplied: bool,
    ) -> Result<v1::SubmitRunResponse, Problem> {
        let partition = super::partition(&self.shared, run);
        Runs::await_driver(&self.shared, run).await?;
        let mut resumed = false;
        if let Some(entry) = record::load(&self.shared, partition, run).await?
            && let Ok(previous) = RunState::of(&entry)
            && previous.phase.is_final()
        {
            let state = previous.resume(&message.uid, SystemTime::now());
            if let Some(supplied) = message.credentials.take() {
                credentials::keep(&self.shared, run, supplied);
            }
            if is_supplied {
                input::keep(&self.shared, run, state.identity(run), supplied_input(&message)?).await?;
            }
            let command = Command::RunRecord { run, expected: entry.version, state: state.encode(), row: None };
            // Of two submissions one resumes it.
            resumed = record::write(&self.shared, partition, command).await?.is_ok();
            if resumed {
                tracing::info!(%run, name = state.name, epochs = state.done, "resuming a run that had ended");
                Runs::drive(&self.shared, run, state, entry.version + 1);
            }
        }
        let overview = self.overview(run, &message.name).await?;
        let status = Some(status_to_wire(&self.shared, &overview));
        Ok(v1::SubmitRunResponse { status, created: false, resumed })
    }

    /// Removes the record of a run that has ended.
    async fn remove(&self, run: RunId, name: &str, uid: &str) -> Result<bool, Problem> {
        let is_removed = |recorded: &RunState| {
            if !uid.is_empty() && uid != recorded.uid {
                return Ok(false);
            }
            if recorded.phase.is_final() {
                return Ok(true);
            }
            let text = format!("name: run {name:?} has not ended; allowed: runs that have ended (cancel it first)");
            Err(Problem::of(ProblemKind::Invalid, text))
        };
        let removed = Runs::remove_ended(&self.shared, run, is_removed).await?;
        if removed {
            tracing::info!(%run, name, "removed the record of an ended run");
        }
        Ok(removed)
    }

    /// Checks a specification like a manifest, because the client may have another version. Returns it, and whether content must be
    /// supplied with it.
    fn check_spec(&self, message: &v1::SubmitRunRequest) -> Result<(serde_json::Value, bool), Problem> {
        let invalid = |text: String| Problem::of(ProblemKind::Invalid, text);
        if message.spec_json.len() > MAX_SPEC_BYTES {
            let length = message.spec_json.len();
            return Err(invalid(format!("spec_json: {length} bytes are not allowed; allowed: up to {MAX_SPEC_BYTES}")));
        }
        if let Some(length) =
            message.input.as_ref().map(|input| input.len()).filter(|length| *length > input::MAX_BYTES)
        {
            let most = input::MAX_BYTES;
            return Err(invalid(format!("input: {length} bytes are not allowed; allowed: up to {most}")));
        }
        let spec: serde_json::Value =
            serde_json::from_str(&message.spec_json).map_err(|error| invalid(format!("spec_json: {error}")))?;
        let manifest = serde_json::json!({
            "apiVersion": engram_api::API_VERSION,
            "kind": "LearnerRun",
            "metadata": { "name": message.name },
            "spec": spec,
        });
        // JSON is YAML, so the manifest checker applies.
        let parsed = engram_api::parse(&manifest.to_string(), "spec_json", Requirement::Runs)
            .map_err(|problems| invalid(problems.to_string()))?;
        parsed
            .check_runs_on(&self.shared.options.cluster_name, &self.shared.options.spec)
            .map_err(|problems| invalid(problems.to_string()))?;
        let run = &parsed.runs.first().ok_or_else(|| invalid("spec_json: no run".into()))?.spec;
        if !run.depends_on.is_empty() || run.backoff_limit > 0 {
            let text = "spec.dependsOn: workers do not order runs; allowed: a run without dependsOn and backoffLimit, submitted when its \
                        dependencies have ended, as `engram run`, `engram up` and the operator do";
            return Err(invalid(text.into()));
        }
        if run.job.is_some() {
            let text = "spec.kind is Job: workers do not start programs of users; allowed: a run that `engram run` or `engram up` executes on a \
                        local cluster, or the operator in Kubernetes";
            return Err(invalid(text.into()));
        }
        if let Some(replay) = &run.replay {
            Job::new(replay).map_err(|error| invalid(error.to_string()))?;
        }
        if let Some(federated) = &run.federated {
            engram_federated::job::Job::new(&message.name, federated)
                .map_err(|error| invalid(format!("spec.federated.{error}")))?;
        }
        match input::refusal(&self.shared, run) {
            Some(refusal) => Err(invalid(refusal)),
            None => Ok((spec, input::is_supplied(run))),
        }
    }

    /// Suspends or resumes a run, directly if no driver is there to do it.
    async fn suspend(&self, run: RunId, suspend: bool) -> Result<(), Problem> {
        let order = if suspend { Order::Suspend } else { Order::Continue };
        let has_driver = self.shared.runs.order(run, order);
        let partition = super::partition(&self.shared, run);
        let Some(entry) = record::load(&self.shared, partition, run).await? else { return Ok(()) };
        let Ok(state) = RunState::of(&entry) else { return Ok(()) };
        let is_done = state.phase.is_final() || state.suspended == suspend;
        if is_done || suspend && has_driver {
            return Ok(());
        }
        let state = RunState { suspended: suspend, ..state };
        let command = Command::RunRecord { run, expected: entry.version, state: state.encode(), row: None };
        // A concurrent change wins; the client sees the resulting status and may retry.
        if record::write(&self.shared, partition, command).await?.is_ok() && !suspend {
            Runs::resume(&self.shared, run, state, entry.version + 1);
        }
        Ok(())
    }

    /// Cancels a suspended run, which has no driver.
    async fn end_suspended(&self, run: RunId) -> Result<(), Problem> {
        let partition = super::partition(&self.shared, run);
        let Some(entry) = record::load(&self.shared, partition, run).await? else { return Ok(()) };
        let Ok(mut state) = RunState::of(&entry) else { return Ok(()) };
        if state.reported_phase() == Phase::Suspended {
            state.end(Phase::Cancelled, "", "cancelled".into(), SystemTime::now());
            let command = Command::RunRecord { run, expected: entry.version, state: state.encode(), row: None };
            let written = record::write(&self.shared, partition, command).await?;
            written.map_err(|refusal| Problem::of(ProblemKind::Unavailable, refusal.to_string()))?;
            credentials::forget(&self.shared, run);
            input::forget(&self.shared, run, state.identity(run)).await?;
        }
        Ok(())
    }

    /// Returns when a run is no longer suspended, or the client has gone. The client watches again then.
    async fn wait_while_suspended(
        &self,
        run: RunId,
        name: &str,
        statuses: &mpsc::Sender<Result<v1::RunStatus, Status>>,
    ) {
        while !statuses.is_closed() {
            tokio::time::sleep(SUSPENDED_POLL_INTERVAL).await;
            match self.overview(run, name).await {
                Ok(overview) if overview.status.phase == Phase::Suspended => {}
                _ => return,
            }
        }
    }

    async fn overview(&self, run: RunId, name: &str) -> Result<RunOverview, Problem> {
        let unknown = || Problem::of(ProblemKind::RunUnknown, format!("run {name:?} does not exist in this cluster"));
        let partition = super::partition(&self.shared, run);
        let entry = record::load(&self.shared, partition, run).await?.ok_or_else(unknown)?;
        Runs::overview(&self.shared, run, &entry).ok_or_else(|| {
            Problem::of(ProblemKind::DataCorruption, format!("the record of run {name:?} cannot be read"))
        })
    }

    async fn report(&self, run: RunId, name: &str) -> Result<String, Problem> {
        let unknown = || Problem::of(ProblemKind::RunUnknown, format!("run {name:?} does not exist in this cluster"));
        let damaged = |error: &dyn std::fmt::Display| Problem::of(ProblemKind::DataCorruption, error.to_string());
        let partition = super::partition(&self.shared, run);
        let entry = record::load(&self.shared, partition, run).await?.ok_or_else(unknown)?;
        let state = RunState::of(&entry).map_err(|error| damaged(&error))?;
        if super::spec(&self.shared, &state).is_ok_and(|spec| spec.kind.has_tasks()) {
            let report = TaskReport::new(&state, &entry.rows, &self.shared.options.cluster_name);
            let report = report.map_err(|error| damaged(&error))?;
            return serde_json::to_string(&report).map_err(|error| damaged(&error));
        }
        if state.spec["kind"] == "Replay" || state.spec["kind"] == "Federated" {
            let report = TaskReport::new(&state, &entry.rows, &self.shared.options.cluster_name);
            let report = report.map_err(|error| damaged(&error))?;
            return serde_json::to_string(&report).map_err(|error| damaged(&error));
        }
        if state.spec["kind"] == "Snapshot" {
            let text = format!("run {name:?} is a snapshot, which has no report; allowed: runs that learn");
            return Err(Problem::of(ProblemKind::Invalid, text));
        }
        let source = super::source(&self.shared, &state).map_err(|error| damaged(&error))?;
        let report = report(&entry, &source, &self.shared.options.cluster_name).map_err(|error| damaged(&error))?;
        serde_json::to_string(&report).map_err(|error| damaged(&error))
    }

    /// Configures every partition served here to count updates, or to stop and reset the counts.
    async fn count(&self, enabled: bool) -> Result<Vec<v1::PartitionVersion>, Problem> {
        let engine = &self.shared.engine;
        let served = self.shared.served();
        let record = |partition: &PartitionId| {
            let settings = Settings { count_updates: enabled, ..engine.served_settings(*partition)? };
            Some((*partition, Record::bare(Command::Configure(settings))))
        };
        let records: Vec<_> = served.iter().filter_map(record).collect();
        let partitions: Vec<PartitionId> = records.iter().map(|(partition, _)| *partition).collect();
        let answers = engine.write(records).await?;
        let mut versions = Vec::with_capacity(partitions.len());
        for (partition, answer) in partitions.into_iter().zip(answers) {
            let committed = answer.map_err(|error| crate::engine::write_problem(&error))?;
            versions.push(v1::PartitionVersion::of(partition, committed.term, committed.lsn));
        }
        Ok(versions)
    }
}

/// Returns whether a submission continues the recorded run, which has ended. The runs that learn epochs can.
fn resumes(message: &v1::SubmitRunRequest, recorded: &RunState, submitted: &RunState) -> bool {
    let is_resumed = match message.resume() {
        v1::ResumeMode::Unspecified => false,
        v1::ResumeMode::Unfinished => matches!(recorded.phase, Phase::Failed | Phase::Cancelled),
        v1::ResumeMode::Always => recorded.phase.is_final(),
    };
    // The operator repeats the submission of an object, and an object is resumed by another one.
    let is_repeated = !message.uid.is_empty() && message.uid == recorded.uid;
    is_resumed
        && !is_repeated
        && !submitted.suspended
        && recorded.spec["kind"] == "Memory"
        && specification::check_same(&recorded.name, &recorded.spec, &submitted.spec).is_ok()
}

/// Returns the content that the specification requires with the submission.
fn supplied_input(message: &v1::SubmitRunRequest) -> Result<&[u8], Problem> {
    message.input.as_deref().ok_or_else(|| {
        let text = "input: missing; the content of the ConfigMap in the specification must be supplied";
        Problem::of(ProblemKind::Invalid, text)
    })
}

/// Sends the status now and after every change, until the run ends or the client has gone.
async fn stream_statuses(
    service: RunEndpoint,
    run: RunId,
    mut overview: RunOverview,
    mut updates: watch::Receiver<RunProgress>,
    statuses: mpsc::Sender<Result<v1::RunStatus, Status>>,
) {
    updates.mark_changed();
    loop {
        let changed = tokio::select! {
            changed = updates.changed() => changed,
            () = statuses.closed() => return,
        };
        if changed.is_err() {
            if overview.status.phase == Phase::Suspended {
                return service.wait_while_suspended(run, &overview.name, &statuses).await;
            }
            // The driver moved to another worker, where the client watches again.
            return;
        }
        overview.status = updates.borrow_and_update().clone();
        let ended = overview.status.phase.is_final();
        if statuses.send(Ok(status_to_wire(&service.shared, &overview))).await.is_err() || ended {
            return;
        }
    }
}

fn status_to_wire(shared: &Shared, overview: &RunOverview) -> v1::RunStatus {
    let status = &overview.status;
    v1::RunStatus {
        name: overview.name.clone(),
        run: answers::identity(overview.run.0),
        uid: overview.uid.clone(),
        ended_ms: overview.ended_ms,
        phase: phase_to_wire(status.phase).into(),
        epoch: status.epoch,
        epochs: status.epochs.unwrap_or(0),
        updates: status.updates,
        elapsed_seconds: status.elapsed_s,
        eta_seconds: status.eta_s().unwrap_or(-1.0),
        epochs_per_second: status.epochs_per_s,
        updates_per_second: status.updates_per_s,
        message: status.message.clone(),
        code: status.code.clone(),
        driver: (!status.phase.is_final() && status.phase != Phase::Suspended).then_some(shared.ordinal().0),
        metrics: status.metrics.clone().into_iter().collect(),
        outputs: status.outputs.clone().into_iter().collect(),
        label: status.label.clone(),
        managed_by: overview.managed_by.clone(),
        kind: overview.kind.clone(),
        needs_credentials: status.needs_credentials,
        spec_fingerprint: overview.spec_fingerprint.clone(),
        tasks: status.tasks.iter().map(task_to_wire).collect(),
        snapshot: status.snapshot.as_ref().map(|written| v1::SnapshotResult {
            url: written.url.clone(),
            digest: written.digest.clone(),
            memories: written.memories,
            bytes: written.bytes,
            partitions: written.partitions,
        }),
    }
}

fn task_to_wire(task: &RunningTask) -> v1::RunningTask {
    let RunningTask { number, name, worker, fraction, losses, checkpoint } = task.clone();
    v1::RunningTask { number, name, worker, fraction, losses, checkpoint }
}

/// A rejection by the storage is part of the response; other failures may be temporary.
fn put_problem(error: &anyhow::Error) -> Result<v1::PutPartitionResponse, Status> {
    if let Some(problem) = error.downcast_ref::<engram_api::Problem>() {
        let (code, message) = (problem.code().id().to_owned(), problem.message().to_owned());
        return Ok(v1::PutPartitionResponse { code, message, ..v1::PutPartitionResponse::default() });
    }
    let kind = match error.downcast_ref::<engram_store::Error>() {
        Some(engram_store::Error::DiskFull { .. }) => ProblemKind::DiskFull,
        _ => ProblemKind::Unavailable,
    };
    Err(Problem::of(kind, format!("{error:#}")).into_status())
}

fn run_from_wire(bytes: &[u8]) -> Result<RunId, Status> {
    answers::run_id(bytes).map_err(|error| Problem::of(ProblemKind::Invalid, error.to_string()).into_status())
}

/// Converts another worker's response.
#[expect(clippy::needless_pass_by_value, reason = "the shape that `map_err` wants")]
fn client_status(error: engram_client::Error) -> Status {
    match error.problem() {
        Some(problem) => problem.clone().into_status(),
        None => Problem::of(ProblemKind::Unavailable, error.to_string()).into_status(),
    }
}
