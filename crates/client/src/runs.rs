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
use tonic::transport::Channel;
use tonic::{Request, Response, Status, Streaming};
use xxhash_rust::xxh3::xxh3_128;

/// After this long without a change the watch is reopened, so that a hanging worker is not waited for permanently.
const WATCH_SILENCE: Duration = Duration::from_secs(30);

/// Returns the id of the record of a run, by its name.
pub fn run_id(cluster: ClusterId, name: &str) -> RunId {
    let mut bytes = cluster.0.to_be_bytes().to_vec();
    bytes.extend_from_slice(name.as_bytes());
    RunId(xxh3_128(&bytes))
}

impl Client {
    /// Submits a run, or returns the existing one. `spec_json` is the `spec` of a `LearnerRun`; `input` the content to
    /// learn from, if the specification requires it inline; `credentials` those of the storage that it names with a
    /// `secretRef`.
    ///
    /// # Errors
    /// As for [`Error`].
    pub async fn submit_run(
        &self,
        name: &str,
        spec_json: &str,
        input: Option<&[u8]>,
        credentials: Option<v1::ObjectCredentials>,
    ) -> Result<v1::SubmitRunResponse, Error> {
        self.submit_run_as(name, "", spec_json, input, credentials).await
    }

    /// Like [`Self::submit_run`], with the identity of the submission: `uid` is the UID of the `LearnerRun` object, or a value
    /// that is never used again. A run that has ended and was submitted with another one is replaced by a new run; any other run
    /// of this name continues, and the response has its status with its `uid`.
    ///
    /// # Errors
    /// As for [`Error`].
    pub async fn submit_run_as(
        &self,
        name: &str,
        uid: &str,
        spec_json: &str,
        input: Option<&[u8]>,
        credentials: Option<v1::ObjectCredentials>,
    ) -> Result<v1::SubmitRunResponse, Error> {
        let input = input.map(|content| content.to_vec().into());
        let (name, uid, spec_json) = (name.to_owned(), uid.to_owned(), spec_json.to_owned());
        self.submit(v1::SubmitRunRequest { name, uid, spec_json, input, credentials, ..Default::default() }).await
    }

    /// Submits a run, resumes one that has ended, or returns the existing one, as the message says. The key of the cluster's owner
    /// is added.
    ///
    /// # Errors
    /// As for [`Error`].
    pub async fn submit(&self, message: v1::SubmitRunRequest) -> Result<v1::SubmitRunResponse, Error> {
        let message = v1::SubmitRunRequest { owner_key: self.owner_key().to_owned(), ..message };
        let name = message.name.clone();
        let submit = |mut driver: RunServiceClient<Channel>, request| async move { driver.submit_run(request).await };
        self.call_driver(&name, self.write(), message, submit).await
    }

    /// Watches a run: its status now and at every change until it ends. Waits for a driver that restarts.
    pub fn watch_run(&self, name: &str) -> Watch {
        Watch { client: self.clone(), name: name.to_owned(), open: None, ended: false }
    }

    /// Cancels a run after the epoch in progress.
    ///
    /// # Errors
    /// As [`Error`] says; an unknown run is [`ProblemKind::RunUnknown`].
    pub async fn cancel_run(&self, name: &str) -> Result<v1::RunStatus, Error> {
        self.cancel_run_as(name, "").await
    }

    /// Like [`Self::cancel_run`], for a run that was submitted with `uid` only; of any other run the status is returned.
    ///
    /// # Errors
    /// As [`Error`] says; an unknown run is [`ProblemKind::RunUnknown`].
    pub async fn cancel_run_as(&self, name: &str, uid: &str) -> Result<v1::RunStatus, Error> {
        let message = v1::CancelRunRequest { name: name.to_owned(), uid: uid.to_owned() };
        let cancel = |mut driver: RunServiceClient<Channel>, request| async move { driver.cancel_run(request).await };
        self.call_driver(name, self.write(), message, cancel).await
    }

    /// Removes the record of a run that has ended. Empty `uid` = any run of this name. Returns whether there was such a run.
    ///
    /// # Errors
    /// As [`Error`] says; a run that has not ended is [`ProblemKind::Invalid`].
    pub async fn remove_run(&self, name: &str, uid: &str) -> Result<bool, Error> {
        let message = v1::RemoveRunRequest { name: name.to_owned(), uid: uid.to_owned() };
        let remove = |mut driver: RunServiceClient<Channel>, request| async move { driver.remove_run(request).await };
        Ok(self.call_driver(name, self.write(), message, remove).await?.removed)
    }

    /// Suspends a run after the epoch in progress, keeping its progress, or resumes it. The response contains its
    /// state: repeat the call until it is the requested one.
    ///
    /// # Errors
    /// As [`Error`] says; an unknown run is [`ProblemKind::RunUnknown`].
    pub async fn suspend_run(&self, name: &str, suspend: bool) -> Result<v1::RunStatus, Error> {
        self.suspend_run_as(name, "", suspend).await
    }

    /// Like [`Self::suspend_run`], for a run that was submitted with `uid` only; of any other run the status is returned.
    ///
    /// # Errors
    /// As [`Error`] says; an unknown run is [`ProblemKind::RunUnknown`].
    pub async fn suspend_run_as(&self, name: &str, uid: &str, suspend: bool) -> Result<v1::RunStatus, Error> {
        let message = v1::SuspendRunRequest { name: name.to_owned(), suspend, uid: uid.to_owned() };
        let order = |mut driver: RunServiceClient<Channel>, request| async move { driver.suspend_run(request).await };
        self.call_driver(name, self.write(), message, order).await
    }

    /// Returns the full report of a run so far, as JSON.
    ///
    /// # Errors
    /// As [`Error`] says; an unknown run is [`ProblemKind::RunUnknown`].
    pub async fn report(&self, name: &str) -> Result<String, Error> {
        let message = v1::GetReportRequest { name: name.to_owned() };
        let get = |mut driver: RunServiceClient<Channel>, request| async move { driver.get_report(request).await };
        Ok(self.call_driver(name, self.read(), message, get).await?.report_json)
    }

    /// Predicts samples with the weights of a Replay run.
    ///
    /// # Errors
    /// As [`Error`] says; an unknown run is [`ProblemKind::RunUnknown`].
    pub async fn predict(&self, message: v1::PredictRequest) -> Result<v1::PredictResponse, Error> {
        let name = message.name.clone();
        let predict = |mut driver: RunServiceClient<Channel>, request| async move { driver.predict(request).await };
        self.call_driver(&name, self.read(), message, predict).await
    }

    /// Makes the primary of a partition upload it to an object store. Failures are retried within `deadline`, also with
    /// another primary; errors of the object store are part of the response.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn put_partition(
        &self,
        message: v1::PutPartitionRequest,
        deadline: Duration,
    ) -> Result<v1::PutPartitionResponse, Error> {
        let (partition, mut retry) = (PartitionId(message.partition), Retry::new(deadline));
        loop {
            let response = async {
                let (mut primary, _) = service(self, partition, &retry)?;
                let remaining = retry.remaining().unwrap_or_default();
                let call = primary.put_partition(self.request(message.clone(), remaining));
                Ok(timeout(remaining, call).await.map_err(|_| Failure::timed_out())??.into_inner())
            };
            match response.await {
                Ok(reply) => return Ok(reply),
                Err(failure) => retry.after(self, failure).await?,
            }
        }
    }

    /// Returns all runs of the cluster, by name.
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

    /// Calls the driver of a run, with retries.
    async fn call_driver<M: Clone, R, F>(
        &self,
        name: &str,
        mut retry: Retry,
        message: M,
        call: impl Fn(RunServiceClient<Channel>, Request<M>) -> F,
    ) -> Result<R, Error>
    where
        F: Future<Output = Result<Response<R>, Status>>,
    {
        loop {
            let response = async {
                let (driver, deadline) = self.driver(name, &retry)?;
                let response = timeout(deadline, call(driver, self.request(message.clone(), deadline))).await;
                Ok(response.map_err(|_| Failure::timed_out())??.into_inner())
            };
            match response.await {
                Ok(reply) => return Ok(reply),
                Err(failure) => retry.after(self, failure).await?,
            }
        }
    }

    /// Returns the worker that drives a run.
    fn driver(&self, name: &str, retry: &Retry) -> Result<(RunServiceClient<Channel>, Duration), Failure> {
        let map = self.map().map_err(|error| Failure::unavailable(error.to_string()))?;
        let id = MemoryId(run_id(map.cluster, name).0 as u64);
        service(self, partition_of(id, map.partition_count()), retry)
    }
}

/// Returns the run service of the primary of `partition`, and the limit of an attempt.
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
    // A report holds a row per epoch, for users and browsers rather than for other clients.
    RunServiceClient::new(channel)
        .max_decoding_message_size(engram_proto::MAX_PEER_MESSAGE_BYTES)
        .max_encoding_message_size(engram_proto::MAX_MESSAGE_BYTES)
}

/// A watch on a run.
#[derive(Debug)]
pub struct Watch {
    client: Client,
    name: String,
    open: Option<Streaming<v1::RunStatus>>,
    ended: bool,
}

impl Watch {
    /// Returns the next status; `None` after the one that ends the run.
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
                // Silence is not a failure: the wait for a worker starts again.
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
                // The deadline applies to the head of the stream: a run takes any time.
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
