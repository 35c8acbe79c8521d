//! Replay buffers: `BufferService` on the client and peer listeners.
//!
//! Any worker serves a client: it makes plans from the shares of all partitions and lets their primaries draw, change and lease items. A worker
//! does for others what concerns its own partitions only.

mod catalog;
mod cluster;
mod declared;
mod local;
mod manage;
mod messages;
mod metrics;
mod sample;
mod training;
mod wait;

pub(crate) use catalog::{Catalog, Definitions, unknown};
pub(crate) use cluster::is_passing;
pub(crate) use declared::follow_declarations;
pub(crate) use messages::convert::command;
pub(crate) use metrics::BufferMetrics;

use messages::pages::Answer;

use crate::service::{Memories, Plane};
use crate::shared::Shared;
use crate::write::WritePart;
use engram_proto::v1::buffer_service_server::BufferService;
use engram_proto::v1::items_part::Change;
use engram_proto::v1::partition_result::Result as PartResult;
use engram_proto::v1::{self, ItemBatch, Problem};
use engram_wire::WriteBody;
use futures::stream::BoxStream;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tonic::{Request, Response, Status, Streaming};

/// Serves the buffers of one worker.
#[derive(Clone)]
pub(crate) struct Buffers {
    pub(crate) shared: Arc<Shared>,
    pub(crate) plane: Plane,
}

type Batches = BoxStream<'static, Result<ItemBatch, Status>>;

fn reply<T>(answer: Result<T, Problem>) -> Result<Response<T>, Status> {
    answer.map(Response::new).map_err(Problem::into_status)
}

fn item_stream(answer: Result<Vec<ItemBatch>, Problem>) -> Result<Response<Batches>, Status> {
    let batches = answer.map_err(Problem::into_status)?;
    Ok(Response::new(Box::pin(futures::stream::iter(batches.into_iter().map(Ok)))))
}

impl Buffers {
    /// Executes one message of changes.
    async fn write(&self, message: v1::WriteItemsRequest) -> Result<v1::WriteResponse, Problem> {
        if !message.admit.is_empty() {
            self.wait_for_append(&message.admit, message.wait_ms).await?;
            return Ok(v1::WriteResponse::default());
        }
        let mut appended: BTreeSet<String> = BTreeSet::new();
        let mut buffer_of: BTreeMap<(u32, u64), String> = BTreeMap::new();
        for part in &message.parts {
            buffer_of.insert((part.partition, part.seq), part.buffer.clone());
            if let Some(Change::Append(_)) = &part.change {
                appended.insert(part.buffer.clone());
            }
        }
        if self.plane == Plane::Client && !message.admitted {
            for name in &appended {
                self.wait_for_append(name, message.wait_ms).await?;
            }
        }
        let mut definitions = Definitions::default();
        for part in &message.parts {
            if !definitions.contains_key(&part.buffer) {
                definitions.insert(part.buffer.clone(), self.definition(&part.buffer).await?);
            }
        }
        let parts = message.parts.into_iter().map(|part| WritePart {
            partition: Some(part.partition),
            seq: part.seq,
            body: WriteBody::Items(part),
        });
        let memories = Memories { shared: Arc::clone(&self.shared), plane: self.plane };
        let parts: Vec<WritePart> = parts.collect();
        let written = self
            .shared
            .limits
            .admission()
            .run("WriteItems", memories.write(message.session, parts, &definitions))
            .await?;
        for part in &written.parts {
            let Some(name) = buffer_of.get(&(part.partition, part.seq)) else { continue };
            match &part.result {
                Some(PartResult::Outcome(outcome)) if outcome.first_handle.is_some() && self.plane == Plane::Client => {
                    self.shared.metrics.buffers.inserted(name, outcome.created);
                }
                // It was dropped, and may have been created again.
                Some(PartResult::Problem(problem)) if local::is_unknown(problem) => self.shared.buffers.forget(name),
                _ => {}
            }
        }
        Ok(written)
    }

    /// Returns the items of each buffer in partitions served here.
    pub(crate) async fn update_metrics(shared: &Arc<Shared>) {
        let buffers = Self { shared: Arc::clone(shared), plane: Plane::Peer };
        if let Ok(items) = buffers.count_items().await {
            shared.metrics.buffers.set_items(items);
        }
    }
}

#[tonic::async_trait]
impl BufferService for Buffers {
    type SampleItemsStream = Batches;
    type GetItemsStream = Batches;
    type ConsumeItemsStream = Batches;
    type ListItemsStream = Batches;
    type DrawItemsStream = Batches;

    async fn create_buffer(
        &self,
        request: Request<v1::CreateBufferRequest>,
    ) -> Result<Response<v1::DescribeBufferResponse>, Status> {
        reply(self.create(request.into_inner().spec).await)
    }

    async fn describe_buffer(
        &self,
        request: Request<v1::DescribeBufferRequest>,
    ) -> Result<Response<v1::DescribeBufferResponse>, Status> {
        reply(self.describe(&request.into_inner().name).await)
    }

    async fn list_buffers(
        &self,
        _request: Request<v1::ListBuffersRequest>,
    ) -> Result<Response<v1::ListBuffersResponse>, Status> {
        reply(self.list().await)
    }

    async fn drop_buffer(
        &self,
        request: Request<v1::DropBufferRequest>,
    ) -> Result<Response<v1::DropBufferResponse>, Status> {
        reply(Self::drop_buffer(self, &request.into_inner().name).await)
    }

    async fn write_items(
        &self,
        request: Request<Streaming<v1::WriteItemsRequest>>,
    ) -> Result<Response<v1::WriteResponse>, Status> {
        let mut messages = request.into_inner();
        let mut written = v1::WriteResponse::default();
        while let Some(message) = messages.message().await? {
            written.parts.extend(self.write(message).await.map_err(Problem::into_status)?.parts);
        }
        Ok(Response::new(written))
    }

    async fn sample_items(
        &self,
        request: Request<v1::SampleItemsRequest>,
    ) -> Result<Response<Self::SampleItemsStream>, Status> {
        let request = request.into_inner();
        let sampled = self.with_definition(&request.buffer, || Box::pin(self.sample(request.clone()))).await;
        self.answer(sampled)
    }

    async fn get_items(&self, request: Request<v1::GetItemsRequest>) -> Result<Response<Self::GetItemsStream>, Status> {
        let request = request.into_inner();
        engram_proto::columns::check_rows(request.handles.len())
            .map_err(|invalid| Problem::from(invalid).into_status())?;
        let read = self.with_definition(&request.buffer, || Box::pin(self.get(request.clone())));
        self.answer(self.shared.limits.admission().run("GetItems", read).await)
    }

    async fn consume_items(
        &self,
        request: Request<v1::ConsumeItemsRequest>,
    ) -> Result<Response<Self::ConsumeItemsStream>, Status> {
        let request = request.into_inner();
        let consumed = self.with_definition(&request.buffer, || Box::pin(self.consume(request.clone()))).await;
        self.answer(consumed)
    }

    async fn list_items(
        &self,
        request: Request<v1::ListItemsRequest>,
    ) -> Result<Response<Self::ListItemsStream>, Status> {
        let request = request.into_inner();
        let listed = self.with_definition(&request.buffer, || Box::pin(Self::list_items(self, request.clone()))).await;
        item_stream(listed)
    }

    async fn get_shares(
        &self,
        request: Request<v1::GetSharesRequest>,
    ) -> Result<Response<v1::GetSharesResponse>, Status> {
        let shares = self.shared.limits.admission().run("GetShares", self.local_shares(request.into_inner())).await;
        reply(shares.map(|shares| v1::GetSharesResponse { shares }))
    }

    async fn draw_items(
        &self,
        request: Request<v1::DrawItemsRequest>,
    ) -> Result<Response<Self::DrawItemsStream>, Status> {
        let request = request.into_inner();
        let drawn = async {
            let definition = self.definition(&request.buffer).await?;
            let selection = messages::rows::Selection::new(definition, &request.fields, request.without_fields)?;
            Ok(selection.cut(self.local_draws(request).await?))
        };
        item_stream(self.shared.limits.admission().run("DrawItems", Box::pin(drawn)).await)
    }

    async fn change_buffer(
        &self,
        request: Request<v1::ChangeBufferRequest>,
    ) -> Result<Response<v1::WriteResponse>, Status> {
        reply(self.local_change(request.into_inner()).await)
    }
}

impl Buffers {
    fn answer(&self, answer: Result<Answer, Problem>) -> Result<Response<Batches>, Status> {
        answer.and_then(|answer| self.messages(answer)).map(Response::new).map_err(Problem::into_status)
    }

    async fn get(&self, request: v1::GetItemsRequest) -> Result<Answer, Problem> {
        let definition = self.definition(&request.buffer).await?;
        let selection = messages::rows::Selection::new(definition, &request.fields, request.without_fields)?;
        let batch = match self.plane {
            Plane::Peer => self.local_items(request).await?,
            Plane::Client => {
                let handles: Vec<_> = request.handles.into_iter().map(engram_memory::MemoryId).collect();
                self.items(&selection, &handles).await?
            }
        };
        Ok(Answer { selection, batch, is_sample: false })
    }
}
