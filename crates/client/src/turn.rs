//! What runs ask of a cluster beside learning: the turn to change it, and the counting of updates.

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
    /// Asks for the turn to change the cluster: one run at a time has it, and of those that ask again and again the one submitted first
    /// (`submitted_ms`, since 1970) has the next.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn take_turn(&self, run: RunId, name: &str, submitted_ms: u64) -> Result<v1::TakeTurnReply, Error> {
        let mut retry = self.write();
        loop {
            let run = engram_proto::answers::identity(run.0);
            let message = v1::TakeTurnRequest { run, name: name.to_owned(), submitted_ms };
            let answer = async {
                let (mut keeper, deadline) = service(self, KEEPER, &retry)?;
                let call = keeper.take_turn(self.request(message, deadline));
                Ok(timeout(deadline, call).await.map_err(|_| Failure::timed_out())??.into_inner())
            };
            match answer.await {
                Ok(reply) => return Ok(reply),
                Err(failure) => retry.after(self, failure).await?,
            }
        }
    }

    /// Gives the turn back; nothing happens when the run does not have it.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn return_turn(&self, run: RunId) -> Result<(), Error> {
        let mut retry = self.write();
        loop {
            let message = v1::ReturnTurnRequest { run: engram_proto::answers::identity(run.0) };
            let answer = async {
                let (mut keeper, deadline) = service(self, KEEPER, &retry)?;
                let call = keeper.return_turn(self.request(message, deadline));
                timeout(deadline, call).await.map_err(|_| Failure::timed_out())??;
                Ok(())
            };
            match answer.await {
                Ok(()) => return Ok(()),
                Err(failure) => retry.after(self, failure).await?,
            }
        }
    }

    /// Makes every memory count the updates that address it, or stops it and sets the counts to zero.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn count_updates(&self, enabled: bool) -> Result<(), Error> {
        let mut retry = self.write();
        loop {
            match self.count_updates_once(enabled, &retry).await {
                Ok(()) => return Ok(()),
                Err(failure) => retry.after(self, failure).await?,
            }
        }
    }

    async fn count_updates_once(&self, enabled: bool, retry: &crate::retry::Retry) -> Result<(), Failure> {
        let map = self.map().map_err(|error| Failure::unavailable(error.to_string()))?;
        let deadline = self.attempt(retry);
        let calls = map.owners().into_iter().map(|owner| {
            let channel = self.channel_of(&map, owner);
            async move {
                let request = self.request(v1::CountUpdatesRequest { enabled, local: true }, deadline);
                let mut service = crate::runs::runs(channel?);
                let call = service.count_updates(request);
                Ok(timeout(deadline, call).await.map_err(|_| Failure::timed_out())??.into_inner().versions)
            }
        });
        let told: Vec<_> = join_all(calls).await.into_iter().collect::<Result<_, Failure>>()?;
        let partitions: usize = told.iter().map(Vec::len).sum();
        if partitions < map.partitions.len() {
            return Err(Failure::unavailable("some partitions have no primary yet"));
        }
        Ok(())
    }
}
