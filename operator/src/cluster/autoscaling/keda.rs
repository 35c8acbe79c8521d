//! The operator as an external scaler of KEDA: the metric is the number of workers that the autoscaler decided on, and its target is 1, so
//! that the HorizontalPodAutoscaler passes the number through.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use engram_proto::keda::external_scaler_server::{ExternalScaler, ExternalScalerServer};
use engram_proto::keda::{
    GetMetricSpecResponse, GetMetricsRequest, GetMetricsResponse, IsActiveResponse, MetricSpec, MetricValue,
    ScaledObjectRef,
};
use futures::Stream;
use futures::stream;
use tonic::{Request, Response, Status};

use crate::context::{Context, Key};

/// Name of the metric.
const METRIC: &str = "engram-desired-workers";
/// Key of the trigger's metadata that names the LearnerCluster.
const CLUSTER: &str = "learnerCluster";
/// Interval of the streams, which exist for scalers whose answer changes suddenly. This one's does not.
const STREAM_INTERVAL: Duration = Duration::from_secs(60);

/// The service.
pub(crate) struct Scaler(Arc<Context>);

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

impl Scaler {
    pub(crate) fn server(context: Arc<Context>) -> ExternalScalerServer<Self> {
        ExternalScalerServer::new(Self(context))
    }

    fn desired_workers(&self, object: &ScaledObjectRef) -> Result<f64, Status> {
        let name = object.scaler_metadata.get(CLUSTER).filter(|name| !name.is_empty()).ok_or_else(|| {
            Status::invalid_argument(format!(
                "the trigger's metadata has no {CLUSTER}; required: the name of a LearnerCluster"
            ))
        })?;
        let key = Key { namespace: object.namespace.clone(), name: name.clone() };
        let decision = self.0.clusters.find(&key, |state| state.autoscaler.decision().cloned()).flatten();
        let decision = decision.ok_or_else(|| {
            Status::not_found(format!("LearnerCluster {key} has no decision yet, or no spec.autoscaling"))
        })?;
        Ok(decision.desired_workers.into())
    }
}

#[tonic::async_trait]
impl ExternalScaler for Scaler {
    type StreamIsActiveStream = Answers<IsActiveResponse>;
    type StreamMetricSpecStream = Answers<GetMetricSpecResponse>;

    async fn is_active(&self, request: Request<ScaledObjectRef>) -> Result<Response<IsActiveResponse>, Status> {
        self.desired_workers(request.get_ref()).map(|_| Response::new(IsActiveResponse { result: true }))
    }

    async fn stream_is_active(
        &self,
        request: Request<ScaledObjectRef>,
    ) -> Result<Response<Self::StreamIsActiveStream>, Status> {
        self.desired_workers(request.get_ref())?;
        Ok(Response::new(repeated(IsActiveResponse { result: true })))
    }

    async fn get_metric_spec(
        &self,
        request: Request<ScaledObjectRef>,
    ) -> Result<Response<GetMetricSpecResponse>, Status> {
        self.desired_workers(request.get_ref()).map(|_| Response::new(metric_spec()))
    }

    async fn get_metrics(&self, request: Request<GetMetricsRequest>) -> Result<Response<GetMetricsResponse>, Status> {
        let object = request.into_inner().scaled_object_ref;
        let object = object.ok_or_else(|| Status::invalid_argument("scaledObjectRef is absent"))?;
        let value = self.desired_workers(&object)?;
        let value = MetricValue { metric_name: METRIC.into(), metric_value: value as i64, metric_value_float: value };
        Ok(Response::new(GetMetricsResponse { metric_values: vec![value] }))
    }

    async fn stream_metric_spec(
        &self,
        request: Request<ScaledObjectRef>,
    ) -> Result<Response<Self::StreamMetricSpecStream>, Status> {
        self.desired_workers(request.get_ref())?;
        Ok(Response::new(repeated(metric_spec())))
    }
}

fn metric_spec() -> GetMetricSpecResponse {
    let spec = MetricSpec { metric_name: METRIC.into(), target_size: 1, target_size_float: 1.0 };
    GetMetricSpecResponse { metric_specs: vec![spec] }
}

/// Returns a stream of the same answer.
fn repeated<T: Clone + Send + 'static>(answer: T) -> Answers<T> {
    Box::pin(stream::unfold(true, move |is_first| {
        let answer = answer.clone();
        async move {
            if !is_first {
                tokio::time::sleep(STREAM_INTERVAL).await;
            }
            Some((Ok(answer), false))
        }
    }))
}
