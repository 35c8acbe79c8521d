//! `TrainingService`, on the listener for workers.

use crate::shared::Shared;
use crate::training::host::Inbound;
use crate::training::transport::transfer::{self, Stripe};
use engram_proto::v1::training_order::Order;
use engram_proto::v1::training_service_server::TrainingService;
use engram_proto::v1::{self, Problem, ProblemKind};
use futures::stream::{BoxStream, StreamExt as _};
use std::sync::Arc;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

/// Queued events for a driver.
const EVENTS: usize = 256;

/// `TrainingService` of this worker.
pub(crate) struct TrainingEndpoint {
    pub(crate) shared: Arc<Shared>,
}

#[tonic::async_trait]
impl TrainingService for TrainingEndpoint {
    type TrainStream = BoxStream<'static, Result<v1::TrainingEvent, Status>>;
    type GetTrainingStateStream = BoxStream<'static, Result<v1::TrainingStatePart, Status>>;

    async fn train(
        &self,
        request: Request<Streaming<v1::TrainingOrder>>,
    ) -> Result<Response<Self::TrainStream>, Status> {
        let mut orders = request.into_inner();
        let Some(Order::Start(start)) = orders.message().await?.and_then(|it| it.order) else {
            return Err(Status::invalid_argument("the first order must start a member"));
        };
        if self.shared.lifecycle.is_stopping() {
            return Err(Status::unavailable("the worker is stopping"));
        }
        if self.shared.membership.is_leaving() {
            return Err(Status::unavailable("the worker is being drained"));
        }
        let member = self.shared.trainings.member_inbox(&self.shared, &start).await;
        let member = member.map_err(|error| Problem::of(ProblemKind::Invalid, format!("{error:#}")).into_status())?;
        let (events, stream) = mpsc::channel(EVENTS);
        let ended = |_| Status::unavailable("the member ended");
        member.send(Inbound::Driver(events)).await.map_err(ended)?;
        tokio::spawn(async move {
            while let Ok(Some(order)) = orders.message().await {
                let Some(order) = order.order else { continue };
                if member.send(Inbound::Order(order)).await.is_err() {
                    break;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(stream).boxed()))
    }

    async fn get_training_state(
        &self,
        request: Request<v1::GetTrainingStateRequest>,
    ) -> Result<Response<Self::GetTrainingStateStream>, Status> {
        let message = request.into_inner();
        let run = engram_proto::answers::run_id(&message.run);
        let run = run.map_err(|error| Problem::of(ProblemKind::Invalid, error.to_string()).into_status())?;
        let stripe = message.stripe.map(Stripe::from_wire);
        let at = stripe.as_ref().map(|it| it.position);
        let state = self.shared.trainings.copy((run, message.submitted_ms), at).await;
        let missing = || Status::not_found("this worker has no member of the run, or its state is at another step");
        let parts = transfer::parts(state.ok_or_else(missing)?, stripe.as_ref());
        Ok(Response::new(futures::stream::iter(parts.into_iter().map(Ok)).boxed()))
    }
}
