//! One write message: parts of one kind under one session, within the limits of a message.

use crate::call::{Failure, Service};
use crate::client::Client;
use crate::session::PARTS_PER_PARTITION;
use crate::window::Generation;
use crate::write::Part;
use engram_memory::MAX_IDS;
use engram_proto::v1;
use engram_wire::{PartitionWrite, WriteRequest};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;
use tonic::{Response, Status};

#[derive(Debug, Default)]
pub(crate) struct Message {
    parts: Vec<Part>,
    ids: usize,
    bytes: usize,
    of_partition: HashMap<u32, usize>,
}

impl Message {
    pub(crate) const fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// Returns the session of its parts.
    pub(crate) fn generation(&self) -> Option<&Arc<Generation>> {
        self.parts.first().and_then(|part| part.number.as_ref()).map(|number| &number.generation)
    }

    pub(crate) fn has_capacity(&self, part: &Part) -> bool {
        let (ids, bytes) = (part.body.rows(), part.body.encoded_bytes());
        self.is_empty()
            || (self.ids + ids <= MAX_IDS
                && self.bytes + bytes <= Client::message_bytes()
                && self.of_partition.get(&part.partition.0).is_none_or(|&parts| parts < PARTS_PER_PARTITION))
    }

    pub(crate) fn push(&mut self, part: Part) {
        let (ids, bytes) = (part.body.rows(), part.body.encoded_bytes());
        self.ids += ids;
        self.bytes += bytes;
        *self.of_partition.entry(part.partition.0).or_default() += 1;
        self.parts.push(part);
    }

    pub(crate) fn into_parts(self) -> Vec<Part> {
        self.parts
    }

    /// Sends it once.
    pub(crate) async fn send(
        &self,
        client: &Client,
        service: &mut Service,
        deadline: Duration,
        wait_ms: u32,
    ) -> Result<v1::WriteResponse, Failure> {
        let session = self.generation().map(|generation| v1::Session::from(generation.id));
        let numbered = self.parts.iter().filter_map(|part| {
            let seq = part.number.as_ref()?.seq;
            Some(PartitionWrite { partition: part.partition, seq, body: part.body.clone() })
        });
        let Some(mut request) = WriteRequest::new(session, numbered) else { return Ok(v1::WriteResponse::default()) };
        if let WriteRequest::Items(items) = &mut request {
            items.wait_ms = wait_ms;
            // An append waits for the rate limiter before its first message.
            items.admitted = true;
        }
        let response = timeout(deadline, client.send_write(service, request, deadline)).await;
        Ok(response.map_err(|_| Failure::timed_out())??.into_inner())
    }
}

impl Client {
    /// Sends a write message to a worker, once.
    ///
    /// # Errors
    /// The status of the call.
    pub async fn send_write(
        &self,
        service: &mut Service,
        request: WriteRequest,
        deadline: Duration,
    ) -> Result<Response<v1::WriteResponse>, Status> {
        match request {
            WriteRequest::Upsert(message) => {
                service.upsert(self.request(futures::stream::iter([message]), deadline)).await
            }
            WriteRequest::Remove(message) => service.remove(self.request(message, deadline)).await,
            WriteRequest::Reinforce(message) => service.apply_reinforcement(self.request(message, deadline)).await,
            WriteRequest::Decay(message) => service.apply_decay(self.request(message, deadline)).await,
            WriteRequest::Items(message) => {
                service.buffers().write_items(self.request(futures::stream::iter([message]), deadline)).await
            }
        }
    }
}
