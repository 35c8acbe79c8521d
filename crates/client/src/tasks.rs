//! Tasks of runs, executed by other workers.

use crate::call::Failure;
use crate::client::Client;
use crate::error::Error;
use crate::read::opened;
use crate::runs::runs;
use engram_memory::Ordinal;
use engram_proto::v1::run_task_response::Event;
use engram_proto::v1::{self, Problem, ProblemKind};
use std::time::Duration;
use tokio::time::timeout;
use tonic::Streaming;

/// Time for a worker to accept or refuse a task.
const OPEN_DEADLINE: Duration = Duration::from_secs(10);
/// A worker that executes a task reports every second; one that is silent for this long is lost.
const SILENCE: Duration = Duration::from_secs(15);

/// A task in execution on a worker. Dropping it stops the task.
#[derive(Debug)]
pub struct TaskCall(Streaming<v1::RunTaskResponse>);

impl Client {
    /// Executes a task on a worker. Calls are not retried: the caller knows whether another worker is better.
    ///
    /// # Errors
    /// As [`Error`] says; [`ProblemKind::Overloaded`] if the worker executes another task.
    pub async fn run_task(&self, worker: Ordinal, message: v1::RunTaskRequest) -> Result<TaskCall, Error> {
        let open = async {
            let map = self.map().map_err(|error| Failure::unavailable(error.to_string()))?;
            let service = runs(self.channel_of(&map, worker)?);
            // A request holds the input of the task and the data of its run.
            let mut service = service.max_encoding_message_size(engram_proto::MAX_PEER_MESSAGE_BYTES);
            let mut request = self.request(message, OPEN_DEADLINE);
            // The deadline applies to the head of the stream: a task takes any time.
            request.metadata_mut().remove("grpc-timeout");
            opened(OPEN_DEADLINE, service.run_task(request)).await
        };
        open.await.map(TaskCall).map_err(|failure: Failure| Error::rejected(failure.problem))
    }
}

impl TaskCall {
    /// Returns the next report of the task; the result or the failure is the last one.
    ///
    /// # Errors
    /// The worker or the connection to it is lost, or the worker stops.
    pub async fn next(&mut self) -> Result<Event, Error> {
        let lost = |text: String| Error::rejected(Problem::of(ProblemKind::Unavailable, text));
        match timeout(SILENCE, self.0.message()).await {
            Ok(Ok(Some(message))) => message.event.ok_or_else(|| Error::Protocol("a task report without event".into())),
            Ok(Ok(None)) => Err(lost("the worker ended the call without a result".into())),
            Ok(Err(status)) => Err(Error::rejected(Failure::from(status).problem)),
            Err(_) => Err(lost(format!("the worker did not report for {} s", SILENCE.as_secs()))),
        }
    }
}
