//! Federated runs: calls of a client, sent to the worker that drives the run.

use crate::call::{Failure, message_limit};
use crate::client::Client;
use crate::error::Error;
use crate::retry::Retry;
use crate::runs::run_id;
use engram_memory::{MemoryId, partition_of};
use engram_proto::v1;
use engram_proto::v1::federated_service_client::FederatedServiceClient;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;
use tokio::time::timeout;
use tonic::transport::Channel;
use tonic::{Request, Response, Status};

/// Time that a call which waits may take beyond its wait.
const GRACE: Duration = Duration::from_secs(2);

/// Whether calls go to a configured endpoint, which forwards them, instead of the driver: outside the cluster's network only an ingress may be reachable.
#[derive(Debug, Default)]
pub(crate) struct Relay {
    is_used: AtomicBool,
    /// Whether a driver was ever reached directly.
    was_direct: AtomicBool,
    /// Number of relayed attempts, to choose an endpoint.
    attempts: AtomicUsize,
}

impl Relay {
    fn succeeded(&self, relayed: bool) {
        if !relayed {
            self.was_direct.store(true, Ordering::Relaxed);
        }
        self.is_used.store(relayed && !self.was_direct.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// The next attempt takes the other way.
    fn failed(&self, relayed: bool) {
        self.is_used.store(!relayed, Ordering::Relaxed);
    }
}

fn run_of(caller: Option<&v1::FederatedCaller>) -> &str {
    caller.map_or("", |caller| &caller.run)
}

impl Client {
    /// Waits for a task of a Federated run.
    ///
    /// # Errors
    /// As for [`Error`]; a refusal is part of the response.
    pub async fn federated_check_in(&self, message: v1::CheckInRequest) -> Result<v1::CheckInResponse, Error> {
        let retry = self.read().waiting(Duration::from_millis(message.wait_ms.into()) + GRACE);
        let call = |mut driver: FederatedServiceClient<Channel>, request| async move { driver.check_in(request).await };
        self.call_federated(run_of(message.caller.as_ref()), retry, message.clone(), call).await
    }

    /// Returns a part of a model.
    ///
    /// # Errors
    /// As for [`Error`]; a refusal is part of the response.
    pub async fn federated_model_part(
        &self,
        message: v1::GetModelPartRequest,
    ) -> Result<v1::GetModelPartResponse, Error> {
        let call =
            |mut driver: FederatedServiceClient<Channel>, request| async move { driver.get_model_part(request).await };
        self.call_federated(run_of(message.caller.as_ref()), self.read(), message.clone(), call).await
    }

    /// Returns a part of the newest model of a run.
    ///
    /// # Errors
    /// As for [`Error`]; a refusal is part of the response.
    pub async fn federated_published(
        &self,
        message: v1::GetPublishedModelRequest,
    ) -> Result<v1::GetPublishedModelResponse, Error> {
        let call = |mut driver: FederatedServiceClient<Channel>, request| async move {
            driver.get_published_model(request).await
        };
        self.call_federated(&message.run, self.read(), message.clone(), call).await
    }

    /// Stores a chunk of an update.
    ///
    /// # Errors
    /// As for [`Error`]; a refusal is part of the response.
    pub async fn federated_upload_chunk(
        &self,
        message: v1::UploadChunkRequest,
    ) -> Result<v1::UploadChunkResponse, Error> {
        let call =
            |mut driver: FederatedServiceClient<Channel>, request| async move { driver.upload_chunk(request).await };
        self.call_federated(run_of(message.caller.as_ref()), self.write(), message.clone(), call).await
    }

    /// Submits an uploaded update.
    ///
    /// # Errors
    /// As for [`Error`]; a refusal is part of the response.
    pub async fn federated_commit(&self, message: v1::CommitUpdateRequest) -> Result<v1::CommitUpdateResponse, Error> {
        let call =
            |mut driver: FederatedServiceClient<Channel>, request| async move { driver.commit_update(request).await };
        self.call_federated(run_of(message.caller.as_ref()), self.write(), message.clone(), call).await
    }

    /// Gives a task up.
    ///
    /// # Errors
    /// As for [`Error`]; a refusal is part of the response.
    pub async fn federated_give_up(&self, message: v1::GiveUpTaskRequest) -> Result<v1::GiveUpTaskResponse, Error> {
        let call =
            |mut driver: FederatedServiceClient<Channel>, request| async move { driver.give_up_task(request).await };
        self.call_federated(run_of(message.caller.as_ref()), self.write(), message.clone(), call).await
    }

    /// Refuses a client of a run from now on. Returns whether it was not revoked before.
    ///
    /// # Errors
    /// As for [`Error`].
    pub async fn federated_revoke(&self, message: v1::RevokeClientRequest) -> Result<v1::RevokeClientResponse, Error> {
        let call =
            |mut driver: FederatedServiceClient<Channel>, request| async move { driver.revoke_client(request).await };
        self.call_federated(&message.run, self.write(), message.clone(), call).await
    }

    /// Sends a message of secure aggregation, and waits for the next one.
    ///
    /// # Errors
    /// As for [`Error`]; a refusal is part of the response.
    pub async fn federated_exchange(
        &self,
        message: v1::ExchangeMasksRequest,
    ) -> Result<v1::ExchangeMasksResponse, Error> {
        let retry = self.read().waiting(Duration::from_millis(message.wait_ms.into()) + GRACE);
        let call =
            |mut driver: FederatedServiceClient<Channel>, request| async move { driver.exchange_masks(request).await };
        self.call_federated(run_of(message.caller.as_ref()), retry, message.clone(), call).await
    }

    /// Calls the driver of a run, with retries: a repeated call changes nothing.
    async fn call_federated<M: Clone, R, F>(
        &self,
        run: &str,
        mut retry: Retry,
        message: M,
        call: impl Fn(FederatedServiceClient<Channel>, Request<M>) -> F,
    ) -> Result<R, Error>
    where
        F: Future<Output = Result<Response<R>, Status>>,
    {
        loop {
            // Workers forward by the map alone: they have no endpoints.
            let relayed = self.relay().is_used.load(Ordering::Relaxed) && !self.options().endpoints.is_empty();
            let response = async {
                let (driver, deadline) = self.federated_driver(run, &retry, relayed)?;
                let response = timeout(deadline, call(driver, self.request(message.clone(), deadline))).await;
                Ok(response.map_err(|_| Failure::timed_out())??.into_inner())
            };
            match response.await {
                Ok(reply) => {
                    self.relay().succeeded(relayed);
                    return Ok(reply);
                }
                Err(failure) => {
                    self.relay().failed(relayed);
                    retry.after(self, failure).await?;
                }
            }
        }
    }

    /// Returns the worker that drives a run, or an endpoint that forwards to it, and the limit of an attempt.
    fn federated_driver(
        &self,
        run: &str,
        retry: &Retry,
        relayed: bool,
    ) -> Result<(FederatedServiceClient<Channel>, Duration), Failure> {
        let limit = message_limit(self.options().plane);
        let service = |channel| {
            let driver = FederatedServiceClient::new(channel);
            driver.max_decoding_message_size(limit).max_encoding_message_size(limit)
        };
        if relayed {
            let number = self.relay().attempts.fetch_add(1, Ordering::Relaxed);
            return Ok((service(self.channel_of_endpoint(number)?), self.attempt(retry)));
        }
        let map = self.map().map_err(|error| Failure::unavailable(error.to_string()))?;
        let partition = partition_of(MemoryId(run_id(map.cluster, run).0 as u64), map.partition_count());
        let owner = map.owner(partition).ok_or_else(|| Failure::unavailable("the partition has no primary yet"))?;
        Ok((service(self.channel_of(&map, owner)?), self.attempt(retry)))
    }
}
