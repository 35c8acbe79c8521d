//! Runs: submitted to the worker that drives them, which is the primary of the run's partition.

use crate::call::Failure;
use crate::client::Client;
use crate::error::Error;
use crate::read::opened;
use crate::retry::Retry;
use engram_memory::{ClusterId, MemoryId, PartitionId, RunId, partition_of};
use engram_proto::v1::run_service_client::RunServiceClient;
use engram_proto::v1::{self, Problem, ProblemKind};
use futures::future::join_all;
use std::time::Duration;
use tokio::time::timeout;
use tonic::Streaming;
use tonic::transport::Channel;
use xxhash_rust::xxh3::xxh3_128;

/// After this long without a change the watch is opened anew: a worker that hangs is not waited for for ever.
const WATCH_SILENCE: Duration = Duration::from_secs(30);

/// The id of a run: a name stands for one run of a cluster for ever.
pub fn run_id(cluster: ClusterId, name: &str) -> RunId {
    let mut bytes = cluster.0.to_be_bytes().to_vec();
    bytes.extend_from_slice(name.as_bytes());
    RunId(xxh3_128(&bytes))
}

impl Client {
    /// Submits a run, or finds it. `spec_json` is the `spec` of a `LearnerRun`.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn submit_run(&self, name: &str, spec_json: &str) -> Result<v1::SubmitRunReply, Error> {
        let mut retry = self.write();
        loop {
            let message = v1::SubmitRunRequest { name: name.to_owned(), spec_json: spec_json.to_owned() };
            let answer = async {
                let (mut service, deadline) = self.driver(name, &retry)?;
                let call = service.submit_run(self.request(message, deadline));
                Ok(timeout(deadline, call).await.map_err(|_| Failure::timed_out())??.into_inner())
            };
            match answer.await {
                Ok(reply) => return Ok(reply),
                Err(failure) => retry.after(self, failure).await?,
            }
        }
    }

    /// Follows a run: its status now and at every change until it ends. A driver that is restarted is waited for.
    pub fn watch_run(&self, name: &str) -> Watch {
        Watch { client: self.clone(), name: name.to_owned(), open: None, ended: false }
    }

    /// Asks a run to stop after the epoch in progress.
    ///
    /// # Errors
    /// As [`Error`] says; an unknown run is [`ProblemKind::RunUnknown`].
    pub async fn cancel_run(&self, name: &str) -> Result<v1::RunStatus, Error> {
        let mut retry = self.write();
        loop {
            let message = v1::CancelRunRequest { name: name.to_owned() };
            let answer = async {
                let (mut service, deadline) = self.driver(name, &retry)?;
                let call = service.cancel_run(self.request(message, deadline));
                Ok(timeout(deadline, call).await.map_err(|_| Failure::timed_out())??.into_inner())
            };
            match answer.await {
                Ok(status) => return Ok(status),
                Err(failure) => retry.after(self, failure).await?,
            }
        }
    }

    /// The full report of a run so far, as JSON.
    ///
    /// # Errors
    /// As [`Error`] says; an unknown run is [`ProblemKind::RunUnknown`].
    pub async fn report(&self, name: &str) -> Result<String, Error> {
        let mut retry = self.read();
        loop {
            let message = v1::GetReportRequest { name: name.to_owned() };
            let answer = async {
                let (mut service, deadline) = self.driver(name, &retry)?;
                let call = service.get_report(self.request(message, deadline));
                Ok(timeout(deadline, call).await.map_err(|_| Failure::timed_out())??.into_inner())
            };
            match answer.await {
                Ok(reply) => return Ok(reply.report_json),
                Err(failure) => retry.after(self, failure).await?,
            }
        }
    }

    /// All runs of the cluster, by name.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn list_runs(&self) -> Result<Vec<v1::RunStatus>, Error> {
        let mut retry = self.read();
        loop {
            match self.list_runs_once(&retry).await {
                Ok(mut runs) => {
                    runs.sort_by(|a, b| a.name.cmp(&b.name));
                    return Ok(runs);
                }
                Err(failure) => retry.after(self, failure).await?,
            }
        }
    }

    async fn list_runs_once(&self, retry: &Retry) -> Result<Vec<v1::RunStatus>, Failure> {
        let map = self.map().map_err(|error| Failure::unavailable(error.to_string()))?;
        let deadline = self.attempt(retry);
        let calls = map.owners().into_iter().map(|owner| {
            let channel = self.channel_of(&map, owner);
            async move {
                let request = self.request(v1::ListRunsRequest { local: true }, deadline);
                let mut service = runs(channel?);
                let call = service.list_runs(request);
                Ok(timeout(deadline, call).await.map_err(|_| Failure::timed_out())??.into_inner().runs)
            }
        });
        let lists: Vec<Vec<v1::RunStatus>> = join_all(calls).await.into_iter().collect::<Result<_, Failure>>()?;
        Ok(lists.into_iter().flatten().collect())
    }

    /// The worker that drives a run.
    fn driver(&self, name: &str, retry: &Retry) -> Result<(RunServiceClient<Channel>, Duration), Failure> {
        let map = self.map().map_err(|error| Failure::unavailable(error.to_string()))?;
        let id = MemoryId(run_id(map.cluster, name).0 as u64);
        service(self, partition_of(id, map.partition_count()), retry)
    }
}

/// The runs of the worker that serves `partition`, and how long an attempt may take.
pub(crate) fn service(
    client: &Client,
    partition: PartitionId,
    retry: &Retry,
) -> Result<(RunServiceClient<Channel>, Duration), Failure> {
    let map = client.map().map_err(|error| Failure::unavailable(error.to_string()))?;
    let owner = map.owner(partition).ok_or_else(|| Failure::unavailable("the partition has no primary yet"))?;
    Ok((runs(client.channel_of(&map, owner)?), client.attempt(retry)))
}

pub(crate) fn runs(channel: Channel) -> RunServiceClient<Channel> {
    // A report holds a row per epoch, for people and browsers rather than for other clients.
    RunServiceClient::new(channel)
        .max_decoding_message_size(engram_proto::MAX_PEER_MESSAGE_BYTES)
        .max_encoding_message_size(engram_proto::MAX_MESSAGE_BYTES)
}

/// A run as it goes on.
#[derive(Debug)]
pub struct Watch {
    client: Client,
    name: String,
    open: Option<Streaming<v1::RunStatus>>,
    ended: bool,
}

impl Watch {
    /// The next status; `None` after the one that ends the run.
    ///
    /// # Errors
    /// The run is unknown, or its worker is gone for longer than the read deadline.
    pub async fn next(&mut self) -> Result<Option<v1::RunStatus>, Error> {
        if self.ended {
            return Ok(None);
        }
        let mut retry = self.client.read();
        loop {
            match self.pull(&retry).await {
                // Quiet is not failure: the time to wait for a worker starts anew.
                Ok(None) => {
                    self.open = None;
                    retry = self.client.read();
                }
                Ok(Some(status)) => {
                    use v1::RunPhase::{Cancelled, Failed, Succeeded};
                    self.ended = matches!(status.phase(), Succeeded | Failed | Cancelled);
                    return Ok(Some(status));
                }
                Err(failure) => {
                    self.open = None;
                    retry.after(&self.client, failure).await?;
                }
            }
        }
    }

    async fn pull(&mut self, retry: &Retry) -> Result<Option<v1::RunStatus>, Failure> {
        let stream = match &mut self.open {
            Some(stream) => stream,
            None => {
                let (mut service, deadline) = self.client.driver(&self.name, retry)?;
                // The deadline is for the head of the stream: a run takes as long as it takes.
                let mut request = self.client.request(v1::WatchRunRequest { name: self.name.clone() }, deadline);
                request.metadata_mut().remove("grpc-timeout");
                self.open.insert(opened(deadline, service.watch_run(request)).await?)
            }
        };
        match timeout(WATCH_SILENCE, stream.message()).await {
            Ok(Ok(Some(status))) => Ok(Some(status)),
            Ok(Ok(None)) => Err(Failure::of(Problem::of(ProblemKind::Stopping, "the run's worker ended the watch"))),
            Ok(Err(status)) => Err(status.into()),
            Err(_) => Ok(None),
        }
    }
}
