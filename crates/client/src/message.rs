//! One write message: parts of one kind under one session, within the limits of a message.

use crate::call::{Failure, Service};
use crate::client::Client;
use crate::session::PARTS_PER_PARTITION;
use crate::window::Generation;
use crate::write::{Body, Part, RequestNumber};
use engram_memory::MAX_IDS;
use engram_proto::v1;
use prost::Message as _;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

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
        let (ids, bytes) = size(&part.body);
        self.is_empty()
            || (self.ids + ids <= MAX_IDS
                && self.bytes + bytes <= Client::message_bytes()
                && self.of_partition.get(&part.partition.0).is_none_or(|&parts| parts < PARTS_PER_PARTITION))
    }

    pub(crate) fn push(&mut self, part: Part) {
        let (ids, bytes) = size(&part.body);
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
    ) -> Result<v1::WriteResponse, Failure> {
        let session = self.generation().map(|generation| v1::Session::from(generation.id));
        let numbered = self.parts.iter().filter_map(|part| part.number.as_ref().map(|number| (part, number)));
        let response = match self.parts.first().map(|part| &part.body) {
            None => return Ok(v1::WriteResponse::default()),
            Some(Body::Upsert(_)) => {
                let parts = numbered.filter_map(upsert).collect();
                let stream = futures::stream::iter([v1::UpsertRequest { session, parts }]);
                timeout(deadline, service.upsert(client.request(stream, deadline))).await
            }
            Some(Body::Remove(_)) => {
                let parts = numbered.filter_map(remove).collect();
                let message = v1::RemoveRequest { session, parts };
                timeout(deadline, service.remove(client.request(message, deadline))).await
            }
            Some(Body::Reinforce(_)) => {
                let parts = numbered.filter_map(reinforce).collect();
                let message = v1::ApplyReinforcementRequest { session, parts };
                timeout(deadline, service.apply_reinforcement(client.request(message, deadline))).await
            }
            Some(Body::Decay(amount)) => {
                let part = |(part, number): (&Part, &RequestNumber)| v1::DecayPart {
                    partition: part.partition.0,
                    seq: number.seq,
                };
                let message = v1::ApplyDecayRequest { session, amount: *amount, parts: numbered.map(part).collect() };
                timeout(deadline, service.apply_decay(client.request(message, deadline))).await
            }
        };
        Ok(response.map_err(|_| Failure::timed_out())??.into_inner())
    }
}

fn size(body: &Body) -> (usize, usize) {
    /// Bytes of number, partition and field tags of a part.
    const HEAD: usize = 32;
    match body {
        Body::Upsert(part) => (part.ids.len(), HEAD + part.encoded_len()),
        Body::Remove(ids) => (ids.len(), HEAD + 8 * ids.len()),
        Body::Reinforce(updates) => (updates.ids.len(), HEAD + updates.encoded_len()),
        Body::Decay(_) => (0, HEAD),
    }
}

fn upsert((part, number): (&Part, &RequestNumber)) -> Option<v1::UpsertPart> {
    match &part.body {
        Body::Upsert(rows) => {
            Some(v1::UpsertPart { partition: Some(part.partition.0), seq: number.seq, ..rows.clone() })
        }
        _ => None,
    }
}

fn remove((part, number): (&Part, &RequestNumber)) -> Option<v1::RemovePart> {
    match &part.body {
        Body::Remove(ids) => {
            Some(v1::RemovePart { partition: Some(part.partition.0), seq: number.seq, ids: ids.clone() })
        }
        _ => None,
    }
}

fn reinforce((part, number): (&Part, &RequestNumber)) -> Option<v1::ReinforcePart> {
    match &part.body {
        Body::Reinforce(updates) => Some(v1::ReinforcePart {
            partition: Some(part.partition.0),
            seq: number.seq,
            updates: Some(updates.clone()),
        }),
        _ => None,
    }
}
