//! `RunService`: the client listener forwards requests for other workers, the peer listener rejects them.

mod check;
mod control;
mod status;
mod submission;

use crate::runs::{Runs, snapshot, tasks, turns};
use crate::service::Plane;
use crate::shared::Shared;
use crate::training;
use engram_learn::run::{Order, Phase, RunState};
use engram_memory::{Command, PartitionId, Record, RunId, Settings};
use engram_proto::answers;
use engram_proto::v1::run_service_server::RunService;
use engram_proto::v1::{self, Problem, ProblemKind};
use futures::stream::{BoxStream, StreamExt as _};
use status::{status_to_wire, stream_statuses};
use std::sync::Arc;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

/// Queued statuses of a client that does not read; the newest is sent once there is space.
const STATUS_QUEUE: usize = 4;

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
            return self.shared.client.submit(message).await.map(Response::new).map_err(client_status);
        }
        let reply = self.submit(run, message).await.map_err(Problem::into_status)?;
        Ok(Response::new(reply))
    }

    async fn watch_run(&self, request: Request<v1::WatchRunRequest>) -> Result<Response<Self::WatchRunStream>, Status> {
        let name = request.into_inner().name;
        let run = self.run_id(&name)?;
        if !self.is_here(run)? {
            let watch = self.shared.client.watch_run(&name);
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
            let forwarded = self.shared.client.cancel_run_as(&name, &uid).await;
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
            self.shared.client.remove_run(&name, &uid).await.map_err(client_status)?
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
            let forwarded = self.shared.client.suspend_run_as(&name, &uid, suspend).await;
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
            let runs = self.shared.client.list_runs().await.map_err(client_status)?;
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
            let report_json = self.shared.client.report(&name).await.map_err(client_status)?;
            return Ok(Response::new(v1::GetReportResponse { report_json }));
        }
        let report_json = self.report(run, &name).await.map_err(Problem::into_status)?;
        Ok(Response::new(v1::GetReportResponse { report_json }))
    }

    async fn predict(&self, request: Request<v1::PredictRequest>) -> Result<Response<v1::PredictResponse>, Status> {
        let message = request.into_inner();
        let run = self.run_id(&message.name)?;
        if !self.is_here(run)? {
            return self.shared.client.predict(message).await.map(Response::new).map_err(client_status);
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
        let result = turns::acquire(&self.shared, run, position).await.map_err(Problem::into_status)?;
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
        turns::release(&self.shared, run).await.map_err(Problem::into_status)?;
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
        let reports = tasks::start(&self.shared, request.into_inner()).map_err(Problem::into_status)?;
        Ok(Response::new(ReceiverStream::new(reports).boxed()))
    }
}

impl RunEndpoint {
    fn run_id(&self, name: &str) -> Result<RunId, Status> {
        if engram_api::is_name(name) {
            return Ok(RunState::run_id(self.shared.setup.options.cluster, name));
        }
        let text = format!("name: {name:?} is not allowed; allowed: a-z 0-9 -, a letter first, at most 45 characters");
        Err(Problem::of(ProblemKind::Invalid, text).into_status())
    }

    /// Returns whether this worker has the record of a run; an error on the peer listener if it has not.
    fn is_here(&self, run: RunId) -> Result<bool, Status> {
        let partition = crate::runs::partition(&self.shared, run);
        let here = self.shared.engine.position(partition).is_some();
        if here || self.plane == Plane::Client {
            Ok(here)
        } else {
            Err(self.shared.not_primary(partition).into_status())
        }
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
