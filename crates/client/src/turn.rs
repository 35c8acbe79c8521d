//! Cluster-wide operations of runs: the turn to change the cluster, and update counting.

use crate::call::Failure;
use crate::client::Client;
use crate::error::Error;
use crate::runs::service;
use engram_memory::{PartitionId, RunId};
use engram_proto::v1;
use futures::future::join_all;
use tokio::time::timeout;

/// The primary of this partition keeps the turn.
const KEEPER: PartitionId = PartitionId(0);

impl Client {
    /// Requests the turn to change the cluster: one run at a time has it, and among the waiting runs that keep
    /// requesting it the one submitted first (`submitted_ms`, since 1970) is next.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn acquire_turn(
        &self,
        run: RunId,
        name: &str,
        submitted_ms: u64,
    ) -> Result<v1::AcquireTurnResponse, Error> {
        let mut retry = self.write();
        loop {
            let run = engram_proto::answers::identity(run.0);
            let message = v1::AcquireTurnRequest { run, name: name.to_owned(), submitted_ms };
            let response = async {
                let (mut keeper, deadline) = service(self, KEEPER, &retry)?;
                let call = keeper.acquire_turn(self.request(message, deadline));
                Ok(timeout(deadline, call).await.map_err(|_| Failure::timed_out())??.into_inner())
            };
            match response.await {
                Ok(reply) => return Ok(reply),
                Err(failure) => retry.after(self, failure).await?,
            }
        }
    }

    /// Releases the turn; no effect if the run does not have it.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn release_turn(&self, run: RunId) -> Result<(), Error> {
        let mut retry = self.write();
        loop {
            let message = v1::ReleaseTurnRequest { run: engram_proto::answers::identity(run.0) };
            let response = async {
                let (mut keeper, deadline) = service(self, KEEPER, &retry)?;
                let call = keeper.release_turn(self.request(message, deadline));
                timeout(deadline, call).await.map_err(|_| Failure::timed_out())??;
                Ok(())
            };
            match response.await {
                Ok(()) => return Ok(()),
                Err(failure) => retry.after(self, failure).await?,
            }
        }
    }

    /// Enables or disables the per-memory update counters; disabling resets them.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn set_update_counting(&self, enabled: bool) -> Result<(), Error> {
        let mut retry = self.write();
        loop {
            match self.set_update_counting_once(enabled, &retry).await {
                Ok(()) => return Ok(()),
                Err(failure) => retry.after(self, failure).await?,
            }
        }
    }

    /// Makes the partitions forget the learning epochs of a removed run.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn forget_run(&self, run: RunId) -> Result<(), Error> {
        let mut retry = self.write();
        loop {
            match self.forget_run_once(run, &retry).await {
                Ok(()) => return Ok(()),
                Err(failure) => retry.after(self, failure).await?,
            }
        }
    }

    async fn forget_run_once(&self, run: RunId, retry: &crate::retry::Retry) -> Result<(), Failure> {
        let map = self.map().map_err(|error| Failure::unavailable(error.to_string()))?;
        let deadline = self.attempt(retry);
        let calls = map.owners().into_iter().map(|owner| {
            let channel = self.channel_of(&map, owner);
            async move {
                let message = v1::ForgetRunRequest { run: engram_proto::answers::identity(run.0) };
                let mut service = crate::runs::runs(channel?);
                let call = service.forget_run(self.request(message, deadline));
                timeout(deadline, call).await.map_err(|_| Failure::timed_out())??;
                Ok(())
            }
        });
        join_all(calls).await.into_iter().collect()
    }

    async fn set_update_counting_once(&self, enabled: bool, retry: &crate::retry::Retry) -> Result<(), Failure> {
        let map = self.map().map_err(|error| Failure::unavailable(error.to_string()))?;
        let deadline = self.attempt(retry);
        let calls = map.owners().into_iter().map(|owner| {
            let channel = self.channel_of(&map, owner);
            async move {
                let request = self.request(v1::SetUpdateCountingRequest { enabled, local: true }, deadline);
                let mut service = crate::runs::runs(channel?);
                let call = service.set_update_counting(request);
                Ok(timeout(deadline, call).await.map_err(|_| Failure::timed_out())??.into_inner().versions)
            }
        });
        let versions: Vec<_> = join_all(calls).await.into_iter().collect::<Result<_, Failure>>()?;
        let partitions: usize = versions.iter().map(Vec::len).sum();
        if partitions < map.partitions.len() {
            return Err(Failure::unavailable("some partitions have no primary yet"));
        }
        Ok(())
    }
}
